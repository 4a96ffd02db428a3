"""Resolve the rotary embedding of a head from its config.

Gives ``Eagle3Config.rope``: type, theta, dims and the scaling dictionary that
``mlx_lm.models.rope_utils.initialize_rope`` takes. The target's rope never stands in for a
missing one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..system.fields import shown
from .schema import BASE
from .stored import Stored

DEFAULT_THETA = 10000.0
# Keys that initialize_rope reads, by type.
SCALING = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ),
}
# With nothing but text, all position components of mrope are equal, and it is plain rope.
PLAIN = ("default", "none", "mrope")


def _per_layer_type(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry that trainers take where the parameters are nested by layer type."""
    for kind in ("sliding_attention", "full_attention"):
        if isinstance(rope.get(kind), Mapping):
            return rope[kind]
    return rope


def _explicit(factors: Sequence[float], max_positions: int, scale: float = 1.0) -> dict[str, Any]:
    """Scaling that multiplies each wavelength by its factor, (dims / 2,), and q, k by ``scale``.

    It is spelled as mlx-lm's longrope, whose scale is sqrt(ln max_positions / ln original).
    """
    original = max_positions if scale == 1 else max_positions ** (1 / scale**2)
    return {
        "type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": list(factors),
        "long_factor": list(factors),
    }


def _untruncated_yarn(
    scaling: Mapping[str, Any], theta: float, dims: int, max_positions: int
) -> dict[str, Any]:
    """Yarn whose ramp ends between channels (``truncate`` false); mlx-lm's rounds the ends."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def channel(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    low = max(channel(scaling.get("beta_fast", 32)), 0)
    high = min(channel(scaling.get("beta_slow", 1)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    factors = 1 / (ramp / factor + 1 - ramp)
    scale = mscale(scaling.get("mscale", 1)) / mscale(scaling.get("mscale_all_dim", 0))
    return _explicit(factors.tolist(), max_positions, scale)


def _yarn(
    source: Mapping[str, Any], theta: float, dims: int, max_positions: int
) -> dict[str, Any]:
    scaling = {"type": "yarn", **_known("yarn", source)}
    original = scaling.setdefault("original_max_position_embeddings", max_positions)
    factor = scaling.setdefault("factor", max_positions / original)
    attention = source.get("attention_factor")
    if attention is not None and factor > 1:
        # mlx-lm scales by (0.1 mscale ln factor + 1) over the same with mscale_all_dim.
        scaling["mscale"] = (attention - 1) / (0.1 * math.log(factor))
        scaling["mscale_all_dim"] = 0
    if source.get("truncate") is False:
        return _untruncated_yarn(scaling, theta, dims, max_positions)
    return scaling


def _longrope(source: Mapping[str, Any], dims: int, max_positions: int) -> dict[str, Any]:
    """Longrope (Phi-3, MiniCPM4) by its factors for texts of the original length.

    Heads are trained on those; for longer texts transformers takes other factors, which a cache
    of rotated keys cannot follow.
    """
    factors = source.get("short_factor")
    if factors is None or len(factors) != dims // 2:
        raise ValueError(
            f"the head's rope is longrope with {len(factors or ())} numbers in short_factor, "
            f"expected {dims // 2}"
        )
    original = source.get("original_max_position_embeddings") or max_positions
    ratio, scale = max_positions / original, source.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return _explicit([float(factor) for factor in factors], max_positions, float(scale))


def _known(kind: str, source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: source[key] for key in SCALING[kind] if source.get(key) is not None}


def _read_factors(factors: Stored, dims: int) -> list[float]:
    values = np.array(factors.read().astype(mx.float32))
    if values.shape != (dims // 2,) or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(
            f"rope_freqs.weight is of the shape {shown(values.shape)}, expected {dims // 2} "
            "numbers above 0"
        )
    return values.tolist()


def _simple_scaling(kind: str, scaled: Mapping[str, Any]) -> dict[str, Any] | None:
    """Scaling that mlx-lm takes as the config has it; None without."""
    if kind in PLAIN:
        return None
    if kind not in SCALING:
        raise ValueError(
            f"the head's rope is of type {shown(kind)}; only default, mrope, proportional, "
            f"longrope, {', '.join(SCALING)} convert"
        )
    scaling = {"type": kind, **_known(kind, scaled)}
    if "factor" not in scaling:
        raise ValueError(f"the head's rope is {kind} without a factor; add one to its config")
    return scaling


def rope_scaling(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of the config that says how the rope is scaled; empty where it has none."""
    rope = _per_layer_type(settings.get("rope_parameters") or {})
    return settings.get("rope_scaling") or rope


def resolve_rope(
    settings: Mapping[str, Any],
    fields: Mapping[str, Any],
    theta: float | None = None,
    factors: Stored | None = None,
) -> dict[str, Any]:
    """Type, theta, dims and scaling out of the config; ``theta`` overrides its base.

    ``fields`` are the head's, as far as they are known. ``factors`` (dims / 2,) divide the
    frequencies, as llama.cpp stores llama3 scaling. Raises ValueError for a type of scaling that
    mlx-lm does not have, and for numbers that give none.
    """
    max_positions, latent = settings["max_position_embeddings"], fields["latent"]
    head_dim = latent["qk_rope_head_dim"] if latent else fields["head_dim"]
    rope = _per_layer_type(settings.get("rope_parameters") or {})
    scaled = rope_scaling(settings)
    kind = scaled.get("rope_type") or scaled.get("type") or "default"
    kind = "yarn" if kind == "deepseek_yarn" else kind
    if theta is None:
        theta = rope.get("rope_theta") or settings.get("rope_theta") or DEFAULT_THETA
    partial = rope.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
    turned = 1.0 if kind == "proportional" else partial
    dims = settings.get("rotary_dim") or int(head_dim * turned)
    if not BASE.holds(theta):
        raise ValueError(f"the base of the head's rope is {shown(theta)}, expected {BASE.words}")
    if dims % 2 or not 0 < dims <= head_dim:
        raise ValueError(
            f"the head's rope turns {dims} of {head_dim} channels, expected an even number of them"
        )
    scaling: dict[str, Any] | None
    if factors is not None:
        kind = "factors"
        scaling = _explicit(_read_factors(factors, dims), max_positions)
    elif kind in ("yarn", "longrope"):
        try:
            if kind == "yarn":
                scaling = _yarn(scaled, float(theta), dims, max_positions)
            else:
                scaling = _longrope(scaled, dims, max_positions)
        except ArithmeticError as err:
            raise ValueError(f"the head's rope cannot be as its config says ({err})") from err
    elif kind == "proportional":  # as if all channels turned, but the slow ones stand still
        factor = float(scaled.get("factor") or 1)
        scaling = {"type": kind, "partial_rotary_factor": float(partial), "factor": factor}
    else:
        scaling = _simple_scaling(kind, scaled)
    traditional = latent is not None and settings.get("rope_interleave", True)
    if traditional and (scaling or {}).get("type") == "longrope":
        raise ValueError(
            "the head's rope turns neighbouring channels by factors of their own, which mlx-lm "
            "does not have; drop truncate from its config, a difference of less than a channel"
        )
    resolved = {
        "type": "default" if kind in PLAIN else kind,
        "theta": float(theta),
        "dims": dims,
        "scaling": scaling,
    }
    return resolved | {"traditional": True} if traditional else resolved
