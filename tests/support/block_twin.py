"""Drafters of blocks in plain NumPy, as their formats are described: every position anew.

Nothing is shared with the product: no cache, no batch, a loop over what each query sees.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from checkpoints import write_config
from golden import frozen
from helpers import PROMPT, plain, randomize
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.convert import convert
from mlx_eagle.drafters.block_config import BlockConfig
from mlx_eagle.drafters.dflash import DFlashDrafter, DFlashHead
from mlx_eagle.drafters.dflash2 import DFlash2Config, DFlash2Drafter, DFlash2Head
from mlx_eagle.drafters.dspark import DSparkConfig, DSparkDrafter, DSparkHead
from mlx_eagle.drafters.kinds import load_drafter
from mlx_eagle.drafters.target_parts import find_embedding, lm_head_of
from mlx_eagle.target_model.target import Target

SIZES = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "mask_token_id": 11,
    "block_size": 7,
}


KINDS = {
    "dflash": (BlockConfig, DFlashHead, DFlashDrafter),
    "dspark": (DSparkConfig, DSparkHead, DSparkDrafter),
    "dflash2": (DFlash2Config, DFlash2Head, DFlash2Drafter),
}


def tiny_block(model, kind: str = "dflash", seed: int = 20, **changes) -> DFlashDrafter:
    """A head of blocks with random weights for a target; its embedding and output are shared."""
    make_config, make_head, make_drafter = KINDS[kind]
    embedding, vocab_size = find_embedding(model)
    sizes = {
        "hidden_size": embedding(mx.array([0])).shape[-1],  # of packed ones as well
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "taps": (1, len(model.layers)),
        **SIZES,
        **changes,
    }
    head = randomize(make_head(make_config(**sizes)), seed)
    return make_drafter(head, embedding, lm_head_of(model, embedding))


def tiny_dflash(model, seed: int = 20, **changes) -> DFlashDrafter:
    return tiny_block(model, "dflash", seed, **changes)


def tiny_dspark(model, seed: int = 21, **changes) -> DFlashDrafter:
    return tiny_block(model, "dspark", seed, **{"markov_rank": 8, "first_slot": 0, **changes})


def tiny_dflash2(model, seed: int = 22, **changes) -> DFlashDrafter:
    sizes = {"group_size": 16, "selector_rank": 8, "top_k": 5, **changes}
    return tiny_block(model, "dflash2", seed, **sizes)


def weights_of(head) -> dict[str, np.ndarray]:
    return {name: np.array(a, np.float64) for name, a in tree_flatten(head.parameters())}


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def turned(
    x: np.ndarray, position: int, theta: float, neighbours: bool, part: float = 1.0
) -> np.ndarray:
    """x (heads, d) at a position: channel i with channel i + d/2, or with its neighbour.

    Of all channels only the first ``part`` of each half turns.
    """
    half = x.shape[-1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    angles[int(part * half) :] = 0
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
        if isinstance(self.c, DFlash2Config):
            return self.convolved_layer(i, x, context)
        if getattr(self.c, "is_gemma", False):
            name = f"layers.{i}."
            added = self.attention(i, self.normed(x, f"{name}input_layernorm"), context)
            x = x + self.normed(added, f"{name}post_attention_layernorm")
            added = self.mlp(i, self.normed(x, f"{name}pre_feedforward_layernorm"))
            x = x + self.normed(added, f"{name}post_feedforward_layernorm")
            return x * self.w[f"{name}layer_scalar"]
        x = x + self.attention(i, self.normed(x, f"layers.{i}.input_layernorm"), context)
        return x + self.mlp(i, self.normed(x, f"layers.{i}.post_attention_layernorm"))

    def convolved_layer(self, i: int, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        u = self.normed(x, f"layers.{i}.input_layernorm")
        inner = self.attention(i, self.convolution(f"layers.{i}.attention_conv", 0, u, u), context)
        x = x + self.convolution(f"layers.{i}.attention_conv", 1, inner, u)
        u = self.normed(x, f"layers.{i}.post_attention_layernorm")
        inner = self.mlp(i, self.convolution(f"layers.{i}.mlp_conv", 0, u, u))
        return x + self.convolution(f"layers.{i}.mlp_conv", 1, inner, u)

    def convolution(self, name: str, which: int, rows: np.ndarray, fed: np.ndarray) -> np.ndarray:
        """Row by row, channel by channel; kernels come from what the sublayer is fed."""
        c, base = self.c, self.w[f"{name}.base_kernel"][which]
        num_groups = c.hidden_size // c.group_size
        out = np.zeros_like(rows)
        for p in range(len(rows)):
            own = self.w[f"{name}.kernel_projection.weight"] @ fed[p]
            own = own.reshape(2, c.kernel_size, num_groups)[which]
            for back in range(min(c.kernel_size, p + 1)):
                for channel in range(c.hidden_size):
                    kernel = base[back, channel] + own[back, channel // c.group_size]
                    out[p, channel] += kernel * rows[p - back, channel]
        return out

    def mlp(self, i: int, x: np.ndarray) -> np.ndarray:
        names = (f"layers.{i}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        gate, up, down = (self.w[name] for name in names)
        activation = silu if self.c.hidden_act == "silu" else gelu
        return (activation(x @ gate.T) * (x @ up.T)) @ down.T

    def attention(self, i: int, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        c, name = self.c, f"layers.{i}.self_attn."

        def heads(rows: np.ndarray, part: str, number: int) -> np.ndarray:
            found = rows @ self.w[f"{name}{part}_proj.weight"].T
            found = found + self.w.get(f"{name}{part}_proj.bias", 0)
            return found.reshape(len(rows), number, c.head_dim)

        def placed(rows: np.ndarray, part: str, start: int) -> list[np.ndarray]:
            rows = self.normed(rows, f"{name}{part}_norm")
            return [
                turned(row, start + n, c.rope_theta, c.rope_traditional, part_turned)
                for n, row in enumerate(rows)
            ]

        is_gemma = getattr(c, "is_gemma", False)
        part_turned = (c.rope_scaling or {}).get("partial_rotary_factor", 1.0)
        num_before = len(context)
        queries = placed(heads(x, "q", c.num_heads), "q", num_before)
        keys = placed(heads(context, "k", c.num_kv_heads), "k", 0)
        keys += placed(heads(x, "k", c.num_kv_heads), "k", num_before)
        part = "k" if getattr(c, "values_are_keys", False) else "v"
        values = [*heads(context, part, c.num_kv_heads), *heads(x, part, c.num_kv_heads)]
        if is_gemma:
            values = [rms(row, np.ones(c.head_dim), c.rms_norm_eps) for row in values]
        out = np.zeros((len(x), c.num_heads, c.head_dim))
        for r, query in enumerate(queries):
            seen = [k for k in range(len(keys)) if sees(c, i, num_before + r, k, num_before)]
            for head in range(c.num_heads):
                group = head // (c.num_heads // c.num_kv_heads)
                scores = np.array([keys[k][group] @ query[head] for k in seen])
                scores = scores * (1.0 if is_gemma else c.head_dim**-0.5)
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


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def corrected(
    twin: Twin, logits: np.ndarray, states: np.ndarray, token: int, path: Sequence[int] = ()
) -> np.ndarray:
    """The logits that each slot's token is chosen from, greedily, by DSpark and DFlash2.

    The first tokens may be given: ``path``.
    """
    c, w = twin.c, twin.w
    out, carried = [], np.zeros(getattr(c, "markov_rank", 1))
    for place, (row, state) in enumerate(zip(logits, states, strict=True)):
        if isinstance(c, DSparkConfig):
            own = w["markov_head.markov_w1.weight"][token]
            if c.markov_kind == "gated":
                gate, bias = (w[f"markov_head.gate_proj.{part}"] for part in ("weight", "bias"))
                own = sigmoid(gate @ np.concatenate([state, own]) + bias) * own
            if c.markov_kind == "rnn":
                joint, bias = (w[f"markov_head.joint_proj.{part}"] for part in ("weight", "bias"))
                g, new, o = np.split(joint @ np.concatenate([carried, own, state]) + bias, 3)
                carried = sigmoid(g) * carried + (1 - sigmoid(g)) * np.tanh(new)
                own = np.tanh(o)
            row = row + w["markov_head.markov_w2.weight"] @ own
        if isinstance(c, DFlash2Config):
            name = "candidate_selector."
            left = w[f"{name}predecessor_codebook"][token]
            left = left * (w[f"{name}hidden_projection.weight"] @ state)
            scored = np.full(len(row), -np.inf)
            for candidate in np.argsort(-row)[: c.top_k]:
                right = w[f"{name}successor_codebook"][candidate]
                scored[candidate] = row[candidate] + left @ right
            row = scored
        out.append(row)
        token = path[place] if place < len(path) else int(row.argmax())
    return np.array(out)


def twin_logits(
    drafter: DFlashDrafter, target, text: list[int], size: int, path: Sequence[int] = ()
) -> np.ndarray:
    """Logits (size, V) of the slots after ``text``, from that text alone; behind ``path``."""
    c = drafter.head.config
    features = features_of(target, c.taps, text)[:-1]
    embed = drafter._embed
    tokens = [text[-1], *[c.mask_token_id] * (size + c.first_slot - 1)]
    block = np.array(embed(mx.array(tokens)), np.float64)
    twin = Twin(drafter.head)
    states = twin.states(features, block)[c.first_slot :]
    logits = np.array(drafter._project(mx.array(states.astype(np.float32))), np.float64)
    logits = logits * getattr(c, "output_multiplier", 1.0)
    if c.logit_softcap is not None:
        logits = c.logit_softcap * np.tanh(logits / c.logit_softcap)
    return corrected(twin, logits, states, text[-1], path)


def naive_dflash(drafter: DFlashDrafter, target, text: list[int], size: int) -> list[int]:
    size = min(size, drafter.head.config.longest_draft)
    return twin_logits(drafter, target, text, size).argmax(axis=-1).tolist()


TOLERANCE = 1e-5


def drafted_logits(drafter, size: int) -> np.ndarray:
    """The logits (size, V) that a draft is chosen from."""
    seen = []

    def pick(logits, ids):
        seen.append(logits)
        return mx.argmax(logits, axis=-1)

    drafter.propose(size, pick)
    return np.array(mx.concatenate(seen), np.float64)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference by the largest value; infinite where not the same are finite."""
    real = np.isfinite(wanted)
    if not np.array_equal(real, np.isfinite(found)):
        return float("inf")
    found, wanted = found[real], wanted[real]
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def after(drafter, target, text: list[int]):
    """The drafter of a request that has read ``text``, and is about to draft behind it."""
    begun = drafter.begin()
    features = mx.array(features_of(target, begun.taps, text).astype(np.float32))
    begun.extend(mx.array(text[1:]), features[:-1])
    return begun


