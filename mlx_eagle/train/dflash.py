"""Training of DFlash heads: many blocks of a text at once, each behind an anchor of its own.

Chen et al. 2026, DFlash. A block sees the target's features of the tokens before its anchor, and
itself. Labels are the target's choices, and the loss is cross-entropy (``position_weights``).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafters.block_config import BlockConfig
from ..drafters.dflash import BlockLayer, DFlashHead, seen_by
from ..drafters.target_parts import find_embedding, lm_head_of
from ..system.safetensors import save_arrays
from .batches import TokenBatch
from .chunks import CHUNK_BYTES, Arrays, chunk_rows, in_chunks, with_weights
from .compiled import is_compiled, softmax
from .given import Given, GivenRecipe
from .losses import TINY
from .settings import LossSettings, TrainSettings
from .student import Student
from .teacher import HiddenTeacher

KEPT = 0.5  # of D-PACE: the least that a position passes on
GAMMAS = ((8, 4.0), (10, 5.0), (16, 7.0))  # of decay, for blocks of up to so many slots
LAYERS = 5  # of a fresh head, and of the target that it taps
BLOCK = 16  # slots of a fresh head's block
SPREAD = 0.02  # standard deviation of a fresh head's matrices
ENOUGH = 20e6  # tokens of answers that a fresh head should see, at least
AT_ONCE = 64  # blocks of a text in an evaluation
FROZEN = ("embed_tokens.", "lm_head.", "attention_sink_bias")


def is_trained(head: nn.Module, model: nn.Module, given: Given, name: str) -> bool:
    """Return whether a parameter is trained: tables and output matrices are not."""
    return not any(part in name for part in FROZEN)


def write_fresh(
    folder: Path,
    settings: TrainSettings,
    model: nn.Module,
    model_config: Mapping[str, Any],
    tokenizer: TokenizerWrapper,
) -> None:
    """Write a new head into ``folder`` as z-lab publishes them, with the target's sizes.

    Its matrices are random, by the seed. Raises ValueError if there is no token for masked slots.
    """
    text = model_config.get("text_config") or model_config
    embedding, vocab_size = find_embedding(model)
    num_layers = settings.num_layers or LAYERS
    depth = len(model.layers)
    layers = [round(1 + i * max(0, depth - 4) / max(1, LAYERS - 1)) for i in range(LAYERS)]
    ids = sorted({min(layer, depth - 1) for layer in layers})
    size = int(embedding(mx.array([0])).shape[-1])
    rope = text.get("rope_parameters") or {}
    block = settings.block_size or BLOCK
    num_heads = text.get("num_attention_heads") or max(1, size // 64)
    config = BlockConfig(
        hidden_size=size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=text.get("num_key_value_heads") or num_heads,
        head_dim=text.get("head_dim") or size // num_heads,
        intermediate_size=settings.intermediate_size or text.get("intermediate_size") or 3 * size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        taps=tuple(i + 1 for i in ids),
        mask_token_id=mask_token(settings.mask_token_id, tokenizer, vocab_size),
        block_size=block,
    )
    keys = mx.random.split(mx.random.key(settings.seed), 1000)
    arrays = {}
    for number, (name, array) in enumerate(tree_flatten(DFlashHead(config).parameters())):
        drawn = SPREAD * mx.random.normal(array.shape, key=keys[number])
        arrays[name] = mx.ones(array.shape) if array.ndim == 1 else drawn
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": text.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        "block_size": block,
        "layer_types": ["full_attention"] * num_layers,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": ids},
    }
    folder.mkdir()
    save_arrays(folder / "model.safetensors", arrays, layout="pt")
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


def mask_token(given: int | None, tokenizer: TokenizerWrapper, vocab_size: int) -> int:
    """Return the token of masked slots: the last row of the embedding that names no token."""
    known = set(tokenizer.get_vocab().values())
    free = [given] if given is not None else sorted(set(range(vocab_size)) - known)
    reserved = {tokenizer.pad_token_id, *tokenizer.eos_token_ids}
    if not free or free[-1] in reserved or free[-1] >= vocab_size:
        found = "every row of the embedding is a token" if given is None else f"{given} cannot be"
        raise ValueError(
            f"{found}, and a drafter of blocks needs one that no text has for masked slots: name "
            f"a token below {vocab_size} by --mask-token-id, neither padding nor an end of text."
        )
    return int(free[-1])


class BlockTargets(NamedTuple):
    """Blocks of a batch: N of each of B texts, with D slots that draft.

    ``anchors`` (B, N) are positions of the tokens before, ``labels`` (B, N, D) what is to be
    drafted, by its number among the tokens that can be, ``asked`` (B, N, D): 1 where it counts.
    ``counts`` (1,) is how many do, averaged over all ranks.
    """

    anchors: mx.array
    labels: mx.array
    asked: mx.array
    counts: mx.array


def anchors_of(batch: TokenBatch, num_anchors: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the anchors of each text, (B, N) ascending, filled up with -1.

    They are tokens of the answer whose successor is one too, and depend on the seed, the epoch
    and the number of the text alone.
    """
    drawn = []
    for row, number in enumerate(batch.numbers):
        (pool,) = (batch.counts[row, :-1] & batch.counts[row, 1:]).nonzero()
        dice = np.random.default_rng([seed, epoch, number])
        chosen = dice.permutation(pool + 1)[:num_anchors]
        drawn.append(np.sort(chosen))
    most = num_anchors if is_compiled() else max(1, *(len(own) for own in drawn))
    return np.stack([np.pad(own, (0, most - len(own)), constant_values=-1) for own in drawn])


