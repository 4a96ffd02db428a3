"""Multi-token-prediction layers in NumPy, as the makers' papers and files describe them.

Published tensors by the names of the files; every slot of a text anew, without a cache. Nothing of
this is ours or mlx-lm's: the target's states are given, and what follows from them is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Tensors = Mapping[str, Array]


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rope(x: Array, theta: float, dims: int, pairs: bool) -> Array:
    """The first ``dims`` channels of x (n, heads, d) turned by position; the rest as it is."""
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turned = x[..., :dims]
    if pairs:
        a, b = turned[..., 0::2], turned[..., 1::2]
        both = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(turned.shape)
    else:
        a, b = np.split(turned, 2, axis=-1)
        both = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return np.concatenate([both, x[..., dims:]], axis=-1)


def attend(
    q: Array, k: Array, v: Array, scale: float, window: int = 10**9, sinks: Array | None = None
) -> Array:
    """Causal attention of q (n, H, d) over the last k, v (n, Hk, .) -> (n, H, dv)."""
    k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
    scores = scale * np.einsum("ihd,jhd->hij", q, k)
    far = np.arange(len(q))[:, None] - np.arange(len(q))
    scores += np.where((far >= 0) & (far < window), 0, -np.inf)
    if sinks is None:
        return np.einsum("hij,jhd->ihd", softmax(scores), v)
    column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    shares = softmax(np.concatenate([scores, column], axis=-1))[..., :-1]
    return np.einsum("hij,jhd->ihd", shares, v)


def swiglu(x: Array, t: Tensors, path: str) -> Array:
    gate, up, down = (t[f"{path}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def qwen_layer(x: Array, t: Tensors, c: Mapping[str, Any]) -> Array:
    """A layer with gated attention; norms hold their weight less one."""
    p, eps, n = "mtp.layers.0.", c["rms_norm_eps"], len(x)
    heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    h = rms(x, 1 + t[f"{p}input_layernorm.weight"], eps)
    q = (h @ t[f"{p}self_attn.q_proj.weight"].T).reshape(n, heads, 2 * d)
    q, gate = q[..., :d], q[..., d:]
    k, v = ((h @ t[f"{p}self_attn.{x}_proj.weight"].T).reshape(n, kv, d) for x in "kv")
    q = rms(q, 1 + t[f"{p}self_attn.q_norm.weight"], eps)
    k = rms(k, 1 + t[f"{p}self_attn.k_norm.weight"], eps)
    dims = int(d * c["partial_rotary_factor"])
    q, k = (rope(part, c["rope_theta"], dims, pairs=False) for part in (q, k))
    out = (attend(q, k, v, d**-0.5) * sigmoid(gate)).reshape(n, -1)
    x = x + out @ t[f"{p}self_attn.o_proj.weight"].T
    h = rms(x, 1 + t[f"{p}post_attention_layernorm.weight"], eps)
    if f"{p}mlp.gate.weight" not in t:
        return x + swiglu(h, t, f"{p}mlp.")
    shared = sigmoid(h @ t[f"{p}mlp.shared_expert_gate.weight"].T)
    out = shared * swiglu(h, t, f"{p}mlp.shared_expert.")
    scores = softmax(h @ t[f"{p}mlp.gate.weight"].T)
    for i, row in enumerate(h):
        chosen = np.argsort(-scores[i])[: c["num_experts_per_tok"]]
        weights = scores[i][chosen]
        if c["norm_topk_prob"]:
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights, strict=True):
            out[i] += weight * swiglu(row, t, f"{p}mlp.experts.{expert}.")
    return x + out


def sigmoid_experts(h: Array, t: Tensors, p: str, c: Mapping[str, Any], expert: Any) -> Array:
    """Experts chosen by sigmoid and correction, weighed by sigmoid; the shared ones added."""
    out = expert(h, t, f"{p}shared_experts.") if c.get("n_shared_experts") else np.zeros_like(h)
    scores = sigmoid(h @ t[f"{p}gate.weight"].T)
    rated = scores + t[f"{p}gate.e_score_correction_bias"]
    for i, row in enumerate(h):
        chosen = np.argsort(-rated[i])[: c["num_experts_per_tok"]]
        weights = scores[i][chosen]
        if c["norm_topk_prob"]:
            weights = weights / weights.sum()
        for index, weight in zip(chosen, weights * c["routed_scaling_factor"], strict=True):
            out[i] = out[i] + weight * expert(row, t, f"{p}experts.{index}.")
    return out


def latent_layer(x: Array, t: Tensors, c: Mapping[str, Any]) -> Array:
    """A layer of DeepSeek-V3 and of GLM-4.7-Flash: latent attention, and experts."""
    p, eps, n = f"model.layers.{c['num_hidden_layers']}.", c["rms_norm_eps"], len(x)
    heads, rank = c["num_attention_heads"], c["kv_lora_rank"]
    nope, turned, dv = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    h = rms(x, t[f"{p}input_layernorm.weight"], eps)
    q = rms(h @ t[f"{p}self_attn.q_a_proj.weight"].T, t[f"{p}self_attn.q_a_layernorm.weight"], eps)
    q = (q @ t[f"{p}self_attn.q_b_proj.weight"].T).reshape(n, heads, nope + turned)
    both = h @ t[f"{p}self_attn.kv_a_proj_with_mqa.weight"].T
    latent = rms(both[:, :rank], t[f"{p}self_attn.kv_a_layernorm.weight"], eps)
    kv = (latent @ t[f"{p}self_attn.kv_b_proj.weight"].T).reshape(n, heads, nope + dv)
    turn = lambda part: rope(part, c["rope_theta"], turned, pairs=True)  # noqa: E731
    k_turned = np.repeat(turn(both[:, None, rank:]), heads, axis=1)
    q = np.concatenate([q[..., :nope], turn(q[..., nope:])], axis=-1)
    k = np.concatenate([kv[..., :nope], k_turned], axis=-1)
    out = attend(q, k, kv[..., nope:], (nope + turned) ** -0.5).reshape(n, -1)
    x = x + out @ t[f"{p}self_attn.o_proj.weight"].T
    h = rms(x, t[f"{p}post_attention_layernorm.weight"], eps)
    return x + sigmoid_experts(h, t, f"{p}mlp.", c, swiglu)


def glm_layer(x: Array, t: Tensors, c: Mapping[str, Any]) -> Array:
    """A layer of GLM-4.5: biases and, in some, norms on queries and keys; half the head turned."""
    p, eps, n = f"model.layers.{c['num_hidden_layers']}.", c["rms_norm_eps"], len(x)
    heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    h = rms(x, t[f"{p}input_layernorm.weight"], eps)

    def project(name: str, count: int) -> Array:
        bias = t.get(f"{p}self_attn.{name}_proj.bias", 0)
        return (h @ t[f"{p}self_attn.{name}_proj.weight"].T + bias).reshape(n, count, d)

    q, k, v = project("q", heads), project("k", kv), project("v", kv)
    if c["use_qk_norm"]:
        q = rms(q, t[f"{p}self_attn.q_norm.weight"], eps)
        k = rms(k, t[f"{p}self_attn.k_norm.weight"], eps)
    dims = int(d * c["partial_rotary_factor"])
    q, k = (rope(part, c["rope_theta"], dims, pairs=False) for part in (q, k))
    x = x + attend(q, k, v, d**-0.5).reshape(n, -1) @ t[f"{p}self_attn.o_proj.weight"].T
    h = rms(x, t[f"{p}post_attention_layernorm.weight"], eps)
    return x + sigmoid_experts(h, t, f"{p}mlp.", c, swiglu)


def mimo_layer(x: Array, t: Tensors, c: Mapping[str, Any]) -> Array:
    """A layer of MiMo-7B, which is Qwen2's."""
    p, eps, n = "model.mtp_layers.0.", c["rms_norm_eps"], len(x)
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    d = c["hidden_size"] // heads
    h = rms(x, t[f"{p}input_layernorm.weight"], eps)

    def project(name: str, count: int) -> Array:
        a = f"{p}self_attn.{name}_proj."
        return (h @ t[f"{a}weight"].T + t[f"{a}bias"]).reshape(n, count, d)

    q, k = (rope(project(*part), c["rope_theta"], d, False) for part in (("q", heads), ("k", kv)))
    out = attend(q, k, project("v", kv), d**-0.5).reshape(n, -1)
    x = x + out @ t[f"{p}self_attn.o_proj.weight"].T
    return x + swiglu(rms(x, t[f"{p}post_attention_layernorm.weight"], eps), t, f"{p}mlp.")


