"""One step of training: losses, their gradients, and what AdamW makes of them.

Weights are in float32, whatever the head's own type is; one function, compiled on a GPU, where a
CPU compiles AdamW alone.
"""

import math
from typing import Any

import mlx.core as mx
from mlx.nn.utils import average_gradients
from mlx.optimizers import AdamW, clip_grad_norm
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from .losses import LossSettings, TargetBatch, is_compiled, step_losses
from .student import Student

BETAS = (0.9, 0.95)

Tree = dict[str, Any]


def learning_rate(step: int, num_steps: int, peak: float, warmup: float) -> float:
    """Of step ``step`` (from 0) of ``num_steps``: a linear rise, then half a cosine to 0.

    ``warmup`` is the share of all steps that rise; the first step is not idle.
    """
    rising = max(1, int(warmup * num_steps))
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, num_steps - rising)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class TrainStep:
    """What a batch does to a student's weights.

    ``weights`` are float32 whatever the head computes in; ``moments`` are the optimizer's
    state; ``kept`` are gradients of batches since its last step, None where there are none.
    """

    def __init__(
        self,
        student: Student,
        settings: LossSettings,
        max_grad_norm: float,
        weight_decay: float = 0.0,
    ):
        self._student = student
        self._settings = settings
        self._max_norm = max_grad_norm
        self._optimizer = AdamW(
            learning_rate=0.0, betas=list(BETAS), weight_decay=weight_decay, bias_correction=True
        )
        self.weights: Tree = student.head.trainable_parameters()
        self._optimizer.init(self.weights)
        self.moments: Tree = self._optimizer.state
        self.kept: Tree | None = None
        self._gradients = mx.value_and_grad(self._loss)
        self._advance = mx.compile(self._step) if is_compiled() else self._step
        # Everywhere: one short kernel, in place of 16 passes over all weights.
        self._update = mx.compile(self._apply)

    def load(self, weights: Tree, moments: Tree) -> None:
        """Go on from there."""
        # In the order they had: the norm of all gradients is summed up in it.
        loaded = dict(tree_flatten(weights))
        self.weights = tree_unflatten([(n, loaded[n]) for n, _ in tree_flatten(self.weights)])
        self.moments = moments
        self.show()

    def show(self) -> None:
        """Let the student's head be what has been learnt so far."""
        self._student.head.update(self.weights)

    def __call__(
        self,
        tokens: mx.array,
        features: mx.array,
        targets: TargetBatch,
        rate: float | None,
        parts: int,
    ) -> tuple[mx.array, mx.array]:
        """Learn from a batch: the losses per step (num_steps,) and the norm of the gradients ().

        ``rate`` is the learning rate where the optimizer makes a step of what ``parts`` batches
        gave; None only adds this batch to them, and gives a norm of 0.
        """
        embeddings = self._student.embed(tokens)
        inputs = (embeddings, features, *targets.arrays())
        at = mx.array(0.0 if rate is None else rate)
        outcome = self._advance(
            self.weights, self.moments, self.kept, at, inputs, rate is not None, parts
        )
        losses, norm, self.weights, self.moments, self.kept = outcome
        mx.eval(losses, norm, self.weights, self.moments, self.kept)
        self.show()
        return losses, norm

    def gradients(
        self, tokens: mx.array, features: mx.array, targets: TargetBatch
    ) -> tuple[mx.array, Tree]:
        """The losses per step (num_steps,) and the gradients of their weighted sum."""
        inputs = (self._student.embed(tokens), features, *targets.arrays())
        (_, losses), gradients = self._gradients(self.weights, inputs)
        self.show()
        return losses, gradients

    def _loss(self, weights: Tree, inputs: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
        head, dtype = self._student.head, self._student.dtype
        head.update(tree_map(lambda weight: weight.astype(dtype), weights))
        embeddings, features, *targets = inputs
        losses = step_losses(head, embeddings, features, TargetBatch(*targets), self._settings)
        return (losses * self._settings.weights).sum(), losses

    def _step(
        self,
        weights: Tree,
        moments: Tree,
        kept: Tree | None,
        rate: mx.array,
        inputs: tuple[mx.array, ...],
        is_update: bool,
        parts: int,
    ) -> tuple[mx.array, mx.array, Tree, Tree, Tree | None]:
        (_, losses), gradients = self._gradients(weights, inputs)
        if kept is not None:
            gradients = tree_map(lambda new, old: new + old, gradients, kept)
        if not is_update:
            return losses, mx.array(0.0), weights, moments, gradients
        norm, weights, moments = self._update(
            weights, moments, average_gradients(gradients), rate, parts
        )
        return losses, norm, weights, moments, None

    def _apply(
        self, weights: Tree, moments: Tree, gradients: Tree, rate: mx.array, parts: int
    ) -> tuple[mx.array, Tree, Tree]:
        """What AdamW makes of the gradients of ``parts`` batches; their norm comes first."""
        if parts > 1:
            gradients = tree_map(lambda gradient: gradient / parts, gradients)
        gradients, norm = clip_grad_norm(gradients, self._max_norm)
        self._optimizer.state = moments
        self._optimizer.learning_rate = rate
        weights = self._optimizer.apply_gradients(gradients, weights)
        return norm, weights, self._optimizer.state
