"""Training of Gemma 4 assistants, which read keys and values of the target.

A chain stands at one position, and sees the target's rows before it, in every step.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from ..convert.layouts import HeadFiles
from ..drafters.assistant import FULL, ORDERING, SLIDING, Assistant, sources, text_of
from .chains import ChainRecipe, ChainTargets
from .chunks import Arrays, run_step
from .given import Given
from .recipe import GivenRecipe
from .settings import TrainSettings
from .student import Student
from .teacher import ROWS_AT_ONCE, Teacher
from .unroll import known_tokens

TABLE = "embed_tokens."
CENTROIDS = "centroids."
GELU = 4  # arrays of the MLP's width that a gradient keeps of GELU besides, measured
FROZEN = (TABLE, CENTROIDS, "layer_scalar")
"""Tables that clusters of tokens are made of, and what Transformers has as a buffer."""


class AssistantRecipe(ChainRecipe, GivenRecipe):
    """An assistant: its own table gives the logits, the target's rows the keys and values."""

    def __init__(self, settings: TrainSettings, student: Student, model: nn.Module, given: Given):
        super().__init__(settings, student, model, given, Teacher(model, ()))
        self._text = text_of(model)
        self._sources = sources(student.head.config, self._text)
        self._window = self._text.args.sliding_window
        self._kinds = sorted(set(student.head.config.layer_types))
        if settings.train_embeddings:  # what the clusters were made of changes
            student.head._clusters = None

    def output_parts(self) -> tuple[str, ...]:
        return ("embed_tokens",) if self.settings.train_embeddings else ()

    def logits(self, head: Assistant, hidden: mx.array) -> mx.array:
        """Return logits of all tokens, because the choice of clusters has no gradient."""
        return head.embed_tokens.as_linear(hidden)

    def choose(self, head: Assistant, hidden: mx.array) -> mx.array:
        return mx.argmax(head.logits(hidden), axis=-1)

    def to_write(self, config: Mapping[str, Any], arrays: dict[str, mx.array]) -> HeadFiles:
        """Leave the clusters out where the table that they were made of has been trained."""
        values = dict(config)
        if not self.settings.train_embeddings:
            return values, arrays
        if "num_centroids" in values:
            values |= {"num_centroids": 0, "centroid_top_k": 0}
        else:
            values["use_ordered_embeddings"] = False
        stale = (CENTROIDS, ORDERING)
        kept = {n: array for n, array in arrays.items() if not any(part in n for part in stale)}
        return values, kept

    def context(self, tokens: np.ndarray, targets: ChainTargets) -> tuple[mx.array, ChainTargets]:
        """Run the target with caches that keep every row, also of sliding layers."""
        args = self._text.args
        num_owning = args.num_hidden_layers - args.num_kv_shared_layers
        parts: list[list[mx.array]] = []
        at_once = max(1, ROWS_AT_ONCE // tokens.shape[1])
        for start in range(0, len(tokens), at_once):
            cache = [KVCache() for _ in range(num_owning)]
            hidden = self._text.model(mx.array(tokens[start : start + at_once]), cache=cache)
            made = [hidden]
            for kind in self._kinds:
                own = cache[self._sources[kind]]
                made += [part[..., : own.offset, :] for part in (own.keys, own.values)]
            mx.eval(made)
            parts.append(made)
        hidden, *rows = (mx.concatenate(list(part)) for part in zip(*parts, strict=True))
        return hidden, targets._replace(seen=tuple(rows))

    def steps(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> Iterator[mx.array]:
        columns = mx.arange(embeddings.shape[1])
        slots = columns[:, None]
        seen = columns <= slots  # slot i stands at i + 1, and sees the rows before that
        masks = {FULL: seen, SLIDING: seen & (columns > slots - self._window)}
        offset = 1 if head.config.position == "next" else 0

        def run(known: mx.array, hidden: mx.array, past: list[Arrays]) -> Arrays:
            (given,) = past
            pairs = zip(given[::2], given[1::2], strict=True)
            shared = dict(zip(self._kinds, pairs, strict=True))
            x = head.pre_projection(mx.concatenate([known, hidden], axis=-1))
            for layer, kind in zip(head.layers, head.config.layer_types, strict=True):
                x, _, _ = layer(x, masks[kind], shared_kv=shared[kind], offset=offset)
            x = head.norm(x)
            return [x, head.post_projection(x)]

        hidden = features
        for step in range(self.depth):
            given = [known_tokens(embeddings, step), hidden]
            again = self.settings.grad_checkpoint
            past = [list(targets.seen)]
            x, hidden = run_step(head, self.output_parts(), run, given, past, again)
            yield x
