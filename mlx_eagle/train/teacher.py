"""The target as a teacher: features at its taps, and distributions where they count.

It is frozen. What a pass gives is kept for its batch alone, or in a folder for several epochs.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..system.device import set_precision
from ..system.safetensors import save_arrays
from ..target.taps import Target
from .examples import Example, Examples, TokenBatch
from .losses import TargetBatch, padded

ROWS_AT_ONCE = 2048  # logits over a whole vocabulary are the largest arrays of a pass
SAMPLES = 1024  # at least, of each of the target's arrays, to know it again
PARTS = 8  # counted slots are filled up to eighths of the batch's, for compiled steps


def load_target(
    name: str, adapter_path: str | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """The model, its tokenizer and its ``config.json``; ValueError where it cannot be loaded.

    On a CPU the weights are dequantized to float32, since other types are many times slower
    there.
    """
    path = Path(name).expanduser()
    try:
        model, tokenizer, config = mlx_lm.load(
            str(path) if path.exists() else name,
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code},
            return_config=True,
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, OSError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ValueError(f"the target {name} cannot be loaded: {reason}") from err
    model = set_precision(model)
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    return model, tokenizer, config


@dataclass(frozen=True)
class Lesson:
    """One sequence of n tokens, K slots of which count.

    ``features`` (n, F); ``slots`` (K,) int32; ``logits`` (K, Vd) float32: what the target says
    may follow token slot + 1, of what can be drafted; ``log_z`` (K,): see ``TargetBatch``.
    """

    features: mx.array
    slots: mx.array
    logits: mx.array
    log_z: mx.array

    def arrays(self) -> dict[str, mx.array]:
        return {
            "features": self.features,
            "slots": self.slots,
            "logits": self.logits,
            "log_z": self.log_z,
        }


class Teacher:
    """A frozen target that teaches heads whose draft vocabulary is ``ids`` (Vd,), target ids.

    ``cache`` is a folder where lessons are kept from one epoch to the next. Without
    ``needs_sums``, for losses that do not ask for them, every ``log_z`` is 0.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: tuple[int, ...],
        ids: mx.array,
        cache: Path | None = None,
        needs_sums: bool = True,
    ):
        self._target = Target(model, taps)
        self._ids = ids
        self._needs_sums = needs_sums
        self._cache = cache
        self._is_drafted: np.ndarray | None = None
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)

    def features(self, tokens: np.ndarray) -> mx.array:
        """The taps at every position of tokens (B, T), side by side: (B, T, F)."""
        parts = []
        for _, _, features in self._passes(tokens, np.zeros(tokens.shape, bool)):
            mx.eval(features)
            parts.append(features)
        return mx.concatenate(parts)

    def teach(
        self, batch: TokenBatch, num_steps: int, num_ranks: int = 1
    ) -> tuple[mx.array, TargetBatch]:
        """Features (B, T, F) of a batch, and what the target says of it.

        ``num_ranks``: so many make up a step. Their losses are averaged, and so divided by
        their mean number of slots.
        """
        lessons = self._lessons(batch)
        size, length = batch.tokens.shape
        features = mx.stack(
            [mx.pad(x.features, [(0, length - len(x.features)), (0, 0)]) for x in lessons]
        )
        rows = np.concatenate([np.array(x.slots) + i * length for i, x in enumerate(lessons)])
        counts = np.array([(rows % length >= step).sum() for step in range(num_steps)])
        # One row at least, so that there is something to compute.
        fill = padded(max(1, len(rows)), -(-size * length // PARTS)) - len(rows)
        logits = mx.concatenate([x.logits for x in lessons])
        log_z = mx.concatenate([x.log_z for x in lessons])
        targets = TargetBatch(
            mx.array(np.pad(rows, (0, fill)), mx.int32),
            mx.array(np.repeat([1.0, 0.0], [len(rows), fill]), mx.float32),
            mx.pad(logits, [(0, fill), (0, 0)]),
            mx.pad(log_z, (0, fill)),
            mx.array(batch.size * batch.longest / num_ranks, mx.float32),
            mx.array(counts, mx.float32),
        )
        return features, targets

    def _lessons(self, batch: TokenBatch) -> list[Lesson]:
        """A lesson for every sequence: from the cache, or from the target and into the cache."""
        lessons = [self._kept(number) for number in batch.numbers]
        missing = [row for row, lesson in enumerate(lessons) if lesson is None]
        if missing:
            made = self._make(batch.tokens[missing], batch.counts[missing])
            for row, lesson in zip(missing, made, strict=True):
                lessons[row] = lesson
                self._keep(batch.numbers[row], lesson)
        return [lesson for lesson in lessons if lesson is not None]

    def _make(self, tokens: np.ndarray, counts: np.ndarray) -> Iterator[Lesson]:
        """Lessons of sequences (B, T); ``counts`` (B, T) says which of their slots may count."""
        # Slot i is taught what may follow token i + 1.
        asked = np.zeros_like(counts)
        asked[:, 1:] = counts[:, :-1]
        row = 0
        for places, logits, features in self._passes(tokens, asked):
            own = counts[row : row + len(features)]
            lessons = self._say(places, logits, features, own)
            mx.eval([lesson.arrays() for lesson in lessons])
            yield from lessons
            row += len(features)

    def _say(
        self, places: np.ndarray, logits: mx.array, features: mx.array, counts: np.ndarray
    ) -> list[Lesson]:
        """What the target says of b sequences, in logits (K, V) and features (b, T, F).

        ``places`` (K,) are the positions of the logits, numbered b * T + i. A slot counts where
        the target's choice can be drafted.
        """
        length, vocab_size = features.shape[1], logits.shape[-1]
        if self._is_drafted is None:
            self._is_drafted = np.zeros(vocab_size, bool)
            self._is_drafted[np.array(self._ids)] = True
        (kept,) = np.nonzero(self._is_drafted[np.array(mx.argmax(logits, axis=-1))])
        rows, slots = places[kept] // length, places[kept] % length - 1
        drafted, log_z = mx.zeros((0, len(self._ids))), mx.zeros(len(slots))
        if len(slots):
            chosen = logits[mx.array(kept, mx.int32)].astype(mx.float32)
            drafted = mx.take(chosen, self._ids, axis=1)
            log_z = mx.logsumexp(chosen, axis=-1) if self._needs_sums else log_z
        lessons = []
        for i, own in enumerate(counts):
            first, last = np.searchsorted(rows, [i, i + 1]).tolist()
            # All that is needed of a position is known up to the last that counts.
            used = int(own.nonzero()[0].max(initial=0)) + 2
            lessons.append(
                Lesson(
                    features[i, :used],
                    mx.array(slots[first:last], mx.int32),
                    drafted[first:last],
                    log_z[first:last],
                )
            )
        return lessons

    def _passes(
        self, tokens: np.ndarray, asked: np.ndarray
    ) -> Iterator[tuple[np.ndarray, mx.array, mx.array]]:
        """A few sequences at once: places (K,) asked for, logits (K, V), features (b, T, F).

        ``asked`` (B, T) says where logits are of use. Places are numbered b * T + i.
        """
        at_once = max(1, ROWS_AT_ONCE // tokens.shape[1])
        for start in range(0, len(tokens), at_once):
            some = slice(start, start + at_once)
            (places,) = asked[some].ravel().nonzero()
            # Padding comes last, so that causal layers need no mask for it, and no cache. One
            # place at least, so that there is something to compute.
            rows = mx.array(places if len(places) else [0], mx.int32)
            logits, features = self._target.logits_at(mx.array(tokens[some]), rows)
            if features is None:
                raise ValueError("the head taps no layer of the target, so it cannot be taught.")
            yield places, logits[: len(places)], features

    def _kept(self, number: int) -> Lesson | None:
        path = self._cache / f"{number}.safetensors" if self._cache is not None else None
        if path is None or not path.exists():
            return None
        return Lesson(**dict(mx.load(str(path))))

    def _keep(self, number: int, lesson: Lesson) -> None:
        if self._cache is None:
            return
        # Under its own name only when it is whole.
        scratch = self._cache / f".{number}.{os.getpid()}.safetensors"
        try:
            save_arrays(scratch, lesson.arrays())
            os.replace(scratch, self._cache / f"{number}.safetensors")
        except OSError as err:
            raise OSError(err.errno, err.strerror, str(self._cache)) from err
        finally:
            scratch.unlink(missing_ok=True)


def cache_bytes(examples: Sequence[Example], width: int, num_drafted: int, item: int) -> int:
    """What a cache of these sequences takes at most, in bytes.

    ``width`` is that of the features, of ``item`` bytes each; ``num_drafted`` the draft
    vocabulary's size.
    """
    per_token, per_slot = width * item, (num_drafted + 2) * 4
    return sum(len(x.tokens) * per_token + x.num_answer * per_slot for x in examples)


def cache_name(
    examples: Examples, model: nn.Module, taps: Sequence[int], ids: mx.array, loss: str
) -> str:
    """Names lessons on these sequences, by this target, for these taps and draftable ``ids``.

    A target is known by values from all over each of its arrays: a fine-tune, adapters or another
    precision make another one of it, wherever it lies.
    """
    digest = hashlib.sha256(repr((list(taps), ids.tolist(), loss == "ce")).encode())
    for name, array in tree_flatten(model.parameters()):
        values = array.reshape(-1)[:: max(1, array.size // SAMPLES)]
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.array(values.view(mx.uint8)).tobytes())
    return f"{examples.fingerprint()}-{digest.hexdigest()[:16]}"
