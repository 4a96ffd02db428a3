"""Drafters of every kind with their targets, and a naive twin for each.

A twin starts from the committed text every time; ``Steered`` compares a drafter with it, while
a script decides how many of its draft tokens are kept.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from assistants import naive_assistant, tiny_assistant, tiny_gemma4
from block_twin import naive_dflash, tiny_dflash, tiny_dflash2, tiny_dspark
from helpers import SIZES, VOCAB, plain, randomize, tiny_head, tiny_llama
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, lfm2, mamba2, qwen3_5, qwen3_next
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_eagle.drafters.assistant import AssistantDrafter
from mlx_eagle.drafters.base import Draft, Drafter
from mlx_eagle.drafters.dflash import DFlashDrafter
from mlx_eagle.drafters.eagle3 import EagleDrafter
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.drafters.mtp import MTPDrafter, make_mtp_head
from mlx_eagle.target_model.target import Target

WINDOW = 8  # of the rotating caches: shorter than any prompt and text together


def tiny_gemma3(seed: int = 5) -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": 3, "sliding_window": WINDOW}
    args = gemma3_text.ModelArgs("gemma3_text", sliding_window_pattern=3, **sizes)
    return randomize(gemma3_text.Model(args), seed)


def tiny_mamba2(seed: int = 6) -> nn.Module:
    args = mamba2.ModelArgs(
        model_type="mamba2",
        num_heads=4,
        head_dim=16,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        state_size=32,
        num_hidden_layers=2,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=True,
        time_step_limit=(0.0, 10.0),
        time_step_rank="auto",
    )
    return randomize(mamba2.Model(args), seed)


def tiny_lfm2(seed: int = 7, **changes) -> nn.Module:
    values = {
        "model_type": "lfm2",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    return randomize(lfm2.Model(lfm2.ModelArgs(**{**values, **changes})), seed)


QWEN = {
    **SIZES,
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_experts": 0,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
}


def tiny_qwen3_next(seed: int = 8, **changes) -> nn.Module:
    args = {**QWEN, "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mlp_only_layers": []}
    args = qwen3_next.ModelArgs("qwen3_next", **{**args, **changes})
    return randomize(qwen3_next.Model(args), seed)


def tiny_qwen3_5(seed: int = 9, **changes) -> nn.Module:
    text = {**QWEN, "model_type": "qwen3_5_text", **changes}
    return randomize(qwen3_5.Model(qwen3_5.ModelArgs("qwen3_5", text)), seed)


def nudged(model: nn.Module, by: float = 0.03) -> nn.Module:
    """A model that agrees with ``model`` often, but not always."""
    other = type(model)(model.args)
    mx.random.seed(77)
    other.update(tree_map(lambda w: w + by * mx.random.normal(w.shape), model.parameters()))
    mx.eval(other.parameters())
    return other


def tiny_mtp(model: nn.Module, seed: int = 10) -> MTPDrafter:
    return MTPDrafter(randomize(make_mtp_head(model), seed), model)


LATENT = {
    "head_dim": 12,
    "num_kv_heads": 4,
    "rope": {"type": "default", "theta": 10000.0, "dims": 8, "traditional": True},
    "latent": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 8,
        "v_head_dim": 6,
    },
}
LLAMA = tiny_llama()
QWEN3_NEXT = tiny_qwen3_next()
GEMMA3 = tiny_gemma3()
GEMMA4 = tiny_gemma4()
QWEN3_5_MOE = tiny_qwen3_5(num_experts=4, tie_word_embeddings=True)

PAIRS: dict[str, tuple[nn.Module, Drafter]] = {
    "lookup": (LLAMA, LookupDrafter()),
    "draft model": (LLAMA, ModelDrafter(nudged(LLAMA))),
    "draft model, rotating": (LLAMA, ModelDrafter(tiny_gemma3())),
    "draft model, recurrent": (LLAMA, ModelDrafter(tiny_mamba2())),
    "draft model, hybrid": (LLAMA, ModelDrafter(tiny_lfm2())),
    "mtp, qwen3-next": (QWEN3_NEXT, tiny_mtp(QWEN3_NEXT)),
    "mtp, qwen3.5 moe, tied": (QWEN3_5_MOE, tiny_mtp(QWEN3_5_MOE)),
    "assistant": (GEMMA4, tiny_assistant(GEMMA4, num_centroids=12, centroid_top_k=4)),
    "eagle-3": (LLAMA, tiny_head(LLAMA)),
    "eagle-3, parallel heads": (
        LLAMA,
        tiny_head(
            LLAMA,
            seed=2,
            num_parallel_heads=2,
            parallel_head_layers=2,
            parallel_head_bias=True,
            parallel_outputs=2,
        ),
    ),
    "eagle-3, latent": (LLAMA, tiny_head(LLAMA, seed=3, **LATENT)),
    "eagle-3, lookup": (LLAMA, tiny_head(LLAMA).with_copies()),
    "p-eagle": (LLAMA, tiny_head(LLAMA, seed=4, num_layers=2, mask_token_id=9)),
    "dflash": (LLAMA, tiny_dflash(LLAMA)),
    "dflash, windows": (
        QWEN3_NEXT,
        tiny_dflash(QWEN3_NEXT, windows=(4, 0), causal_layers=(0,), attention_bias=True),
    ),
    "dspark": (LLAMA, tiny_dspark(LLAMA, markov_kind="rnn")),
    "dflash2, rotating": (GEMMA3, tiny_dflash2(GEMMA3, scales_as_target=True)),
}
SHOWN = [name for name in PAIRS if "recurrent" not in name and "hybrid" not in name]

BLOCKS = ("dflash", "dflash, windows", "dspark", "dflash2, rotating")
PARALLEL = ("p-eagle", "eagle-3, parallel heads", *BLOCKS)


# What each drafter proposes after a text, from that text alone.


def naive_mtp(drafter: MTPDrafter, target: nn.Module, text: list[int], size: int) -> list[int]:
    """Slot by slot from the features of the whole text, without a cache."""
    head, num_layers = drafter.head, len(target.layers)
    _, features = Target(target, (num_layers,))(mx.array(text), make_prompt_cache(target))
    states = target.model.norm(features)[None, :-1]
    tokens = list(text[1:])
    for _ in range(size):
        embeddings = target.model.embed_tokens(mx.array([tokens]))
        # As the published code has it: the embedding first, and a norm at the end, whose
        # output goes to the vocabulary and back into the layer.
        x = [head.pre_fc_norm_embedding(embeddings), head.pre_fc_norm_hidden(states)]
        x = mx.concatenate(x, axis=-1) @ head.fc.weight.T
        out = head.norm(head.layers[0](x, "causal", None))[:, -1:]
        tied = "lm_head" not in getattr(target, "language_model", target)
        project = target.model.embed_tokens.as_linear if tied else target.lm_head
        tokens.append(mx.argmax(project(out)[0, -1]).item())
        states = mx.concatenate([states, out], axis=1)
    return tokens[-size:]


def naive_eagle(drafter: EagleDrafter, target: nn.Module, text: list[int], size: int) -> list[int]:
    """Everything anew for every token, from the features of the whole text."""
    head, taps, embed = drafter.head, drafter.taps, target.model.embed_tokens
    _, features = Target(target, taps)(mx.array(text), make_prompt_cache(target))
    tokens, states = list(text[1:]), head.fuse(features[:-1])

    def outputs() -> mx.array:
        caches = [KVCache() for _ in head.layers]
        return head(embed(mx.array(tokens)), states, caches)

    def chosen(logits: mx.array) -> int:
        return 2 * mx.argmax(logits[-1]).item()  # every second token can be drafted

    config = head.config
    if config.mask_token_id is not None:
        tokens += [config.mask_token_id] * (size - 1)
        mask = head.fuse(head.mask_hidden[None])
        states = mx.concatenate([states, *[mask] * (size - 1)])
        return [chosen(head.logits(row[None])) for row in outputs()[-size:]]
    drafted: list[int] = []
    while len(drafted) < max(1, size - config.num_parallel_heads):
        tokens, last = tokens + drafted[-1:], outputs
        out = last()[-1:]
        drafted.append(chosen(head.logits(out)))
        states = mx.concatenate([states, out])
    for i in range(size - len(drafted)):
        drafted.append(chosen(head.parallel_logits(out, i)))
    return drafted


def naive_twin(drafter: Drafter, target: nn.Module) -> Callable[[list[int], int], list[int]]:
    if isinstance(drafter, ModelDrafter):
        return lambda text, size: plain(drafter.model, text, size)
    if isinstance(drafter, DFlashDrafter):
        return lambda text, size: naive_dflash(drafter, target, text, size)
    if isinstance(drafter, AssistantDrafter):
        return lambda text, size: naive_assistant(drafter, target, text, size)
    naive = naive_mtp if isinstance(drafter, MTPDrafter) else naive_eagle
    return lambda text, size: naive(drafter, target, text, size)


class Steered:
    """Runs a drafter, checks each draft against its twin, and hands on what the script says."""

    def __init__(self, inner, twin, text, script):
        self.inner, self.twin, self.text, self.script = inner, twin, text, script
        self.num_rounds, self.absorbed = 0, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, cache=None):
        self.begun = Steered(self.inner.begin(cache), self.twin, self.text, self.script)
        return self.begun

    def extend(self, tokens, features, last=None):
        self.absorbed.append((tokens, last))
        self.inner.extend(tokens, features, last)

    def propose(self, size, pick):
        committed = []
        for tokens, last in self.absorbed:
            committed += tokens.tolist()[: None if last is None else last.item() + 1]
        assert committed == self.text[: len(committed)]
        drafted = self.inner.propose(size, pick)
        assert drafted.tokens.tolist() == self.twin(committed, size)
        right = self.script(self.num_rounds, size)
        self.num_rounds += 1
        tokens = self.text[len(committed) : len(committed) + size]
        if right < size:
            tokens[right] = (tokens[right] + 1) % VOCAB
        return Draft(mx.array(tokens, dtype=mx.int32))
