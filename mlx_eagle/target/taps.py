"""Taps on an unmodified mlx-lm model: the activations entering chosen layers.

Knows how to look into a model while it runs; knows nothing of drafts or of what the
activations are for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .masks import exact_masks
from .ropes import exact_ropes, find_ropes
from .sharding import find_stage
from .swap import swapped_classes
from .tree_attention import tree_attention


@dataclass
class LayerCall:
    """One layer's part in a forward pass over R rows, kept so that it can be repeated."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def stream(self) -> mx.array:
        """The residual stream (1, R, H) entering the layer: what comes first in the call."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def uses(self, cache: Any) -> bool:
        return any(value is cache for value in (*self.args, *self.kwargs.values()))

    def is_repeatable(self, caches: tuple[type, ...]) -> bool:
        """Whether its arguments say all: arrays, plain values, known caches, nothing that grew."""
        plain = (mx.array, str, int, float, type(None), *caches)
        return all(isinstance(v, plain) for v in (*self.args, *self.kwargs.values()))

    def repeat(self, num_rows: int) -> None:
        """Run the layer on its first rows again, for what that does to its cache."""
        total = self.stream.shape[1]

        def cut(value: Any) -> Any:
            if not isinstance(value, mx.array) or value.ndim < 2:
                return value
            if value.ndim > 2 and value.shape[1] == total:  # activations (1, R, ...)
                return value[:, :num_rows]
            if value.shape[-2] == total:  # a mask (..., R, S), S ending with the R rows
                return value[..., :num_rows, : value.shape[-1] - total + num_rows]
            return value

        self.layer(*map(cut, self.args), **{k: cut(v) for k, v in self.kwargs.items()})


def _first(output: mx.array | tuple) -> mx.array:
    """Some layers return the hidden state with extras; the state comes first."""
    return output[0] if isinstance(output, tuple) else output


def _watched_class(
    original: type[nn.Module],
    on_enter: Callable[[mx.array], None] | None,
    on_leave: Callable[[mx.array], None] | None,
    on_call: Callable[[LayerCall], None] | None = None,
) -> type[nn.Module]:
    """A subclass whose call reports its first argument, its result or itself, and no more."""

    def call(self, *args, **kwargs):
        this = LayerCall(self, args, kwargs)
        if on_enter is not None:
            on_enter(this.stream)
        if on_call is not None:
            on_call(this)
        output = original.__call__(self, *args, **kwargs)
        if on_leave is not None:
            on_leave(_first(output))
        return output

    return type(original.__name__, (original,), {"__call__": call})


def find_final_norm(model: nn.Module) -> nn.Module:
    """The norm beside a model's layers; ValueError where there is not exactly one.

    A norm is known by its parameters: vectors only, of which one is the weight.
    """
    # model.layers may be a list made for the occasion: know the owner by a layer.
    last = model.layers[-1]
    owners = [
        module
        for _, module in model.named_modules()
        if any(layer is last for layer in module.get("layers") or ())
    ]
    owner = owners[-1] if owners else model
    norms = []
    for child in owner.children().values():
        parameters = child.parameters() if isinstance(child, nn.Module) else {}
        vectors = all(isinstance(p, mx.array) and p.ndim == 1 for p in parameters.values())
        if "weight" in parameters and vectors:
            norms.append(child)
    if len(norms) != 1:
        raise ValueError(
            f"the draft head needs what leaves the target's final norm, but {len(norms)} norms "
            "stand beside its layers where one was expected: this target is not supported."
        )
    return norms[0]


class Target:
    """An mlx-lm model that also hands out its taps.

    Tap i is the residual stream entering layer i (0-based), before any norm; tap
    ``num_layers`` is what enters the final norm, ``num_layers + 1`` what leaves it. The model is changed only while it runs,
    by swapping the class of the tapped layer objects: its parameters keep their names, and
    everything the user holds stays as it was.
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...] = ()):
        self.stage = find_stage(model)
        num_layers = self.stage.num_layers
        outside = [tap for tap in taps if not 0 <= tap <= num_layers + 1]
        if outside:
            raise ValueError(
                f"the draft head taps layers {list(taps)}, but the target has {num_layers} "
                f"layers (taps 0 to {num_layers}): convert the head for this target."
            )
        self.model = model
        self.taps = taps
        self._watched = set(taps)
        if taps and not self.stage.is_whole:
            self._watched |= {self.stage.end, num_layers + 1}  # see Stage.fetch
        self.num_layers = num_layers
        self._seen: dict[int, mx.array] = {}
        self._calls: list[LayerCall] = []
        self._classes = self._watched_classes(record=False)
        self._recording_classes = self._watched_classes(record=True)
        self._ropes = find_ropes(model)

    def __call__(
        self, tokens: mx.array, cache: list, tree_mask: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """Run tokens (R,) on top of ``cache``: logits (R, V) and features (R, F).

        Features are the taps side by side, low to high; None without taps. ``reach`` (R, R)
        makes the rows a tree (see ``tree.ancestors``); they are a chain without.
        """
        tree = nullcontext() if tree_mask is None else tree_attention(self._ropes, cache, tree_mask)
        self._seen.clear()
        with swapped_classes(self._classes), tree:
            logits = self.model(tokens[None], cache=cache)[0]
        return logits, self._features()

    def batch(self, tokens: mx.array, cache: list) -> tuple[mx.array, mx.array | None]:
        """Run tokens (B, R) on top of batch caches: logits (B, R, V), features (B, R, F)."""
        self._seen.clear()
        with swapped_classes(self._classes):
            logits = self.model(tokens, cache=cache)
        return logits, self._all_features(tokens.shape[0])

    def record(
        self, tokens: mx.array, cache: list
    ) -> tuple[mx.array, mx.array | None, list[LayerCall]]:
        """The same, and every layer's call."""
        self._seen.clear()
        with swapped_classes(self._recording_classes):
            logits = self.model(tokens[None], cache=cache)[0]
        calls, self._calls = self._calls, []
        return logits, self._features(), calls

    @contextmanager
    def as_alone(self, cache: list, num_rows: int) -> Iterator[None]:
        """Within, each row of a chain gets the mask and the position it would get alone."""
        with exact_masks(cache, num_rows), exact_ropes(self._ropes, num_rows):
            yield

    def _features(self) -> mx.array | None:
        features = self._all_features(1)
        return None if features is None else features[0]

    def _all_features(self, batch: int) -> mx.array | None:
        """The taps side by side, (batch, R, F)."""
        if not self.taps:
            return None
        seen = dict(self._seen)
        self._seen.clear()
        for tap in filter(self.stage.sees, self._watched):
            if tap not in seen or seen[tap].ndim != 3 or seen[tap].shape[0] != batch:
                found = f"shape {tuple(seen[tap].shape)}" if tap in seen else "nothing"
                raise ValueError(
                    f"tap {tap} of this target gave {found} where one activation a token was "
                    f"expected ({batch}, R, H): it cannot be used with a draft head."
                )
        if not self.stage.is_whole:
            seen = self.stage.fetch(seen, self.taps)
        return mx.concatenate([seen[tap] for tap in self.taps], axis=-1)

    def _keep(self, tap: int) -> Callable[[mx.array], None] | None:
        if tap not in self._watched:
            return None

        def keep(x: mx.array) -> None:
            if tap in self._seen:
                raise ValueError(
                    f"this target runs layer {tap} more than once a pass, so what enters it is not "
                    "one activation a token: it cannot be used with a draft head."
                )
            self._seen[tap] = x

        return keep

    def _watched_classes(self, record: bool) -> list[tuple[nn.Module, type]]:
        """Every layer that is watched, with its class while it is."""
        classes = []
        on_call = (lambda call: self._calls.append(call)) if record else None
        for i, layer in enumerate(self.model.layers, self.stage.start):
            # What enters layer i > 0 is what leaves the one before; some layers take the stream
            # as another argument than the first.
            enter = self._keep(0) if i == 0 else None
            leave = self._keep(i + 1)
            if enter or leave or record:
                classes.append((layer, _watched_class(type(layer), enter, leave, on_call)))
        leave = self._keep(self.num_layers + 1)
        if leave:
            norm = find_final_norm(self.model)
            classes.append((norm, _watched_class(type(norm), None, leave)))
        return classes
