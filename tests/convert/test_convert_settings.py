"""Taps, overrides and rope: what the config says and what it comes to."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import CONFIG, Tensors, config_of, eagle3_tensors, speculators, write_safetensors
from mlx_lm.models.rope_utils import initialize_rope
from tolerances import tolerance

from mlx_eagle.convert.__main__ import main
from mlx_eagle.convert.checkpoint import DraftCheckpoint, TargetFolder
from mlx_eagle.convert.head_config import Resolved, resolve
from mlx_eagle.convert.stored import Stored

PLAIN = eagle3_tensors()
TWO = eagle3_tensors(num_layers=2)

# Which layers are tapped

NESTED, TOP = "nested", "top"
TAPS = [
    # place, ids as written, depth of the target (None: unknown), boundary ids, source, doubts
    (NESTED, [1, 15, 28], 32, [2, 16, 29], "nested+1", False),
    (NESTED, [1, 15, 28], None, [2, 16, 29], "nested+1", False),
    (NESTED, [1, 17, 33], 36, [2, 18, 34], "nested+1", False),  # gpt-oss-120b, SpecForge
    (NESTED, [1, 11, 21], 24, [2, 12, 22], "nested+1", False),  # gpt-oss-20b, SpecForge
    (NESTED, [2, 30, 58], 61, [2, 30, 58], "nested-as-is", False),  # Kimi, AQ-MedAI
    (NESTED, [2, 30, 58], None, [2, 30, 58], "nested-as-is", False),
    (NESTED, [24, 30, 36], 36, [24, 30, 36], "nested-as-is", False),  # gpt-oss-120b v3
    (NESTED, [24, 30, 36], None, [25, 31, 37], "nested+1", True),
    (NESTED, [4, 20, 40], 45, [5, 21, 41], "nested+1", True),  # step-3.5-flash
    (TOP, [2, 30, 57], 60, [2, 30, 57], "top-level", False),  # Gemma-4-31B
    (TOP, [1, 23, 44], 48, [1, 23, 44], "top-level", True),  # Llama-4 Maverick, converted
    (TOP, [1, 23, 44], None, [1, 23, 44], "top-level", True),
    (TOP, [1, 46, 90], 94, [1, 46, 90], "top-level", True),
    (TOP, [0, 16, 32], 32, [0, 16, 32], "top-level", False),
]


def resolved(config: dict, num_layers: int | None, tensors: Tensors) -> Resolved:
    stored = {n: Stored("F32", t.shape, np.zeros(0, np.uint8)) for n, t in tensors.items()}
    for name in stored.keys() & {"d2t", "t2d"}:
        kind = "I64" if name == "d2t" else "BOOL"
        data = np.frombuffer(tensors[name].tobytes(), np.uint8)
        stored[name] = Stored(kind, tensors[name].shape, data)
    target = None
    if num_layers is not None:
        sizes = {"hidden_size": 64, "num_hidden_layers": num_layers, "vocab_size": 128}
        target = TargetFolder.of("target", Path("."), sizes)
    return resolve(DraftCheckpoint("head", config, stored, ()), target)


@pytest.mark.parametrize("place, ids, depth, expected, source, doubts", TAPS)
def test_taps(place, ids, depth, expected, source, doubts):
    entry = {"eagle_aux_hidden_state_layer_ids": ids}
    if place == NESTED:
        found = resolved(CONFIG | {"eagle_config": entry}, depth, PLAIN)
    else:
        found = resolved(speculators(**entry), depth, PLAIN)
    assert list(found.config.aux_boundary_ids) == expected
    assert found.config.aux_ids_source == source
    assert bool(found.notes) == doubts


@pytest.mark.parametrize("depth", [24, 28, 32, 36, 40, 48, 60, 61, 62, 64, 80, 94])
def test_default_taps(depth):
    found = resolved(CONFIG, depth, PLAIN)
    assert found.config.aux_boundary_ids == (2, depth // 2, depth - 3)
    assert found.config.aux_ids_source == "default"


def test_taps_beyond_the_target(capsys):
    with pytest.raises(ValueError, match="the target has 32 layers"):
        resolved(speculators(eagle_aux_hidden_state_layer_ids=[2, 16, 33]), 32, PLAIN)


# Overrides


def overridden(tmp_path: Path, *args: str) -> dict:
    """The config of a two-layer head with ids, converted with these arguments."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}
    config = CONFIG | {"eagle_config": ids, "norm_before_residual": True}
    folder, out = write_safetensors(tmp_path / "source", config, TWO), tmp_path / "out"
    main(["--hf-path", str(folder), "--mlx-path", str(out), *args])
    return config_of(out)


