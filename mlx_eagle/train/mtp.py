"""Training of MTP layers that are run again on their own state.

Cai et al. 2025, FastMTP, arXiv:2509.18362, but that a step sees what it sees when decoding: the
committed slots of step 0, and its own of later ones.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..convert.checkpoint import DraftCheckpoint
from ..drafters.folder import shapes_of
from ..drafters.mtp import FLOAT32, ROUTER
from ..drafters.mtp_layers import JOIN, family_of
from ..drafters.target_parts import find_embedding, lm_head_of
from .chains import ChainRecipe, ChainTargets, known_tokens
from .chunks import Arrays, with_weights
from .given import Given
from .settings import LossSettings, TrainSettings
from .student import Student
from .teacher import HiddenTeacher

EXPERTS = ("switch_mlp", FLOAT32, f"{ROUTER}.weight", "mixer.gate.weight")


def published_names(
    checkpoint: DraftCheckpoint, head: nn.Module, model: nn.Module
) -> dict[str, str]:
    """Find the parameters of a head that are published as they are, or turned or less one."""
    own = {name: name for name in checkpoint.tensors}
    named = family_of(model).renamed(own, len(model.layers))
    shapes = shapes_of(head)
    return {
        name: theirs
        for name, theirs in named.items()
        if shapes.get(name) == tuple(checkpoint.tensors[theirs].shape)
    }


def is_trained(head: nn.Module, model: nn.Module, given: Given, name: str) -> bool:
    """Return whether a parameter is trained: experts, routers and split matrices are not."""
    if any(part in name for part in EXPERTS):
        return False
    return given.published is None or name in published_names(given.published, head, model)


class MTPRecipe(ChainRecipe):
    """MTP layers: the target's table and output matrix, and steps through mlx-lm's layers."""

    def __init__(self, settings: TrainSettings, student: Student, model: nn.Module, given: Given):
        head: Any = student.head
        if "steps" in head or head.chooses:
            what = "draft one each" if "steps" in head else "choose the slots that they attend to"
            raise ValueError(
                f"the MTP layers of {given.source} {what}, and only layers that are run again are "
                "trained here: begin with another drafter."
            )
        taps = () if head.state_normed else (len(model.layers),)
        super().__init__(settings, student, model, given, HiddenTeacher(model, taps))
        self.weights = self.weights / self.weights.sum()
        self._names = {}
        if given.published is not None:
            own = given.load(model, mx.float32).head
            self._names = published_names(given.published, own, model)
        self._project = lm_head_of(model, find_embedding(model)[0])

    def output_parts(self) -> tuple[str, ...]:
        return () if self.student.head.state_normed else ("norm",)

    def logits(self, head: Any, hidden: mx.array) -> mx.array:
        return self._project(hidden if head.state_normed else head.norm(hidden))

    def steps(
        self,
        head: Any,
        embeddings: mx.array,
        features: mx.array,
        targets: ChainTargets,
        settings: LossSettings,
        first: int,
    ) -> Iterator[mx.array]:
        alone = self.settings.mtp_attention == "step"
        start = 0 if alone else first
        hidden = features[..., : self.width]
        past: list[Arrays] = []
        forward = _checkpointed if settings.checkpoint else advance
        for step in range(self.depth):
            own = start if step else 0
            known = known_tokens(embeddings, step, own)
            hidden, *made = forward(head, known, hidden, [] if alone else past, own, step)
            past.append(made)
            if step == 0:
                hidden = hidden[:, start:]
            yield hidden[:, first - start :]

    def published_names(self, checkpoint: DraftCheckpoint) -> Mapping[str, str]:
        return self._names

    def as_published(self, name: str, change: mx.array) -> mx.array:
        """Swap the halves of a joining matrix that takes the state first."""
        if not (name.startswith(JOIN) and family_of(self.model).state_first):
            return change
        embedding, hidden = mx.split(change, 2, axis=-1)
        return mx.concatenate([hidden, embedding], axis=-1)


class _StepCache:
    """Keys and values of a layer in all steps so far; the newest ones are kept apart."""

    def __init__(self, offset: int, past: list[tuple[mx.array, mx.array]]):
        self.offset = offset
        self._past = past
        self.made: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.made = keys, values
        all_keys = [*(k for k, _ in self._past), keys]
        all_values = [*(v for _, v in self._past), values]
        return mx.concatenate(all_keys, axis=2), mx.concatenate(all_values, axis=2)


def advance(
    head: Any,
    embeddings: mx.array,
    hidden: mx.array,
    past: list[Arrays],
    first: int,
    step: int,
) -> Arrays:
    """Run a step: hidden states (B, R, h), then keys and values of each layer that attends.

    The slots are those from ``first`` on, at positions that are ``step`` later. Each sees those
    up to itself among the first of ``past``, which has a slot for every token, and itself in the
    others; without ``past``, those up to itself in this step.
    """
    x = head.join(embeddings, hidden)
    rows = x.shape[1]
    slots = mx.arange(first, first + rows)[:, None]
    own = slots == slots.T
    if past:
        columns = mx.arange(past[0][0].shape[2])
        mask = mx.concatenate([columns <= slots, *[own] * len(past)], axis=1)
    else:
        mask = slots >= slots.T
    made: Arrays = []
    for layer, attends in zip(head.layers, head._attends, strict=True):
        if not attends:
            x = layer(x)
            continue
        place = len(made)
        before = [(chain[place], chain[place + 1]) for chain in past]
        cache = _StepCache(first + step, before)
        x = layer(x, mask=mask, cache=cache)
        assert cache.made is not None
        made += cache.made
    return [head.norm(x) if head.state_normed else x, *made]


def _checkpointed(
    head: Any,
    embeddings: mx.array,
    hidden: mx.array,
    past: list[Arrays],
    first: int,
    step: int,
) -> Arrays:
    """Run a step as ``advance`` does, but keep only its inputs and outputs for the gradient."""
    num = len(past[0]) if past else 0

    def inner(_: int, rows: Arrays) -> Arrays:
        embeddings, hidden, *flat = rows
        chains = [flat[i : i + num] for i in range(0, len(flat), num or 1)]
        return advance(head, embeddings, hidden, chains, first, step)

    rows = [embeddings, hidden, *(x for made in past for x in made)]
    return with_weights(head, list(head.trainable_parameters()), inner, rows, len(hidden), True)
