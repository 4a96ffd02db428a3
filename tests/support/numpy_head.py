"""EAGLE heads in plain NumPy, without a cache, to test the fast code against.

What a head computes is in Li et al. 2025, arXiv:2503.01840, section 3 (EAGLE-3), and Li et al.
2024, arXiv:2401.15077 (EAGLE-1). Here everything is recomputed at every step, in float64.

Sizes: m slots, h the head's hidden size, F = number of features x the target's hidden size,
V the target's vocabulary, Vd the draft vocabulary, H heads of D channels, K of them for keys.
Slot t holds the features of position t and the token *after* it: with the text
[10, 11, 12], of which 12 was just chosen, the slots are (11, features 0), (12, features 1).

``weights`` maps canonical, unfused names to arrays: ``fc.weight``, ``input_norm.weight`` or
``fc_norm.0.weight``.., ``layers.0.self_attn.q_proj.weight``, .., ``norm.weight``,
``lm_head.weight``. ``config`` is an ``Eagle3Config`` or anything with its attributes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Weights = Mapping[str, np.ndarray]


def eagle3_extend(
    weights: Weights, config: Any, tokens: Sequence[int], features: np.ndarray, embed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """States (m, h) and logits (m, Vd) of all slots: tokens (m,), features (m, F), embed (V, h).

    The last row of the logits says which token may follow ``tokens``; the last state is what
    a draft step feeds back. Raises ValueError where a shape does not fit.
    """
    _check_slots(config, tokens, features, embed)
    states = _advance(weights, config, tokens, _fuse(weights, config, features), embed)
    return states, _logits(weights, config, states)


def eagle3_draft(
    weights: Weights,
    config: Any,
    tokens: Sequence[int],
    features: np.ndarray,
    embed: np.ndarray,
    num_draft_tokens: int,
    d2t: np.ndarray | None = None,
    forced: Sequence[int] | None = None,
) -> tuple[list[int], np.ndarray]:
    """Draft a chain greedily: its tokens, as target ids, and the logits (k, Vd) of each.

    The first k - 1 drafted tokens each add a slot, whose state is the head's own output for
    the slot before. ``d2t`` (Vd,) holds offsets: draft id i is target id i + d2t[i]. With
    ``forced``, k - 1 target ids or more, those are fed in place of the drafted tokens. A
    P-EAGLE head (arXiv:2602.01469) is fed nothing it drafted, but masked slots.
    """
    _check_slots(config, tokens, features, embed)
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}, but a draft has 1 or more")
    if forced is not None and len(forced) < num_draft_tokens - 1:
        raise ValueError(
            f"{len(forced)} tokens are forced, but {num_draft_tokens} draft tokens need "
            f"{num_draft_tokens - 1}"
        )
    fed, states = list(tokens), _fuse(weights, config, features)
    if getattr(config, "mask_token_id", None) is not None:  # P-EAGLE: all in one pass
        masked = num_draft_tokens - 1
        mask = _fuse(weights, config, np.reshape(weights["mask_hidden"], (1, -1)))
        fed += [config.mask_token_id] * masked
        outputs = _advance(weights, config, fed, np.concatenate([states, *[mask] * masked]), embed)
        rows = _logits(weights, config, outputs[-num_draft_tokens:])
        best = [int(i) for i in np.argmax(rows, axis=-1)]
        return [i if d2t is None else i + int(d2t[i]) for i in best], rows
    drafted, logits = [], []
    while True:
        outputs = _advance(weights, config, fed, states, embed)
        logits.append(_logits(weights, config, outputs[-1:])[0])
        index = int(np.argmax(logits[-1]))
        drafted.append(index if d2t is None else index + int(d2t[index]))
        if len(drafted) == num_draft_tokens:
            return drafted, np.stack(logits)
        fed.append(drafted[-1] if forced is None else int(forced[len(drafted) - 1]))
        states = np.concatenate([states, outputs[-1:]])


def _array(name: str, value: ArrayLike, shape: tuple[int | None, ...] | None) -> np.ndarray:
    """``value`` in float64, checked to have the shape; None fits any size, or any vector."""
    array = np.asarray(value, dtype=np.float64)
    wanted = (None,) if shape is None else shape
    fits = array.ndim == len(wanted) and all(
        size is None or size == found for size, found in zip(wanted, array.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ValueError(f"{name} has shape {array.shape}, but ({sizes}) is needed")
    return array


def _weight(weights: Weights, name: str, *shape: int) -> np.ndarray:
    if name not in weights:
        raise ValueError(f"the weights lack {name}, which this config needs")
    return _array(name, weights[name], shape)


def _check_slots(config: Any, tokens: Sequence[int], features: Any, embed: Any) -> None:
    if any(getattr(config, name, None) for name in ("latent", "position_scale", "branch_norms")):
        raise ValueError(
            "the reference is for llama layers, and this head has latent attention, scaled "
            "positions or layers of Gemma-4"
        )
    _array("embed", embed, (None, config.hidden_size))
    rows = len(tokens)
    if rows == 0:
        raise ValueError("tokens is empty, but a head needs one slot or more")
    _array("features", features, (rows, config.num_aux * config.target_hidden_size))
    if min(tokens) < 0 or max(tokens) >= len(embed):
        raise ValueError(f"tokens go up to {max(tokens)}, but embed has {len(embed)} rows")


def _linear(weights: Weights, name: str, x: np.ndarray, size: int, has_bias: bool) -> np.ndarray:
    """(m, n) -> (m, size)."""
    out = x @ _weight(weights, f"{name}.weight", size, x.shape[-1]).T
    return out + _weight(weights, f"{name}.bias", size) if has_bias else out


def _rms_norm(weights: Weights, config: Any, name: str, x: np.ndarray) -> np.ndarray:
    """Llama's: x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)
    return x / scale * _weight(weights, f"{name}.weight", x.shape[-1])


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: (
        x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    ),
}


