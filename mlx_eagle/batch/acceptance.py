"""Picks and verification for all requests of a batch at once, each with its own rule.

Requests with equal rules are verified in the same operations: greedy requests, and requests that
sample with the same filters, each with its own noise. Rules that cannot be combined, with a
sampler that is a closure or "reject", are applied request by request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

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


class GreedyRows:
    """One round of requests without a sampler, verified in the same operations.

    ``pick`` and ``of_request`` are as in ``drafters.base.Picks``, for the requests of this group.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        positions: list[int],
        size: int,
        forced: Sequence[Sequence[int]],
    ):
        self._rules = rules
        self._positions = positions
        self._size = size
        self._forced = forced

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        return mx.argmax(logits, axis=-1)

    def of_request(self, index: int) -> Pick:
        choice = self._rules[index].open(self._positions[index], self._size)
        return ForcedPicks(choice, self._forced[index]).pick

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


class CoupledRows(GreedyRows):
    """One round of requests that sample with their positions' noise, by the same filters."""

    def __init__(
        self,
        rules: Sequence[Coupled],
        keys: mx.array,
        positions: list[int],
        size: int,
        forced: Sequence[Sequence[int]],
    ):
        super().__init__(rules, positions, size, forced)
        self._rule = rules[0]
        starts = mx.array(positions, mx.uint32)[:, None]
        where = starts + mx.arange(size + 1).astype(mx.uint32)
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
        self,
        rules: list[Rule],
        positions: list[int],
        room: list[int],
        forced: Sequence[Sequence[int]],
    ):
        self._choices: list[Choice] = [
            rule.open(at, size) for rule, at, size in zip(rules, positions, room, strict=True)
        ]
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


@dataclass
class RuleGroup:
    """Requests that are verified together: their indices in the batch, and their rules."""

    judged_by: object
    members: list[int] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    keys: mx.array | None = None  # (n, 2) of their noise

    def open(
        self, positions: Sequence[int], room: Sequence[int], forced: Sequence[Sequence[int]]
    ) -> GreedyRows | RowByRow:
        """One round; its first tokens have these positions in the requests of the batch."""
        own = [positions[b] for b in self.members]
        own_forced = [forced[b] for b in self.members]
        if self.judged_by is RowByRow:
            return RowByRow(self.rules, own, [room[b] for b in self.members], own_forced)
        size = max(*room, *map(len, forced))
        if self.judged_by is GreedyRows:
            return GreedyRows(self.rules, own, size, own_forced)
        rules = [rule for rule in self.rules if isinstance(rule, Coupled)]
        if self.keys is None:
            self.keys = mx.stack([rule.sampling.base_key for rule in rules])
        return CoupledRows(rules, self.keys, own, size, own_forced)


def _judged_by(rule: Rule) -> object:
    """A key that is equal for rules that can be applied together."""
    if isinstance(rule, Match) and rule.sampler is None:
        return GreedyRows
    if isinstance(rule, Coupled) and type(rule.sampling) is Sampling:
        return (*rule.sampling.parameters, rule.drafts_greedily, rule.vocab_size)
    return RowByRow


class BatchRule:
    """The rules of a batch, in its order."""

    def __init__(self, rules: Sequence[Rule]):
        groups: dict[object, RuleGroup] = {}
        for b, rule in enumerate(rules):
            judged_by = _judged_by(rule)
            group = groups.setdefault(judged_by, RuleGroup(judged_by))
            group.members.append(b)
            group.rules.append(rule)
        self._groups = list(groups.values())
        side_by_side = [b for group in self._groups for b in group.members]
        self._order = [side_by_side.index(b) for b in range(len(side_by_side))]

    def open(
        self, positions: Sequence[int], room: Sequence[int], forced: Sequence[Sequence[int]]
    ) -> "BatchChoice":
        """One round, see ``Rule.open``; request b can keep at most ``room[b]`` draft tokens.

        Its first draft tokens are ``forced[b]``.
        """
        choices = [(each.members, each.open(positions, room, forced)) for each in self._groups]
        return BatchChoice(choices, self._order, forced)


class BatchChoice:
    """One round of a batch: the ``Picks`` for its drafter, and the verification of its drafts."""

    def __init__(
        self,
        choices: list[tuple[list[int], GreedyRows | RowByRow]],
        order: list[int],
        forced: Sequence[Sequence[int]],
    ):
        self._choices = choices  # with the indices of their requests
        self._order = order  # index of each request in the concatenation of all choices
        self._forced = forced
        self._num_picked = 0

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        if len(self._choices) == 1:
            picked = self._choices[0][1].pick(logits, ids)
        else:
            each = [
                choice.pick(logits[mx.array(members)], ids) for members, choice in self._choices
            ]
            picked = mx.concatenate(each)[mx.array(self._order)]
        at = self._num_picked
        self._num_picked += 1
        is_forced = [len(tokens) > at for tokens in self._forced]
        if not any(is_forced):
            return picked
        tokens = mx.array([tokens[at] if len(tokens) > at else 0 for tokens in self._forced])
        return mx.where(mx.array(is_forced), index_in(ids, tokens), picked)

    def of_request(self, index: int) -> Pick:
        members, choice = next(each for each in self._choices if index in each[0])
        return choice.of_request(members.index(index))

    def verify(
        self, drafts: mx.array, lengths: Sequence[int], logits: mx.array
    ) -> BatchVerification:
        """Verify drafts (B, k), of which ``lengths[b]`` tokens count, against (B, k + 1, V)."""
        if len(self._choices) == 1:
            return self._choices[0][1].verify(drafts, lengths, logits)
        made = []
        for members, choice in self._choices:
            index = mx.array(members)
            made.append(choice.verify(drafts[index], [lengths[b] for b in members], logits[index]))
        following = mx.concatenate([verification.following for verification in made])
        kept = mx.concatenate([verification.num_kept for verification in made])
        return BatchVerification(following, kept).of(mx.array(self._order))
