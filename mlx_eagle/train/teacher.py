"""Teacher: the frozen target, with features at its taps and distributions where they count.

Its lessons are kept for the batch only, or in a folder for several epochs.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafters.head import capped
from ..drafters.output_rows import subset_of
from ..drafters.target_parts import find_embedding, lm_head_of
from ..system.atomic_folder import new_file
from ..system.hub import locate
from ..system.loading import load, read_json
from ..system.safetensors import save_arrays
from ..target_model.target import Target, find_final_norm
from .batches import TokenBatch
from .chunks import eval_in_chunks
from .compiled import padded
from .data import Example, Examples
from .losses import TargetBatch
from .student import Student

ROWS_AT_ONCE = 2048  # positions in a pass: logits over a whole vocabulary are its largest arrays
SAMPLES = 1024  # numbers of each of the target's arrays, at least, by which it is known again
PARTS = 4  # for compiled steps, counted slots are filled up to quarters of the batch's slots
LESSONS = "states"  # kind of lessons that a cache holds; those of other kinds are not read
PACKED = ("features", "states")  # arrays of a lesson that a cache may keep in fewer bits
GROUP = 32  # numbers of these that share a scale
PROBED = 8  # tokens that the output is tried on
ALIKE = 1e-4  # of the largest logit: differences that rounding can make
ALIKE_IN_HALF = 0.02  # the same in half precision


def load_target(
    name: str,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | None = None,
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Load a frozen model, its tokenizer and its ``config.json``; ``dtype`` is as in ``load``."""
    model, tokenizer = load(
        name,
        {"trust_remote_code": trust_remote_code},
        dtype=dtype,
        whole=True,
        adapter_path=adapter_path,
        trust_remote_code=trust_remote_code,
    )
    model.freeze()
    model.eval()
    return model, tokenizer, read_json(locate(name, ("config.json",)) / "config.json")


Lesson = dict[str, mx.array]
"""Answers of the target about one sequence of n tokens, K slots of which count.

``features`` (n, F); ``slots`` (K,) int32; ``states`` (K, h): the states that enter the target's
output matrix and give its prediction after token slot + 1. If there is more to its output than
that matrix, they are the logits (K, Vd) of the tokens that can be drafted. ``shares`` (K,): see
``TargetBatch``.
"""


def packed(lesson: Lesson, bits: int | None) -> Lesson:
    """Return the arrays to keep, with features and states in ``bits`` bits a number."""
    arrays = dict(lesson)
    for name in PACKED if bits is not None else ():
        if lesson[name].size and lesson[name].shape[1] % GROUP == 0:
            parts = mx.quantize(lesson[name], GROUP, bits)
            arrays |= dict(zip((name, f"{name}.scales", f"{name}.biases"), parts, strict=True))
    return arrays


def unpacked(arrays: Lesson, bits: int | None) -> Lesson:
    """Make a lesson of arrays that ``packed`` returned."""
    lesson = dict(arrays)
    for name in PACKED:
        if f"{name}.scales" in lesson:
            parts = (lesson.pop(f"{name}.{part}") for part in ("scales", "biases"))
            lesson[name] = mx.dequantize(lesson[name], *parts, GROUP, bits)
    return lesson


