"""Taps: layers whose inputs are recorded while a model runs unmodified."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class TapRecorder:
    """Records one pass at a time: the activations at chosen taps.

    ``last`` is the tap after the last layer.
    """

    def __init__(self, taps: set[int], last: int):
        self._taps = taps
        self._last = last
        self._seen: dict[int, mx.array] = {}
        self._rows: mx.array | None = None
        self.cut: mx.array | None = None

    def begin(self, rows: mx.array | None = None) -> None:
        """Forget the last pass.

        If ``rows`` (K,), numbered b * R + r, are given, the last layer of the next pass returns
        only these; they are ``cut`` (1, K, H).
        """
        self._seen = {}
        self._rows = rows
        self.cut = None

    def take(self) -> dict[int, mx.array]:
        """Return the activations of the finished pass, by tap."""
        seen = self._seen
        self.begin()
        return seen

    def on_tap(self, tap: int, output: Any) -> None:
        """Record an activation. Some layers return it with extras; it comes first."""
        if tap not in self._taps:
            return
        if tap in self._seen:
            raise ValueError(
                f"this target runs layer {tap} more than once per pass, so what enters it is not "
                "one activation per token: it cannot be used with a draft head."
            )
        self._seen[tap] = output[0] if isinstance(output, tuple) else output

    def on_layer_output(self, tap: int, output: Any) -> Any:
        """Record a layer's output; return what the model continues with."""
        self.on_tap(tap, output)
        if self._rows is None or tap != self._last or not isinstance(output, mx.array):
            return output
        if self.cut is not None:
            raise ValueError(
                f"this target runs layer {tap - 1} more than once per pass: it cannot teach a "
                "draft head."
            )
        self.cut = output.reshape(-1, output.shape[-1])[self._rows][None]
        return self.cut


class RecordedLayer(nn.Module):
    """Mixin for the copy of a layer or of the final norm that reports to a ``TapRecorder``.

    The norm counts as the layer after the last.
    """

    _recorder: TapRecorder
    _index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._index == 0:  # what enters any other layer is what left the one before
            # The stream, which some call by a name.
            self._recorder.on_tap(0, args[0] if args else next(iter(kwargs.values())))
        return self._recorder.on_layer_output(self._index + 1, super().__call__(*args, **kwargs))
