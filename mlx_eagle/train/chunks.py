"""Computing in chunks of rows, so that the largest arrays of a step never exist as a whole."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

CHUNK_BYTES = 2**27  # of the largest array in a chunk; about four of that size exist at once
ROWS_ALIKE = 16  # rows that one tile of a GPU's matrix product takes

Arrays = list[mx.array]


def chunk_rows(width: int) -> int:
    """Return the number of rows in a chunk, for rows of ``width`` numbers in float32."""
    return max(ROWS_ALIKE, CHUNK_BYTES // (4 * width) // ROWS_ALIKE * ROWS_ALIKE)


def eval_in_chunks(
    function: Callable[[mx.array], mx.array], rows: mx.array, width: int
) -> mx.array:
    """Evaluate ``function`` on chunks of ``rows``, one after the other, and join the results.

    ``width`` is how many numbers the function makes of each row on its way.
    """
    size = chunk_rows(width)
    parts: Arrays = []
    for begin in range(0, len(rows), size):
        parts.append(function(rows[begin : begin + size]))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def in_chunks(
    function: Callable[[int, Arrays, Arrays], Arrays],
    rows: Arrays,
    shared: Arrays,
    size: int,
    axis: int,
    again: bool,
) -> Arrays:
    """Call ``function(begin, rows, shared)`` for at most ``size`` rows at a time, in turn.

    The arrays in ``rows`` are cut along ``axis``, and the results are joined along it; ``begin``
    is the number of a chunk's first row. What the function makes is released after each chunk and
    made again for the gradients, which are those of ``rows`` and ``shared`` only. If all rows fit
    into one chunk, it is kept instead, unless ``again`` is set.
    """
    num = len(rows)
    total = rows[0].shape[axis]
    if total <= size and not again:
        return function(0, rows, shared)
    spans = [(begin, min(begin + size, total)) for begin in range(0, total, size)]

    def cut(arrays: Arrays, begin: int, end: int, after: Arrays) -> Arrays:
        where = (slice(begin, end),) if axis == 0 else (..., slice(begin, end), slice(None))
        parts = list(arrays) if len(spans) == 1 else [array[where] for array in arrays]
        return mx.depends(parts, after) if after else parts

    def joined(made: list[Arrays]) -> Arrays:
        if len(made) == 1:
            return list(made[0])
        return [mx.concatenate(parts, axis) for parts in zip(*made, strict=True)]

    @mx.custom_function
    def run(*arrays: mx.array) -> Arrays:
        made: list[Arrays] = []
        for begin, end in spans:
            own = cut(arrays[:num], begin, end, made[-1] if made else [])
            made.append(function(begin, own, arrays[num:]))
        return joined(made)

    @run.vjp
    def gradient(primals: Any, cotangents: Arrays, _: Arrays) -> Arrays:
        arrays = [primals] if isinstance(primals, mx.array) else primals  # one comes without
        made: list[Arrays] = []
        sums: Arrays = []
        for begin, end in spans:
            after = [*made[-1], *sums] if made else list(cotangents)
            own = cut(arrays[:num], begin, end, after)

            def made_again(*arrays: mx.array, begin: int = begin) -> Arrays:
                return function(begin, list(arrays[:num]), list(arrays[num:]))

            given = [*own, *arrays[num:]]
            _, found = mx.vjp(made_again, given, cut(cotangents, begin, end, []))
            made.append(found[:num])
            sums = [x + y for x, y in zip(sums, found[num:], strict=True)] if sums else found[num:]
        # The gradients of the rows wait for the shared ones, which nothing else asks for so soon.
        # Otherwise all that the shared ones are made of would stay in memory until then.
        return [*(mx.depends(joined(made), sums) if sums else joined(made)), *sums]

    return run(*rows, *shared)


def with_weights(
    module: nn.Module,
    parts: Iterable[str],
    function: Callable[[int, Arrays], Arrays],
    rows: Arrays,
    size: int,
    again: bool,
) -> Arrays:
    """Call ``in_chunks`` for a function that uses weights of ``module``, which get gradients too.

    ``parts`` names the module's children that it uses. ``function(begin, rows)`` finds their
    weights in the module itself.
    """
    trained = module.trainable_parameters()
    own = {name: trained[name] for name in parts if name in trained}
    flat = dict(tree_flatten(own))

    def inner(begin: int, rows: Arrays, shared: Arrays) -> Arrays:
        module.update(tree_unflatten(list(zip(flat, shared, strict=True))))
        return function(begin, rows)

    found = in_chunks(inner, rows, list(flat.values()), size, 0, again)
    module.update(own)
    return found


def run_step(
    module: nn.Module,
    outside: Container[str],
    function: Callable[..., Arrays],
    inputs: Arrays,
    past: list[Arrays],
    again: bool | None,
) -> Arrays:
    """Call ``function(*inputs, past)``; if ``again``, only what it takes and gives is kept.

    It is then computed again for the gradient. It uses weights of ``module``, all but those of
    its children ``outside``, whose gradients are added up step by step.
    """
    num = len(past[0]) if past else 1
    parts = [name for name in module.trainable_parameters() if name not in outside]
    rows = _summed_first(module, parts, [*inputs, *(x for made in past for x in made)])

    def inner(_: int, rows: Arrays) -> Arrays:
        flat = rows[len(inputs) :]
        chains = [flat[i : i + num] for i in range(0, len(flat), num)]
        return function(*rows[: len(inputs)], chains)

    if not again:
        return inner(0, rows)
    return with_weights(module, parts, inner, rows, len(inputs[0]), again=True)


def _summed_first(module: nn.Module, parts: Iterable[str], rows: Arrays) -> Arrays:
    """Return ``rows``, whose gradients wait for those of ``module`` from here on, added up.

    Otherwise those of every step would be there at once, before the first two are added.
    """
    trained = module.trainable_parameters()
    flat = dict(tree_flatten({name: trained[name] for name in parts}))
    num = len(rows)

    @mx.custom_function
    def same(*arrays: mx.array) -> Arrays:
        return list(arrays)

    @same.vjp
    def gradient(primals: Any, cotangents: Arrays, _: Arrays) -> Arrays:
        sums = list(cotangents[num:])
        return [*mx.depends(list(cotangents[:num]), sums), *sums]

    found = same(*rows, *flat.values())
    module.update(tree_unflatten(list(zip(flat, found[num:], strict=True))))
    return list(found[:num])