def filled_up(
    rows: np.ndarray, shape: tuple[int, int], num_steps: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Return ``rows`` (K,) of a batch (B, T), their weights, and how many count in each step.

    One row at least, so that there is something to compute; for compiled steps, quarters of all.
    """
    size, length = shape
    counts = np.array([(rows % length >= step).sum() for step in range(num_steps)])
    fill = padded(max(1, len(rows)), -(-size * length // PARTS)) - len(rows)
    return (
        mx.array(np.pad(rows, (0, fill)), mx.int32),
        mx.array(np.repeat([1.0, 0.0], [len(rows), fill]), mx.float32),
        mx.array(counts, mx.float32),
    )


def output_from(
    model: nn.Module, states: mx.array, logits: mx.array, ids: mx.array | None
) -> Callable[[mx.array], mx.array] | None:
    """Return the function that made ``logits`` (K, V) of ``states`` (K, h), for tokens ``ids``.

    It takes the rows ``ids`` of the output matrix, None for all, and caps logits as Gemma does.
    It is None if that gives other logits than the model itself, which may have a scale or
    adapters of its own.
    """
    said = (logits if ids is None else mx.take(logits, ids, axis=1)).astype(mx.float32)
    whole = lm_head_of(model, find_embedding(model)[0])
    project = whole if ids is None else subset_of(whole, ids)
    caps = {getattr(m, "final_logit_softcapping", None) for _, m in model.named_modules()}

    def output(cap: float | None, states: mx.array) -> mx.array:
        return capped(project(states), cap)

    def difference(cap: float | None) -> float:
        found = mx.abs(output(cap, states).astype(mx.float32) - said).max()
        return float((found / mx.abs(said).max()).item())

    best = min({None, *caps}, key=difference)
    is_alike = difference(best) <= (ALIKE if logits.dtype == mx.float32 else ALIKE_IN_HALF)
    return partial(output, best) if is_alike else None


class TargetReader:
    """A frozen target that tells the inputs of the layers ``taps`` of every position."""

    def __init__(self, model: nn.Module, taps: tuple[int, ...]):
        self._target = Target(model, taps)

    def features(self, tokens: np.ndarray) -> mx.array:
        """Compute the taps at every position of tokens (B, T), side by side: (B, T, F)."""
        parts = []
        at_once = max(1, ROWS_AT_ONCE // tokens.shape[1])
        for start in range(0, len(tokens), at_once):
            some = mx.array(tokens[start : start + at_once])
            # No logits are computed, for nothing asks for their values.
            _, features, _ = self._target.logits_at(some, mx.array([0], mx.int32))
            mx.eval(features)
            parts.append(features)
        return mx.concatenate(parts)


class Teacher(TargetReader):
    """A frozen target that teaches heads with the draft vocabulary ``ids`` (Vd,), target ids.

    Without ``needs_sums``, for losses that do not use them, every share is 1.
    """

    def __init__(
        self, model: nn.Module, taps: tuple[int, ...], ids: mx.array, needs_sums: bool = True
    ):
        if not taps:
            raise ValueError("the head taps no layer of the target, so it cannot be taught.")
        super().__init__(model, taps)
        self._ids = ids
        self._needs_sums = needs_sums
        self._cache: Path | None = None
        self._bits: int | None = None
        # From states to logits; if there is more to it than a product, from logits themselves.
        self._norm: Any = None
        self._output: Any = nn.Identity()
        logits, _, states = self._target.logits_at(mx.arange(PROBED)[None], mx.arange(PROBED))
        with suppress(ValueError):  # of models whose norm has another place
            norm = find_final_norm(model)
            output = None if states is None else output_from(model, norm(states), logits, ids)
            if output is not None:
                self._norm = norm
                self._output = output

    def keep_in(self, cache: Path, bits: int | None = None) -> None:
        """Keep lessons in the folder ``cache``, in ``bits`` bits a number or as they are."""
        self._cache = cache
        self._bits = bits

    def cache_bytes(self, examples: Sequence[Example], student: Student, bits: int | None) -> int:
        """Return the bytes that a cache of these sequences takes at most."""
        config = student.head.config
        item = student.dtype.size
        width = config.num_aux * config.target_hidden_size
        states = len(self._ids) if self._norm is None else config.target_hidden_size
        # In fewer bits, the numbers of a group share a scale and a bias.
        number = item if bits is None else bits / 8 + 2 * item / GROUP
        numbers = sum(len(x.tokens) * width + x.num_answer * states for x in examples)
        return int(numbers * number) + 8 * sum(x.num_answer for x in examples)

    def teach(
        self, batch: TokenBatch, num_steps: int, num_ranks: int = 1
    ) -> tuple[mx.array, TargetBatch]:
        """Return the features (B, T, F) of a batch and the target's answers about it.

        ``num_ranks`` ranks make a step together. Their losses are averaged, so each is divided by
        the mean number of slots.
        """
        lessons = self._lessons(batch)
        length = batch.tokens.shape[1]
        taps = [x["features"] for x in lessons]
        features = mx.stack([mx.pad(x, [(0, length - len(x)), (0, 0)]) for x in taps])
        rows = np.concatenate([np.array(x["slots"]) + i * length for i, x in enumerate(lessons)])
        slots, weights, counts = filled_up(rows, batch.tokens.shape, num_steps)
        fill = (0, len(slots) - len(rows))
        states = mx.pad(mx.concatenate([x["states"] for x in lessons]), [fill, (0, 0)])
        shares = mx.pad(mx.concatenate([x["shares"] for x in lessons]), fill)
        probs = eval_in_chunks(
            lambda x: mx.softmax(self._output(x).astype(mx.float32), axis=-1),
            states,
            len(self._ids),
        )
        num_slots = mx.array(batch.size * batch.longest / num_ranks, mx.float32)
        return features, TargetBatch(slots, weights, probs, shares, num_slots, counts)

    def _lessons(self, batch: TokenBatch) -> list[Lesson]:
        """Return a lesson for every sequence, from the cache if it has it, or from the target."""
        if self._cache is None:
            return list(self._make(batch.tokens, batch.counts))
        paths = [self._cache / f"{number}.safetensors" for number in batch.numbers]
        kept = {row: dict(mx.load(str(path))) for row, path in enumerate(paths) if path.exists()}
        missing = [row for row in range(len(paths)) if row not in kept]
        made = self._make(batch.tokens[missing], batch.counts[missing]) if missing else []
        for row, lesson in zip(missing, made, strict=True):
            kept[row] = packed(lesson, self._bits)
            with new_file(paths[row]) as draft:
                save_arrays(draft, kept[row])
        # New lessons are unpacked too: the same is learnt, whether or not a lesson was there.
        return [unpacked(kept[row], self._bits) for row in range(len(paths))]

    def _make(self, tokens: np.ndarray, counts: np.ndarray) -> Iterator[Lesson]:
        """Make lessons of sequences (B, T); ``counts`` (B, T) says which slots may count.

        A slot counts if the target's choice can be drafted.
        """
        at_once = max(1, ROWS_AT_ONCE // tokens.shape[1])
        for start in range(0, len(tokens), at_once):
            own = counts[start : start + at_once]
            # Slot i is taught about the token that follows token i + 1.
            (places,) = np.pad(own[:, :-1], [(0, 0), (1, 0)]).ravel().nonzero()
            # Padding comes last, so causal layers need neither a mask for it nor a cache. One
            # place at least, so that there is something to compute.
            asked = mx.array(places if len(places) else [0], mx.int32)
            some = mx.array(tokens[start : start + at_once])
            logits, features, states = self._target.logits_at(some, asked)
            assert features is not None
            choices = np.array(mx.argmax(logits[: len(places)], axis=-1))
            (kept,) = np.isin(choices, np.array(self._ids)).nonzero()
            chosen = mx.array(kept, mx.int32)
            entering = self._entering(logits, states, chosen)
            shares = self._shares(logits, chosen)
            texts, slots = np.divmod(places[kept], tokens.shape[1])
            for i, counted in enumerate(own):
                part = slice(*np.searchsorted(texts, [i, i + 1]).tolist())
                # Nothing is needed of the positions after the last slot that counts.
                last = int(counted.nonzero()[0].max(initial=0)) + 2
                lesson = {"features": features[i, :last], "states": entering[part]}
                lesson |= {"slots": mx.array(slots[part] - 1, mx.int32), "shares": shares[part]}
                mx.eval(lesson)
                yield lesson

    def _entering(self, logits: mx.array, states: Any, chosen: mx.array) -> mx.array:
        """Return the ``states`` of lessons at the rows that are ``chosen``."""
        if self._norm is None:
            return mx.take(logits[chosen], self._ids, axis=1)
        return self._norm(states[chosen])

    def _shares(self, logits: mx.array, chosen: mx.array) -> mx.array:
        """Return how much of the target's probability the tokens have that can be drafted."""
        if not (self._needs_sums and len(chosen)):
            return mx.ones(len(chosen))

        def share(rows: mx.array) -> mx.array:
            own = logits[rows].astype(mx.float32)
            drafted = mx.logsumexp(mx.take(own, self._ids, axis=1), axis=-1)
            return mx.exp(drafted - mx.logsumexp(own, axis=-1))

        return eval_in_chunks(share, chosen, logits.shape[-1])


class HiddenTeacher(TargetReader):
    """A frozen target that tells taps and final states of every position.

    ``ids`` (Vd,) are the tokens that can be drafted, None for all. ``output`` maps states
    (K, h) to the target's logits (K, Vd) of these.
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...], ids: mx.array | None = None):
        """Raises ValueError if there is more to the target's output than a product."""
        super().__init__(model, (*taps, len(model.layers) + 1))
        rows = mx.arange(PROBED)
        logits, features, _ = self._target.logits_at(rows[None], rows)
        assert features is not None
        width = features.shape[-1] // (len(taps) + 1)
        output = output_from(model, features[0, :, -width:], logits, ids)
        if output is None:
            raise ValueError(
                "the output of this target is more than a product with a matrix, and only EAGLE "
                "heads are trained for such a one: leave out --init, or name an EAGLE head."
            )
        self.output = output


def cache_name(
    examples: Examples,
    model: nn.Module,
    taps: Sequence[int],
    ids: mx.array,
    loss: str,
    bits: int | None = None,
) -> str:
    """Name a cache by its sequences, target, ``taps`` and draftable ``ids``.

    A target is known by values from all over each of its arrays: a fine-tune, adapters or another
    precision make it another target, wherever it is stored.
    """
    asked = (list(taps), ids.tolist(), loss == "ce", bits, LESSONS)
    digest = hashlib.sha256(repr(asked).encode())
    for name, array in tree_flatten(model.parameters()):
        values = array.reshape(-1)[:: max(1, array.size // SAMPLES)]
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.array(values.view(mx.uint8)).tobytes())
    return f"{examples.fingerprint()}-{digest.hexdigest()[:16]}"