def relu2(x: Array, t: Tensors, path: str) -> Array:
    up, down = (t[f"{path}{name}_proj.weight"] for name in ("up", "down"))
    return np.maximum(x @ up.T, 0) ** 2 @ down.T


def nemotron_layer(x: Array, t: Tensors, c: Mapping[str, Any]) -> Array:
    """Nemotron-H's two blocks: attention that knows no positions, and experts."""
    eps, n = c["layer_norm_epsilon"], len(x)
    heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    p = "mtp.layers.0."
    h = rms(x, t[f"{p}norm.weight"], eps)
    q, k, v = (
        (h @ t[f"{p}mixer.{name}_proj.weight"].T).reshape(n, count, d)
        for name, count in (("q", heads), ("k", kv), ("v", kv))
    )
    x = x + attend(q, k, v, d**-0.5).reshape(n, -1) @ t[f"{p}mixer.o_proj.weight"].T
    p = "mtp.layers.1."
    return x + sigmoid_experts(rms(x, t[f"{p}norm.weight"], eps), t, f"{p}mixer.", c, relu2)


def step_layer(x: Array, t: Tensors, c: Mapping[str, Any], p: str) -> Array:
    """A layer of Step 3.5: a gate for each head, norms less one, some with a window."""
    index, eps, n, d = int(p.split(".")[2]), c["rms_norm_eps"], len(x), c["head_dim"]
    slides = c["layer_types"][index] == "sliding_attention"
    heads = c["attention_other_setting"]["num_attention_heads"] if slides else None
    heads, kv = heads or c["num_attention_heads"], c["num_attention_groups"]
    h = rms(x, 1 + t[f"{p}input_layernorm.weight"], eps)
    q, k, v = (
        (h @ t[f"{p}self_attn.{name}_proj.weight"].T).reshape(n, count, d)
        for name, count in (("q", heads), ("k", kv), ("v", kv))
    )
    q = rms(q, 1 + t[f"{p}self_attn.q_norm.weight"], eps)
    k = rms(k, 1 + t[f"{p}self_attn.k_norm.weight"], eps)
    theta, dims = c["rope_theta"][index], int(d * c["partial_rotary_factors"][index])
    q, k = (rope(part, theta, dims, pairs=False) for part in (q, k))
    out = attend(q, k, v, d**-0.5, c["sliding_window"] if slides else 10**9)
    out = out * sigmoid(h @ t[f"{p}self_attn.g_proj.weight"].T)[..., None]
    x = x + out.reshape(n, -1) @ t[f"{p}self_attn.o_proj.weight"].T
    return x + swiglu(rms(x, 1 + t[f"{p}post_attention_layernorm.weight"], eps), t, f"{p}mlp.")


