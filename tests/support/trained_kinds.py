"""Tiny targets with drafters of each kind that is trained, and naive losses of them."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import assistants
import block_twin
import mlx.core as mx
import mlx.nn as nn
import mtp_checkpoints
import numpy as np
from block_losses import naive_block_loss
from checkpoints import write_config
from drafter_pairs import tiny_qwen3_next
from helpers import SIZES, tiny_llama
from mlx_lm.models.cache import make_prompt_cache
from training import VOCAB, write_model

from mlx_eagle.target_model.target import Target
from mlx_eagle.train.batches import TokenBatch
from mlx_eagle.train.block import anchors_of
from mlx_eagle.train.given import open_given
from mlx_eagle.train.kinds import TRAINED, filled, student_of
from mlx_eagle.train.recipe import Recipe
from mlx_eagle.train.settings import TrainSettings

LENGTHS = ((11, 5), (7, 3), (5, 0))  # tokens of each text, and of its prompt


@dataclass
class Case:
    """A target in a folder, with a drafter as published, and the loss of it by hand.

    ``naive(drafter, text, place, steps)`` gives logits (steps, V) of the chain or block whose
    first draft is about ``place``, the tokens before being the text's.
    """

    target: Path
    given: Path
    model: nn.Module
    config: dict[str, Any]
    states: Callable[[list[int]], mx.array]
    output: Callable[[mx.array], mx.array]
    naive: Callable[[Any, list[int], int, int], mx.array] | None = None


def loud(model: nn.Module) -> nn.Module:
    """The same model with large logits, so that its texts are its own."""
    model.model.norm.weight = 6 * model.model.norm.weight
    return model


def mtp(folder: Path, **changes: Any) -> Case:
    model = loud(tiny_qwen3_next(vocab_size=VOCAB, **changes))
    config = dict(vars(model.args))
    write_model(folder / "target", model, config)
    part = mtp_checkpoints.qwen(model)
    (folder / "given").mkdir()
    arrays = {name.removeprefix("mtp."): array for name, array in part.arrays().items()}
    mx.save_safetensors(str(folder / "given" / "model.safetensors"), arrays)
    write_config(folder / "given", {"model_type": "qwen3_5_mtp", "text_config": config})

    def naive(head: Any, text: list[int], place: int, steps: int) -> mx.array:
        """Slot after slot, without a cache, as ``naive_mtp`` in ``drafter_pairs.py`` drafts."""
        states = model.model(mx.array([text]))[:, : place - 1]
        found = []
        for step in range(steps):
            tokens = mx.array([text[1 : place + step]])
            parts = [
                head.pre_fc_norm_embedding(model.model.embed_tokens(tokens)),
                head.pre_fc_norm_hidden(states),
            ]
            x = mx.concatenate(parts, axis=-1) @ head.fc.weight.T
            out = head.norm(head.layers[0](x, "causal", None))[:, -1:]
            found.append((out @ model.lm_head.weight.T)[0, 0])
            states = mx.concatenate([states, out], axis=1)
        return mx.stack(found)

    def states(text: list[int]) -> mx.array:
        return model.model(mx.array([text]))[0]

    return Case(folder / "target", folder / "given", model, config, states, model.lm_head, naive)


def assistant(folder: Path, **changes: Any) -> Case:
    model = loud(assistants.tiny_gemma4(vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB))
    for layer in model.layers:  # or the table, which is the output too, repeats the last token
        norm = layer.post_feedforward_layernorm
        norm.weight = 5 * norm.weight
    config = {"model_type": "gemma4_text", **vars(model.args)}
    write_model(folder / "target", model, config)
    drafter = assistants.tiny_assistant(model, num_centroids=6, centroid_top_k=4, **changes)
    assistants.published(folder / "given", drafter)

    def naive(head: Any, text: list[int], place: int, steps: int) -> mx.array:
        # All tokens are compared with: the choice of clusters has no gradient.
        drafter.head = copy(head)
        drafter.head.config = replace(head.config, num_centroids=0)
        before = list(text[:place])
        return assistants.twin_logits(drafter, model, before, steps, text[place:])

    def states(text: list[int]) -> mx.array:
        return model.model(mx.array([text]))[0]

    def output(states: mx.array) -> mx.array:
        logits = states @ model.model.embed_tokens.weight.T
        cap = model.final_logit_softcapping
        return cap * mx.tanh(logits / cap) if cap else logits

    return Case(folder / "target", folder / "given", model, config, states, output, naive)


def blocks(kind: str, folder: Path, reduced: int = 0, **changes: Any) -> Case:
    """Layers with and without a window, causal and not; three of a text's taps.

    With ``reduced``, in speculators' layout, with a head for every second token of so many.
    """
    model = loud(tiny_llama(vocab_size=VOCAB))
    config = {"model_type": "llama", **SIZES, "vocab_size": VOCAB}
    write_model(folder / "target", model, config)
    if reduced:
        changes |= {"draft_vocab_size": reduced, "lm_head_source": "file"}
    if kind == "dspark":
        changes = {"confidence": "markov", "block_size": 5} | changes
    drafter = getattr(block_twin, f"tiny_{kind}")(model, num_layers=2, **changes)
    if kind == "dflash2":  # kernels nearly as training begins with them: less is rounded
        for layer in drafter.head.layers:
            for own in (layer.attention_conv, layer.mlp_conv):
                own.kernel_projection.weight = 0.3 * own.kernel_projection.weight
                own.base_kernel = 0.3 * own.base_kernel
                own.base_kernel[:, 0] += 1
    c = drafter.head.config
    taps = {"target_layer_ids": [tap - 1 for tap in c.taps], "mask_token_id": c.mask_token_id}
    values = {
        "model_type": "qwen3",
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "block_size": c.block_size,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "dflash_config": taps | {"selector_top_k": getattr(c, "top_k", 16)},
    }
    more = {}
    if reduced:
        values |= {"transformer_layer_config": dict(values), "mask_token_id": c.mask_token_id}
        values |= {"aux_hidden_state_layer_ids": list(c.taps), "sample_from_anchor": True}
        more["d2t"] = mx.arange(reduced)
    block_twin.published(folder / "given", drafter, values, more=more)

    def states(text: list[int]) -> mx.array:
        return model.model(mx.array([text]))[0]

    output = model.model.embed_tokens.as_linear
    return Case(folder / "target", folder / "given", model, config, states, output)


def dflash(folder: Path, **changes: Any) -> Case:
    return blocks("dflash", folder, **changes)


def dspark(folder: Path, **changes: Any) -> Case:
    return blocks("dspark", folder, **changes)


def dflash2(folder: Path, **changes: Any) -> Case:
    return blocks("dflash2", folder, **changes)


CASES = {
    "mtp": mtp,
    "assistant": assistant,
    "dflash": dflash,
    "dspark": dspark,
    "dflash2": dflash2,
}
BLOCKS = ("dflash", "dspark", "dflash2")


def recipe_of(case: Case, kind: str, **options: Any) -> Recipe:
    settings = TrainSettings(
        model=str(case.target), data="", output="", init=str(case.given), **options
    )
    settings = filled(settings, kind)
    given = open_given(str(case.given), str(case.target))
    student = student_of(settings, given, case.model)
    return TRAINED[kind].recipe(settings, student, case.model, given)


def some_batch(seed: int = 0) -> TokenBatch:
    """Texts of several lengths, padded with another token than 0."""
    dice = np.random.default_rng(seed)
    longest = max(length for length, _ in LENGTHS)
    tokens = np.full((len(LENGTHS), longest), 7, np.int32)
    counts = np.zeros(tokens.shape, bool)
    for row, (length, num_prompt) in enumerate(LENGTHS):
        tokens[row, :length] = dice.integers(8, VOCAB, length)
        counts[row, max(0, num_prompt - 1) : length - 1] = True
    return TokenBatch(tokens, counts, tuple(range(len(LENGTHS))))


def naive_chain_losses(
    case: Case, head: Any, batch: TokenBatch, steps: int, loss: str
) -> list[mx.array]:
    """The mean loss of each step, from one chain after the other."""
    found: list[list[mx.array]] = [[] for _ in range(steps)]
    for row, (length, num_prompt) in enumerate(LENGTHS):
        text = batch.tokens[row, :length].tolist()
        states = mx.stop_gradient(case.states(text))
        # A chain whose first draft is about ``start``; its first slot is start - 2.
        for start in range(2, length):
            logits = case.naive(head, text, start, min(steps, length - start))
            for step in range(len(logits)):
                place = start + step
                if place < max(num_prompt, 1):
                    continue
                log_q = logits[step] - mx.logsumexp(logits[step])
                said = case.output(states[place - 1])
                p = mx.softmax(said)
                if loss == "kl":
                    one = (p * (mx.log(p) - log_q)).sum()
                elif loss == "mix":  # ce=.1,tv=.6,l1=.2
                    rejected = 1 - mx.minimum(p, mx.exp(log_q)).sum()
                    one = rejected - 0.1 * log_q[text[place]]
                else:
                    label = text[place] if loss == "text" else mx.argmax(said).item()
                    one = -log_q[label]
                found[step].append(one)
    return [mx.stack(values).mean() for values in found]


def block_loss_by_hand(case: Case, kind: str, recipe: Any, batch: TokenBatch) -> mx.array:
    """See ``block_losses.py``."""
    head = recipe.student.head
    anchors = anchors_of(batch, recipe.settings.anchors, 0, 0)
    texts = [
        (batch.tokens[row, :length].tolist(), num_prompt, [a for a in own.tolist() if a >= 0])
        for row, ((length, num_prompt), own) in enumerate(zip(LENGTHS, anchors, strict=True))
    ]

    def features(text: list[int]) -> mx.array:
        return Target(case.model, head.config.taps)(mx.array(text), make_prompt_cache(case.model))[
            1
        ]

    target = (case.model.model.embed_tokens, features, case.states, case.output)
    ids = recipe.student.ids.tolist()
    return naive_block_loss(kind, head, recipe.settings, texts, target, ids)
