"""EAGLE-3 speculative decoding to read: a draft head and the whole loop, in one file that runs.

It drafts chains, decodes greedily, keeps mlx-lm's plain caches, and waits for the device in every
step. ``decoding/loop.py`` writes the same text, sooner, with any model, drafter and sampler.

Paper: Li et al. 2025, arXiv:2503.01840. Sizes: m rows, hidden size h, F features, V tokens.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from numpy.typing import ArrayLike

LLAMA_LIKE = {
    "num_layers": 1, "layer_input": "first", "latent": None, "values": "projected",
    "hidden_act": "silu", "fc_input": "features", "uses_aux": True, "pre_fc_norm": "none",
    "fusion_norm": False, "embedding_norm": True, "state_norm": True, "qk_norm": False,
    "value_norm": False, "branch_norms": False, "final_norm": True, "norm_output": False,
    "norm_before_residual": False, "layer_scalar": False, "embed_source": "target",
    "embed_scale": 1.0, "softmax_scale": None, "position_scale": None, "logit_softcap": None,
    "sliding_window": None, "mask_token_id": None, "num_parallel_heads": 0,
}  # fmt: skip
"""Config fields of the heads that this file runs; ``decoding/loop.py`` runs all others."""


class EagleHead:
    """A draft head of one llama layer; each slot sees the slots before it.

    Slot i takes the hidden state at position i and the token at i + 1. It estimates the hidden
    state at i + 1, from which the token at i + 2 is drafted. Hidden states come from the target
    as far as it has run (``fuse``); beyond that, the head's own estimates stand in for them.
    """

    def __init__(self, drafter: Any, model: nn.Module):
        """Take the weights of a head opened by ``mlx_eagle.open_drafter`` or ``load_drafter``.

        Raises ValueError for a head that is not one plain llama layer.
        """
        for name, needed in LLAMA_LIKE.items():
            found = getattr(drafter.head.config, name)
            if found != needed:
                text = f"the head's {name} is {found}, and the reference needs {needed}"
                raise ValueError(f"{text}: use mlx_eagle.generate with this head.")
        self.embed = model.model.embed_tokens
        self.weights = drafter.head
        self.taps = drafter.taps  # the target's layers whose inputs are the features
        self.to_target = drafter.to_target  # tokens by draft id, (Vd,); None: they are the same

    def fuse(self, features: mx.array) -> mx.array:
        """Make hidden states (m, h) from features (m, F)."""
        return self.weights.fc(features)

    def __call__(self, tokens: list[int], hidden: mx.array, cache: KVCache) -> mx.array:
        """Append m slots to the cache: tokens (m,), hidden (m, h) -> estimates (m, h)."""
        layer = self.weights.layers[0]
        embeddings = layer.input_layernorm(self.embed(mx.array(tokens)))
        x = mx.concatenate([embeddings, layer.hidden_norm(hidden)], axis=-1)
        hidden = hidden + self.attend(x, cache)
        x = layer.post_attention_layernorm(hidden)
        gate, up = mx.split(layer.mlp.gate_up_proj(x), 2, axis=-1)
        return hidden + layer.mlp.down_proj(nn.silu(gate) * up)

    def attend(self, x: mx.array, cache: KVCache) -> mx.array:
        """Attend from m new slots to themselves and all earlier ones, (m, 2h) -> (m, h)."""
        attention = self.weights.layers[0].self_attn
        heads = attention.qkv_proj(x).reshape(1, len(x), -1, attention.head_dim).swapaxes(1, 2)
        ends = [attention.num_heads, attention.num_heads + attention.num_kv_heads]
        queries, keys, values = mx.split(heads, ends, axis=1)
        queries = attention.rope(queries, offset=cache.offset)
        keys = attention.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        attend = mx.fast.scaled_dot_product_attention
        heads = attend(queries, keys, values, scale=attention.head_dim**-0.5, mask="causal")
        return attention.o_proj(heads.swapaxes(1, 2).reshape(len(x), -1))

    def best_token(self, estimate: mx.array) -> int:
        """Draft the token after an estimated hidden state (1, h). Waits for the device."""
        best = mx.argmax(self.weights.lm_head(self.weights.norm(estimate)))
        return int(best if self.to_target is None else self.to_target[best])


def run_target(
    model: nn.Module, tokens: list[int], cache: list[KVCache], taps: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Run tokens (m,) after the cached ones: logits (m, V), features (m, F), low taps first."""
    x = model.model.embed_tokens(mx.array([tokens]))
    mask = create_attention_mask(x, cache[0])
    entered = []
    for layer, layer_cache in zip(model.layers, cache, strict=True):
        entered.append(x)
        x = layer(x, mask, layer_cache)
    features = mx.concatenate([[*entered, x][tap] for tap in taps], axis=-1)
    is_tied = model.args.tie_word_embeddings
    project = model.model.embed_tokens.as_linear if is_tied else model.lm_head
    return project(model.model.norm(x))[0], features[0]


