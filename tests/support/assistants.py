"""Gemma 4 assistants: tiny targets and assistants, frozen ones, and what one drafts, by hand.

The twin starts from the text every time, in operations of its own.
"""

import json
from pathlib import Path

import mlx.core as mx
from checkpoints import write_config
from golden import frozen
from helpers import VOCAB, randomize
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_eagle.drafters.assistant import (
    FULL,
    SLIDING,
    Assistant,
    AssistantConfig,
    AssistantDrafter,
)

WINDOW = 8  # of the sliding layers: shorter than any prompt and text together
SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True}
LARGE = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
MIXED = (SLIDING, SLIDING, SLIDING, FULL)


def tiny_gemma4(seed: int = 30, **changes):
    """A target with rotating caches; by default its last two layers share others' rows."""
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, FULL] * 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "sliding_window": WINDOW,
        **SHARED,
        **changes,
    }
    return randomize(gemma4_text.Model(gemma4_text.ModelArgs(**values)), seed)


def tiny_assistant(target, seed: int = 31, **changes) -> AssistantDrafter:
    """A random assistant for a target; with ``num_centroids``, its tokens are in clusters."""
    args = target.args
    values = {
        "hidden_size": 32,
        "target_hidden_size": args.hidden_size,
        "vocab_size": args.vocab_size,
        "intermediate_size": 48,
        "num_heads": 4,
        "head_dim": args.head_dim,
        "global_head_dim": args.global_head_dim,
        "layer_types": MIXED,
        **changes,
    }
    config = AssistantConfig(**values)
    head = randomize(Assistant(config), seed)
    if config.num_centroids:
        head.set_clusters(mx.random.permutation(config.vocab_size, key=mx.random.key(seed)))
    return AssistantDrafter(head, target)


def rows_of(target, text: list[int], window: int):
    """Keys and values by type of layer, and the states (P, H), of a text in one pass."""
    cache, args = make_prompt_cache(target), target.args
    states = target.model(mx.array([text]), cache=cache)[0]
    rows = {}
    for layer, own in zip(target.layers, cache, strict=False):
        parts = [part[..., : len(text), :] for part in (own.keys, own.values)]
        if isinstance(own, RotatingKVCache):
            # From empty, nothing is cut yet.
            assert own.keys.shape[2] == len(text) or len(text) == 1
            parts = [part[..., -window:, :] for part in parts]
        rows[layer.layer_type] = parts
    assert len(cache) == args.num_hidden_layers - args.num_kv_shared_layers
    return rows, states


def rms(x: mx.array, weight: mx.array, eps: float = 1e-6) -> mx.array:
    return x / mx.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def turned(x: mx.array, place: int, theta: float, share: float) -> mx.array:
    """x (heads, d) at a place; of each half of the channels the first ``share`` is turned."""
    half = x.shape[-1] // 2
    index = mx.arange(half)
    angles = mx.where(index < share * half, place * theta ** (-index / half), 0.0)
    first, second = x[:, :half], x[:, half:]
    return mx.concatenate(
        [
            first * mx.cos(angles) - second * mx.sin(angles),
            second * mx.cos(angles) + first * mx.sin(angles),
        ],
        axis=-1,
    )


def attended(layer, kind: str, x: mx.array, rows, place: int, num_heads: int) -> mx.array:
    own, (keys, values) = layer.self_attn, rows[kind]
    queries = rms((x @ own.q_proj.weight.T).reshape(num_heads, -1), own.q_norm.weight)
    queries = turned(queries, place, *((1e6, 0.25) if kind == FULL else (1e4, 1.0)))
    repeats = num_heads // keys.shape[1]
    made = []
    for head in range(num_heads):
        shares = mx.softmax(keys[0, head // repeats] @ queries[head])
        made.append(shares @ values[0, head // repeats])
    return mx.concatenate(made) @ own.o_proj.weight.T


def gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh((2 / mx.pi) ** 0.5 * (x + 0.044715 * x**3)))


def twin_logits(
    drafter: AssistantDrafter, target, text: list[int], size: int, forced: list[int] = ()
) -> mx.array:
    """Logits (size, V) of a draft behind ``text``, each from the likeliest token before.

    ``forced`` are the first tokens of the draft, whatever is likeliest.
    """
    head, c = drafter.head, drafter.head.config
    rows, states = rows_of(target, text[:-1], target.args.sliding_window)
    token, state, found = text[-1], states[-1], []
    for step in range(size):
        embedding = target.model.embed_tokens.weight[token] * target.args.hidden_size**0.5
        x = mx.concatenate([embedding, state]) @ head.pre_projection.weight.T
        for layer, kind in zip(head.layers, c.layer_types, strict=True):
            y = rms(x, layer.input_layernorm.weight)
            y = attended(layer, kind, y, rows, len(text) - 1, c.num_heads)
            x = x + rms(y, layer.post_attention_layernorm.weight)
            y, mlp = rms(x, layer.pre_feedforward_layernorm.weight), layer.mlp
            y = gelu(y @ mlp.gate_proj.weight.T) * (y @ mlp.up_proj.weight.T)
            x = x + rms(y @ mlp.down_proj.weight.T, layer.post_feedforward_layernorm.weight)
            x = x * layer.layer_scalar
        x = rms(x, head.norm.weight)
        logits = head.embed_tokens.weight @ x
        if c.num_centroids:
            best = mx.argsort(head.centroids.weight @ x)[-c.centroid_top_k :]
            inside = mx.zeros(c.vocab_size)
            for cluster in best.tolist():
                inside[head._clusters[cluster]] = 1.0
            logits = mx.where(inside > 0, logits, -mx.inf)
        found.append(logits)
        state = x @ head.post_projection.weight.T
        token = forced[step] if step < len(forced) else mx.argmax(logits).item()
    return mx.stack(found)


def naive_assistant(drafter: AssistantDrafter, target, text: list[int], size: int) -> list[int]:
    return mx.argmax(twin_logits(drafter, target, text, size), axis=-1).tolist()


def golden_folder(name: str) -> Path:
    return Path(frozen.FOLDER) / f"assistant-{name}"


def golden_target(name: str):
    """The target that a frozen assistant is for, in float32."""
    folder = golden_folder(name)
    values = json.loads((folder / "target.json").read_text())
    target = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(values))
    weights = mx.load(str(folder / "target.safetensors"))
    weights = {name: array.astype(mx.float32) for name, array in weights.items()}
    target.load_weights(list(target.sanitize(weights).items()))
    mx.eval(target.parameters())
    return target


def published(folder, drafter, prefix: str = "model.", drop: tuple = (), **changes):
    """A checkpoint of the drafter's weights under published names."""
    folder.mkdir()
    c, weights = drafter.head.config, {}
    for name, array in tree_flatten(drafter.head.parameters()):
        own = "masked_embedding." if name.startswith("centroids") else prefix
        weights[name if "projection" in name else own + name] = array
    if c.num_centroids:
        ordering = drafter.head._clusters.reshape(-1).astype(mx.int64)
        weights["masked_embedding.token_ordering"] = ordering
    weights = {name: a for name, a in weights.items() if name not in drop}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    text = {
        "model_type": "gemma4_text",
        "layer_types": list(c.layer_types),
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_kv_shared_layers": 0,
        **changes.pop("text_config", {}),
    }
    config = {
        "model_type": "gemma4_unified_assistant",
        "backbone_hidden_size": c.target_hidden_size,
        "use_ordered_embeddings": bool(c.num_centroids),
        "centroid_intermediate_top_k": c.centroid_top_k or 32,
        "text_config": text,
        **changes,
    }
    write_config(folder, config)
    return folder
