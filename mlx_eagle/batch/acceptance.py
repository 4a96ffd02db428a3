"""Picks and verification for all requests of a batch at once, each with its own rule.

Requests with equal rules are verified in the same operations: greedy requests, and requests that
sample with the same filters, each with its own noise. Rules that cannot be combined, with a
sampler that is a closure or "reject", are applied request by request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..decoding.accept import Choice, Coupled, Match, Rule, log_softmax
from ..decoding.draft import ForcedPicks, index_in
from ..decoding.sampling import Sampling, noise_of_rows
from ..drafters.base import Draft, Pick


@dataclass(frozen=True)
class BatchVerification:
    """Result of a verify pass of B requests, on the device.

    ``following`` (B, R) is the token after each row, ``num_kept`` (B,) how many draft tokens are
    kept.
    """

    following: mx.array
    num_kept: mx.array

    @cached_property
    def packed(self) -> mx.array:
        """Everything that the host reads, (B, 1 + R), so that it waits once."""
        return mx.concatenate([self.num_kept[:, None], self.following], axis=1)

    def of(self, index: mx.array) -> "BatchVerification":
        """Select the requests ``index`` (n,), in that order."""
        return BatchVerification(self.following[index], self.num_kept[index])


@dataclass
class GreedyRows:
    """One round of requests without a sampler, verified in the same operations.

    ``pick`` and ``of_request`` are as in ``drafters.base.Picks``, for the requests of this group.
    """

    rules: Sequence[Rule]
    positions: list[int]
    forced: list[list[int]]
    size: int  # of the longest draft in the batch

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        return mx.argmax(logits, axis=-1)

    def of_request(self, index: int) -> Pick:
        choice = self.rules[index].open(self.positions[index], self.size)
        return ForcedPicks(choice, self.forced[index]).pick

    def verify(
        self, drafts: mx.array, lengths: Sequence[int], logits: mx.array
    ) -> BatchVerification:
        """Verify drafts (n, k), of which ``lengths[b]`` tokens count, against (n, k + 1, V)."""
        size = drafts.shape[1]
        following = self._chosen(logits).astype(mx.int32)
        keep = drafts == following[:, :-1]
        if min(lengths) < size:
            keep = keep & (mx.arange(size) < mx.array([*lengths])[:, None])
        kept = mx.cumprod(keep.astype(mx.int32), axis=1).sum(axis=1)
        return BatchVerification(following, kept)

    def _chosen(self, logits: mx.array) -> mx.array:
        """The target's own choice of each row, (n, k + 1)."""
        return mx.argmax(logits, axis=-1)


@dataclass
class CoupledRows(GreedyRows):
    """One round of requests that sample with their positions' noise, by the same filters."""

    rules: Sequence[Coupled]

    def __post_init__(self) -> None:
        self._rule = self.rules[0]
        keys = mx.array([rule.sampling.base_key.tolist() for rule in self.rules], mx.uint32)
        starts = mx.array(self.positions, mx.uint32)[:, None]
        where = starts + mx.arange(self.size + 1).astype(mx.uint32)
        self._noise = noise_of_rows(keys, where, self._rule.vocab_size)  # (n, k + 1, V)
        self._num_picked = 0

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        if self._rule.drafts_greedily:
            return mx.argmax(logits, axis=-1)
        noise = self._noise[:, self._num_picked]
        self._num_picked += 1
        scores = self._rule.sampling.scores(logits)
        return mx.argmax(scores + (noise if ids is None else noise[:, ids]), axis=-1)

    def _chosen(self, logits: mx.array) -> mx.array:
        rows = log_softmax(logits).reshape(-1, logits.shape[-1])
        scores = self._rule.sampling.scores(rows, is_normalized=True).reshape(logits.shape)
        return mx.argmax(scores + self._noise[:, : logits.shape[1]], axis=-1)


