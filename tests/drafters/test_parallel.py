"""P-EAGLE: a draft of one head forward, as speculators computes it and as a naive twin does."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from golden import frozen
from golden.frozen import Frozen, relative
from heads import TOLERANCE, Runner
from helpers import byte_tokenizer, plain, speculative, tiny_head, tiny_llama

from mlx_eagle import batch_generate, load_drafter
from mlx_eagle.convert import convert
from mlx_eagle.convert.check import unroll
from mlx_eagle.convert.publish import to_pytorch
from mlx_eagle.drafters.eagle3 import ParallelDrafter
from mlx_eagle.drafters.head_weights import AttachedHead
from mlx_eagle.drafters.tree import TreeShape

NAMES = [name for name in frozen.CHANGES if name.startswith("peagle")]


def drafter_of(golden: Frozen) -> ParallelDrafter:
    runner = Runner(golden)
    to_target = mx.array(golden.d2t) + mx.arange(len(golden.d2t))
    return ParallelDrafter(runner.head, lambda tokens: runner.embed[tokens], (2, 6, 9), to_target)


class Seen:
    """A greedy pick that remembers the logits it chose from."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def __call__(self, logits: mx.array, to_target: mx.array | None) -> mx.array:
        self.rows.append(np.array(logits[0]))
        return mx.argmax(logits, axis=-1)


def absorb(drafter: ParallelDrafter, golden: Frozen, start: int, end: int, extra: int) -> None:
    """Slots start .. end - 1 as a round does: with rows after them that do not count."""
    rows = slice(start, end + extra)
    drafter.extend(
        mx.array(golden.tokens[rows]), mx.array(golden.features[rows]), mx.array(end - start - 1)
    )


def cut(drafter: ParallelDrafter, end: int) -> None:
    """As the loop does once it knows how many rows count."""
    for cache in drafter.cache[:-1]:
        cache.trim(cache.offset - end)


@pytest.mark.parametrize("name", NAMES)
def test_every_draft_equals_speculators(name):
    golden = frozen.load(name)
    depths, num_slots, _ = golden.logits.shape
    drafter = drafter_of(golden)
    for end in range(1, num_slots + 1):
        size = min(depths, num_slots + 1 - end)
        wanted = golden.logits[:size, end - 1]
        alone = drafter.begin()
        alone.extend(mx.array(golden.tokens[:end]), mx.array(golden.features[:end]))
        together = drafter.begin()
        absorb(together, golden, 0, end, extra=2)
        cut(together, end)
        grown = drafter.begin()
        grown._size = 1
        absorb(grown, golden, 0, end, extra=1)
        cut(grown, end)
        for begun, num_forwards in ((alone, 2), (together, 1), (grown, 2)):
            seen = Seen()
            draft = begun.propose(size, seen)
            assert relative(np.stack(seen.rows), wanted) < TOLERANCE
            ids = wanted.argmax(axis=-1)
            assert draft.tokens.tolist() == (golden.d2t[ids] + ids).tolist()
            assert begun.num_forwards == num_forwards - (size == 1 and num_forwards == 2)
            assert begun.cache[0].offset == end


@pytest.mark.parametrize("name", NAMES)
def test_rounds_equal_speculators(name):
    """Round after round on one cache, keeping one to three pairs."""
    golden = frozen.load(name)
    depths, num_slots, _ = golden.logits.shape
    drafter, start = drafter_of(golden).begin(), 0
    for kept in (2, 1, 3, 1, 1):
        end = start + kept
        absorb(drafter, golden, start, end, extra=2)
        size = min(depths, num_slots + 1 - end)
        cut(drafter, end)
        seen = Seen()
        drafter.propose(size, seen)
        assert relative(np.stack(seen.rows), golden.logits[:size, end - 1]) < TOLERANCE
        start = end
    assert drafter.num_forwards == 5


@pytest.mark.parametrize("name", [name for name in NAMES if "windows" not in name])
def test_the_converters_check_measures_the_same_drafts(name):
    golden = frozen.load(name)
    drafter = drafter_of(golden)
    part = AttachedHead(drafter.head, drafter._embed, drafter.taps, drafter.to_target)
    tokens, features = mx.array([0, *golden.tokens]), mx.array(golden.features)
    rows = unroll(part, tokens, features, first=2, num_slots=5)
    for depth, (logits, drafted) in enumerate(rows):
        wanted = golden.logits[depth, 2:7]
        assert relative(np.array(logits), wanted) < TOLERANCE
        ids = wanted.argmax(axis=-1)
        assert drafted.tolist() == (golden.d2t[ids] + ids).tolist()


def test_a_batch_reads_as_each_prompt_alone(recwarn):
    model = tiny_llama(vocab_size=258)
    drafter = tiny_head(model, seed=4, num_layers=2, mask_token_id=9)
    prompts = [[5, 17, 3, 88], [9], [70, 71, 72] * 5]
    made = batch_generate(
        model,
        byte_tokenizer(),
        prompts,
        max_tokens=15,
        draft_model=drafter,
        num_draft_tokens=3,
        return_token_ids=True,
    )
    for prompt, tokens, stats in zip(prompts, made.token_ids, made.stats, strict=True):
        assert tokens == plain(model, prompt, 15)[: len(tokens)]
        _, own = speculative(model, drafter, prompt, 15, num_draft_tokens=3)
        assert stats.num_accepted == own.num_accepted
        assert stats.num_head_forwards <= 2 * own.num_head_forwards
    assert not recwarn.list, "drafts are made prompt by prompt"


def test_what_is_not_for_masked_slots_is_refused(tmp_path):
    convert(str(frozen.FOLDER / "peagle-llama"), str(tmp_path / "head"), quantize=False)
    with pytest.raises(ValueError, match="mask_token_id 97, which the flat PyTorch layout"):
        to_pytorch(str(tmp_path / "head"), str(tmp_path / "back"))
    model = tiny_llama(vocab_size=128, hidden_size=32, num_hidden_layers=12)
    config = tmp_path / "head" / "config.json"
    text = config.read_text()
    wrong = {"vocab_size": 1000, "mask_token_id": 500}
    config.write_text(json.dumps(json.loads(text) | wrong))
    with pytest.raises(ValueError, match="masks with token 500, but the target's has 128"):
        load_drafter(tmp_path / "head", model)
    config.write_text(text)
    with pytest.raises(ValueError, match="lagging draft cache is for EAGLE heads that draft step"):
        load_drafter(tmp_path / "head", model, draft_cache="lagging")
    drafter = load_drafter(tmp_path / "head", model)
    assert isinstance(drafter, ParallelDrafter) and drafter.taps == (2, 6, 9)
    with pytest.raises(ValueError, match="proposes chains only"):
        speculative(model, drafter, [5, 6], 4, tree=TreeShape.parse("2x2:4"))


@pytest.mark.parametrize(
    "change", [{"mask_token_id": 5}, {"norm_before_residual": True}, frozen.rope(5e5)]
)
def test_a_wrong_setting_shows(change):
    golden = frozen.load("peagle-llama")
    wrong = drafter_of(replace(golden, config=replace(golden.config, **change)))
    wrong.extend(mx.array(golden.tokens[:5]), mx.array(golden.features[:5]))
    seen = Seen()
    wrong.propose(4, seen)
    assert relative(np.stack(seen.rows), golden.logits[:4, 4]) > 100 * TOLERANCE
