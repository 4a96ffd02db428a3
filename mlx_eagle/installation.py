"""Our loop inside mlx-lm: for a drafter as ``draft_model``, or by default for every model.

Unmodified callers of mlx-lm go through three functions of it, which ours take the place of, also
under names that were imported before.
"""

import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper, wraps
from typing import Any
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream

from .batch.generate import batch_generate
from .decoding.generate_step import speculative_generate_step
from .decoding.setup import AUTO
from .decoding.stats import Stats
from .draft_models import open_drafter
from .drafters.base import Drafter, is_drafter
from .generate import stream_generate

WORKS_WITH = "mlx-lm>=0.32.2,<0.33"
NAME = "speculative_generate_step"
# The attribute ``mlx_lm.generate`` is the function of that name.
THEIRS = importlib.import_module("mlx_lm.generate")


class Installation:
    """The stand-in for mlx-lm's ``speculative_generate_step`` while we are installed.

    ``stats`` are the counts of the latest generation that ran our loop, of a batch the sum, final
    once it has ended; None before the first.
    """

    def __init__(self, original: Callable[..., Any]):
        update_wrapper(self, original)
        self.original = original
        self.stats: Stats | None = None
        self.exact = False
        self._draft_model: str | Drafter | None = None
        self._drafters: dict[int, Drafter | None] = {}  # by the id of a model, while it lives
        self._in_batch = threading.local()
        self._replaced: list[tuple[Any, Any]] = []  # theirs and ours

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
        options = {"exact": self.exact, **kwargs, "stats": self.stats}
        return speculative_generate_step(prompt, model, draft_model, stream, **options)

    def draft_by_default(self, draft_model: str | Drafter | None) -> None:
        """Draft with this from now on where a call names no draft model."""
        if not isinstance(draft_model, str | None) and not is_drafter(draft_model):
            raise ValueError(
                f"draft_model is a {type(draft_model).__name__}: give 'auto', the name of a draft "
                "model, or a drafter that mlx_eagle has opened."
            )
        self._draft_model = draft_model
        self._drafters.clear()

    def default_for(self, model: nn.Module, tokenizer: Any) -> Drafter | None:
        """The drafter for ``model`` by default, opened once; None where there is none.

        Why there is none is said once, in a warning.
        """
        if not isinstance(self._draft_model, str):
            return self._draft_model
        if id(model) not in self._drafters:
            self._drafters[id(model)] = _open(self._draft_model, model, tokenizer)
            finalize(model, self._drafters.pop, id(model), None)
        return self._drafters[id(model)]

    def put_in_place(self) -> None:
        """Replace mlx-lm's functions in its module, and wherever they were imported to."""
        texts = THEIRS.stream_generate
        batches = THEIRS.batch_generate
        self._replaced = [
            (self.original, self),
            (texts, self._for_texts(texts)),
            (batches, self._for_batches(batches)),
        ]
        for theirs, ours in self._replaced:
            _replace_everywhere(theirs, ours)

    def put_back(self) -> None:
        """Give mlx-lm its own back, also where ours were imported to in between.

        References to our functions that are left behave as mlx-lm's do: nothing drafts by default.
        """
        for theirs, ours in self._replaced:
            _replace_everywhere(ours, theirs)
        self._replaced = []
        self.exact = False
        self.draft_by_default(None)

    def _for_texts(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """``stream_generate`` with a drafter where none is named."""

        @wraps(theirs)
        def generate(
            model: nn.Module,
            tokenizer: Any,
            prompt: Any,
            max_tokens: int = 256,
            draft_model: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Iterator[GenerationResponse]:
            drafter = self.default_for(model, tokenizer) if draft_model is None else None
            if drafter is None:
                yield from theirs(
                    model, tokenizer, prompt, max_tokens, draft_model, *args, **kwargs
                )
                return
            stats = Stats()
            options = {
                "num_draft_tokens": AUTO, "exact": self.exact, "stats": stats, **kwargs
            }  # fmt: skip
            responses = stream_generate(
                model, tokenizer, prompt, max_tokens, drafter, *args, **options
            )
            try:
                first = next(responses)
            except ValueError as err:  # what our loop refuses, and mlx-lm may not
                warnings.warn(f"decoded without drafts: {err}", stacklevel=2)
                yield from theirs(model, tokenizer, prompt, max_tokens, None, *args, **kwargs)
                return
            self.stats = stats
            yield first
            yield from responses

        return generate

    def _for_batches(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """``batch_generate`` that takes a ``draft_model``, and one of ours where none is named."""

        @wraps(theirs)
        def generate(model: nn.Module, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            # Ours gives mlx-lm's the batches that it does not draft for.
            is_inner = getattr(self._in_batch, "is_inside", False)
            named = kwargs.pop("draft_model", None)
            drafter = self.default_for(model, tokenizer) if named is None else named
            if is_inner or drafter is None:
                return theirs(model, tokenizer, *args, **kwargs)
            if not is_drafter(drafter):
                raise ValueError(
                    "mlx-lm drafts for no batch: give a drafter that mlx_eagle has opened, or "
                    "leave draft_model out."
                )
            options = {"exact": self.exact, **kwargs}
            if named is None:
                options = {"num_draft_tokens": AUTO, **options}
            self._in_batch.is_inside = True
            try:
                response = batch_generate(model, tokenizer, *args, draft_model=drafter, **options)
                self.stats = response.stats.total
                return response
            except ValueError as err:  # what ours refuses, and mlx-lm may not
                if named is not None:
                    raise
                warnings.warn(f"decoded without drafts: {err}", stacklevel=2)
                return theirs(model, tokenizer, *args, **kwargs)
            finally:
                self._in_batch.is_inside = False

        return generate


def _replace_everywhere(old: Any, new: Any) -> None:
    """Put ``new`` in the place of ``old`` under each name of each module that was imported."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is old]:
            setattr(module, name, new)


def _open(name: str, model: nn.Module, tokenizer: Any) -> Drafter | None:
    """Open the drafter ``name`` for ``model``; None, with a warning, where there is none."""
    try:
        return open_drafter(name, model, tokenizer)
    except ValueError as err:
        warnings.warn(f"decoded without drafts: {err}", stacklevel=4)
        return None


def install(draft_model: str | Drafter | None = None, exact: bool | None = None) -> Installation:
    """Let mlx-lm run our loop wherever ``draft_model`` is one of our drafters, or by default.

    ``mlx_lm.generate``, ``mlx_lm.stream_generate``, ``mlx_lm.server`` and what is built on them
    take a drafter as ``draft_model``, and so does ``mlx_lm.batch_generate``; it does not matter
    whether they were imported before. Ordinary draft models keep mlx-lm's own path.

    With ``draft_model`` calls that name none draft as well, ``num_draft_tokens`` "auto" unless
    they say more, so that programs of other people do: a name is opened for each model, "auto"
    among them (see ``open_drafter``), and a drafter is for the model that it was opened for.
    Where there is none for a model it decodes plainly, with a warning. mlx-lm's server has
    batches of its own, which this does not reach: use ``mlx_eagle.server``.

    ``exact`` is the default of every call that our loop runs: see ``speculative_generate_step``.

    Installing again changes the defaults that are given, and returns the same ``Installation``.

    Raises RuntimeError, in one sentence, where this version of mlx-lm is not the one we know.
    """
    installation = _current()
    if installation is None:
        _check()
        installation = Installation(getattr(THEIRS, NAME))
        installation.draft_by_default(draft_model)
        installation.put_in_place()
    elif draft_model is not None:
        installation.draft_by_default(draft_model)
    if exact is not None:
        installation.exact = exact
    return installation


def uninstall() -> None:
    """Give mlx-lm its own functions back; nothing happens where we are not installed."""
    if (current := _current()) is not None:
        current.put_back()


@contextmanager
def installed(
    draft_model: str | Drafter | None = None, exact: bool | None = None
) -> Iterator[Installation]:
    """Install for the length of a block; afterwards everything is as it was before."""
    before = _current()
    if before is not None:
        defaults = before._draft_model, before.exact
    try:
        yield install(draft_model, exact)
    finally:
        if before is not None:
            before.draft_by_default(defaults[0])
            before.exact = defaults[1]
        else:
            uninstall()


def _current() -> Installation | None:
    """The installation that is in place; None where mlx-lm has its own functions."""
    found = getattr(THEIRS, NAME, None)
    return found if isinstance(found, Installation) else None


def _check() -> None:
    """Raise RuntimeError unless every call of mlx-lm's functions is a call of ours."""
    for ours in (speculative_generate_step, stream_generate, batch_generate):
        theirs = getattr(THEIRS, ours.__name__, None)
        if theirs is None or not _takes(ours, theirs):
            raise RuntimeError(
                f"mlx-lm {mlx_lm.__version__} has another {ours.__name__} than the one that "
                f"mlx_eagle.install() knows: install {WORKS_WITH}."
            )


def _takes(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether the positions are the same and ``ours`` knows every name that ``theirs`` has."""
    known, calls = (
        [(each.name, each.kind) for each in inspect.signature(f).parameters.values()]
        for f in (ours, theirs)
    )
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positions = [[each for each in own if each[1] is by_position] for own in (known, calls)]
    return positions[0] == positions[1] and set(calls) <= set(known)
