"""Training of MTP layers that are run again on their own state.

Cai et al. 2025, FastMTP, arXiv:2509.18362, but that a step sees what it sees when decoding: the
committed slots of step 0, and its own of later ones.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..convert.checkpoint import DraftCheckpoint
from ..drafters.folder import shapes_of
from ..drafters.mtp import FLOAT32, ROUTER
from ..drafters.mtp_layers import JOIN, family_of
from .chains import ChainRecipe
from .chunks import Arrays, run_step
from .given import Given
from .recipe import GivenRecipe
from .settings import TrainSettings
from .student import Student
from .teacher import Teacher
from .unroll import known_tokens

EXPERTS = "switch_mlp."  # of names in mlx-lm's layers, which hold all experts in a matrix
FROZEN = (EXPERTS, FLOAT32, f"{ROUTER}.weight", "mixer.gate.weight")
"""Parameters that are not trained: experts and routers."""


def renamed(checkpoint: DraftCheckpoint, model: nn.Module) -> dict[str, str]:
    """Return the names of published tensors by those that the model's family gives their parts."""
    own = {name: name for name in checkpoint.tensors}
    return family_of(model).renamed(own, len(model.layers))


def published_alike(checkpoint: DraftCheckpoint, head: nn.Module, model: nn.Module) -> set[str]:
    """Name the parameters of a head that are published as they are, or turned or less one."""
    shapes = shapes_of(head)
    theirs = {own: checkpoint.tensors[name] for own, name in renamed(checkpoint, model).items()}
    return {own for own, tensor in theirs.items() if shapes.get(own) == tuple(tensor.shape)}


class MTPRecipe(ChainRecipe, GivenRecipe):
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
        super().__init__(settings, student, model, given, Teacher(model, taps))
        if not self.teacher.has_states:
            raise ValueError(
                "the output of this target is more than a product with a matrix, and its MTP "
                "layers are not trained: begin with another drafter."
            )
        self.weights = self.weights / self.weights.sum()
        if settings.train_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        """Raise ValueError if there are no experts, or they are stored in another form."""
        trained = tree_flatten(self.student.head.trainable_parameters())
        own = [(name, array[:1]) for name, array in trained if EXPERTS in name]
        came = self.given.published
        names = {} if came is None else self.published_names(came)
        if not own or (names and not all(self.published_parts(names, *each) for each in own)):
            what = "stored in a form that is not written here" if own else "none"
            raise ValueError(
                f"the experts of {self.given.source} are {what}: leave out --train-experts."
            )

    def published_names(self, checkpoint: DraftCheckpoint) -> Mapping[str, str]:
        return renamed(checkpoint, self.model)

    def published_parts(
        self, names: Mapping[str, str], own: str, change: mx.array
    ) -> dict[str, mx.array]:
        """Cut experts apart that are stored one by one, and put gates before what is fused.

        Of a joining matrix that takes the state first, the halves are swapped.
        """
        if own.startswith(JOIN) and family_of(self.model).state_first:
            change = mx.concatenate(mx.split(change, 2, axis=-1)[::-1], axis=-1)
        if EXPERTS not in own:
            return {names[own]: change}
        alone = {own.replace(EXPERTS, f"experts.{i}."): part for i, part in enumerate(change)}
        path, _, kind = own.removesuffix(".weight").rpartition(EXPERTS)
        fused = {f"{path}experts.{kind}": change}
        if kind != "down_proj":
            none = mx.zeros_like(change)
            halves = [change, none] if kind == "gate_proj" else [none, change]
            fused = {f"{path}experts.gate_up_proj": mx.concatenate(halves, axis=-2)}
        found = alone if alone.keys() <= names.keys() else fused
        return {names[name]: x for name, x in found.items() if name in names}

    def output_parts(self) -> tuple[str, ...]:
        return () if self.student.head.state_normed else ("norm",)

    def logits(self, head: Any, hidden: mx.array) -> mx.array:
        return self.teacher.whole(hidden if head.state_normed else head.norm(hidden))

    def steps(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> Iterator[mx.array]:
        hidden = features[..., : self.teacher.width]
        past: list[Arrays] = []
        for step in range(self.depth):
            given = [known_tokens(embeddings, step), hidden]
            before = [] if self.settings.mtp_attention == "step" else past
            forward = partial(advance, head, step=step)
            again = self.settings.grad_checkpoint
            hidden, *made = run_step(head, (), forward, given, before, again)
            past.append(made)
            yield hidden


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
    head: Any, embeddings: mx.array, hidden: mx.array, past: list[Arrays], step: int
) -> Arrays:
    """Run a step: hidden states (B, T, h), then keys and values of each layer that attends.

    The slots are at positions that are ``step`` later. Each sees those up to itself in the first
    of ``past``, and itself in the others; without ``past``, those up to itself in this step.
    """
    x = head.join(embeddings, hidden)
    slots = mx.arange(x.shape[1])[:, None]
    mask = mx.concatenate([slots >= slots.T, *[slots == slots.T] * len(past)], axis=1)
    made: Arrays = []
    for layer, attends in zip(head.layers, head._attends, strict=True):
        if not attends:
            x = layer(x)
            continue
        place = len(made)
        before = [(chain[place], chain[place + 1]) for chain in past]
        cache = _StepCache(step, before)
        x = layer(x, mask=mask, cache=cache)
        assert cache.made is not None
        made += cache.made
    return [head.norm(x) if head.state_normed else x, *made]
