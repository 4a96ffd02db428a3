"""Read the rotary embedding of a head from its config: ``Eagle3Config.rope``.

It holds type, theta, dims and the scaling dictionary that mlx-lm's ``initialize_rope`` takes. The
target's rope never stands in for a missing one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import shown

from .schema import BASE

DEFAULT_THETA = 10000.0
SCALING = {
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim",
}
"""The keys that ``initialize_rope`` reads, by type."""
# In text without images all position components of mrope are equal, so it is plain rope.
PLAIN = ("default", "none", "mrope")


def _parameters(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters``; if they are nested by layer type, the entry that trainers take."""
    rope = settings.get("rope_parameters") or {}
    for kind in ("sliding_attention", "full_attention"):
        if isinstance(rope.get(kind), Mapping):
            return rope[kind]
    return rope


def scaling_entry(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of the config that says how the rope is scaled; empty if it has none."""
    return settings.get("rope_scaling") or _parameters(settings)


def scaling_type(entry: Mapping[str, Any]) -> str:
    """The type of scaling that an entry names."""
    kind = entry.get("rope_type") or entry.get("type") or "default"
    return "yarn" if kind == "deepseek_yarn" else kind


def _explicit(factors: Sequence[float], max_positions: int, scale: float = 1.0) -> dict[str, Any]:
    """Scaling that multiplies each wavelength by its factor, (dims / 2,), and q, k by ``scale``.

    It is written as mlx-lm's longrope, whose scale is sqrt(ln max_positions / ln original).
    """
    original = max_positions if scale == 1 else max_positions ** (1 / scale**2)
    return {
        "type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": list(factors),
        "long_factor": list(factors),
    }


def _known(kind: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: entry[key] for key in SCALING[kind].split() if entry.get(key) is not None}
    return {"type": kind, **values}


def _yarn(entry: Mapping[str, Any], theta: float, dims: int, max_positions: int) -> dict[str, Any]:
    scaling = _known("yarn", entry)
    original = scaling.setdefault("original_max_position_embeddings", max_positions)
    factor = scaling.setdefault("factor", max_positions / original)
    attention = entry.get("attention_factor")
    if attention is not None and factor > 1:
        # mlx-lm scales by (0.1 mscale ln factor + 1) over the same with mscale_all_dim.
        scaling["mscale"] = (attention - 1) / (0.1 * math.log(factor))
        scaling["mscale_all_dim"] = 0
    if entry.get("truncate") is False:
        return _untruncated_yarn(scaling, theta, dims, max_positions)
    return scaling


def _untruncated_yarn(
    scaling: Mapping[str, Any], theta: float, dims: int, max_positions: int
) -> dict[str, Any]:
    """Yarn whose ramp ends between channels (``truncate`` false); mlx-lm's rounds the ends."""
    factor = scaling["factor"]
    original = scaling["original_max_position_embeddings"]

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


def _longrope(entry: Mapping[str, Any], dims: int, max_positions: int) -> dict[str, Any]:
    """Longrope (Phi-3, MiniCPM4) by its factors for texts of the original length.

    Heads are trained on these. For longer texts transformers takes other factors, which a cache
    of rotated keys cannot follow.
    """
    factors = entry.get("short_factor")
    if factors is None or len(factors) != dims // 2:
        raise ValueError(
            f"the head's rope is longrope with {len(factors or ())} numbers in short_factor, "
            f"expected {dims // 2}"
        )
    original = entry.get("original_max_position_embeddings") or max_positions
    ratio = max_positions / original
    scale = entry.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return _explicit([float(factor) for factor in factors], max_positions, float(scale))


def _stored_factors(factors: Tensor, dims: int, max_positions: int) -> dict[str, Any]:
    """Scaling by the divisors of frequencies in a GGUF file, as llama.cpp stores llama3's."""
    values = np.array(factors.read().astype(mx.float32))
    if values.shape != (dims // 2,) or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(
            f"rope_freqs.weight is of the shape {shown(values.shape)}, expected {dims // 2} "
            "numbers above 0"
        )
    return _explicit(values.tolist(), max_positions)


def _simple(kind: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Scaling that mlx-lm takes as the config writes it."""
    if kind not in SCALING:
        raise ValueError(
            f"the head's rope is of type {shown(kind)}; only default, mrope, proportional, "
            f"longrope, {', '.join(SCALING)} convert"
        )
    if entry.get("factor") is None:
        raise ValueError(f"the head's rope is {kind} without a factor; add one to its config")
    return _known(kind, entry)


def resolve_rope(
    settings: Mapping[str, Any],
    attention: Mapping[str, Any],
    theta: float | None = None,
    factors: Tensor | None = None,
) -> dict[str, Any]:
    """Type, theta, dims and scaling, as the config has them; ``theta`` overrides its base.

    ``attention`` holds the head's ``head_dim`` and ``latent``. ``factors`` (dims / 2,) are a
    GGUF file's. Raises ValueError for a type of scaling that mlx-lm does not have, and for
    numbers that make no rope.
    """
    latent = attention["latent"]
    head_dim = latent["qk_rope_head_dim"] if latent else attention["head_dim"]
    max_positions = settings["max_position_embeddings"]
    own = _parameters(settings)
    entry = scaling_entry(settings)
    kind = scaling_type(entry) if factors is None else "factors"
    if theta is None:
        theta = own.get("rope_theta") or settings.get("rope_theta") or DEFAULT_THETA
    partial = own.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
    turned = 1.0 if scaling_type(entry) == "proportional" else partial
    dims = settings.get("rotary_dim") or int(head_dim * turned)
    if not BASE.holds(theta):
        raise ValueError(f"the base of the head's rope is {shown(theta)}, expected {BASE.words}")
    if dims % 2 or not 0 < dims <= head_dim:
        raise ValueError(
            f"the head's rope turns {dims} of {head_dim} channels, expected an even number of them"
        )
    scaling: dict[str, Any] | None = None
    try:
        if factors is not None:
            scaling = _stored_factors(factors, dims, max_positions)
        elif kind == "yarn":
            scaling = _yarn(entry, float(theta), dims, max_positions)
        elif kind == "longrope":
            scaling = _longrope(entry, dims, max_positions)
        elif kind == "proportional":  # as if all channels turned, but the slow ones stand still
            factor = float(entry.get("factor") or 1)
            scaling = {"type": kind, "partial_rotary_factor": float(partial), "factor": factor}
        elif kind not in PLAIN:
            scaling = _simple(kind, entry)
    except ArithmeticError as err:
        raise ValueError(f"the head's rope cannot be as its config says ({err})") from err
    traditional = latent is not None and settings.get("rope_interleave", True)
    if traditional and (scaling or {}).get("type") == "longrope":
        raise ValueError(
            "the head's rope turns neighbouring channels by factors of their own, which mlx-lm "
            "does not have; drop truncate from its config, a difference of less than a channel"
        )
    kind = "default" if kind in PLAIN else kind
    resolved = {"type": kind, "theta": float(theta), "dims": dims, "scaling": scaling}
    return resolved | {"traditional": True} if traditional else resolved
