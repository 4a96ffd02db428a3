"""Evaluation of a head: its drafts along known texts, and acceptance when it decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.stats import Stats
from ..drafters.kinds import load_drafter
from ..generate import stream_generate
from ..system.progress import open_bar
from ..system.stop_signals import StopSignals
from .batches import make_batch
from .data import Example
from .recipe import Recipe

UNKNOWN = -1  # in place of a token after the end of a text: no draft equals it


@dataclass(frozen=True)
class Evaluation:
    """Figures on known texts, without decoding.

    ``match`` (D,): the share of slots whose draft at that depth is the text's own token, if the
    tokens before it are. ``lengths`` (D,): for drafts of 1 ... D tokens, the mean acceptance
    length (tau), including the target's own token, of decoding these texts. On the target's
    greedy texts it is that of greedy decoding.
    """

    match: tuple[float, ...]
    lengths: tuple[float, ...]
    num_slots: int
    num_sequences: int


def rounds_of(hits: np.ndarray, num_drafts: int) -> int:
    """Count the rounds that decoding a text with drafts of ``num_drafts`` tokens would take.

    ``hits`` (D, S): whether the draft of slot s at depth d is the text's token. A round at
    slot s accepts the hits up to the first miss, and the next one starts after them and the
    target's own token.

    [[1, 0, 1, 1], [1, 0, 0, 0]], drafts of 2: rounds at slots 0 (two hits) and 3 (one): 2
    """
    kept = np.cumprod(hits[:num_drafts], axis=0).sum(axis=0)
    slot = 0
    rounds = 0
    while slot < len(kept):
        slot += int(kept[slot]) + 1
        rounds += 1
    return rounds


def evaluate(recipe: Recipe, examples: Sequence[Example], batch_size: int) -> Evaluation:
    """Evaluate a drafter on these texts, ``batch_size`` at once."""
    # Texts of similar length are in one batch.
    texts = sorted(examples, key=lambda example: len(example.tokens))
    hits: list[np.ndarray] = []
    for start in range(0, len(texts), batch_size):
        hits += _hits(recipe, texts[start : start + batch_size])
    # Every slot stands for one token, the one that its first draft is about.
    num_slots = sum(text.shape[1] for text in hits)
    match = []
    lengths = []
    for depth in range(1, recipe.depth + 1):
        # A slot near the end has no token that its later drafts could be compared with.
        ends = [max(0, text.shape[1] - depth + 1) for text in hits]
        share = np.concatenate([text[depth - 1, :n] for text, n in zip(hits, ends, strict=True)])
        match.append(float(share.mean()) if share.size else 0.0)
        lengths.append(num_slots / sum(rounds_of(text, depth) for text in hits))
    return Evaluation(tuple(match), tuple(lengths), num_slots, len(hits))


def _hits(recipe: Recipe, examples: Sequence[Example]) -> list[np.ndarray]:
    """Compare drafts with each text: (D, S), whose first slot drafts the answer's second token."""
    batch = make_batch(examples, range(len(examples)))
    size, length = batch.tokens.shape
    # Slot i drafts token i + 2, which the last slot that counts does not have.
    rows, slots = (batch.counts[:, :-1] & batch.counts[:, 1:]).nonzero()
    drafts = recipe.drafts(batch.tokens, mx.array(rows * length + slots))
    texts = np.full((size, length + recipe.depth), UNKNOWN)
    for row, example in enumerate(examples):
        texts[row, : len(example.tokens)] = example.tokens
    hits = drafts == texts[rows, slots + 2 + np.arange(recipe.depth)[:, None]]
    return np.split(hits, np.cumsum(np.bincount(rows, minlength=size))[:-1], axis=1)


@dataclass(frozen=True)
class Generated:
    """Acceptance of a finished head that decodes.

    ``lengths`` (D,): the mean acceptance length (tau) of greedy decoding with drafts of 1 ... D
    tokens, without the first token of each of the ``num_answers`` answers.
    """

    lengths: tuple[float, ...]
    num_answers: int
    max_tokens: int


def generate_held_out(
    folder: Path,
    recipe: Recipe,
    tokenizer: TokenizerWrapper,
    examples: Sequence[Example],
    stop: StopSignals,
) -> Generated | None:
    """Let the head in ``folder`` draft for its target on prompts of these examples.

    These are the first ``test_prompts`` different ones; each is answered once for every draft
    length up to the recipe's depth. Returns None if there are no prompts, as in plain text, or if
    ``stop`` asks to end.
    """
    settings = recipe.settings
    found = (x.tokens[: x.num_prompt] for x in examples if x.num_prompt)
    prompts = list(dict.fromkeys(found))[: settings.test_prompts]
    if not prompts:
        return None
    drafter = load_drafter(folder, recipe.model)
    lengths = []
    with open_bar(recipe.depth * len(prompts), "Generating", "answer") as bar:
        for size in range(1, recipe.depth + 1):
            total = Stats()
            options: dict[str, Any] = {"draft_model": drafter, "num_draft_tokens": size}
            for prompt in map(list, prompts):
                how = (recipe.model, tokenizer, prompt, settings.test_tokens)
                *_, last = stream_generate(*how, **options)
                if stop.is_asked:
                    return None
                total += last.stats
                bar.update()
            lengths.append(total.mean_acceptance_length)
    return Generated(tuple(lengths), len(prompts), settings.test_tokens)
