"""One step of training: losses, their gradients, and what AdamW makes of them.

Weights are in float32, whatever the head's own type is. Losses and gradients are compiled on a
GPU, AdamW everywhere.
"""

import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx.nn.utils import average_gradients
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten, tree_unflatten

from .compiled import is_compiled
from .losses import TargetBatch, step_losses
from .settings import LossSettings
from .student import Student

BETAS = (0.9, 0.95)
MOMENTS = ("m", "v")
MOST_SHAPES = 32  # of batches, whose compiled functions are kept

Arrays = dict[str, mx.array]


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

    Everything by the names of the head's parameters: ``weights`` are float32 whatever the head
    computes in; ``moments`` are the optimizer's state; ``kept`` are gradients of batches since
    its last step.
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
        self.weights: Arrays = dict(tree_flatten(student.head.trainable_parameters()))
        self._optimizer.init(student.head.trainable_parameters())
        self.moments: Arrays = dict(tree_flatten(self._optimizer.state))
        self.kept: Arrays = {}
        self._run = mx.value_and_grad(self._loss)
        # By shape, so that one that has not come for long is let go.
        self._compiled = lru_cache(MOST_SHAPES)(lambda shapes: mx.compile(self._run))
        # Everywhere: one short kernel, in place of 16 passes over all weights.
        self._update = mx.compile(self._updated)

    def load(self, weights: dict[str, Any], moments: dict[str, Any]) -> None:
        """Go on from there."""
        # In the order they had: the norm of all gradients is summed up in it.
        loaded = dict(tree_flatten(weights))
        self.weights = {name: loaded[name] for name in self.weights}
        self.moments = dict(tree_flatten(moments))
        self.show()

    def show(self) -> None:
        """Let the student's head be what has been learnt so far."""
        self._student.head.update(tree_unflatten(list(self.weights.items())))

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
        losses, gradients = self.gradients(tokens, features, targets)
        if rate is None or self.kept:
            for name in self.weights:
                gradient = gradients.pop(name).astype(mx.float32)
                kept = self.kept.pop(name, None)
                self.kept[name] = gradient if kept is None else kept + gradient
                mx.eval(self.kept[name])
            gradients = self.kept
        if rate is None:
            return losses, mx.array(0.0)
        self.kept = {}
        return losses, self._learn(gradients, rate, parts)

    def gradients(
        self, tokens: mx.array, features: mx.array, targets: TargetBatch
    ) -> tuple[mx.array, Arrays]:
        """The losses per step (num_steps,) and the gradients of their weighted sum.

        They are of the type that the head computes in.
        """
        inputs = (self._student.embed(tokens), features, *targets)
        run: Any = self._run
        if is_compiled():
            run = self._compiled(tuple(array.shape for array in inputs))
        dtype = self._student.dtype
        weights = {name: weight.astype(dtype) for name, weight in self.weights.items()}
        (_, losses), gradients = run(weights, inputs)
        mx.eval(losses, gradients)
        self.show()
        return losses, gradients

    def _loss(self, weights: Arrays, inputs: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
        head = self._student.head
        head.update(tree_unflatten(list(weights.items())))
        embeddings, features, *targets = inputs
        losses = step_losses(head, embeddings, features, TargetBatch(*targets), self._settings)
        return (losses * self._settings.weights).sum(), losses

    def _learn(self, gradients: Arrays, rate: float, parts: int) -> mx.array:
        """What AdamW makes of the gradients of ``parts`` batches; their norm, (), before that.

        One tensor after the other, so that no two of old and new are there for all at once.
        """
        squares = mx.array(0.0)
        for name, gradient in gradients.items():
            if mx.distributed.init().size() > 1:
                gradient = average_gradients(gradient.astype(mx.float32))
            gradients[name] = gradient
            squares = squares + gradient.astype(mx.float32).square().sum()
            mx.eval(gradient, squares)
        norm = mx.sqrt(squares) / parts
        scale = mx.minimum(self._max_norm / (norm + 1e-6), 1.0) / parts
        self.moments["learning_rate"] = mx.array(rate)
        self.moments["step"] = self.moments["step"] + 1
        for name in list(self.weights):
            state = [self.moments.pop(f"{name}.{part}") for part in MOMENTS]
            weight, *state = self._update(
                self.weights.pop(name), gradients.pop(name), state, scale,
                self.moments["learning_rate"], self.moments["step"],
            )  # fmt: skip
            mx.eval(weight, state)
            self.weights[name] = weight
            self.moments |= {f"{name}.{part}": x for part, x in zip(MOMENTS, state, strict=True)}
            self._student.head.update(tree_unflatten([(name, weight)]))
        return norm

    def _updated(
        self,
        weight: mx.array,
        gradient: mx.array,
        state: list[mx.array],
        scale: mx.array,
        rate: mx.array,
        step: mx.array,
    ) -> list[mx.array]:
        """A weight and its moments after a step, of the gradient times ``scale``."""
        self._optimizer.state = {"step": step, "learning_rate": rate}
        moments = dict(zip(MOMENTS, state, strict=True))
        gradient = gradient.astype(mx.float32) * scale
        weight = self._optimizer.apply_single(gradient, weight, moments)
        return [weight, *moments.values()]