def _softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def _llama3_frequencies(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Slow channels divided by the factor, fast ones kept, a linear blend between."""
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    original = scaling.get("original_max_position_embeddings", 8192)
    turns = original * frequencies / (2 * math.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling["factor"]


def _yarn_frequencies(
    frequencies: np.ndarray, theta: float, scaling: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """As llama3, with a ramp over channels; and a factor for q and k (arXiv:2309.00071)."""
    dims, factor = 2 * len(frequencies), scaling["factor"]
    original = scaling.get("original_max_position_embeddings", 4096)

    def channel(turns: float) -> float:
        """The channel that turns that often in the original context."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    first = max(math.floor(channel(scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(channel(scaling.get("beta_slow", 1))), dims - 1)
    slow = np.clip((np.arange(dims // 2) - first) / max(last - first, 0.001), 0, 1)
    scale = magnitude(scaling.get("mscale", 1)) / magnitude(scaling.get("mscale_all_dim", 0))
    return (1 - slow) * frequencies + slow * frequencies / factor, scale


def _rope_frequencies(config: Any) -> tuple[np.ndarray, float]:
    """Radians a position for each pair of rotated channels, and what q and k are scaled by."""
    theta = config.rope["theta"]
    dims = config.rope.get("dims") or config.head_dim
    scaling = config.rope.get("scaling") or {}
    kind = scaling.get("type") or scaling.get("rope_type") or "default"
    frequencies = theta ** (-np.arange(0, dims, 2) / dims)
    if kind in ("default", "mrope"):
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3_frequencies(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn_frequencies(frequencies, theta, scaling)
    if kind == "longrope":  # a factor for each pair of channels
        original = scaling["original_max_position_embeddings"]
        grown = config.max_position_embeddings / original
        scale = math.sqrt(1 + math.log(grown) / math.log(original)) if grown > 1 else 1.0
        return frequencies / np.asarray(scaling["long_factor"]), scale
    raise ValueError(f"rope is of type {kind}, but the reference knows no such type")


def _rotate(config: Any, x: np.ndarray) -> np.ndarray:
    """Rope on (m, heads, D), slot t at position t; pairs are channels i and i + dims / 2."""
    frequencies, scale = _rope_frequencies(config)
    half = len(frequencies)
    angles = np.arange(len(x))[:, None, None] * frequencies
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _attention(weights: Weights, config: Any, index: int, x: np.ndarray) -> np.ndarray:
    """Causal attention over all slots, (m, h or 2h) -> (m, h)."""
    c, prefix, rows = config, f"layers.{index}.self_attn", len(x)

    def project(name: str, num_heads: int) -> np.ndarray:
        size = num_heads * c.head_dim
        out = _linear(weights, f"{prefix}.{name}_proj", x, size, c.attention_bias)
        return out.reshape(rows, num_heads, c.head_dim)

    q, k, v = project("q", c.num_heads), project("k", c.num_kv_heads), project("v", c.num_kv_heads)
    if c.qk_norm:
        q = _rms_norm(weights, c, f"{prefix}.q_norm", q)
        k = _rms_norm(weights, c, f"{prefix}.k_norm", k)
    q, k = _rotate(c, q), _rotate(c, k)
    slots = np.arange(rows)
    visible = slots[None, :] <= slots[:, None]
    if c.sliding_window is not None and index not in c.full_attention_layers:
        visible &= slots[None, :] > slots[:, None] - c.sliding_window
    out = np.empty_like(q)
    for head in range(c.num_heads):
        shared = head * c.num_kv_heads // c.num_heads  # the key head of this group
        scores = q[:, head] @ k[:, shared].T / math.sqrt(c.head_dim)
        out[:, head] = _softmax(np.where(visible, scores, -np.inf)) @ v[:, shared]
    return _linear(
        weights, f"{prefix}.o_proj", out.reshape(rows, -1), c.hidden_size, c.attention_out_bias
    )


def _mlp(weights: Weights, config: Any, index: int, x: np.ndarray) -> np.ndarray:
    c, prefix = config, f"layers.{index}.mlp"
    gate = _linear(weights, f"{prefix}.gate_proj", x, c.intermediate_size, c.mlp_bias)
    up = _linear(weights, f"{prefix}.up_proj", x, c.intermediate_size, c.mlp_bias)
    hidden = ACTIVATIONS[c.hidden_act](gate) * up
    return _linear(weights, f"{prefix}.down_proj", hidden, c.hidden_size, c.mlp_bias)


def _layer(
    weights: Weights, config: Any, index: int, embeddings: np.ndarray, states: np.ndarray
) -> np.ndarray:
    """One decoder layer, (m, h) -> (m, h); of the embedding nothing enters the residual."""
    c, prefix = config, f"layers.{index}"
    normed = states
    if index > 0 or c.state_norm:
        normed = _rms_norm(weights, c, f"{prefix}.hidden_norm", states)
    x, residual = normed, states
    if c.layer_input == "every" or (c.layer_input == "first" and index == 0):
        if c.embedding_norm:
            embeddings = _rms_norm(weights, c, f"{prefix}.input_layernorm", embeddings)
        x = np.concatenate([embeddings, normed], axis=-1)
        residual = normed if c.norm_before_residual else states
    states = residual + _attention(weights, c, index, x)
    x = _rms_norm(weights, c, f"{prefix}.post_attention_layernorm", states)
    return states + _mlp(weights, c, index, x)


def _fuse(weights: Weights, config: Any, features: np.ndarray) -> np.ndarray:
    """The target's features (m, F), low tap first, as states (m, h)."""
    c, x = config, np.asarray(features, dtype=np.float64)
    if c.pre_fc_norm == "concat":
        x = _rms_norm(weights, c, "input_norm", x)
    elif c.pre_fc_norm == "per_feature":
        parts = np.split(x, c.num_aux, axis=-1)
        normed = [_rms_norm(weights, c, f"fc_norm.{j}", part) for j, part in enumerate(parts)]
        x = np.concatenate(normed, axis=-1)
    return _linear(weights, "fc", x, c.hidden_size, c.fc_bias) if c.fc_input == "features" else x


def _advance(
    weights: Weights, config: Any, tokens: Sequence[int], states: np.ndarray, embed: np.ndarray
) -> np.ndarray:
    """What every slot hands to the next and to the logits, (m, h) -> (m, h)."""
    embeddings = np.asarray(embed, dtype=np.float64)[list(tokens)]
    if getattr(config, "fusion_norm", False):
        embeddings = _rms_norm(weights, config, "embedding_norm", embeddings)
    if config.fc_input == "embedding_and_state":  # EAGLE-1, at every step
        x = np.concatenate([embeddings, states], axis=-1)
        states = _linear(weights, "fc", x, config.hidden_size, config.fc_bias)
    for index in range(config.num_layers):
        states = _layer(weights, config, index, embeddings, states)
    return _rms_norm(weights, config, "norm", states) if config.norm_output else states


def _logits(weights: Weights, config: Any, states: np.ndarray) -> np.ndarray:
    """(m, h) -> (m, Vd); the final norm is applied once, here or to the states fed back."""
    if config.final_norm and not config.norm_output:
        states = _rms_norm(weights, config, "norm", states)
    return _linear(weights, "lm_head", states, config.draft_vocab_size, False)