@pytest.mark.parametrize(
    "args, fields",
    [
        (("--aux-layers", "3,5,7"), {"aux_boundary_ids": [3, 5, 7], "aux_ids_source": "override"}),
        (("--norm-output",), {"norm_output": True}),
        (("--no-norm-before-residual",), {"norm_before_residual": False}),
        (("--num-layers", "1"), {"num_layers": 1}),
        (
            ("--rope-theta", "12345"),
            {"rope": {"type": "default", "theta": 12345.0, "dims": 16, "scaling": None}},
        ),
        ((), {"norm_output": False, "norm_before_residual": True, "num_layers": 2}),
    ],
)
def test_overrides(tmp_path, args, fields):
    written = overridden(tmp_path, *args)
    assert {key: written[key] for key in fields} == fields


@pytest.mark.parametrize(
    "args",
    [
        ("--aux-layers", "3,5"),
        ("--num-layers", "3"),
    ],
)
def test_bad_overrides(tmp_path, capsys, args):
    with pytest.raises(SystemExit) as exit:
        overridden(tmp_path, *args)
    assert exit.value.code == 2 and "--" in capsys.readouterr().err


# Rope

YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
ROPE = {
    "missing": ({}, 10000.0, 16, None),
    "theta": ({"rope_theta": 1e6}, 1e6, 16, None),
    "parameters": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        7.0,
        16,
        None,
    ),
    "by layer type": (
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 5e4, "rope_type": "default"},
            }
        },
        5e4,
        16,
        None,
    ),
    "linear": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        10000.0,
        16,
        {"type": "linear", "factor": 2.0},
    ),
    "llama3": (
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 4096,
            },
        },
        5e5,
        16,
        {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn": ({"rope_scaling": YARN | {"rope_type": "yarn"}}, 10000.0, 16, YARN | {"type": "yarn"}),
    "yarn from max_position_embeddings": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        10000.0,
        16,
        {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
    ),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, 10000.0, 16, None),
    "partial": ({"partial_rotary_factor": 0.5}, 10000.0, 8, None),
}


@pytest.mark.parametrize("case", ROPE)
def test_rope(case):
    config, theta, dims, scaling = ROPE[case]
    rope = resolved(CONFIG | config, None, PLAIN).config.rope
    assert (rope["theta"], rope["dims"], rope["scaling"]) == (theta, dims, scaling)
    initialize_rope(dims, theta, False, scaling, 2048)


def test_untruncated_yarn():
    """Against transformers' formula, spelled out, at some positions."""
    source = {"rope_type": "yarn", "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0, **YARN}
    rope = resolved(CONFIG | {"rope_scaling": source}, None, PLAIN).config.rope
    base = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    low, high = (16 * np.log(512 / (r * 2 * np.pi)) / (2 * np.log(10000.0)) for r in (32, 1))
    ramp = np.clip((np.arange(8) - max(low, 0)) / (min(high, 15) - max(low, 0)), 0, 1)
    check_rotation(rope, base / 4 * ramp + base * (1 - ramp), 0.1 * np.log(4) + 1)


def check_rotation(rope: dict, inverse: np.ndarray, scale: float) -> None:
    """It turns by those frequencies and lengthens by ``scale``, at a text of 2048 tokens."""
    module = initialize_rope(16, rope["theta"], False, rope["scaling"], 2048)
    x = np.random.default_rng(0).standard_normal(16)
    angle = 5 * inverse
    left, right = x[:8], x[8:]
    cos, sin = np.cos(angle), np.sin(angle)
    expected = scale * np.concatenate([left * cos - right * sin, right * cos + left * sin])
    ours = module(mx.array(x, dtype=mx.float32).reshape(1, 1, 1, 16), offset=5)
    assert np.abs(np.array(ours).ravel() - expected).max() < tolerance()


def test_longrope():
    """Against transformers' formula for texts of the original length, spelled out."""
    factors = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0]
    source = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors[::-1]}
    inverse = 10000.0 ** (-np.arange(0, 16, 2) / 16) / np.array(factors)
    for original, own, scale in (
        (512, {}, (1 + np.log(4) / np.log(512)) ** 0.5),
        (2048, {}, 1.0),
        (512, {"attention_factor": 1.25}, 1.25),
    ):
        scaling = source | own | {"original_max_position_embeddings": original}
        rope = resolved(CONFIG | {"rope_scaling": scaling}, None, PLAIN).config.rope
        check_rotation(rope, inverse, scale)
    with pytest.raises(ValueError, match="longrope with 2 numbers in short_factor, expected 8"):
        resolved(CONFIG | {"rope_scaling": source | {"short_factor": [1.0, 2.0]}}, None, PLAIN)


def test_the_token_of_masked_slots_where_no_config_names_it(tmp_path):
    """As SpecForge's own template leaves it."""
    tensors = TWO | {"mask_hidden": np.ones((1, 1, 192), np.float32)}
    config = CONFIG | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2}
    folder = write_safetensors(tmp_path / "source", config, tensors)
    main(["--hf-path", str(folder), "--mlx-path", str(tmp_path / "out"), "--mask-token-id", "7"])
    assert config_of(tmp_path / "out")["mask_token_id"] == 7