class RowByRow:
    """One round of requests that are judged one after the other.

    A rule is asked for as many picks as there is room for, as in a generation of its own: those
    that follow because others have more room are fillers. It is not asked where a token is
    forced.
    """

    def __init__(
        self, rules: list[Rule], positions: list[int], forced: list[list[int]], room: list[int]
    ):
        opened = zip(rules, positions, room, strict=True)
        self._choices: list[Choice] = [rule.open(at, size) for rule, at, size in opened]
        self._picks = [ForcedPicks(*each) for each in zip(self._choices, forced, strict=True)]
        self._room = list(room)  # left

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        rows = range(len(self._choices))
        return mx.concatenate([self.of_request(b)(logits[b : b + 1], ids) for b in rows])

    def of_request(self, index: int) -> Pick:
        def pick(logits: mx.array, ids: mx.array | None) -> mx.array:
            self._room[index] -= 1
            if self._room[index] < 0:
                return mx.argmax(logits, axis=-1)
            return self._picks[index].pick(logits, ids)

        return pick

    def verify(
        self, drafts: mx.array, lengths: Sequence[int], logits: mx.array
    ) -> BatchVerification:
        following = []
        kept = []
        for b, (choice, length) in enumerate(zip(self._choices, lengths, strict=True)):
            made = choice.verify(Draft(drafts[b, :length]), None, logits[b, : length + 1])
            padding = (0, drafts.shape[1] - length)
            following.append(mx.pad(made.following.astype(mx.int32), padding))
            kept.append(made.num_kept.astype(mx.int32))
        return BatchVerification(mx.stack(following), mx.stack(kept))


def _judged_by(rule: Rule) -> tuple[Any, ...]:
    """The class that applies a rule, and what must be equal where rules are applied together."""
    if isinstance(rule, Match) and rule.sampler is None:
        return (GreedyRows,)
    if isinstance(rule, Coupled) and type(rule.sampling) is Sampling:
        return CoupledRows, *rule.sampling.parameters, rule.drafts_greedily, rule.vocab_size
    return (RowByRow,)


def judged_together(rules: Sequence[Rule]) -> dict[tuple[Any, ...], list[int]]:
    """The indices of ``rules`` that are applied together, by ``_judged_by``."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for b, rule in enumerate(rules):
        groups.setdefault(_judged_by(rule), []).append(b)
    return groups


def open_rules(
    rules: Sequence[Rule], positions: list[int], room: list[int], forced: list[list[int]]
) -> "BatchChoice":
    """One round of a batch by the rules of its requests, see ``Rule.open``.

    Request b can keep at most ``room[b]`` draft tokens, the first of which are ``forced[b]``.
    """
    size = max(*room, *map(len, forced))
    choices = []
    for (kind, *_), members in judged_together(rules).items():
        own = [[values[b] for b in members] for values in (rules, positions, forced)]
        limits = [room[b] for b in members] if kind is RowByRow else size
        choices.append((members, kind(*own, limits)))
    return BatchChoice(choices, forced)


@dataclass
class BatchChoice:
    """One round of a batch: the ``Picks`` for its drafter, and the verification of its drafts."""

    choices: list[tuple[list[int], GreedyRows | RowByRow]]  # with the indices of their requests
    forced: list[list[int]]
    num_picked: int = 0

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        each = [choice.pick(self._part(logits, own), ids) for own, choice in self.choices]
        picked = self._in_order(each)
        at = self.num_picked
        self.num_picked += 1
        is_forced = [len(tokens) > at for tokens in self.forced]
        if not any(is_forced):
            return picked
        tokens = mx.array([tokens[at] if len(tokens) > at else 0 for tokens in self.forced])
        return mx.where(mx.array(is_forced), index_in(ids, tokens), picked)

    def of_request(self, index: int) -> Pick:
        members, choice = next(each for each in self.choices if index in each[0])
        return choice.of_request(members.index(index))

    def verify(
        self, drafts: mx.array, lengths: Sequence[int], logits: mx.array
    ) -> BatchVerification:
        """Verify drafts (B, k), of which ``lengths[b]`` tokens count, against (B, k + 1, V)."""
        made = [
            choice.verify(
                self._part(drafts, own), [lengths[b] for b in own], self._part(logits, own)
            )
            for own, choice in self.choices
        ]
        following = self._in_order([verification.following for verification in made])
        return BatchVerification(following, self._in_order([each.num_kept for each in made]))

    def _part(self, array: mx.array, members: list[int]) -> mx.array:
        """The rows of a group's requests."""
        return array if len(self.choices) == 1 else array[mx.array(members)]

    def _in_order(self, parts: list[mx.array]) -> mx.array:
        """The rows of all groups, in the order of the batch."""
        if len(parts) == 1:
            return parts[0]
        side_by_side = [b for members, _ in self.choices for b in members]
        order = [side_by_side.index(b) for b in range(len(side_by_side))]
        return mx.concatenate(parts)[mx.array(order)]