def speculative_rounds(
    prompt: list[int],
    model: nn.Module,
    head: EagleHead,
    num_draft_tokens: int = 3,
    max_tokens: int = 256,
    stop_tokens: Collection[int] = (),
) -> Iterator[list[int]]:
    """Generate greedily, yielding the tokens of each round: the accepted ones and one more.

    The first round has only the token after the prompt. The text ends with the first stop token.
    """
    cache = make_prompt_cache(model)
    head_cache = KVCache()

    # Prefill. The root is the newest token, which the target has not run yet.
    logits, features = run_target(model, prompt, cache, head.taps)
    root = int(mx.argmax(logits[-1]))
    estimates = head([*prompt[1:], root], head.fuse(features), head_cache)
    num_left = max_tokens - 1
    yield [root]

    while num_left > 0 and root not in stop_tokens:
        # 1. Draft. The head continues from its own estimates, in slots that are dropped again.
        size = min(num_draft_tokens, num_left - 1)  # the target adds one token
        estimate = estimates[-1:]
        draft: list[int] = []
        for _ in range(size):
            draft.append(head.best_token(estimate))
            estimate = head(draft[-1:], estimate, head_cache)
        trim_prompt_cache([head_cache], size)

        # 2. Verify. One pass over the root and the draft; choices[i] follows row i.
        logits, features = run_target(model, [root, *draft], cache, head.taps)
        choices: Any = mx.argmax(logits, axis=-1).tolist()

        # 3. Accept what the target would have written itself; a stop token ends the round.
        kept = 0
        while kept < size and draft[kept] == choices[kept] and choices[kept] not in stop_tokens:
            kept += 1
        run = choices[: kept + 1]

        # 4. Commit. The target forgets the rejected rows; the head absorbs the others.
        trim_prompt_cache(cache, size - kept)
        estimates = head(run, head.fuse(features[: kept + 1]), head_cache)
        num_left -= len(run)
        root = run[-1]
        yield run


def eagle_draft_forward(
    hidden_state: ArrayLike, last_token: int, embed_matrix: ArrayLike,
    fc_fuse_weight: ArrayLike, fc_fuse_bias: ArrayLike, draft_head_weight: ArrayLike,
    draft_head_bias: ArrayLike, lm_head_weight: ArrayLike, num_draft_tokens: int,
) -> list[int]:  # fmt: skip
    """Draft tokens from a hidden state and the token after it: the idea of EAGLE in ten lines.

    A simplification of EAGLE-1 (arXiv:2401.15077, section 3.1): one ReLU layer stands for the
    transformer layer. Each step fuses the hidden state and the token's embedding, in this order,
    with a linear layer and ReLU, makes the next hidden state with another, and takes the token
    with the highest logit, on a tie the lowest one. Both are fed back.

    Shapes: hidden_state (d,), embed_matrix (V, d), fc_fuse_weight (d, 2d), fc_fuse_bias (d,),
    draft_head_weight (d, d), draft_head_bias (d,), lm_head_weight (V, d). Raises ValueError
    where one does not fit.
    """
    hidden = _array("hidden_state", hidden_state, (None,))
    size = hidden.shape[0]
    embed = _array("embed_matrix", embed_matrix, (None, size))
    fuse = _array("fc_fuse_weight", fc_fuse_weight, (size, 2 * size))
    fuse_bias = _array("fc_fuse_bias", fc_fuse_bias, (size,))
    head = _array("draft_head_weight", draft_head_weight, (size, size))
    head_bias = _array("draft_head_bias", draft_head_bias, (size,))
    lm_head = _array("lm_head_weight", lm_head_weight, embed.shape)
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}, but cannot be negative")
    token = int(last_token)
    if not 0 <= token < len(embed):
        raise ValueError(f"last_token is {token}, but embed_matrix has {len(embed)} rows")

    drafted = []
    for _ in range(num_draft_tokens):
        fused = nn.relu(fuse @ mx.concatenate([hidden, embed[token]]) + fuse_bias)
        hidden = nn.relu(head @ fused + head_bias)
        token = int(mx.argmax(lm_head @ hidden))
        drafted.append(token)
    return drafted


def _array(name: str, value: ArrayLike, shape: Sequence[int | None]) -> mx.array:
    """Convert ``value`` to float32 and check its shape; None fits any size."""
    array = mx.array(np.asarray(value, dtype=np.float32))
    sizes = zip(shape, array.shape, strict=False)
    if array.ndim != len(shape) or any(size not in (None, found) for size, found in sizes):
        needed = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {array.shape}, but ({needed}) is needed")
    return array