def mimo_v2_layer(x: Array, t: Tensors, c: Mapping[str, Any], p: str) -> Array:
    """A layer of MiMo-V2-Flash: a window, something of the attention for no slot at all."""
    eps, n = c["layernorm_epsilon"], len(x)
    heads, kv, d = c["swa_num_attention_heads"], c["swa_num_key_value_heads"], c["swa_head_dim"]
    h = rms(x, t[f"{p}input_layernorm.weight"], eps)
    q, k, v = (
        (h @ t[f"{p}self_attn.{name}_proj.weight"].T).reshape(n, count, -1)
        for name, count in (("q", heads), ("k", kv), ("v", kv))
    )
    dims = int(d * c["partial_rotary_factor"])
    q, k = (rope(part, c["swa_rope_theta"], dims, pairs=False) for part in (q, k))
    sinks = t[f"{p}self_attn.attention_sink_bias"]
    v = v * c["attention_value_scale"]
    out = attend(q, k, v, d**-0.5, c["sliding_window_size"], sinks).reshape(n, -1)
    x = x + out @ t[f"{p}self_attn.o_proj.weight"].T
    return x + swiglu(rms(x, t[f"{p}pre_mlp_layernorm.weight"], eps), t, f"{p}mlp.")


@dataclass(frozen=True)
class SteppedMTP:
    """Layers of which number j sees the token at i + 1 + j beside the state of position i."""

    layer: Callable[[Array, Tensors, Mapping[str, Any], str], Array]
    prefixes: tuple[str, ...]
    out_norm: str
    head: str | None = None
    """The layer's own matrix of logits; None: the target's."""
    less_one: bool = False
    chained: bool = True
    """Whether the state is what the layer before made of position i; else the target's."""
    normed: bool = False
    """Whether states are behind a norm, so that what a layer made goes through its own."""

    @property
    def join(self) -> str:
        return f"{self.prefixes[0]}eh_proj.weight"

    def logits(
        self,
        tensors: Tensors,
        config: Mapping[str, Any],
        table: Array,
        output: Array,
        states: Array,
        text: list[int],
        size: int,
        drafted: Sequence[int] = (),
    ) -> list[Array]:
        """As those of ``NaiveMTP``; layer by layer, anew."""
        eps = config.get("rms_norm_eps") or config["layernorm_epsilon"]
        plus = 1.0 if self.less_one else 0.0
        t = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
        table, output = np.asarray(table, np.float64), np.asarray(output, np.float64)
        tokens, states, found = list(text), np.asarray(states, np.float64), []
        for j, p in enumerate(self.prefixes[:size]):
            seen = tokens[1 + j :]
            assert len(seen) == len(states)
            both = [
                rms(table[seen], plus + t[f"{p}enorm.weight"], eps),
                rms(states, plus + t[f"{p}hnorm.weight"], eps),
            ]
            joined = np.concatenate(both, axis=-1) @ t[f"{p}eh_proj.weight"].T
            made = self.layer(joined, t, config, p)
            last = rms(made[-1], plus + t[f"{p}{self.out_norm}"], eps)
            found.append((t[f"{p}{self.head}"] if self.head else output) @ last)
            tokens.append(drafted[j] if j < len(drafted) else int(found[-1].argmax()))
            passed = rms(made, plus + t[f"{p}{self.out_norm}"], eps) if self.normed else made
            states = passed if self.chained else states
        return found


