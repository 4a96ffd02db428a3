"""Taps on an unmodified mlx-lm model: the activations entering chosen layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .masks_and_ropes import exact_masks, positions_of_one_scale
from .sharding import Exchange, find_stage
from .stand_in import StandIn, add_behaviour
from .states import StateUpdates
from .taps import RecordedLayer, TapRecorder


def find_final_norm(model: nn.Module) -> nn.Module:
    """The norm beside a model's layers: the only one, or the one called ``norm``; else ValueError.

    A norm is recognised by its parameters: only vectors, one of them called ``weight``.
    """
    # model.layers may be a new list at each call, so the owner is found by a layer in it.
    last = model.layers[-1]
    owners = [
        module
        for _, module in model.named_modules()
        if any(layer is last for layer in module.get("layers") or ())
    ]
    owner = owners[-1] if owners else model
    norms: dict[str, nn.Module] = {}
    for name, child in owner.children().items():
        parameters = child.parameters() if isinstance(child, nn.Module) else {}
        vectors = all(isinstance(p, mx.array) and p.ndim == 1 for p in parameters.values())
        if "weight" in parameters and vectors:
            norms[name] = child
    if "norm" in norms:
        return norms["norm"]
    if len(norms) != 1:
        raise ValueError(
            f"the draft head needs what leaves the target's final norm, but {len(norms)} norms "
            "stand beside its layers where one was expected: this target is not supported."
        )
    return next(iter(norms.values()))


class Target:
    """An mlx-lm model that also returns its taps.

    Tap i is the residual stream entering layer i (0-based), before any norm; tap ``num_layers``
    is what enters the final norm, ``num_layers + 1`` what leaves it.

    The user's model is never changed: passes run on a ``StandIn``, which shares its weights. So
    other threads may use the model, or their own targets, at the same time. A target itself
    belongs to one generation.
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
        self.num_layers = num_layers
        self._recorded = set(taps)
        if taps and not self.stage.is_whole:
            self._recorded |= {self.stage.end, num_layers + 1}  # see Stage.fetch
        self._recorder = TapRecorder(self._recorded, num_layers)
        self._stand_in = self._recording_stand_in()
        self.attention = self._stand_in.attention
        self._positions_of_one_scale = positions_of_one_scale(model)
        self.exchange: Exchange = mx.distributed.all_sum  # of activations in a pipeline

    def can_verify_tree(self, cache: list[Any], num_rows: int) -> bool:
        """Whether the rows of a tree have the attention scales of plain decoding."""
        num = self._positions_of_one_scale
        if num is None:  # the cache may be missing, or count no positions
            return True
        start: int = cache[0].offset
        return start // num == (start + num_rows - 1) // num

    def _recording_stand_in(self) -> StandIn:
        """The model's stand-in, whose layers and final norm tell ``self._recorder``.

        The last layer always does, for ``logits_at``; of the others, the ones next to a tap.
        """
        wanted = {max(tap - 1, 0) for tap in self._recorded} | {self.num_layers - 1}
        layers = enumerate(self.model.layers, self.stage.start)
        recorded = {index: layer for index, layer in layers if index in wanted}
        if self.num_layers + 1 in self._recorded:
            recorded[self.num_layers] = find_final_norm(self.model)
        stand_in = StandIn(self.model, recorded.values())
        for index, copy in zip(recorded, stand_in.copies, strict=True):
            add_behaviour(copy, RecordedLayer, _recorder=self._recorder, _index=index)
        return stand_in

    def __call__(
        self,
        tokens: mx.array,
        cache: list[Any],
        tree_mask: mx.array | None = None,
        embeddings: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Run tokens (R,) after the entries of ``cache``: logits (R, V) and features (R, F).

        Features are the taps side by side, low to high; None without taps. ``tree_mask`` (R, R)
        makes the rows a tree (see ``tree_rows.ancestors``); without it they are a chain. For a
        chain, ``embeddings`` (R, h) may replace the tokens, which may then be empty (0,).
        """
        given = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        as_tree = self._stand_in.tree_attention
        with nullcontext() if tree_mask is None else as_tree(cache, tree_mask):
            logits, seen = self._pass(tokens[None], cache, **given)
        features = self._features(seen, 1)
        return logits[0], None if features is None else features[0]

    def batch(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array | None]:
        """Run tokens (B, R) with batch caches: logits (B, R, V), features (B, R, F)."""
        with self._stand_in.absorbed.absorbing():
            logits, seen = self._pass(tokens, cache)
        return logits, self._features(seen, tokens.shape[0])

    def logits_at(
        self, tokens: mx.array, rows: mx.array
    ) -> tuple[mx.array, mx.array | None, mx.array | None]:
        """Run texts (B, R) from the beginning: logits (K, V) at only K of their positions.

        ``rows`` (K,) are numbered b * R + r. Features (B, R, F) cover all positions. The modules
        after the layers, above all the output matrix, get only these rows, unless a tap is there
        or the layers are spread over machines. The third result is the last layer's output (K, H)
        for these rows; None if the modules got all rows.
        """
        is_possible = self.stage.is_whole and self.num_layers + 1 not in self._recorded
        self._recorder.begin(rows=rows if is_possible else None)
        logits = self._stand_in.model(tokens)
        cut = self._recorder.cut
        seen = self._recorder.take()
        features = self._features(seen, tokens.shape[0])
        if cut is None:
            return logits.reshape(-1, logits.shape[-1])[rows], features, None
        return logits[0], features, cut[0]

    @contextmanager
    def recording(
        self, cache: list[Any], num_rows: int, keep: Callable[[StateUpdates | None], None]
    ) -> Iterator[None]:
        """Record a pass over ``num_rows`` in this block; ``keep`` gets its state updates."""
        states = self._stand_in.states
        states.begin(cache, num_rows)
        try:
            yield
            keep(states.end())
        finally:
            states.begin([], 0)

    @contextmanager
    def matching_single_row(self, cache: list[Any], num_rows: int) -> Iterator[None]:
        """Give each row of a chain, in this block, the mask and position of plain decoding.

        Its rows attend to a latent cache as a single row does.
        """
        positions = self._stand_in.positions.using(one_by_one=num_rows > 1)
        with exact_masks(cache, num_rows), positions, self._stand_in.absorbed.absorbing():
            yield

    def _pass(
        self, tokens: mx.array, cache: list[Any], **given: Any
    ) -> tuple[mx.array, dict[int, mx.array]]:
        """One forward pass over tokens (B, R): logits (B, R, V), activations by tap.

        ``given`` are further arguments for the model.
        """
        self._recorder.begin()
        self.attention.begin()
        logits = self._stand_in.model(tokens, cache=cache, **given)
        self.attention.begin()
        return logits, self._recorder.take()

    def _features(self, seen: dict[int, mx.array], batch: int) -> mx.array | None:
        """The taps side by side, (batch, R, F); None if there are none."""
        if not self.taps:
            return None
        for tap in filter(self.stage.sees, self._recorded):
            if tap not in seen or seen[tap].ndim != 3 or seen[tap].shape[0] != batch:
                found = f"shape {tuple(seen[tap].shape)}" if tap in seen else "nothing"
                raise ValueError(
                    f"tap {tap} of this target gave {found} where one activation per token was "
                    f"expected ({batch}, R, H): it cannot be used with a draft head."
                )
        seen = self.stage.fetch(seen, self.taps, self.exchange)
        return mx.concatenate([seen[tap] for tap in self.taps], axis=-1)
