"""Our loop inside mlx-lm: unmodified callers of mlx-lm may pass a drafter as ``draft_model``.

All of them go through one function of mlx-lm, which ours takes the place of.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generation_stream

from .decoding.loop import speculative_generate_step
from .decoding.stats import Stats
from .drafters.base import Drafter
from .generate import is_drafter, stream_generate

WORKS_WITH = "mlx-lm>=0.32.2,<0.33"
NAME = "speculative_generate_step"


class Installation:
    """What stands in mlx-lm for its ``speculative_generate_step`` while we are installed.

    ``stats`` are the counts of the latest generation that ran our loop, final once it has
    ended; None before the first.
    """

    def __init__(self, original: Callable):
        update_wrapper(self, original)
        self.original = original
        self.stats: Stats | None = None

    def __call__(
        self,
        prompt: mx.array,
        model: nn.Module,
        draft_model: Drafter | nn.Module,
        stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
        **kwargs: Any,
    ) -> Iterator[tuple[int, mx.array, bool]]:
        """Our loop for one of our drafters, mlx-lm's own for any other draft model."""
        if not is_drafter(draft_model):
            return self.original(prompt, model, draft_model, stream, **kwargs)
        self.stats = kwargs.pop("stats", None) or Stats()
        return speculative_generate_step(
            prompt, model, draft_model, stream, **kwargs, stats=self.stats
        )


def install() -> Installation:
    """Let mlx-lm run our loop wherever ``draft_model`` is one of our drafters.

    ``mlx_lm.generate``, ``mlx_lm.stream_generate``, ``mlx_lm.server`` and what is built on them
    all look this function up when they are called, so it does not matter whether they were
    imported before. Ordinary draft models keep mlx-lm's own path. Installing again changes
    nothing and returns the same ``Installation``.

    Raises RuntimeError, in one sentence, where this version of mlx-lm is not the one we know.
    """
    module = _module()
    current = getattr(module, NAME, None)
    if isinstance(current, Installation):
        return current
    _check(module)
    installation = Installation(current)
    setattr(module, NAME, installation)
    return installation


def uninstall() -> None:
    """Give mlx-lm its own function back; nothing happens where we are not installed."""
    module = _module()
    current = getattr(module, NAME, None)
    if isinstance(current, Installation):
        setattr(module, NAME, current.original)


@contextmanager
def installed() -> Iterator[Installation]:
    """Installed within; afterwards as it was before."""
    before = getattr(_module(), NAME, None)
    installation = install()
    try:
        yield installation
    finally:
        if before is not installation:
            uninstall()


def _module() -> ModuleType:
    # The attribute ``mlx_lm.generate`` is the function of that name.
    return importlib.import_module("mlx_lm.generate")


def _check(module: ModuleType) -> None:
    """Raise RuntimeError unless every call of mlx-lm's functions is a call of ours."""
    for ours in (speculative_generate_step, stream_generate):
        theirs = getattr(module, ours.__name__, None)
        if theirs is None or not _takes(ours, theirs):
            raise RuntimeError(
                f"mlx-lm {mlx_lm.__version__} has another {ours.__name__} than the one that "
                f"mlx_eagle.install() knows: install {WORKS_WITH}."
            )


def _takes(ours: Callable, theirs: Callable) -> bool:
    """Whether the positions are the same and ``ours`` knows every name that ``theirs`` has."""
    calls, known = (
        {name: parameter.kind for name, parameter in inspect.signature(f).parameters.items()}
        for f in (theirs, ours)
    )
    positions = [
        [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        for kinds in (calls, known)
    ]
    return positions[0] == positions[1] and calls.items() <= known.items()
