"""From a checkpoint in its native layout to logits: converted, loaded, run, and compared.

Checkpoints that real libraries wrote are compared with the logits those libraries computed;
layouts written from the specification with the NumPy head on the native tensors.
"""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import config_of, weights_of, write_safetensors
from golden import frozen
from golden.frozen import Frozen, relative
from heads import NUM_SLOTS, NUM_STEPS, TOLERANCE, Runner
from mlx_lm.models.cache import KVCache
from numpy_head import eagle3_draft, eagle3_extend
from test_convert_families import CASES

from mlx_eagle.convert import convert
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.head_weights import fuse_weights

# 4 bits in groups of 32, random weights (the worst case): of the largest logit.
FOUR_BITS = 0.35
SLOTS = (0, 3, 6)


def converted(folder, out, **options) -> tuple[Eagle3Config, dict[str, mx.array]]:
    convert(str(folder), str(out), dtype="float32", **options)
    return Eagle3Config.from_dict(config_of(out)), weights_of(out)


def as_example(native: Frozen, config: Eagle3Config, weights: dict[str, mx.array]) -> Frozen:
    """The converted head on the inputs of ``native``; its own embedding where it has one."""
    weights = {name: np.array(value) for name, value in weights.items() if name != "d2t"}
    embed = weights.pop("embed_tokens.weight", native.embed)
    return replace(
        native, config=replace(config, embed_source="target"), weights=weights, embed=embed
    )


@pytest.mark.parametrize("name", frozen.CHANGES)
def test_heads_of_other_libraries_give_their_logits(tmp_path, name):
    golden = frozen.load(name)
    config, weights = converted(frozen.FOLDER / name, tmp_path / "out", quantize=False)
    example = as_example(golden, config, weights)
    runner = Runner(example)
    states = runner.extend(golden.tokens, golden.features)
    assert relative(runner.logits(states), golden.logits[0]) < TOLERANCE
    num_compared = 0
    for slot in range(len(golden.tokens)):
        steps = golden.num_comparable(slot)
        if steps > 0:
            found, wanted = Runner(example).draft(golden, slot), golden.logits[:, slot]
            assert relative(found[:steps], wanted[:steps]) < TOLERANCE
            num_compared = max(num_compared, steps)
    assert num_compared >= NUM_STEPS  # a window hides the last one from those who move it


@pytest.mark.parametrize("name", frozen.CHANGES)
def test_in_four_bits_they_stay_near(tmp_path, name):
    golden = frozen.load(name)
    options = {"q_bits": 4, "q_group_size": 32}
    config, weights = converted(frozen.FOLDER / name, tmp_path / "out", **options)
    dense = {k: v for k, v in weights.items() if not k.startswith(("embed_tokens", "d2t"))}
    runner = Runner(replace(golden, config=replace(config, embed_source="target")), dense)
    states = runner.extend(golden.tokens, golden.features)
    assert 1e-4 < relative(runner.logits(states), golden.logits[0]) < FOUR_BITS


def of_native(name: str, out: Path, **options) -> tuple[Frozen, dict[str, mx.array]]:
    """A head of that folder converted, on its inputs, with what it takes of its target."""
    golden, shared = frozen.native(name)
    config, weights = converted(frozen.FOLDER / name, out, **options)
    weights |= {key: mx.array(value) for key, value in shared.items()}
    config = replace(config, lm_head_source="file", embed_source="target")
    for key in [key for key in weights if key.startswith(("embed_tokens", "d2t"))]:
        del weights[key]
    return replace(golden, config=config), weights


@pytest.mark.parametrize("name", frozen.NATIVE)
def test_heads_of_other_trainers_give_their_logits(tmp_path, name):
    golden, weights = of_native(name, tmp_path / "out", quantize=False)
    example = replace(golden, weights={key: np.array(value) for key, value in weights.items()})
    runner = Runner(example)
    states = runner.extend(golden.tokens, golden.features)
    assert relative(runner.logits(states), golden.logits[0]) < TOLERANCE
    for slot in range(len(golden.tokens)):
        found = Runner(example).draft(golden, slot)
        assert relative(found, golden.logits[:, slot]) < TOLERANCE
    # One row of a tree beside another: positions and a mask of its own for each.
    half = Runner(example)
    seed = half.extend(golden.tokens[:5], golden.features[:5])[-1:]
    own = mx.concatenate([mx.ones((2, 5), mx.bool_), mx.eye(2).astype(mx.bool_)], axis=1)
    tokens = [golden.tokens[5], golden.tokens[0]]
    twins = half.step(tokens, mx.repeat(seed, 2, axis=0), mx.full((2,), 5), own)
    assert relative(half.logits(twins)[0], golden.logits[1, 4]) < TOLERANCE


