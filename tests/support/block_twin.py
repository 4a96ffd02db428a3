"""Drafters of blocks in plain NumPy, as their formats are described: every position anew.

Nothing is shared with the product: no cache, no batch, a loop over what each query sees.
"""

import mlx.core as mx
import numpy as np
from helpers import randomize
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.drafters.block_config import BlockConfig
from mlx_eagle.drafters.dflash import DFlashDrafter, DFlashHead
from mlx_eagle.drafters.target_parts import find_embedding, lm_head_of
from mlx_eagle.target.taps import Target

SIZES = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "mask_token_id": 11,
    "block_size": 7,
}


def tiny_dflash(model, seed: int = 20, **changes) -> DFlashDrafter:
    """A head of blocks with random weights for a target; its embedding and output are shared."""
    embedding, vocab_size = find_embedding(model)
    sizes = {
        "hidden_size": embedding.weight.shape[1],
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "taps": (1, len(model.layers)),
        **SIZES,
        **changes,
    }
    head = randomize(DFlashHead(BlockConfig(**sizes)), seed)
    return DFlashDrafter(head, embedding, lm_head_of(model, embedding))


def weights_of(head) -> dict[str, np.ndarray]:
    return {name: np.array(a, np.float64) for name, a in tree_flatten(head.parameters())}


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def turned(x: np.ndarray, position: int, theta: float, neighbours: bool) -> np.ndarray:
    """x (heads, d) at a position: channel i with channel i + d/2, or with its neighbour."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    first, second = (x[:, ::2], x[:, 1::2]) if neighbours else (x[:, :half], x[:, half:])
    pair = (
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    )
    if not neighbours:
        return np.concatenate(pair, axis=-1)
    out = np.empty_like(x)
    out[:, ::2], out[:, 1::2] = pair
    return out


def sees(c: BlockConfig, layer: int, query: int, key: int, anchor: int) -> bool:
    """Whether a query of the block sees a key, by position; the block begins at ``anchor``."""
    if layer in c.causal_layers and key > query:
        return False
    window = c.windows[layer] if c.windows else 0
    if not window or (c.window_from == "anchor" and key >= anchor):
        return True
    start = anchor - window if c.window_from == "anchor" else query - window + 1
    return key >= start


class Twin:
    """One head: ``states`` of a block behind a context."""

    def __init__(self, head):
        self.c, self.w = head.config, weights_of(head)

    def normed(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms(x, self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def states(self, features: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Features (P, F) and the block's embeddings (B, h) -> (B, h)."""
        context = self.normed(features @ self.w["fc.weight"].T, "hidden_norm")
        x = block
        for i in range(self.c.num_layers):
            x = self.layer(i, x, context)
        return self.normed(x, "norm")

    def layer(self, i: int, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        x = x + self.attention(i, self.normed(x, f"layers.{i}.input_layernorm"), context)
        return x + self.mlp(i, self.normed(x, f"layers.{i}.post_attention_layernorm"))

    def mlp(self, i: int, x: np.ndarray) -> np.ndarray:
        names = (f"layers.{i}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        gate, up, down = (self.w[name] for name in names)
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def attention(self, i: int, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        c, name = self.c, f"layers.{i}.self_attn."

        def heads(rows: np.ndarray, part: str, number: int) -> np.ndarray:
            found = rows @ self.w[f"{name}{part}_proj.weight"].T
            found = found + self.w.get(f"{name}{part}_proj.bias", 0)
            return found.reshape(len(rows), number, c.head_dim)

        def placed(rows: np.ndarray, part: str, start: int) -> list[np.ndarray]:
            rows = self.normed(rows, f"{name}{part}_norm")
            return [
                turned(row, start + n, c.rope_theta, c.rope_traditional)
                for n, row in enumerate(rows)
            ]

        num_before = len(context)
        queries = placed(heads(x, "q", c.num_heads), "q", num_before)
        keys = placed(heads(context, "k", c.num_kv_heads), "k", 0)
        keys += placed(heads(x, "k", c.num_kv_heads), "k", num_before)
        values = [*heads(context, "v", c.num_kv_heads), *heads(x, "v", c.num_kv_heads)]
        out = np.zeros((len(x), c.num_heads, c.head_dim))
        for r, query in enumerate(queries):
            seen = [k for k in range(len(keys)) if sees(c, i, num_before + r, k, num_before)]
            for head in range(c.num_heads):
                group = head // (c.num_heads // c.num_kv_heads)
                scores = np.array([keys[k][group] @ query[head] for k in seen]) * c.head_dim**-0.5
                if c.has_sinks:
                    scores = np.append(scores, self.w[f"{name}attention_sink_bias"][head])
                shares = np.exp(scores - scores.max())
                shares = (shares / shares.sum())[: len(seen)]
                out[r, head] = shares @ np.array([values[k][group] for k in seen])
        projected = out.reshape(len(x), -1) @ self.w[f"{name}o_proj.weight"].T
        return projected + self.w.get(f"{name}o_proj.bias", 0)


def features_of(target, taps: tuple[int, ...], text: list[int]) -> np.ndarray:
    """The activations (n, F) of a text at the taps."""
    _, features = Target(target, taps)(mx.array(text), make_prompt_cache(target))
    return np.array(features, np.float64)


def twin_logits(drafter: DFlashDrafter, target, text: list[int], size: int) -> np.ndarray:
    """Logits (size, V) of the slots after ``text``, from that text alone."""
    c = drafter.head.config
    features = features_of(target, c.taps, text)[:-1]
    embed = drafter._embed
    tokens = [text[-1], *[c.mask_token_id] * (size + c.first_slot - 1)]
    block = np.array(embed(mx.array(tokens)), np.float64)
    states = Twin(drafter.head).states(features, block)[c.first_slot :]
    logits = np.array(drafter._project(mx.array(states.astype(np.float32))), np.float64)
    return (
        logits if c.logit_softcap is None else c.logit_softcap * np.tanh(logits / c.logit_softcap)
    )


def naive_dflash(drafter: DFlashDrafter, target, text: list[int], size: int) -> list[int]:
    size = min(size, drafter.head.config.longest_draft)
    return twin_logits(drafter, target, text, size).argmax(axis=-1).tolist()
