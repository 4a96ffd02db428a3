"""The MLX head against the NumPy head and against what other libraries computed."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from golden import frozen
from golden.frozen import Frozen, relative
from heads import NUM_SLOTS, NUM_STEPS, TOLERANCE, VARIANTS, Runner, random_head
from mlx.utils import tree_flatten
from numpy_head import eagle3_draft, eagle3_extend
from tolerances import tolerance

from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.head_weights import fuse_weights

# Against the dequantized weights: the kernels sum in another order.
QUANTIZED_TOLERANCE = 10 * TOLERANCE


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def example(request) -> Frozen:
    return random_head(request.param)


@pytest.fixture(params=frozen.CHANGES)
def golden(request) -> Frozen:
    return frozen.load(request.param)


def test_every_golden_folder_is_compared():
    """But those of other kinds of drafters, which have tests of their own."""
    folders = {path.parent.name for path in frozen.FOLDER.glob("*/expected.safetensors")}
    folders = {name for name in folders if not name.startswith(("block-", "assistant-"))}
    assert folders == {*frozen.CHANGES, *frozen.NATIVE}


def test_extend_pass_equals_the_reference(example):
    runner = Runner(example)
    states = runner.extend(example.tokens, example.features)
    wanted_states, wanted_logits = eagle3_extend(
        example.weights, example.config, example.tokens, example.features, example.embed
    )
    assert relative(states, wanted_states) < TOLERANCE
    assert relative(runner.logits(states), wanted_logits) < TOLERANCE


def test_chained_draft_steps_equal_the_reference(example):
    runner = Runner(example)
    for slot in (0, 3, 6):
        _, wanted = eagle3_draft(
            example.weights,
            example.config,
            example.tokens[: slot + 1],
            example.features[: slot + 1],
            example.embed,
            1 + NUM_STEPS,
            forced=example.chain(slot),
        )
        assert relative(runner.draft(example, slot), wanted) < TOLERANCE


def test_extend_pass_equals_other_libraries(golden):
    runner = Runner(golden)
    states = runner.extend(golden.tokens, golden.features)
    assert relative(runner.logits(states), golden.logits[0]) < TOLERANCE


def test_chained_draft_steps_equal_other_libraries(golden):
    runner = Runner(golden)
    for slot in range(len(golden.tokens)):
        steps = golden.num_comparable(slot)
        if steps > 0:
            found, wanted = runner.draft(golden, slot), golden.logits[:, slot]
            assert relative(found[:steps], wanted[:steps]) < TOLERANCE


def test_draft_steps_under_a_standing_window_equal_speculators():
    golden = frozen.load("speculators-sliding-window")
    window = golden.config.sliding_window
    config = replace(golden.config, sliding_window=None)  # the masks below say it all
    runner = Runner(replace(golden, config=config))
    slots = mx.arange(len(golden.tokens) + len(golden.logits))
    causal = slots[None] <= slots[:, None]
    for slot in range(len(golden.tokens)):
        visible = causal & (slots[None] > mx.minimum(slots, slot)[:, None] - window)
        assert relative(runner.draft(golden, slot, visible), golden.logits[:, slot]) < TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"norm_before_residual": True},
        {"norm_output": True},
        {"rms_norm_eps": 1e-2},
        {"sliding_window": 2},
        frozen.rope(5e5),
        frozen.rope(1e4, dims=8),
    ],
    ids=lambda change: "-".join(change),
)
def test_a_wrong_setting_shows(change):
    golden = frozen.load("speculators-default")
    wrong = replace(golden, config=replace(golden.config, **change))
    assert relative(Runner(wrong).draft(golden, 6), golden.logits[:, 6]) > 100 * TOLERANCE


def test_a_shifted_pairing_shows():
    golden = frozen.load("speculators-default")
    runner = Runner(golden)
    states = runner.extend(golden.tokens[1:], golden.features[:-1])
    assert relative(runner.logits(states), golden.logits[0, :-1]) > 100 * TOLERANCE


@pytest.mark.parametrize("sizes", [[1] * NUM_SLOTS, [4, 1, 6], [2, 9]], ids=str)
def test_cached_chunks_equal_one_block(example, sizes):
    whole = Runner(example).extend(example.tokens, example.features)
    runner, parts = Runner(example), []
    for size in sizes:
        start = runner.cache[0].offset
        part = slice(start, start + size)
        parts.append(runner.extend(example.tokens[part], example.features[part]))
    assert relative(mx.concatenate(parts, axis=0), np.array(whole)) < TOLERANCE


def test_explicit_positions_equal_the_default(example):
    whole = Runner(example).extend(example.tokens, example.features)
    runner = Runner(example)
    first = runner.extend(example.tokens[:4], example.features[:4], mx.arange(4))
    rest = runner.extend(example.tokens[4:], example.features[4:], mx.arange(4, NUM_SLOTS))
    assert relative(mx.concatenate([first, rest], axis=0), np.array(whole)) < TOLERANCE


def test_only_relative_positions_matter(example):
    whole = Runner(example).extend(example.tokens, example.features)
    for positions in (7, mx.arange(7, 7 + NUM_SLOTS)):
        moved = Runner(example).extend(example.tokens, example.features, positions)
        assert relative(moved, np.array(whole)) < TOLERANCE
    drifting = Runner(example).extend(example.tokens, example.features, 2 * mx.arange(NUM_SLOTS))
    assert relative(drifting, np.array(whole)) > 100 * TOLERANCE


@pytest.fixture(params=[name for name in VARIANTS if "window" not in name])
def unwindowed(request) -> Frozen:
    """One mask serves all layers only where they do not differ in their windows."""
    example = random_head(request.param)
    assert example.config.sliding_window is None
    return example


def test_an_explicit_mask_equals_the_default(unwindowed):
    example = unwindowed
    whole = Runner(example).extend(example.tokens, example.features)
    causal = mx.tri(NUM_SLOTS, dtype=mx.bool_)
    masked = Runner(example).extend(example.tokens, example.features, mask=causal)
    assert relative(masked, np.array(whole)) < TOLERANCE


def test_siblings_at_one_position_equal_each_path_alone(unwindowed):
    example = unwindowed
    prefix, siblings = slice(0, 5), example.tokens[5:8]
    runner = Runner(example)
    seed = runner.extend(example.tokens[prefix], example.features[prefix])[-1:]
    own = mx.concatenate([mx.ones((3, 5), mx.bool_), mx.eye(3).astype(mx.bool_)], axis=1)
    together = runner.step(siblings, mx.repeat(seed, 3, axis=0), mx.full((3,), 5), own)
    for row, token in enumerate(siblings):
        alone = Runner(example)
        alone.extend(example.tokens[prefix], example.features[prefix])
        wanted = alone.step([token], seed)
        assert relative(together[row : row + 1], np.array(wanted)) < TOLERANCE


def test_fused_rows_are_the_parts_in_order():
    example = random_head("biases")
    weights = {name: mx.array(value) for name, value in example.weights.items()}
    fused = fuse_weights(weights, 1)
    for whole, parts in (
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        for kind in ("weight", "bias"):
            rows = [example.weights[f"layers.0.{part}.{kind}"] for part in parts]
            found = np.array(fused[f"layers.0.{whole}.{kind}"])
            np.testing.assert_array_equal(found, np.concatenate(rows))
    assert len(fused) == len(weights) - 2 * (2 + 1)
    assert set(example.weights) == set(weights)  # the argument is left as it was


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["all norms", "eagle 3.1", "yarn rope", "eagle 1"])
def test_half_precision_stays_near_and_stays_half(variant, dtype):
    example = random_head(variant)
    weights = {name: mx.array(value) for name, value in example.weights.items()}
    runner = Runner(example, {name: value.astype(dtype) for name, value in weights.items()})
    states = runner.extend(example.tokens, example.features)
    logits = runner.head.logits(states)
    assert states.dtype == logits.dtype == runner.cache[0].keys.dtype == dtype
    _, wanted = eagle3_extend(
        example.weights, example.config, example.tokens, example.features, example.embed
    )
    assert relative(np.array(logits.astype(mx.float32)), wanted) < tolerance(dtype)


@pytest.mark.parametrize(
    "variant", ["default", "eagle 3.1", "biases", "qk norm", "two layers", "eagle 1"]
)
def test_quantized_head_equals_its_dequantized_weights(variant):
    example = random_head(variant)
    packed, dequantized = {}, {}
    for name, value in example.weights.items():
        if value.ndim == 1:
            packed[name], dequantized[name] = mx.array(value), value
            continue
        parts = mx.quantize(mx.array(value), group_size=32, bits=4)
        for kind, part in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[name.replace("weight", kind)] = part
        dequantized[name] = np.array(mx.dequantize(*parts, group_size=32, bits=4))
    runner = Runner(example, packed)
    matrices = [m for _, m in runner.head.named_modules() if "weight" in m and m.weight.ndim == 2]
    assert matrices and all(isinstance(m, nn.QuantizedLinear) for m in matrices)
    states = runner.extend(example.tokens, example.features)
    found = [runner.logits(states), Runner(example, packed).draft(example, 5)]
    arguments = (dequantized, example.config)
    _, logits = eagle3_extend(*arguments, example.tokens, example.features, example.embed)
    _, drafted = eagle3_draft(
        *arguments,
        example.tokens[:6],
        example.features[:6],
        example.embed,
        1 + NUM_STEPS,
        forced=example.chain(5),
    )
    assert relative(found[0], logits) < QUANTIZED_TOLERANCE
    assert relative(found[1], drafted) < QUANTIZED_TOLERANCE


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("norm_output", [False, True])
def test_parallel_heads_equal_a_naive_one(outputs, norm_output):
    """x + silu(linear(x)) twice on the normed state, then an output matrix of all or its own."""
    changes = {
        "num_parallel_heads": 3,
        "parallel_head_layers": 2,
        "parallel_head_bias": True,
        "parallel_outputs": outputs,
        "norm_output": norm_output,
    }
    head = Eagle3Head(replace(random_head("default").config, **changes))
    rng = np.random.default_rng(2)
    values = {
        name: 0.2 * rng.standard_normal(array.shape).astype(np.float32)
        for name, array in tree_flatten(head.parameters())
    }
    head.load_weights([(name, mx.array(value)) for name, value in values.items()])
    states = rng.standard_normal((2, 64)).astype(np.float32)
    for i in range(3):
        x = states.astype(np.float64)
        if not norm_output:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * values["norm.weight"]
        for j in range(2):
            place = f"parallel_heads.{i}.layers.{j}"
            y = x @ values[f"{place}.weight"].T + values[f"{place}.bias"]
            x = x + y / (1 + np.exp(-y))
        wanted = x @ values[f"parallel_outputs.{i if outputs > 1 else 0}.weight"].T
        assert relative(np.array(head.parallel_logits(mx.array(states), i)), wanted) < TOLERANCE
