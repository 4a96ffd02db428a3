"""Drafts from an ordinary, smaller mlx-lm model (Leviathan et al. 2023, arXiv:2211.17192)."""

from copy import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load as load_model

from ..system.device import set_precision
from ..target_model.masks_and_ropes import evaluate_ropes, exact_masks
from ..target_model.rollback import Checkpoint, check_supported
from .base import Draft, Drafter, Pick, index_of, row_at, start_early
from .kind import LoadOptions
from .target_parts import find_embedding, sizes_of

# What mlx-lm raises on folders that it does not know how to read.
NOT_LOADED = (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError)
MOST_AGAIN = 4096  # tokens before a request that a recurrent model runs over: the state forgets
STEP = 512  # of them in one pass
SAME_TOKENS = 0.99
"""Share of the target's vocabulary that the draft model's must spell in the same way."""


class ModelDrafter(Drafter):
    """A ``Drafter`` around a model with the target's vocabulary.

    The model sees every token, the first of a request included, so its caches hold a position
    more than there are pairs: as many as the target's, with which they can be trimmed.

    A recurrent model's state has no rows to cut. Its caches are not shown in ``cache``: what
    the last ``extend`` fed too much is cut here, once the host knows how much that is, at the
    price of running the kept rows again. A prompt cache cannot carry them, so ``cache`` holds the
    tokens instead, (1, 1, n, 1), over whose newest a request runs the model once.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: nn.Module, vocab_size: int | None = None):
        """``vocab_size`` is the target's, where its tables are padded to another length.

        Raises ValueError for a cache type that cannot be rolled back exactly.
        """
        caches = make_prompt_cache(model)
        check_supported(caches, "draft model")
        self.model = model
        self._is_recurrent = bool(Checkpoint(caches).recurrent)
        self._num_known = find_embedding(model)[1]
        self._vocab_size = self._num_known if vocab_size is None else vocab_size
        self._ids = mx.arange(self._num_known) if self._num_known < self._vocab_size else None
        self._start(caches)
        # Arrays that are no parameters: nothing else computes them before another thread asks.
        evaluate_ropes(model)
        mx.eval(self._ids)

    def _start(self, caches: list[Any]) -> None:
        self._caches = caches
        self.cache = caches
        self._is_cold = self._is_recurrent  # and may have to run over the tokens in ``cache``
        self.num_forwards = 0
        self._seed = mx.zeros((0,))
        self._uncut: tuple[Checkpoint, mx.array, mx.array] | None = None

    def begin(self, cache: list[Any] | None = None) -> "ModelDrafter":
        drafter = copy(self)
        text_cache = self.make_cache() if cache is None else cache
        drafter._start(make_prompt_cache(self.model) if self._is_recurrent else text_cache)
        drafter.cache = text_cache
        return drafter

    def make_cache(self) -> list[Any]:
        return [KVCache()] if self._is_recurrent else make_prompt_cache(self.model)

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """Tokens (m,)."""
        self._cut()
        if self._is_recurrent:
            self._hold(tokens)
        if self._is_recurrent and last is not None:
            self._uncut = Checkpoint(self._caches), tokens, last
        logits = self._forward(tokens)
        self._seed = row_at(logits, last)
        if self._is_recurrent and last is None:
            # The loop computes the caches it sees chunk by chunk; it does not see these.
            mx.async_eval([cache.state for cache in self._caches])

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: one forward for each but the first."""
        self._cut()
        checkpoint = Checkpoint(self._caches)
        tokens = [self._next(self._seed, pick)]
        for _ in range(size - 1):
            start_early(tokens[-1], size)
            tokens.append(self._next(self._forward(tokens[-1]), pick))
        checkpoint.rollback(0)
        return Draft(mx.concatenate(tokens))

    def modules(self) -> list[nn.Module]:
        return [self.model]

    def pending(self) -> list[mx.array]:
        return [] if self._seed.size == 0 else [self._seed]

    def _hold(self, tokens: mx.array) -> None:
        """Add tokens (m,) to those in ``cache``, which the model has seen before them."""
        (text_cache,) = self.cache
        if self._is_cold and text_cache.offset > 0:
            seen = text_cache.keys[0, 0, : text_cache.offset, 0][-MOST_AGAIN:]
            for start in range(0, seen.shape[0], STEP):
                self._forward(seen[start : start + STEP])
                mx.eval([cache.state for cache in self._caches])
        self._is_cold = False
        rows = tokens.astype(mx.int32)[None, None, :, None]
        text_cache.update_and_fetch(rows, rows)

    def _cut(self) -> None:
        """Bring recurrent caches back to the last valid row of the last ``extend``."""
        if self._uncut is None:
            return
        checkpoint, tokens, last = self._uncut
        self._uncut = None
        num_valid = index_of(last) + 1
        if num_valid < tokens.shape[0]:
            checkpoint.rollback(0)
            self._forward(tokens[:num_valid])

    def _forward(self, tokens: mx.array) -> mx.array:
        """One forward over tokens (m,) -> logits (m, Vd)."""
        self.num_forwards += 1
        if self._ids is not None:
            tokens = mx.minimum(tokens, self._num_known - 1)  # padding, which no text contains
        with exact_masks(self._caches, tokens.shape[0]):
            logits: mx.array = self.model(tokens[None], cache=self._caches)[0]
        return logits

    def _next(self, logits: mx.array, pick: Pick) -> mx.array:
        """The choice after logits (1, Vd), as a token (1,) int32."""
        return pick(logits[:, : self._vocab_size], self._ids).astype(mx.int32)


def load(
    folder: Path, config: dict[str, Any], model: nn.Module, options: LoadOptions
) -> "ModelDrafter":
    """The drafter of an mlx-lm model; see ``Kind.load``.

    With the target's tokenizer the vocabularies are compared token by token. Raises ValueError, in
    one sentence, where it is no model that mlx-lm knows, or where the two models do not speak of
    the same tokens.
    """
    if options.quantize_bits:
        raise ValueError(
            f"{folder} is an ordinary model, which is not quantized while loading: make a "
            "quantized copy with mlx_lm.convert."
        )
    try:
        own, own_tokenizer = load_model(str(folder), lazy=True)[:2]
    except NOT_LOADED as err:
        reason = (str(err).strip() or type(err).__name__).splitlines()[0].rstrip(" :")
        raise ValueError(
            f"{folder} is neither a draft head that is known here nor a model that mlx-lm "
            f"loads ({reason[:200]}): give an EAGLE head or a model of the target's family."
        ) from err
    own = set_precision(own, whose="the draft model's")
    mx.eval(own.parameters())
    sizes = sizes_of(model)
    num_known = find_embedding(own)[1]
    if not sizes.is_padded_as(num_known):
        raise ValueError(
            f"the draft model {folder} has a vocabulary of {num_known} tokens, but the "
            f"target's has {sizes.vocab_size}: use a draft model of the same family."
        )
    if options.tokenizer is not None:
        ours = options.tokenizer.get_vocab()
        theirs = own_tokenizer.get_vocab()
        num_same = sum(theirs.get(token) == index for token, index in ours.items())
        if num_same < SAME_TOKENS * len(ours):
            raise ValueError(
                f"the draft model {folder} gives only {num_same} of the target's "
                f"{len(ours)} tokens the same number: use a draft model of the same family."
            )
    return ModelDrafter(own, sizes.vocab_size)
