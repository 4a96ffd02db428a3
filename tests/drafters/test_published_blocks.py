"""Drafters of blocks against others: files that another library wrote, and public ones.

Public ones resolve at full size, without weights, as their configs and cards say; the rows are in
``public_drafters.py``.
"""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from block_twin import TOLERANCE, drafted_logits, relative
from golden import frozen
from public_drafters import BLOCKS, block_shapes

from mlx_eagle.convert import convert
from mlx_eagle.convert.stored import Stored
from mlx_eagle.drafters import dflash, dflash2, dspark
from mlx_eagle.drafters.block_config import BlockConfig
from mlx_eagle.drafters.folder import fill, read_weights
from mlx_eagle.drafters.kinds import KINDS, recognise
from mlx_eagle.drafters.pairs import PAIRS
from mlx_eagle.drafters.target_parts import TargetSizes

NOTHING = np.zeros(0, np.uint8)


@pytest.mark.parametrize("name", BLOCKS)
def test_it_resolves(name):
    row = BLOCKS[name]
    kind, config, (depth, h, vocab) = row["kind"], row["config"], row["target"]
    tensors = {
        tensor: Stored("BF16", shape, NOTHING) for tensor, shape in block_shapes(row).items()
    }
    assert recognise(tensors, config) == kind
    written, _ = KINDS[kind].convert(tensors, config)
    made, target = PARTS[kind][0].from_dict(written, "config.json"), TargetSizes(h, depth, vocab)
    made.check_fit(target)
    assert {key: getattr(made, key) for key in row["wanted"]} == row["wanted"]
    KINDS[kind].made_for(written, "config.json", target)
    with pytest.raises(ValueError, match="use the one made for this model"):
        made.check_fit(TargetSizes(h + 64, depth, vocab))


@pytest.mark.parametrize("name", BLOCKS)
def test_its_size_is_what_its_page_says(name):
    """What the table of pairs says follows from the shapes; half a percent is rounding."""
    row = BLOCKS[name]
    counted = [s for n, s in block_shapes(row).items() if n not in ("d2t", "t2d")]
    num_bytes = 2 * sum(map(math.prod, counted))
    for source in row.keys() & {"published", "gguf"}:
        assert num_bytes == pytest.approx(row[source], rel=5e-3)
    pairs = [pair for pair in PAIRS if pair.head == name]
    assert [pair.kind for pair in pairs] == [row["kind"]] * ("," not in name)
    for pair in pairs:
        is_known = "published" in row or "assumed" not in row
        assert pair.megabytes == (round(num_bytes / 1e6) if is_known else None)


# What mlx-vlm makes of the same files

ROUNDS = ((9, 5), (1, 8), (4, 40), (2, 3))  # as in tools/golden/make_blocks.py


@pytest.mark.parametrize("name", ["dflash", "dflash-capped", "dflash2", "dspark"])
def test_four_rounds_are_those_of_another_library(tmp_path, name):
    """Its logits, or where tokens depend on each other the ones that it drafts greedily."""
    source = Path(frozen.FOLDER) / f"block-{name}"
    written = convert(str(source), str(tmp_path / "head"), quantize=False, dtype="float32")
    expected = mx.load(str(source / "expected.safetensors"))
    config, head, drafter = PARTS[written["kind"]]
    head = head(config.from_dict(written, "config.json"))
    fill(head, read_weights(tmp_path / "head"))
    embed, project = expected["embed"], expected["head"].T
    own = drafter(head, lambda t: embed[t], lambda x: x @ project).begin()
    start = 0
    for i, (num_rows, token) in enumerate(ROUNDS):
        tokens = mx.array([*[0] * (num_rows - 1), token])
        own.extend(tokens, expected["features"][start : start + num_rows])
        start += num_rows
        if f"logits.{i}" in expected:
            wanted = np.array(expected[f"logits.{i}"], np.float64)
            assert relative(drafted_logits(own, len(wanted)), wanted) < TOLERANCE
        else:
            wanted = expected[f"tokens.{i}"].tolist()
            drafted = own.propose(len(wanted), lambda logits, _: mx.argmax(logits, axis=-1))
            assert drafted.tokens.tolist() == wanted


PARTS = {
    "dflash": (BlockConfig, dflash.DFlashHead, dflash.DFlashDrafter),
    "dflash2": (dflash2.DFlash2Config, dflash2.DFlash2Head, dflash2.DFlash2Drafter),
    "dspark": (dspark.DSparkConfig, dspark.DSparkHead, dspark.DSparkDrafter),
}
