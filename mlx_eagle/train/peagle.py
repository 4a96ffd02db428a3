"""Training of P-EAGLE heads, which draft all tokens in one pass (arXiv:2602.01469).

An element (a, d) is depth d behind slot a: at depth 0 it has the token and the target's features,
later a mask for both. It sees the slots up to a at depth 0, and (a, 1) ... (a, d); it is compared
with the target's distribution of slot a + d. Elements are dropped at random, as in the trainers of
speculators and SpecForge: only what is behind a kept one can be kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..convert.checkpoint import DraftCheckpoint
from ..convert.families import canonical
from ..drafters.config import Eagle3Config
from ..drafters.head_weights import split_weights
from ..drafters.kinds import kind_of
from ..drafters.target_parts import find_embedding, rows_of_lm_head
from . import eagle3
from .batches import TokenBatch
from .block import layer_values, mask_token
from .chunks import Arrays, chunk_rows, with_weights
from .compiled import padded
from .data import Examples
from .given import Given, stored_arrays, write_published
from .losses import OUTPUT, TINY, first_slot, mixed_losses, slots_at
from .settings import LossSettings, TrainSettings
from .student import Student
from .teacher import PARTS
from .unroll import unroll_masked

MASK = "mask_hidden"  # features of slots that none are known of
VERSION = "0.9.0"  # of speculators, whose layout fresh heads are published in
OWN = (
    "draft_vocab_size", "mask_token_id", "target_hidden_size", "norm_before_residual",
    "norm_output",
)  # fmt: skip
SAME = (
    "hidden_size", "intermediate_size", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size",
    "max_position_embeddings", "attention_bias", "mlp_bias", "sliding_window",
)  # fmt: skip
"""Fields that the layout has under the same names: of the head, and of its layers."""


def is_parallel(given: Given) -> bool:
    """Return whether a drafter is a P-EAGLE head already."""
    if given.published is None:
        return kind_of(given.folder)[1].get("mask_token_id") is not None
    return any(canonical(name) == MASK for name in given.published.tensors)


def make_student(
    settings: TrainSettings,
    model: nn.Module,
    config: dict[str, Any],
    tokenizer: TokenizerWrapper,
    examples: Examples,
) -> Student:
    """Make a fresh head, or take that of --init; one that drafts step by step gets masked slots.

    Its embedding is its own, by default the target's table. Raises ValueError for heads that
    cannot draft in one pass, and if there is no token for masked slots.
    """
    student = eagle3.make_student(settings, model, config, tokenizer, examples)
    head = student.head
    c = head.config
    plain = c.fc_input == "features" and c.layer_input == "first" and c.embed_scale == 1
    if not plain or c.rope.get("type") == "dynamic":
        raise ValueError(
            f"{settings.init} cannot draft in one pass, for it is no EAGLE-3 head as speculators "
            "has them: name another with --init, or leave it out for a fresh one."
        )
    if c.mask_token_id is None:
        _, vocab_size = find_embedding(model)
        token = mask_token(settings.mask_token_id, tokenizer, vocab_size)
        width = c.num_aux * c.target_hidden_size
        head.mask_hidden = mx.random.normal((width,), key=mx.random.key(settings.seed))
        c = replace(c, mask_token_id=token, speculative_tokens_hint=settings.depths)
    elif settings.mask_token_id is not None:
        raise ValueError(
            "--mask-token-id is for heads without masked slots, and --init keeps that of the one "
            "it names: leave it out."
        )
    if c.embed_source != "file":
        _, num_rows = find_embedding(model)
        table = student.embed(mx.arange(num_rows)).astype(mx.float32)
        head.embed_tokens = nn.Embedding(*table.shape)
        head.embed_tokens.weight = table
        c = replace(c, vocab_size=num_rows)
    head.unfreeze()
    head.config = replace(c, embed_source="file")
    mx.eval(head.parameters())
    return replace(student, embed=head.embed_tokens)


class ElementTargets(NamedTuple):
    """Elements of a batch of (B, T) slots, D depths of them, and what the target says of K slots.

    ``rows`` (K,), ``weights`` (K,) and ``probs`` (K, Vd) are as in a ``TargetBatch``, and the
    elements of depth 0. For each later depth, ``chosen`` (B, R_d) numbers its elements among those
    of the depth before (at depth 1, among all slots), and ``places`` (B, R_d) are the rows of
    ``probs`` that they are compared with, -1 for those that do not count. ``counts`` (1,) is how
    many do, at all depths, averaged over all ranks; ``tokens`` (B, T) are the texts.
    """

    tokens: mx.array
    rows: mx.array
    weights: mx.array
    probs: mx.array
    chosen: tuple[mx.array, ...]
    places: tuple[mx.array, ...]
    counts: mx.array


def kept_slots(
    batch: TokenBatch, settings: LossSettings, seed: int, epoch: int
) -> list[list[np.ndarray]]:
    """Draw the slots a of each depth from 1, for each text: [text][depth - 1] (R,), ascending.

    They depend on the seed, the epoch and the number of the text alone. At depth d they are the
    counted slots less d, of which ``settings.share`` is kept.
    """
    drawn = []
    for row, number in enumerate(batch.numbers):
        dice = np.random.default_rng([seed, epoch, number])
        (counted,) = batch.counts[row].nonzero()
        pool = counted
        own = []
        for depth in range(1, settings.num_steps):
            pool = pool[pool >= depth]
            size = max(0, int((len(counted) - depth) * settings.share(depth)))
            kept = np.sort(dice.permutation(pool)[:size])
            own.append(kept - depth)
            pool = np.intersect1d(kept + 1, counted)
        drawn.append(own)
    return drawn


class PEagleRecipe(eagle3.Eagle3Recipe):
    """A P-EAGLE head, whose elements are compared with the target's distributions."""

    def teach(
        self, batch: TokenBatch, epoch: int, num_ranks: int = 1
    ) -> tuple[mx.array, ElementTargets]:
        kept = kept_slots(batch, self.settings.losses(), self.settings.seed, epoch)
        return self.targets_of(batch, kept)

    def targets_of(
        self, batch: TokenBatch, kept: Sequence[Sequence[np.ndarray]]
    ) -> tuple[mx.array, ElementTargets]:
        """Return features and targets of these slots, by text and depth from 1."""
        features, taught = self.teacher.teach(batch, 1)
        size, length = batch.tokens.shape
        place_of = np.full(size * length, -1)
        is_real = np.array(taught.weights) > 0
        place_of[np.array(taught.rows)[is_real]] = np.flatnonzero(is_real)
        chosen = []
        places = []
        before = [np.arange(length)] * size
        for depth in range(1, self.depth):
            own = [text[depth - 1] for text in kept]
            num = padded(max(1, *map(len, own)), max(1, length // PARTS))
            index = np.zeros((size, num), np.int32)
            place = np.full((size, num), -1, np.int32)
            for text, slots in enumerate(own):
                index[text, : len(slots)] = np.searchsorted(before[text], slots)
                place[text, : len(slots)] = place_of[text * length + slots + depth]
            chosen.append(mx.array(index))
            places.append(mx.array(place))
            before = own
        num_elements = is_real.sum() + sum(int((x >= 0).sum()) for x in places)
        return features, ElementTargets(
            mx.array(batch.tokens),
            taught.rows,
            taught.weights,
            taught.probs,
            tuple(chosen),
            tuple(places),
            mx.array([float(num_elements)]),
        )

    def losses(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: ElementTargets
    ) -> mx.array:
        rows = (targets.rows, targets.weights, embeddings.shape[1])
        first = first_slot(*rows, 1)
        slots, weights = slots_at(*rows, 0, first)
        again = bool(self.settings.grad_checkpoint)
        hidden = [
            found.reshape(-1, found.shape[-1])
            for found in unroll_masked(
                head, targets.tokens, features, targets.chosen, again, first
            )
        ]
        hidden[0] = hidden[0][slots]
        flat = [mx.arange(len(slots)), *(x.reshape(-1) for x in targets.places)]
        places = mx.maximum(mx.concatenate(flat), 0)

        def compare(begin: int, rows: Arrays) -> Arrays:
            logits = head.logits(rows[0]).astype(mx.float32)
            probs = targets.probs[places[begin : begin + len(logits)]]
            return [mixed_losses(terms, logits, probs)]

        terms = self.settings.losses().terms
        size = chunk_rows(targets.probs.shape[-1])
        joined = [mx.concatenate(hidden)]
        (found,) = with_weights(head, OUTPUT, compare, joined, size, again=False)
        parts = mx.split(found, np.cumsum([len(x) for x in flat])[:-1].tolist())
        counting = [weights, *(x >= 0 for x in flat[1:])]
        sums = [(x * w).sum() for x, w in zip(parts, counting, strict=True)]
        return mx.stack(sums) / mx.maximum(targets.counts, TINY)

    def hidden(self, tokens: mx.array, features: mx.array, first: int) -> Iterator[mx.array]:
        size, length = tokens.shape
        all_slots = [mx.arange(first, length), *[mx.arange(length - first)] * self.depth]
        chosen = [mx.broadcast_to(x, (size, length - first)) for x in all_slots[: self.depth - 1]]
        return unroll_masked(self.student.head, tokens, features, chosen, first=first)

    def write_published(self, folder: Path) -> str:
        """Write the layout that it came in, and speculators' of what came as another head."""
        head = self.student.head
        own = split_weights(dict(tree_flatten(head.parameters())), head.config)
        came = None if self.given is None else self.given.published
        found = None if came is None else as_it_came(came, own, self.student.ids)
        if came is not None and found is not None:
            return write_published(folder, came.config, found)
        config = published_config(head.config, self.student.taps)
        arrays = {name: array.astype(self.student.dtype) for name, array in own.items()}
        if head.config.lm_head_source == "target":
            table, _ = find_embedding(self.model)
            arrays |= rows_of_lm_head(self.model, table, self.student.ids)
        for number in range(1, head.config.num_layers):
            norm = arrays.pop(f"layers.{number}.hidden_norm.weight")
            arrays[f"layers.{number}.input_layernorm.weight"] = norm
        arrays[MASK] = arrays[MASK][None, None]
        if head.config.has_d2t:
            ids = self.student.ids.astype(mx.int64)
            arrays["d2t"] = ids - mx.arange(len(ids), dtype=mx.int64)
            arrays["t2d"] = mx.zeros(head.config.vocab_size, mx.bool_)
            arrays["t2d"][ids] = True
        return write_published(folder, config, arrays)


def as_it_came(
    checkpoint: DraftCheckpoint, own: Mapping[str, mx.array], ids: mx.array
) -> dict[str, mx.array] | None:
    """Return a checkpoint's tensors with a head's parameters in place, each in its stored type.

    None if they are not stored as they are, as in a head that drafted step by step, or whose
    draft vocabulary (``ids``) has changed.
    """
    arrays = stored_arrays(checkpoint)
    named = {canonical(name): name for name in arrays}
    num_drafted = len(arrays.get("d2t", ()))
    for name, array in own.items():
        there = named.get(name) or named.get(name.replace("hidden_norm", "input_layernorm"))
        stored = None if there is None else arrays[there]
        if stored is None or num_drafted not in (0, len(ids)):
            return None
        array = array.astype(stored.dtype)
        if name == "lm_head.weight" and num_drafted and len(stored) != num_drafted:
            stored[ids] = array  # a row for every token of the target
        elif array.size != stored.size:
            return None
        else:
            arrays[str(there)] = array.reshape(stored.shape)
    return arrays


def published_config(config: Eagle3Config, taps: Sequence[int]) -> dict[str, Any]:
    """Return the ``config.json`` of a P-EAGLE head as speculators publish it."""
    c = config
    window = c.sliding_window
    full = range(c.num_layers) if window is None else c.full_attention_layers
    kinds = ["full" if i in full else "sliding" for i in range(c.num_layers)]
    scaling = c.rope.get("scaling") or {"type": "default"}
    rope = {**scaling, "rope_type": scaling["type"], "rope_theta": c.rope["theta"]}
    if c.rope.get("dims"):
        rope["partial_rotary_factor"] = c.rope["dims"] / c.head_dim
    layer = layer_values(c, SAME) | {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "use_sliding_window": window is not None,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": c.speculative_tokens_hint or 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {name: getattr(c, name) for name in OWN} | {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_version": VERSION,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "embed_requires_grad": True,
        "fc_norm": c.pre_fc_norm == "per_feature",
        "norm_before_fc": c.pre_fc_norm == "concat",
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [], "name_or_path": None},
        },
    }