@dataclass(frozen=True)
class NaiveMTP:
    """Layers of one kind: their parts' names in the files, and what stands between the norms."""

    layer: Callable[[Array, Tensors, Mapping[str, Any]], Array]
    embedding_norm: str
    state_norm: str
    join: str
    out_norm: str
    state_first: bool = False
    less_one: bool = False
    normed: bool = True
    """Whether states are behind a norm, so that those made go through the head's own."""

    def logits(
        self,
        tensors: Tensors,
        config: Mapping[str, Any],
        table: Array,
        output: Array,
        states: Array,
        text: list[int],
        size: int,
        drafted: Sequence[int] = (),
    ) -> list[Array]:
        """Logits of each of ``size`` drafts after ``text``, of whose tokens all but the last have
        ``states``; ``table`` (V, h) embeds, ``output`` (V, h) is the target's. The first drafts
        are ``drafted``, the others the greatest."""
        eps = config.get("rms_norm_eps") or config["layer_norm_epsilon"]
        plus = 1.0 if self.less_one else 0.0
        t = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
        tokens, states, found = text[1:], np.asarray(states, np.float64), []
        for i in range(size):
            both = [
                rms(np.asarray(table, np.float64)[tokens], plus + t[self.embedding_norm], eps),
                rms(states, plus + t[self.state_norm], eps),
            ]
            joined = np.concatenate(both[::-1] if self.state_first else both, axis=-1)
            out = self.layer(joined @ t[self.join].T, t, config)
            last = rms(out, plus + t[self.out_norm], eps)[-1]
            found.append(np.asarray(output, np.float64) @ last)
            tokens = [*tokens, drafted[i] if i < len(drafted) else int(found[-1].argmax())]
            states = np.concatenate([states, last[None] if self.normed else out[-1:]])
        return found


def appended(layer: Any, num_layers: int) -> NaiveMTP:
    p = f"model.layers.{num_layers}."
    names = (f"{p}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    return NaiveMTP(layer, *names)


QWEN = NaiveMTP(
    qwen_layer,
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    less_one=True,
)
MIMO = NaiveMTP(
    mimo_layer,
    "model.mtp_layers.0.token_layernorm.weight",
    "model.mtp_layers.0.hidden_layernorm.weight",
    "model.mtp_layers.0.input_proj.weight",
    "model.mtp_layers.0.final_layernorm.weight",
    state_first=True,
)
NEMOTRON = NaiveMTP(
    nemotron_layer,
    "mtp.layers.0.enorm.weight",
    "mtp.layers.0.hnorm.weight",
    "mtp.layers.0.eh_proj.weight",
    "mtp.layers.1.final_layernorm.weight",
)
