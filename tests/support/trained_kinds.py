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
from checkpoints import write_config
from drafter_pairs import tiny_qwen3_next
from helpers import SIZES, tiny_llama
from mlx_lm.models.cache import KVCache, make_prompt_cache
from training import VOCAB, write_model

from mlx_eagle.target_model.target import Target
from mlx_eagle.train.batches import TokenBatch
from mlx_eagle.train.given import converted, open_given
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
    naive: Callable[[Any, list[int], int, int], mx.array]


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


def dflash(folder: Path) -> Case:
    """Layers with and without a window, causal and not; three of a text's taps."""
    model = loud(tiny_llama(vocab_size=VOCAB))
    config = {"model_type": "llama", **SIZES, "vocab_size": VOCAB}
    write_model(folder / "target", model, config)
    drafter = block_twin.tiny_dflash(model, num_layers=2)
    c = drafter.head.config
    taps = {"target_layer_ids": [tap - 1 for tap in c.taps], "mask_token_id": c.mask_token_id}
    values = {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "block_size": c.block_size,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "dflash_config": taps,
    }
    block_twin.published(folder / "given", drafter, values)

    def naive(head: Any, text: list[int], place: int, steps: int) -> mx.array:
        """The block behind the anchor before ``place``, by the caches of drafting."""
        target = Target(model, head.config.taps)
        _, features = target(mx.array(text), make_prompt_cache(model))
        caches = [KVCache() for _ in head.layers]
        head.absorb(mx.stop_gradient(features)[None, : place - 1], caches)
        tokens = [text[place - 1], *[head.config.mask_token_id] * (head.config.block_size - 1)]
        states = head(model.model.embed_tokens(mx.array([tokens])), caches)
        return model.model.embed_tokens.as_linear(states[0, head.config.first_slot :][:steps])

    def states(text: list[int]) -> mx.array:
        return model.model(mx.array([text]))[0]

    output = model.model.embed_tokens.as_linear
    return Case(folder / "target", folder / "given", model, config, states, output, naive)


CASES = {"mtp": mtp, "assistant": assistant, "dflash": dflash}


def recipe_of(case: Case, kind: str, **options: Any) -> Recipe:
    settings = TrainSettings(
        model=str(case.target), data="", output="", init=str(case.given), **options
    )
    settings = filled(settings, kind)
    given = converted(open_given(str(case.given), str(case.target)), str(case.target))
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
    return TokenBatch(tokens, counts, longest, len(LENGTHS), tuple(range(len(LENGTHS))))


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


def naive_block_loss(case: Case, head: Any, batch: TokenBatch, anchors: np.ndarray) -> mx.array:
    """Cross-entropy of the target's choices with D-PACE's weights, from block after block."""
    sums, num = [], 0
    for row, (length, num_prompt) in enumerate(LENGTHS):
        text = batch.tokens[row, :length].tolist()
        said = case.output(case.states(text))
        for anchor in anchors[row].tolist():
            if anchor < 0:
                continue
            block = head.config.longest_draft
            logits = case.naive(head, text, anchor + 1, block)
            entropies = []
            for step in range(block):
                place = anchor + 1 + step
                if place >= length or place < max(num_prompt, 1):
                    break
                log_q = logits[step] - mx.logsumexp(logits[step])
                entropies.append(-log_q[mx.argmax(said[place - 1]).item()])
            passed = [0.5 * float(np.exp(-x.item())) + 0.5 for x in entropies]
            reached = np.cumprod(passed)
            for step, entropy in enumerate(entropies):
                sums.append(float(reached[step:].sum()) * entropy)
                num += 1
    return mx.stack(sums).sum() / num
