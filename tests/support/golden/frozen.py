"""The frozen heads of this folder: configs, written by hand, and what their makers computed.

Written by ``tools/golden/make_*.py``, whose docstrings say what the files hold.
"""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_eagle.drafters.config import Eagle3Config

FOLDER = Path(__file__).parent
SIZES = {
    "hidden_size": 32,
    "target_hidden_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 128,
    "draft_vocab_size": 48,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "embed_source": "file",
}
LONG_HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}


def rope(theta: float, dims: int | None = None, **scaling: object) -> dict:
    return {"rope": {"theta": theta, "dims": dims, "scaling": scaling or None}}


LLAMA3_ROPE = rope(
    5e5,
    type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)

MASK = {"mask_token_id": 97, "speculative_tokens_hint": 5}

CHANGES = {
    "speculators-default": {
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
    },
    "speculators-norm-before-residual": {"norm_before_residual": True},
    "speculators-norm-before-fc": {"pre_fc_norm": "concat"},
    "speculators-eagle31": {"pre_fc_norm": "per_feature", "norm_output": True},
    "speculators-all-norms": {
        "norm_before_residual": True,
        "pre_fc_norm": "concat",
        "norm_output": True,
    },
    "speculators-two-layers": {"num_layers": 2, "norm_before_residual": True},
    "speculators-qwen3": {"qk_norm": True, **rope(1e6)},
    "speculators-attention-bias": {
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        **rope(5e5),
    },
    "speculators-sliding-window": {"qk_norm": True, "sliding_window": 4},
    "speculators-mixed-windows": {
        "qk_norm": True,
        "num_layers": 2,
        "sliding_window": 4,
        "full_attention_layers": (0,),
    },
    "speculators-llama3-rope": {**LONG_HEADS, **LLAMA3_ROPE},
    "speculators-yarn-rope": {
        **LONG_HEADS,
        **rope(1e4, type="yarn", factor=8.0, original_max_position_embeddings=32),
    },
    "speculators-partial-rope": {**LONG_HEADS, **rope(1e4, dims=8, type="linear", factor=2.0)},
    "speculators-wide-heads": {"head_dim": 16},
    "speculators-full-vocabulary": {"draft_vocab_size": 128, "has_d2t": False},
    "peagle-llama": {"num_layers": 2, **MASK},
    "peagle-five-features": {
        "num_layers": 3,
        "num_aux": 5,
        "qk_norm": True,
        "norm_before_residual": True,
        "pre_fc_norm": "concat",
        **MASK,
    },
    "peagle-eagle31": {
        "num_layers": 2,
        "pre_fc_norm": "per_feature",
        "norm_output": True,
        **MASK,
    },
    "peagle-mixed-windows": {
        "num_layers": 2,
        "qk_norm": True,
        "sliding_window": 4,
        "full_attention_layers": (0,),
        **MASK,
    },
    "specforge-plain": {},
    "specforge-fc-norm": {"pre_fc_norm": "per_feature"},
    "specforge-target-hidden-size": {"target_hidden_size": 48},
    "specforge-linear-rope": rope(1e4, type="linear", factor=4.0),
    "specforge-yarn-rope": {
        **LONG_HEADS,
        **rope(
            5e4,
            type="yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=0.5,
        ),
    },
}


NATIVE = tuple(sorted(path.name for path in FOLDER.glob("native-*")))
"""Heads whose files are compared once they are converted: no config of theirs is written here."""


@dataclass(frozen=True)
class Frozen:
    """One head; T slots, S = 1 + 4 steps: the extend pass and four draft steps."""

    config: Eagle3Config
    weights: dict[str, np.ndarray]  # canonical, unfused names, float32
    embed: np.ndarray  # (V, h)
    d2t: np.ndarray | None  # (Vd,) offsets
    tokens: list[int]  # (T,)
    features: np.ndarray  # (T, F)
    logits: np.ndarray  # (S, T, Vd): step i after the prefix of slots 0..t

    @property
    def is_parallel(self) -> bool:
        return self.config.mask_token_id is not None

    def chain(self, slot: int) -> list[int]:
        """The tokens of the draft steps after the prefix that ends with that slot."""
        steps = range(slot + 1, slot + len(self.logits))
        return [self.tokens[i] if i < len(self.tokens) else 0 for i in steps]

    def num_comparable(self, slot: int) -> int:
        """Steps after that prefix over which a moving window hides nothing: all without one.

        Of a parallel head, the steps that are known: those within the T slots.
        """
        window, steps = self.config.sliding_window, len(self.logits)
        if self.is_parallel:
            steps = min(steps, len(self.tokens) - slot)
        return steps if window is None else min(steps, window - slot)


def _canonical(name: str) -> str:
    """Layers after the first have one norm before attention, hidden_norm, whatever its name."""
    name = name.replace("midlayer.", "layers.0.")
    if name.startswith("layers.") and not name.startswith("layers.0."):
        name = name.replace("input_layernorm", "hidden_norm")
    return name


def load(name: str) -> Frozen:
    stored = mx.load(str(FOLDER / name / "model.safetensors"))
    expected = mx.load(str(FOLDER / name / "expected.safetensors"))
    weights = {
        _canonical(key): np.array(value.astype(mx.float32))
        for key, value in stored.items()
        if key not in ("d2t", "t2d", "embed_tokens.weight")
    }
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"].reshape(-1)
    config = Eagle3Config(**{**SIZES, **CHANGES[name]})
    return Frozen(
        config=config,
        weights=weights,
        embed=np.array(stored["embed_tokens.weight"].astype(mx.float32)),
        d2t=np.array(stored["d2t"]) if config.has_d2t else None,
        tokens=expected["tokens"].tolist(),
        features=np.array(expected["features"]),
        logits=np.array(expected["logits"]),
    )


def native(name: str) -> tuple[Frozen, dict[str, np.ndarray]]:
    """The inputs and logits of a head that is compared once it is converted.

    And what of the target's it needs, under canonical names. The config is a stand-in.
    """
    expected = dict(mx.load(str(FOLDER / name / "expected.safetensors")))
    arrays = {key: np.array(value) for key, value in expected.items()}
    shared = {"lm_head.weight": arrays["lm_head"]} if "lm_head" in arrays else {}
    found = Frozen(
        config=Eagle3Config(**SIZES),
        weights={},
        embed=arrays["embed_tokens"],
        d2t=None,
        tokens=expected["tokens"].tolist(),
        features=arrays["features"],
        logits=arrays["logits"],
    )
    return found, shared


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference as a part of the largest value wanted."""
    return float(np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max())