class BlockRecipe(GivenRecipe):
    """A DFlash head, whose blocks are compared with the target's choices."""

    def __init__(self, settings: TrainSettings, student: Student, model: nn.Module, given: Given):
        super().__init__(settings, student, model, given)
        config = student.head.config
        ids = student.ids if config.has_d2t else None
        self.teacher = HiddenTeacher(model, student.taps, ids)
        self.config = config
        self.depth = config.longest_draft
        self.weights = mx.ones(1)
        embedding, _ = find_embedding(model)
        self._project = lm_head_of(model, embedding)
        self._mask = student.embed(mx.array([config.mask_token_id]))
        numbers = {token: number for number, token in enumerate(student.ids.tolist())}
        self._numbers = numbers if config.has_d2t else None

    def logits(self, head: DFlashHead, hidden: mx.array) -> mx.array:
        """Return logits (K, Vd) after hidden states (K, h)."""
        project = head.lm_head if self.config.lm_head_source == "file" else self._project
        logits = project(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * mx.tanh(logits / cap)

    def teach(
        self, batch: TokenBatch, epoch: int, num_ranks: int = 1
    ) -> tuple[mx.array, BlockTargets]:
        settings = self.settings
        assert settings.anchors is not None
        drawn = anchors_of(batch, settings.anchors, settings.seed, epoch)
        return self.targets_of(batch, drawn)

    def targets_of(self, batch: TokenBatch, drawn: np.ndarray) -> tuple[mx.array, BlockTargets]:
        """Return features and targets of the blocks with these anchors (B, N), -1: none."""
        features = self.teacher.features(batch.tokens)
        size, length = batch.tokens.shape
        places = np.maximum(drawn, 0)[..., None] + 1 + np.arange(self.depth)
        inside = np.minimum(places, length - 1)
        texts = np.arange(size)[:, None, None]
        # Token j belongs to the answer where slot j - 1 counts.
        is_asked = batch.counts[texts, inside - 1] & (places < length) & (drawn[..., None] >= 0)
        asked = np.cumprod(is_asked, axis=-1).astype(np.float32)
        if self.settings.labels == "text":
            tokens = batch.tokens[texts, inside]
            labels = tokens if self._numbers is None else self._numbers_of(tokens, asked)
        else:
            labels = self._choices(features, texts * length + inside - 1)
        counts = mx.array([float(asked.sum())])
        anchors = mx.array(drawn, mx.int32)
        return features, BlockTargets(anchors, mx.array(labels, mx.int32), mx.array(asked), counts)

    def _choices(self, features: mx.array, rows: np.ndarray) -> np.ndarray:
        """Return the target's choices after positions, numbered b * T + i."""
        hidden = features[..., -self._width :].reshape(-1, self._width)
        used, back = np.unique(rows, return_inverse=True)
        found = self.teacher.choices(hidden[mx.array(used, mx.int32)], len(self.student.ids))
        return np.array(found)[back].reshape(rows.shape)

    def _numbers_of(self, tokens: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Return numbers of tokens among those that can be drafted; others are not asked for."""
        assert self._numbers is not None
        known = np.vectorize(lambda token: self._numbers.get(int(token), -1))(tokens)
        asked *= np.cumprod(known >= 0, axis=-1)
        return np.maximum(known, 0)

    @property
    def _width(self) -> int:
        return int(self.config.hidden_size)

    def losses(
        self,
        head: nn.Module,
        embeddings: mx.array,
        features: mx.array,
        targets: tuple[Any, ...],
        settings: LossSettings,
    ) -> mx.array:
        given = BlockTargets(*targets)
        hidden = self.hidden(head, embeddings, features, given.anchors, settings.checkpoint)
        entropies = self._entropies(head, hidden, given.labels.reshape(-1))
        entropies = entropies.reshape(given.labels.shape)
        weights = mx.stop_gradient(self._position_weights(entropies, given.asked))
        total = (weights * entropies * given.asked).sum()
        divisor = {
            "rows": given.counts[0],
            "weights": (weights * given.asked).sum(),
            "texts": mx.array(float(len(given.anchors))),
        }
        return (total / mx.maximum(divisor[str(self.settings.loss_divisor)], TINY))[None]

    def _entropies(self, head: Any, hidden: mx.array, labels: mx.array) -> mx.array:
        """Compare hidden states (K, h) with labels (K,): cross-entropies (K,)."""

        def compare(begin: int, rows: Arrays) -> Arrays:
            logits = self.logits(head, rows[0]).astype(mx.float32)
            own = labels[begin : begin + len(logits), None]
            said = mx.take_along_axis(logits, own, axis=-1)[:, 0]
            return [mx.logsumexp(logits, axis=-1) - said]

        size = chunk_rows(len(self.student.ids))
        return with_weights(head, (), compare, [hidden], size, again=False)[0]

    def _position_weights(self, entropies: mx.array, asked: mx.array) -> mx.array:
        """Return the weights (B, N, D): of D-PACE, or those of an exponential decay."""
        if self.settings.position_weights == "decay":
            block = self.config.block_size
            usual = next((g for most, g in GAMMAS if block <= most), GAMMAS[-1][1])
            gamma = self.settings.gamma or usual
            return mx.broadcast_to(mx.exp(-mx.arange(self.depth) / gamma), asked.shape)
        passed = mx.where(asked > 0, (1 - KEPT) * mx.exp(-entropies) + KEPT, 1.0)
        reached = mx.cumprod(passed, axis=-1) * asked
        return mx.cumsum(reached, axis=-1, reverse=True)

    def hidden(
        self,
        head: Any,
        embeddings: mx.array,
        features: mx.array,
        anchors: mx.array,
        checkpoint: bool,
    ) -> mx.array:
        """Return the states (B * N * D, h) of the slots that draft, behind each anchor (B, N)."""
        size, num = anchors.shape
        block = self.config.block_size
        width = self._width
        places = mx.maximum(anchors, 0)
        taps = features[..., : -self._width]
        context = head.hidden_norm(head.fc(taps.astype(embeddings.dtype)))
        first = mx.take_along_axis(embeddings, places[..., None], axis=1)[:, :, None]
        masks = mx.broadcast_to(self._mask.astype(first.dtype), (size, num, block - 1, width))
        x = mx.concatenate([first, masks], axis=2)
        for number, layer in enumerate(head.layers):

            def run(_: int, rows: Arrays, own: Any = layer, number: int = number) -> Arrays:
                return [self._through(own, number, *rows, places)]

            if checkpoint:
                parts = list(layer.trainable_parameters())
                x = with_weights(layer, parts, run, [x, context], size, again=True)[0]
            else:
                x = run(0, [x, context])[0]
        return head.norm(x[:, :, self.config.first_slot :]).reshape(-1, width)

    def _through(
        self, layer: BlockLayer, number: int, x: mx.array, context: mx.array, places: mx.array
    ) -> mx.array:
        x = x + self._attend(layer, number, layer.input_layernorm(x), context, places)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def _attend(
        self, layer: BlockLayer, number: int, x: mx.array, context: mx.array, places: mx.array
    ) -> mx.array:
        """Attend from blocks x (B, N, S, h) to the context (B, T, h) and to themselves."""
        a = layer.self_attn
        size, num, block, _ = x.shape
        length = context.shape[1]
        flat = x.reshape(size * num, block, -1)
        starts = places.reshape(-1)

        def heads(y: mx.array, count: int) -> mx.array:
            return y.reshape(*y.shape[:2], count, a.head_dim).swapaxes(1, 2)

        q = a.rope(a.q_norm(heads(a.q_proj(flat), a.num_heads)), offset=starts)
        own_k = a.rope(a.k_norm(heads(a.k_proj(flat), a.num_kv_heads)), offset=starts)
        own_v = heads(a.v_proj(flat), a.num_kv_heads)
        keys = a.rope(a.k_norm(heads(a.k_proj(context), a.num_kv_heads)))[:, None, :, None]
        values = heads(a.v_proj(context), a.num_kv_heads)[:, None, :, None]
        shape = (size, num, a.num_kv_heads, -1, block, a.head_dim)
        # The blocks come first: they are what is cut into chunks.
        rows = [y.reshape(shape).swapaxes(0, 1) for y in (q * a.scale, own_k, own_v)]
        sinks = a.get("attention_sink_bias")

        def attend(begin: int, rows: Arrays, shared: Arrays) -> Arrays:
            q, own_k, own_v = rows
            start = places[:, begin : begin + len(q)].T[..., None, None]
            before = mx.arange(length)
            seen = seen_by(start, block, before, self.config, number) & (before < start)
            inside = seen_by(start, block, start + mx.arange(block), self.config, number)
            masks = [mx.where(m, 0.0, -mx.inf)[:, :, None, None] for m in (seen, inside)]
            keys, values = (array[:, 0] for array in shared)
            scores = [
                q @ keys.swapaxes(-1, -2) + masks[0].astype(q.dtype),
                q @ own_k.swapaxes(-1, -2) + masks[1].astype(q.dtype),
            ]
            if sinks is not None:
                each = sinks.reshape(a.num_kv_heads, -1, 1, 1).astype(q.dtype)
                scores.append(mx.broadcast_to(each, (*q.shape[:-1], 1)))
            weights = mx.split(softmax(mx.concatenate(scores, -1)), [length, length + block], -1)
            return [weights[0] @ values + weights[1] @ own_v]

        width = size * a.num_heads * block * (length + block)  # numbers of a block
        at_once = max(1, CHUNK_BYTES // (4 * width))
        out = in_chunks(attend, rows, [keys, values], at_once, 0, again=True)[0]
        out = out.swapaxes(0, 1).reshape(size * num, a.num_heads, block, a.head_dim)
        out = out.swapaxes(1, 2).reshape(size, num, block, -1)
        return a.o_proj(out)

    def drafts(self, tokens: np.ndarray, rows: mx.array, begin: int) -> np.ndarray:
        head = self.student.head
        features = self.teacher.features(tokens)
        embeddings = self.student.embed(mx.array(tokens))
        length = tokens.shape[1] - begin
        texts = np.array(rows) // length
        anchors = np.array(rows) % length + begin + 1
        found = np.zeros((self.depth, len(anchors)), np.int32)
        for text in np.unique(texts).tolist():
            (own,) = (texts == text).nonzero()
            part = slice(text, text + 1)
            for start in range(0, len(own), AT_ONCE):
                some = own[start : start + AT_ONCE]
                asked = mx.array(anchors[some][None], mx.int32)
                hidden = self.hidden(head, embeddings[part], features[part], asked, False)
                chosen = self.student.ids[mx.argmax(self.logits(head, hidden), axis=-1)]
                found[:, some] = np.array(chosen).reshape(len(some), self.depth).T
        return found
