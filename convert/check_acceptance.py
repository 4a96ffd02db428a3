"""Acceptance of a drafter of any kind, measured on the target's own answers, under each reading.

``check.py`` measures EAGLE heads position by position. For all other kinds drafts are made and
verified here as in use, and the result is the mean number of tokens per pass of the target.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.kind import Kind, LoadOptions
from mlx_eagle.drafters.output_rows import with_draft_vocab

from .check import QUESTIONS, as_saved, encode

MOST_DRAFTED = 7
CLEAR = 1.1  # ratio of mean acceptance lengths, to count as better


@dataclass(frozen=True)
class Reading:
    """The statistics of a drafter with ``change`` in its config."""

    name: str
    change: Mapping[str, Any]
    stats: Stats

    @property
    def tau(self) -> float:
        return self.stats.mean_acceptance_length


@dataclass(frozen=True)
class MeasuredAcceptance:
    """The drafter as it was resolved, and other readings of it."""

    resolved: Reading
    others: tuple[Reading, ...]
    num_prompts: int

    @property
    def winner(self) -> Reading:
        """The best other reading if it is clearly better, else the resolved one."""
        best = max(self.others, key=lambda reading: reading.tau, default=self.resolved)
        return best if best.tau > CLEAR * self.resolved.tau else self.resolved

    def entry(self) -> dict[str, Any]:
        """The entry ``check`` for the converted ``config.json``."""
        stats = self.resolved.stats
        return {
            "num_prompts": self.num_prompts,
            "mean_acceptance_length": round(self.resolved.tau, 3),
            "acceptance_by_position": [round(x, 4) for x in stats.acceptance_by_position],
            "readings": {reading.name: round(reading.tau, 3) for reading in self.others},
            "winner": self.winner.name,
        }

    def table(self) -> str:
        """A table of all that was measured, one line per reading, and what to do about it."""
        rows = [self.resolved, *self.others]
        width = max(len(row.name) for row in rows)
        lines = [f"tokens per pass of the target, in {self.num_prompts} answers of its own"]
        for row in rows:
            shares = " ".join(f"{share:4.0%}" for share in row.stats.acceptance_by_position)
            lines.append(f"{row.name:{width}}  {row.tau:5.2f}   {shares}")
        if self.winner is self.resolved:
            return "\n".join([*lines, f"winner: {self.resolved.name}"])
        change = ", ".join(f"{key} to {json.dumps(v)}" for key, v in self.winner.change.items())
        lines.append(
            f"warning: {self.winner.name} fits better ({self.winner.tau:.2f} tokens per pass, not "
            f"{self.resolved.tau:.2f}): set {change} in the config.json of the converted folder"
        )
        return "\n".join(lines)


def measure_acceptance(
    kind: Kind,
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    questions: Sequence[str] = QUESTIONS,
    num_tokens: int = 96,
) -> MeasuredAcceptance:
    """Let the target answer with the drafter as it will be saved, under every reading of it.

    Raises ValueError if drafter and target do not fit each other.
    """
    prompts = [encode(tokenizer, [{"role": "user", "content": text}]) for text in questions]
    stops = set(tokenizer.eos_token_ids)

    def measured(name: str, change: Mapping[str, Any]) -> Reading:
        changed = {**config, **change}
        with as_saved(changed, weights) as folder:
            drafter = kind.load(folder, changed, model, LoadOptions())
        drafter = with_draft_vocab(drafter, changed.get("draft_vocab"), model, tokenizer)
        runs = [_answer(model, drafter, prompt, num_tokens, stops) for prompt in prompts]
        return Reading(name, change, sum(runs[1:], runs[0]))

    resolved = measured("as resolved", {})
    others = []
    readings = kind.readings(config)
    if config.get("draft_vocab") is not None:
        readings = {"full vocabulary": {"draft_vocab": None}} | readings
    for name, change in readings.items():
        try:
            others.append(measured(name, change))
        except ValueError:  # a tap that this target lacks
            continue
    return MeasuredAcceptance(resolved, tuple(others), len(prompts))


def _answer(
    model: nn.Module, drafter: Drafter, prompt: Sequence[int], num_tokens: int, stops: set[int]
) -> Stats:
    stats = Stats()
    size = min(drafter.longest_draft or MOST_DRAFTED, MOST_DRAFTED)
    steps = speculative_generate_step(
        mx.array(list(prompt)),
        model,
        drafter,
        num_draft_tokens=size,
        max_tokens=num_tokens,
        stats=stats,
    )
    for token, _, _ in steps:
        if token in stops:
            break
    return stats