@pytest.mark.parametrize(
    "name, changes",
    [
        ("native-mla-eagle31", ("softmax_scale", "traditional", "norm_output", "rms_norm_eps")),
        ("native-mla-two-layers", ("norm_before_residual", "traditional")),
        ("native-mistral-mla", ("position_scale", "norm_output", "traditional")),
        ("native-mistral-grouped", ("position_scale", "norm_output")),
        ("native-gemma4", ("softmax_scale", "value_norm", "logit_softcap", "rope")),
        ("native-gemma4-values", ("value_norm", "hidden_act")),
    ],
)
def test_every_setting_of_theirs_shows(tmp_path, name, changes):
    golden, weights = of_native(name, tmp_path / "out", quantize=False)
    weights = {key: np.array(value) for key, value in weights.items()}
    config = golden.config
    plain = {"type": "default", "theta": config.rope["theta"], "dims": config.rope["dims"]}
    wrong = {
        "softmax_scale": {"softmax_scale": None},
        "traditional": {"rope": {**config.rope, "traditional": False}},
        "norm_output": {"norm_output": not config.norm_output},
        "norm_before_residual": {"norm_before_residual": not config.norm_before_residual},
        "rms_norm_eps": {"rms_norm_eps": 1e-2},
        "position_scale": {"position_scale": None},
        "value_norm": {"value_norm": False},
        "logit_softcap": {"logit_softcap": None},
        "rope": {"rope": plain},
        "hidden_act": {"hidden_act": "silu"},
    }
    for change in changes:
        example = replace(golden, config=replace(config, **wrong[change]), weights=weights)
        found = Runner(example).draft(golden, 6)
        assert relative(found, golden.logits[:, 6]) > 100 * TOLERANCE, change


@pytest.mark.parametrize("name", frozen.NATIVE)
def test_in_eight_bits_they_stay_near(tmp_path, name):
    """Rows of 8 and 10 that belong to one head are packed together, and cut apart exactly."""
    golden, weights = of_native(name, tmp_path / "out", q_group_size=32, q_bits=8)
    # Matrices 16 or 24 wide stay as they are: there is no group that small.
    packed = {key.rpartition(".")[0] for key in weights if key.endswith("scales")}
    assert "layers.0.self_attn.o_proj" in packed or golden.config.latent is not None
    head = Eagle3Head(golden.config)
    fused = fuse_weights(weights, golden.config.num_layers, golden.config)
    nn.quantize(head, 32, 8, class_predicate=lambda path, _: f"{path}.scales" in fused)
    head.load_weights(list(fused.items()))
    embed = mx.array(golden.embed)[mx.array(golden.tokens)]
    cache = [KVCache() for _ in head.layers]
    states = head(embed, head.fuse(mx.array(golden.features)), cache)
    assert relative(np.array(head.logits(states)), golden.logits[0]) < 0.05


@pytest.mark.parametrize("case", CASES)
def test_layouts_of_every_family_give_the_references_logits(tmp_path, case):
    native, values, expected, _ = CASES[case]
    folder = write_safetensors(tmp_path / "source", values, native)
    config, weights = converted(folder, tmp_path / "out", quantize=False)
    rng = np.random.default_rng(3)
    if "lm_head.weight" not in weights:  # the target's, or rows of it
        rows = rng.standard_normal((config.draft_vocab_size, config.hidden_size)) / 8
        weights["lm_head.weight"] = mx.array(rows.astype(np.float32))
    config = replace(config, lm_head_source="file")
    width = config.num_aux * config.target_hidden_size
    inputs = Frozen(
        config=config,
        weights={},
        embed=rng.standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32),
        d2t=None,
        tokens=rng.integers(0, config.vocab_size, NUM_SLOTS).tolist(),
        features=rng.standard_normal((NUM_SLOTS, width)).astype(np.float32),
        logits=np.zeros((1 + NUM_STEPS, NUM_SLOTS, config.draft_vocab_size)),
    )
    example = as_example(inputs, config, weights)
    tensors = dict(example.weights)
    if case == "EAGLE-1 of speculators, with norms":
        assert len(tensors) == 14  # under names of their own, compared in test_convert_families
    if expected is not None:  # the native tensors under the reference's names
        tensors |= {name: value for name, value in expected.items() if name in tensors}
    arguments = (tensors, example.config)
    runner = Runner(example)
    states = runner.extend(example.tokens, example.features)
    _, wanted = eagle3_extend(*arguments, example.tokens, example.features, example.embed)
    assert relative(runner.logits(states), wanted) < TOLERANCE
    for slot in SLOTS:
        _, wanted = eagle3_draft(
            *arguments,
            example.tokens[: slot + 1],
            example.features[: slot + 1],
            example.embed,
            1 + NUM_STEPS,
            forced=example.chain(slot),
        )
        assert relative(Runner(example).draft(example, slot), wanted) < TOLERANCE
