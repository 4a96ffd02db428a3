"""The MLX head against the NumPy reference and against what other libraries computed."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from golden import frozen
from golden.frozen import Frozen, relative
from mlx_lm.models.cache import KVCache

from mlx_eagle.head import Eagle3Config, Eagle3Head, fuse_weights
from mlx_eagle.reference import eagle3_draft, eagle3_extend

TOLERANCE = 1e-5
QUANTIZED_TOLERANCE = 1e-4  # against the dequantized weights: the kernels sum in another order
HALF_TOLERANCE = 5e-2
NUM_SLOTS = 11
NUM_STEPS = 4

SIZES = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "draft_vocab_size": 48,
}
BIASES = {"fc_bias": True, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
EAGLE1 = {
    "target_hidden_size": 64,
    "num_aux": 1,
    "uses_aux": False,
    "fc_input": "embedding_and_state",
    "fc_bias": True,
    "layer_input": "none",
    "state_norm": False,
    "final_norm": False,
    "draft_vocab_size": 128,
    "has_d2t": False,
}
VARIANTS = {
    "default": {},
    "norm before residual": {"norm_before_residual": True},
    "concat norm": {"pre_fc_norm": "concat"},
    "per-feature norm": {"pre_fc_norm": "per_feature"},
    "norm output": {"norm_output": True},
    "eagle 3.1": {"pre_fc_norm": "per_feature", "norm_output": True},
    "all norms": {"norm_before_residual": True, "pre_fc_norm": "concat", "norm_output": True},
    "qk norm": {"qk_norm": True, **frozen.rope(1e6)},
    "biases": BIASES,
    "qkv bias only": {"attention_bias": True},
    "two layers": {"num_layers": 2, "norm_before_residual": True},
    "three layers, every": {"num_layers": 3, "layer_input": "every", "norm_before_residual": True},
    "window": {"sliding_window": 4},
    "mixed windows": {"num_layers": 3, "sliding_window": 3, "full_attention_layers": (1,)},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"head_dim": 8},
    "all key heads": {"num_kv_heads": 4},
    "other target width": {"target_hidden_size": 96},
    "five features": {"num_aux": 5, "qk_norm": True, "draft_vocab_size": 128, "has_d2t": False},
    "large epsilon": {"rms_norm_eps": 0.3, "pre_fc_norm": "concat", "qk_norm": True},
    "large epsilon by feature": {"rms_norm_eps": 0.3, "pre_fc_norm": "per_feature"},
    "gelu": {"hidden_act": "gelu"},
    "gelu tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "final state": {"num_aux": 1, "uses_aux": False, "fc_input": "none"},
    "eagle 1": EAGLE1,
    "eagle 1, two layers": {**EAGLE1, "num_layers": 2, "final_norm": True},
    "raw embedding": {"embedding_norm": False},
    "linear rope": frozen.rope(1e4, type="linear", factor=4.0),
    "partial rope": frozen.rope(1e4, dims=8),
    "llama3 rope": frozen.rope(
        5e5,
        type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "yarn rope": frozen.rope(1e4, type="yarn", factor=8.0, original_max_position_embeddings=32),
    "partial yarn rope": frozen.rope(
        1e4, dims=8, type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7
    ),
    "explicit rope": frozen.rope(
        1e4,
        type="longrope",
        original_max_position_embeddings=64.0,
        short_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
        long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
    ),
}


def random_weights(config: Eagle3Config, seed: int = 0) -> dict[str, np.ndarray]:
    """What the config needs under canonical, unfused names; norms away from 1."""
    c, rng = config, np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def linear(name: str, rows: int, columns: int, has_bias: bool = False) -> None:
        weights[f"{name}.weight"] = rng.standard_normal((rows, columns)) / np.sqrt(columns)
        if has_bias:
            weights[f"{name}.bias"] = 0.3 * rng.standard_normal(rows)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + 0.3 * rng.standard_normal(size)

    h, width = c.hidden_size, c.num_aux * c.target_hidden_size
    if c.fc_input != "none":
        linear("fc", h, width if c.fc_input == "features" else 2 * h, c.fc_bias)
    if c.pre_fc_norm == "concat":
        norm("input_norm", width)
    if c.pre_fc_norm == "per_feature":
        for j in range(c.num_aux):
            norm(f"fc_norm.{j}", c.target_hidden_size)
    for i in range(c.num_layers):
        prefix = f"layers.{i}"
        sees = c.layer_input == "every" or (c.layer_input == "first" and i == 0)
        size = 2 * h if sees else h
        if sees and c.embedding_norm:
            norm(f"{prefix}.input_layernorm", h)
        if i > 0 or c.state_norm:
            norm(f"{prefix}.hidden_norm", h)
        norm(f"{prefix}.post_attention_layernorm", h)
        for part, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            linear(f"{prefix}.self_attn.{part}_proj", heads * c.head_dim, size, c.attention_bias)
        linear(f"{prefix}.self_attn.o_proj", h, c.num_heads * c.head_dim, c.attention_out_bias)
        if c.qk_norm:
            norm(f"{prefix}.self_attn.q_norm", c.head_dim)
            norm(f"{prefix}.self_attn.k_norm", c.head_dim)
        linear(f"{prefix}.mlp.gate_proj", c.intermediate_size, h, c.mlp_bias)
        linear(f"{prefix}.mlp.up_proj", c.intermediate_size, h, c.mlp_bias)
        linear(f"{prefix}.mlp.down_proj", h, c.intermediate_size, c.mlp_bias)
    if c.final_norm:
        norm("norm", h)
    linear("lm_head", c.draft_vocab_size, h)
    return {name: value.astype(np.float32) for name, value in weights.items()}


def random_head(variant: str) -> Frozen:
    """Like a frozen head, but random, and with no logits known."""
    config = Eagle3Config(**{**SIZES, **VARIANTS[variant]})
    rng = np.random.default_rng(1)
    width = config.num_aux * config.target_hidden_size
    return Frozen(
        config=config,
        weights=random_weights(config),
        embed=rng.standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32),
        d2t=None,
        tokens=rng.integers(0, config.vocab_size, NUM_SLOTS).tolist(),
        features=2 * rng.standard_normal((NUM_SLOTS, width)).astype(np.float32),
        logits=np.zeros((1 + NUM_STEPS, NUM_SLOTS, config.draft_vocab_size)),
    )


class Runner:
    """An MLX head with a cache of its own."""

    def __init__(self, example: Frozen, weights: dict[str, mx.array] | None = None):
        config = example.config
        self.embed = mx.array(example.embed)
        self.head = Eagle3Head(config)
        if weights is None:
            weights = {name: mx.array(value) for name, value in example.weights.items()}
        else:
            packed = fuse_weights(weights, config.num_layers)
            nn.quantize(self.head, 32, 4, class_predicate=lambda p, _: f"{p}.scales" in packed)
        if config.embed_source == "file":
            weights["embed_tokens.weight"] = self.embed
        self.head.load_weights(list(fuse_weights(weights, config.num_layers).items()))
        self.cache = [KVCache() for _ in range(config.num_layers)]

    def extend(self, tokens, features, positions=None, mask=None) -> mx.array:
        """States (m, h) after tokens (m,) and features (m, F)."""
        return self.step(tokens, self.head.fuse(mx.array(features)), positions, mask)

    def step(self, tokens, states, positions=None, mask=None) -> mx.array:
        embeddings = self.embed[mx.array(tokens)]
        return self.head(embeddings, states, self.cache, positions, mask)

    def logits(self, states: mx.array) -> np.ndarray:
        """(m, h) -> (m, Vd)."""
        return np.array(self.head.logits(states))

    def draft(self, example: Frozen, slot: int, visible: mx.array | None = None) -> np.ndarray:
        """Logits (1 + steps, Vd): of the prefix up to that slot, then of each forced step.

        ``visible`` (slots, slots) says which slot sees which, where not the default.
        """

        def mask(start: int, stop: int) -> mx.array | None:
            return None if visible is None else visible[start:stop, :stop]

        size = slot + 1
        tokens, features = example.tokens[:size], example.features[:size]
        states = self.extend(tokens, features, mask=mask(0, size))[-1:]
        rows = [self.logits(states)]
        for i, token in enumerate(example.chain(slot), size):
            states = self.step([token], states, mask=mask(i, i + 1))
            rows.append(self.logits(states))
        for cache in self.cache:
            cache.trim(cache.offset)
        return np.concatenate(rows)


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def example(request) -> Frozen:
    return random_head(request.param)


@pytest.fixture(params=frozen.CHANGES)
def golden(request) -> Frozen:
    return frozen.load(request.param)


def test_every_golden_folder_is_compared():
    folders = {path.parent.name for path in frozen.FOLDER.glob("*/expected.safetensors")}
    assert folders == set(frozen.CHANGES)


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
    assert relative(np.array(logits.astype(mx.float32)), wanted) < HALF_TOLERANCE


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