def is_as_twin(drafter, target, text: list[int], size: int, twin=None) -> bool:
    """Whether a draft's logits are those of the NumPy head, of ``twin`` where one is given."""
    wanted = twin_logits(twin or drafter, target, text, size)
    return relative(drafted_logits(after(drafter, target, text), size), wanted) < TOLERANCE


def compare_rounds(drafter, target) -> None:
    """Whole prompts, then rounds of which some or all rows are kept, as the loop does it."""
    drafter = drafter.begin()
    text = PROMPT + plain(target, PROMPT, 16)
    features = mx.array(features_of(target, drafter.taps, text).astype(np.float32))
    end = len(PROMPT) + 1
    drafter.extend(mx.array(text[1:end]), features[: end - 1])
    for kept, num_rows, size in ((1, 4, 3), (4, 4, 6), (2, 5, 1), (3, 3, 6)):
        wanted = twin_logits(drafter, target, text[:end], size)
        assert relative(drafted_logits(drafter, size), wanted) < TOLERANCE
        before = drafter.cache[0].offset
        rows = slice(end - 1, end - 1 + num_rows)
        tokens = mx.array([*text[end : end + kept], *[7] * (num_rows - kept)])
        drafter.extend(tokens, features[rows], last=mx.array(kept - 1))
        for cache in drafter.cache[:-1]:
            cache.trim(num_rows - kept)
        assert drafter.cache[0].offset == before + kept
        end += kept
    assert drafter.num_forwards == 4


