"""Teacher: the frozen target, which tells taps and final states of every position of a text.

They are kept for the batch only, or in a folder for several epochs.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from ..system.ranks import is_first
from ..system.safetensors import save_arrays
from ..target_model.target import Target
from .batches import TokenBatch
from .chunks import eval_in_chunks
from .data import Examples
from .memory import amount
from .settings import CACHE_BITS

ROWS_AT_ONCE = 2048  # positions in a pass
SAMPLES = 1024  # numbers of each of the target's arrays, at least, by which it is known again
LESSONS = "features and states"  # in each file of a cache; those with anything else are not read
GROUP = 32  # kept numbers that share a scale, where they are kept in fewer bits
PROBED = 8  # tokens that the output is tried on
ALIKE = 1e-4  # of the largest logit: differences that rounding can make
ALIKE_IN_HALF = 0.02  # the same in half precision

Output = Callable[[mx.array], mx.array]
"""Function from what is told last, states (..., h), to logits (..., V)."""


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


def scale_and_cap(
    model: nn.Module, states: mx.array, logits: mx.array
) -> tuple[float, float | None] | None:
    """Return the scale, as Cohere's, and the cap, as Gemma's, of a model's logits (K, V).

    They change the product of ``states`` (K, h) with the output matrix. None if there is more to
    it, such as adapters of its own.
    """
    said = logits.astype(mx.float32)
    product = lm_head_of(model, find_embedding(model)[0])(states).astype(mx.float32)
    if product.shape != said.shape:
        return None
    caps = {getattr(m, "final_logit_softcapping", None) for _, m in model.named_modules()}
    fitting = float(((said * product).sum() / (product * product).sum()).item())

    def difference(scale: float, cap: float | None) -> float:
        found = mx.abs(capped(scale * product, cap) - said).max()
        return float((found / mx.abs(said).max()).item())

    bound = ALIKE if logits.dtype == mx.float32 else ALIKE_IN_HALF
    cap = min({None, *caps}, key=lambda cap: difference(1.0, cap))
    ways = ((1.0, cap), (fitting, None))
    return next((way for way in ways if difference(*way) <= bound), None)


class Teacher:
    """A frozen target that tells, of each position, the inputs of its layers ``taps``, and more.

    That is the state that enters its output matrix, ``width`` numbers. If there is more to its
    output than a product, a scale and a cap, it is all logits: it has no states then. ``whole``
    makes logits (..., V) of what is told last, ``output`` those (..., Vd) of the tokens ``ids``,
    None for all.
    """

    def __init__(self, model: nn.Module, taps: Sequence[int], ids: mx.array | None = None):
        self._taps = tuple(taps)
        self._cache: Path | None = None
        self._bits: int | None = None
        embedding, _ = find_embedding(model)
        rows = mx.arange(PROBED)
        self.width = int(embedding(rows[:1]).shape[-1])
        way = None
        with suppress(ValueError):  # of models whose norm has another place
            self._target = Target(model, (*taps, len(model.layers) + 1))
            logits, features, _ = self._target.logits_at(rows[None], rows)
            assert features is not None
            way = scale_and_cap(model, features[0, :, -self.width :], logits)
        self.has_states = way is not None
        if way is not None:
            product = lm_head_of(model, embedding)
            drafted = product if ids is None else subset_of(product, ids)
            scale, cap = way
            self.whole: Output = lambda x: capped(scale * product(x), cap)
            self.output: Output = lambda x: capped(scale * drafted(x), cap)
        else:
            self._target = Target(model, self._taps)
            logits, _, _ = self._target.logits_at(rows[None], rows)
            self.width = logits.shape[-1]
            self.whole = nn.Identity()
            self.output = self.whole if ids is None else lambda x: mx.take(x, ids, axis=-1)

    def features(self, tokens: np.ndarray) -> mx.array:
        """Compute taps and states of tokens (B, T), side by side: (B, T, F)."""
        parts = []
        at_once = max(1, ROWS_AT_ONCE // tokens.shape[1])
        for start in range(0, len(tokens), at_once):
            some = mx.array(tokens[start : start + at_once])
            # Logits that nothing asks for are not computed.
            logits, told, _ = self._target.logits_at(some, mx.arange(some.size))
            if not self.has_states:
                logits = logits.reshape(*some.shape, -1)
                told = logits if told is None else mx.concatenate([told, logits], axis=-1)
            mx.eval(told)
            parts.append(told)
        return mx.concatenate(parts)

    def final(self, features: mx.array, rows: mx.array) -> mx.array:
        """Return what was told last of positions ``rows`` (K,), numbered b * T + i: (K, width)."""
        return features.reshape(-1, features.shape[-1])[rows, -self.width :]

    def choices(self, final: mx.array, logits: Output) -> np.ndarray:
        """Return the best tokens (K,) by ``logits``, one of its outputs."""
        width = logits(final[:1]).shape[-1]
        return np.array(eval_in_chunks(lambda x: mx.argmax(logits(x), axis=-1), final, width))

    def probs(self, final: mx.array) -> mx.array:
        """Compute the target's probabilities (..., Vd) among the tokens that can be drafted."""
        return mx.softmax(self.output(final).astype(mx.float32), axis=-1)

    def shares(self, final: mx.array) -> mx.array:
        """Compute how much of the target's whole probability these tokens have, (...)."""
        each = (x(final).astype(mx.float32) for x in (self.output, self.whole))
        drafted, whole = (mx.logsumexp(logits, axis=-1) for logits in each)
        return mx.exp(drafted - whole)

    def keep_in(self, folder: str, examples: Examples, bits: int | None = None) -> None:
        """Keep what is read of these texts in a part of ``folder``, in ``bits`` bits a number.

        None keeps it as it is. Raises ValueError if there is no room for it.
        """
        told = self.features(np.zeros((1, 1), np.int32))
        numbers = told.size * sum(len(x.tokens) for x in examples.train)
        # In fewer bits, the numbers of a group share a scale and a bias.
        packed = CACHE_BITS / 8 + 2 * told.itemsize / GROUP
        name = cache_name(examples, self._target.model, self._taps, bits)
        self._bits = bits
        self._cache = Path(folder).expanduser() / name
        self._cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache).free
        needed = numbers * (told.itemsize if bits is None else packed)
        taken = f"{self._cache} takes up to {amount(needed)}, and {amount(free)} are free"
        if needed > free and not any(self._cache.iterdir()):
            way_on = "leave out --cache-features"
            if numbers * packed <= free:
                way_on = f"give --cache-bits {CACHE_BITS}, or {way_on}"
            raise ValueError(f"{taken}: {way_on}.")
        if is_first():
            print(f"{taken}.")

    def read(self, batch: TokenBatch) -> mx.array:
        """Return the features of a batch, from the cache if it has them, or from the target.

        From the cache, they are zeros after the last position that is of use.
        """
        if self._cache is None:
            return self.features(batch.tokens)
        paths = [self._cache / f"{number}.safetensors" for number in batch.numbers]
        missing = [row for row, path in enumerate(paths) if not path.exists()]
        made = self.features(batch.tokens[missing]) if missing else []
        for row, told in zip(missing, made, strict=True):
            last = int(batch.counts[row].nonzero()[0].max(initial=0)) + 2
            arrays = {"features": told[:last]}
            if self._bits is not None and told.shape[-1] % GROUP == 0:
                parts = mx.quantize(told[:last], GROUP, self._bits)
                arrays = dict(zip(("features", "scales", "biases"), parts, strict=True))
            with new_file(paths[row]) as draft:
                save_arrays(draft, arrays)
        kept = []
        for path in paths:
            arrays = dict(mx.load(str(path)))
            told = arrays.pop("features")
            if arrays:
                told = mx.dequantize(told, **arrays, group_size=GROUP, bits=self._bits)
            kept.append(mx.pad(told, [(0, batch.tokens.shape[1] - len(told)), (0, 0)]))
        return mx.stack(kept)


def cache_name(
    examples: Examples, model: nn.Module, taps: Sequence[int], bits: int | None = None
) -> str:
    """Name a cache by its sequences, target and ``taps``.

    A target is known by values from all over each of its arrays: a fine-tune, adapters or another
    precision make it another target, wherever it is stored.
    """
    digest = hashlib.sha256(repr((list(taps), bits, LESSONS)).encode())
    for name, array in tree_flatten(model.parameters()):
        values = array.reshape(-1)[:: max(1, array.size // SAMPLES)]
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.array(values.view(mx.uint8)).tobytes())
    return f"{examples.fingerprint()}-{digest.hexdigest()[:16]}"
