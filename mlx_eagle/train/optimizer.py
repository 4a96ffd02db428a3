"""Optimizer: one step of training, from losses and gradients to new weights by AdamW or Muon.

Weights are in float32, whatever type the head computes in.
"""

import math
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.utils import average_gradients
from mlx.optimizers import AdamW, Muon, Optimizer
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from .recipe import Recipe

BETAS = (0.9, 0.95)  # of AdamW, as in EAGLE-3's trainers
TABLES = ("embed_tokens", "lm_head", "markov_head", "confidence_head", "codebook", "centroids")
"""Parts of names of matrices that are no maps between states: they are AdamW's in any case."""

Arrays = dict[str, mx.array]


def learning_rate(step: int, num_steps: int, peak: float, warmup: float) -> float:
    """Return the rate of step ``step`` (from 0): a linear rise, then half a cosine to 0.

    ``warmup`` is the share of all ``num_steps`` in which it rises; the first rate is above 0.
    """
    rising = max(1, int(warmup * num_steps))
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, num_steps - rising)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def is_for_muon(name: str, weight: mx.array) -> bool:
    """Return whether Muon learns this weight, if it is chosen: a matrix between states."""
    return weight.ndim == 2 and not any(part in name for part in TABLES)


class TrainStep:
    """A student's weights and the optimizer that changes them, batch after batch.

    All arrays go by the names of the head's parameters. ``weights`` are in float32, whatever type
    the head computes in; ``moments`` and ``clock`` are the optimizer's state, and ``kept`` the
    gradients since its last step.
    """

    def __init__(self, recipe: Recipe):
        """Learn as the settings of ``recipe`` say.

        With "muon" (Jordan et al. 2024, kellerjordan.github.io/posts/muon) matrices between
        states are learnt by that, and all other weights by AdamW.
        """
        settings = recipe.settings
        self._recipe = recipe
        self._student = recipe.student
        adamw = AdamW(0.0, list(BETAS), weight_decay=settings.weight_decay, bias_correction=True)
        muon = Muon(0.0, weight_decay=settings.weight_decay)
        # One short kernel, in place of 16 passes over all weights.
        by_adamw, by_muon = (mx.compile(partial(_updated, own)) for own in (adamw, muon))
        head = self._student.head
        self.weights: Arrays = dict(tree_flatten(head.trainable_parameters()))
        self.moments: dict[str, Any] = {name: {} for name in self.weights}
        self._updates = dict.fromkeys(self.weights, by_adamw)
        for name, weight in self.weights.items():
            is_muon = settings.optimizer == "muon" and is_for_muon(name, weight)
            self._updates[name] = by_muon if is_muon else by_adamw
            (muon if is_muon else adamw).init_single(weight, self.moments[name])
        self.clock: Arrays = dict(adamw.state)  # the step and the learning rate, of both
        self.kept: Arrays = {}

    @property
    def state(self) -> Arrays:
        """Weights and moments, all that a run needs to go on, by their names in checkpoints."""
        moments = self.moments | self.clock
        return dict(tree_flatten({"weights": self.weights, "moments": moments}))

    def load(self, state: Arrays) -> None:
        """Go on from weights and moments of before."""
        # In the order of before, in which the norm of all gradients is summed up.
        self.weights = {name: state[f"weights.{name}"] for name in self.weights}
        self.moments = tree_map_with_path(lambda name, _: state[f"moments.{name}"], self.moments)
        self.clock = {name: state[f"moments.{name}"] for name in self.clock}
        self.show()

    def show(self) -> None:
        """Give the student's head the weights that have been learnt so far."""
        self._student.head.update(tree_unflatten(list(self.weights.items())))

    def __call__(
        self,
        tokens: mx.array,
        features: mx.array,
        targets: tuple[Any, ...],
        rate: float | None,
        parts: int,
    ) -> tuple[mx.array, mx.array]:
        """Learn from a batch; return the losses per step (num_steps,) and the gradients' norm ().

        With a learning ``rate``, the optimizer makes a step of the gradients of ``parts``
        batches, of which this is the last. With None, this batch's gradients are only added to
        them, and the norm is 0.
        """
        losses, gradients = self.gradients(tokens, features, targets)
        if rate is None or self.kept:
            for name in self.weights:
                gradient = gradients.pop(name).astype(mx.float32)
                self.kept[name] = self.kept.pop(name, 0.0) + gradient
                mx.eval(self.kept[name])
            gradients = self.kept
        if rate is None:
            return losses, mx.array(0.0)
        self.kept = {}
        return losses, self._learn(gradients, rate, parts)

    def gradients(
        self, tokens: mx.array, features: mx.array, targets: tuple[Any, ...]
    ) -> tuple[mx.array, Arrays]:
        """Return the losses per step (num_steps,) and the gradients of their weighted sum.

        The gradients have the type that the head computes in.
        """
        head = self._student.head
        dtype = self._student.dtype
        embeddings = self._student.embed(tokens)

        def loss(weights: Arrays) -> tuple[mx.array, mx.array]:
            head.update(tree_unflatten(list(weights.items())))
            losses = self._recipe.losses(head, embeddings, features, targets)
            return (losses * self._recipe.weights).sum(), losses

        weights = {name: weight.astype(dtype) for name, weight in self.weights.items()}
        (_, losses), gradients = mx.value_and_grad(loss)(weights)
        mx.eval(losses, gradients)
        self.show()
        return losses, gradients

    def _learn(self, gradients: Arrays, rate: float, parts: int) -> mx.array:
        """Make a step of the gradients of ``parts`` batches; return their norm (), not clipped.

        The tensors are taken one after the other, so that old and new ones never exist all at
        once.
        """
        squares = mx.array(0.0)
        for name, gradient in gradients.items():
            if mx.distributed.init().size() > 1:
                gradient = average_gradients(gradient.astype(mx.float32))
            gradients[name] = gradient
            squares = squares + gradient.astype(mx.float32).square().sum()
            mx.eval(gradient, squares)
        norm = mx.sqrt(squares) / parts
        most = self._recipe.settings.max_grad_norm or math.inf
        scale = mx.minimum(most / (norm + 1e-6), 1.0) / parts
        self.clock = {"step": self.clock["step"] + 1, "learning_rate": mx.array(rate)}
        for name in list(self.weights):
            weight, moments = self._updates[name](
                self.weights.pop(name), gradients.pop(name), self.moments.pop(name), scale,
                self.clock,
            )  # fmt: skip
            mx.eval(weight, moments)
            self.weights[name] = weight
            self.moments[name] = moments
            self._student.head.update(tree_unflatten([(name, weight)]))
        return norm


def _updated(
    optimizer: Optimizer,
    weight: mx.array,
    gradient: mx.array,
    moments: Arrays,
    scale: mx.array,
    clock: Arrays,
) -> tuple[mx.array, Arrays]:
    """Return a weight and its moments after a step of the gradient times ``scale``."""
    optimizer.state = clock
    after = dict(moments)
    gradient = gradient.astype(mx.float32) * scale
    return optimizer.apply_single(gradient, weight, after), after