def rows_of(drafter, states: mx.array, before: mx.array) -> mx.array:
    """The logits (k, V) of slots (1, k, h) where the tokens before each are given."""
    given = iter(before[1:].tolist())
    seen: list[mx.array] = []

    def choose(row: mx.array) -> mx.array:
        seen.append(row)
        return mx.array([next(given, 0)])

    drafter.read(states, before[:1], choose)
    return mx.maximum(mx.concatenate(seen), -1e4)


PROMPTS = [PROMPT, PROMPT[:5], PROMPT[2:9]]
LAYERS = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_target_layers": 6,
}
INSIDE = {"mask_token_id": 11, "target_layer_ids": [0, 5]}
MARKOV = {"block_size": 7, "markov_rank": 8, "markov_head_type": "vanilla"}
CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 16}
SELECTOR = {"selector_rank": 8, "selector_top_k": 16}
LEARNED: dict[str, dict[str, Any]] = {
    "dflash": {
        **LAYERS,
        "architectures": ["DFlashDraftModel"],
        "block_size": 7,
        "dflash_config": INSIDE,
    },
    "dflash2": {
        **LAYERS,
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "block_size": 7,
        "dflash_config": INSIDE | CONVOLUTIONS | SELECTOR,
    },
    "dspark": {
        **LAYERS,
        **MARKOV,
        "architectures": ["DSparkDraftModel"],
        "dflash_config": INSIDE | {"projector_type": "dspark"},
    },
    "liquid": {
        **LAYERS,
        **MARKOV,
        "architectures": ["Lfm2DSparkDraftModel"],
        "rope_is_neox_style": False,
        "dflash_config": INSIDE,
    },
    "muse": {
        **LAYERS,
        "model_type": "muse_glimmer_assistant",
        "block_size": 7,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 64,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        **INSIDE,
    },
}
"""Configs of the heads that ``tools/golden/learn_blocks.py`` teaches what follows the prompts."""

FLAT = LEARNED["dflash"]
NESTED = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS,
    "aux_hidden_state_layer_ids": [1, 6],
    "mask_token_id": 11,
    "block_size": 7,
    "draft_vocab_size": 96,
    "sample_from_anchor": False,
}
"""The same DFlash head as z-lab and as speculators write its config."""
DFLASH2 = FLAT | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": INSIDE | {"selector_top_k": 5, "output_multiplier": 0.5},
}


def learned_head(model, kind: str) -> DFlashDrafter:
    """A head that knows these texts by heart, frozen as mlx-vlm published it, and converted."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(frozen.FOLDER) / f"learned-{kind}"
        convert(str(source), f"{folder}/head", quantize=False, dtype="float32")
        drafter = load_drafter(f"{folder}/head", model)
        mx.eval(drafter.head.parameters())
        return drafter


def published(folder, drafter, config: dict, prefix: str = "", more: dict | None = None):
    """A checkpoint of the drafter's weights under published names; None in ``more`` omits one."""
    folder.mkdir()
    weights = {f"{prefix}{n}": a for n, a in tree_flatten(drafter.head.parameters())}
    weights = {name: a for name, a in (weights | (more or {})).items() if a is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    write_config(folder, config)
    return folder
