"""Drafts of Gemma 4's assistants, small models that read the target's own keys and values.

An assistant has no keys and values. Its sliding layers attend to those of the target's last
sliding layer that has its own, its full layers to those of the last full one, and all of them from
the position of the newest token, however many tokens are drafted. What a drafted token passes on
to the next is a state as wide as the target's.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma4_text

from ..system.fields import BOOL, Table, check, list_of, number_above, one_of, shown, whole
from ..target_model.cache_view import CacheView
from ..target_model.ragged import RaggedCaches
from .base import Draft, Pick, row_at, start_early
from .feature_drafter import FeatureDrafter
from .folder import (
    LARGEST_WIDTH,
    SIZE,
    FolderConfig,
    Size,
    check_tensors,
    read_module,
    read_weights,
    rows_of,
    shapes_of,
)
from .head import Projection, with_all_rows
from .kind import LoadOptions, Tensors
from .target_parts import TargetSizes, activation_dtype, find_embedding, sizes_of

SLIDING = "sliding_attention"
FULL = "full_attention"
ORDERING = "token_ordering"
LAYER_TYPES = list_of(one_of(SLIDING, FULL), f"{SLIDING} and {FULL}")
ROPE: Table = {
    "rope_type": one_of("default", "proportional"),
    "rope_theta": number_above(1, 1e15),
    "partial_rotary_factor": number_above(0, 1),
}
ROPES: Table = {SLIDING: ROPE, FULL: ROPE}
PUBLISHED: Table = {
    "use_ordered_embeddings": BOOL,
    "centroid_intermediate_top_k": SIZE,
    "tie_word_embeddings": BOOL,
    "text_config": {"layer_types": LAYER_TYPES},
}
KNOWN = {
    "hidden_activation": "gelu_pytorch_tanh",
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
}
"""Keys of a published text_config, and the one value that an assistant has."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(FolderConfig):
    """The ``config.json`` of a converted assistant.

    Sliding layers have heads of width ``head_dim``, full ones of ``global_head_dim``. With
    ``num_centroids`` above 0 the vocabulary is cut into that many equal clusters, and only the
    tokens of the ``centroid_top_k`` best can be drafted. ``position`` "next" is the position of
    the newest token, whose keys and values the target has yet to compute; "newest" is the
    position of the last row that it has.
    """

    target_hidden_size: Size
    intermediate_size: Size
    num_heads: Annotated[int, whole(1, 1024)]
    head_dim: Size
    global_head_dim: Size
    layer_types: Annotated[tuple[str, ...], LAYER_TYPES]
    rope_parameters: Annotated[dict[str, Any] | None, ROPES] = None
    rms_norm_eps: Annotated[float, number_above(0, 1)] = 1e-6
    num_centroids: Annotated[int, whole(0, 2**24)] = 0
    centroid_top_k: Annotated[int, whole(0, 2**24)] = 0
    position: Annotated[str, one_of("next", "newest")] = "next"

    def rules(self) -> Iterator[tuple[str, bool]]:
        widest = max(self.head_dim, self.global_head_dim)
        yield "layer_types", 0 < len(self.layer_types) <= 256
        yield "head_dim global_head_dim", self.head_dim % 2 == self.global_head_dim % 2 == 0
        yield "num_heads head_dim global_head_dim", self.num_heads * widest <= LARGEST_WIDTH
        if self.num_centroids:
            yield "vocab_size num_centroids", self.vocab_size % self.num_centroids == 0
            yield "centroid_top_k num_centroids", 0 < self.centroid_top_k <= self.num_centroids

    def check_fit(self, target: TargetSizes) -> None:
        target.check_width("assistant", self.target_hidden_size)
        if self.vocab_size != target.vocab_size:
            raise ValueError(
                f"the assistant was made for a vocabulary of {self.vocab_size} tokens, but the "
                f"target's has {target.vocab_size}: use the one made for this model."
            )

    @property
    def targets(self) -> str:
        return f"for Gemma 4 of hidden size {self.target_hidden_size}"

    def layer_args(self) -> gemma4_text.ModelArgs:
        """Arguments of mlx-lm's layers, all of which read keys and values of other layers."""
        others = {
            "num_hidden_layers": len(self.layer_types),
            "num_kv_shared_layers": len(self.layer_types),
            "num_attention_heads": self.num_heads,
            "layer_types": list(self.layer_types),
            "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
        }
        args: gemma4_text.ModelArgs = gemma4_text.ModelArgs.from_dict(self.to_dict() | others)
        return args


Rows = Mapping[str, tuple[mx.array, mx.array, mx.array | None]]
"""Keys and values (B, H, S, D) for each type of layer, and a mask of those that count, or None."""


class Assistant(nn.Module):
    """Weights of an assistant, and one step of it."""

    def __init__(self, config: AssistantConfig):
        super().__init__()
        self.config = c = config
        args = c.layer_args()
        self.pre_projection = nn.Linear(2 * c.target_hidden_size, c.hidden_size, bias=False)
        self.layers = [gemma4_text.DecoderLayer(args, i) for i in range(len(c.layer_types))]
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_projection = nn.Linear(c.hidden_size, c.target_hidden_size, bias=False)
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if c.num_centroids:
            self.centroids = nn.Linear(c.hidden_size, c.num_centroids, bias=False)
        self._clusters: mx.array | None = None

    def set_clusters(self, ordering: mx.array) -> None:
        """Set the clusters: ``ordering`` (V,) lists the tokens cluster by cluster."""
        self._clusters = ordering.astype(mx.int32).reshape(self.config.num_centroids, -1)
        mx.eval(self._clusters)

    def __call__(
        self,
        joined: mx.array,
        rows: Rows,
        position: int | mx.array,
        project: Projection = with_all_rows,
    ) -> tuple[mx.array, mx.array]:
        """Logits (B, V) and states (B, H) after embeddings and states side by side, (B, 2H).

        ``project`` multiplies with the table, or some rows of it.
        """
        x = self.pre_projection(joined)[:, None]
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            keys, values, mask = rows[kind]
            x, _, _ = layer(x, mask=mask, shared_kv=(keys, values), offset=position)
        x = self.norm(x)[:, 0]
        return self.logits(x, project), self.post_projection(x)

    @property
    def has_clusters(self) -> bool:
        return self._clusters is not None

    def logits(self, x: mx.array, project: Projection = with_all_rows) -> mx.array:
        """Logits (B, V) after x (B, h): minus infinity for what cannot be drafted."""
        if self._clusters is None:
            return project(self.embed_tokens.as_linear, x)
        best = self.config.centroid_top_k
        found = mx.argpartition(-self.centroids(x), best - 1, axis=-1)[:, :best]
        candidates = self._clusters[found].reshape(x.shape[0], -1)
        # Rows of a packed table are unpacked as they are gathered.
        own = (x[:, None] @ self.embed_tokens(candidates).swapaxes(1, 2))[:, 0]
        nothing = mx.full((x.shape[0], self.config.vocab_size), -mx.inf, own.dtype)
        return mx.put_along_axis(nothing, candidates, own, axis=1)


class AssistantDrafter(FeatureDrafter):
    """A ``Drafter`` around an assistant: a forward for each token, and nothing to absorb.

    It starts from the newest token and the target's state before it, after the final norm. Of
    the target's caches it sees the rows of two layers, at the beginning of a draft.
    """

    head: Assistant
    knows_first = False  # the target's rows have to be cut to what was kept

    def __init__(self, head: Assistant, target: nn.Module):
        """Raises ValueError if the assistant was not made for this target."""
        text = text_of(target)
        head.config.check_fit(sizes_of(target))
        self._sources = sources(head.config, text)
        self._embed, _ = find_embedding(target)
        self._scale: float = text.model.embed_scale
        super().__init__(head, (len(target.layers) + 1,), 0, head.config.target_hidden_size)

    def _start(self, cache: list[Any]) -> None:
        super()._start(cache)
        self._rows: Rows = {}
        self._position: Any = 0

    def absorb_rows(self, tokens: mx.array, features: mx.array, caches: RaggedCaches) -> mx.array:
        return self.joined(self._embed(tokens), features)

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """The seed is the newest token's embedding beside the state before it, (1, 2H)."""
        return self.joined(self._embedded(row_at(tokens, last)), row_at(features, last))

    def embed(self, tokens: mx.array) -> mx.array:
        return self._embed(tokens) * self._scale

    def joined(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """Embeddings and hidden states (..., H) side by side."""
        embeddings = embeddings * self._scale
        return mx.concatenate([embeddings, hidden.astype(embeddings.dtype)], axis=-1)

    def with_draft_vocab(self, ids: np.ndarray) -> Self:
        if self.head.has_clusters:
            raise ValueError(
                "this assistant scores a few clusters of its vocabulary, which a draft vocabulary "
                "would make no smaller: leave it out."
            )
        return super().with_draft_vocab(ids)

    def see_target(self, caches: CacheView | RaggedCaches) -> None:
        """Take the rows that the layers attend to, and where the newest tokens stand."""
        rows: dict[str, tuple[Any, ...]]
        if isinstance(caches, RaggedCaches):
            rows = {kind: caches.kept(index) for kind, index in self._sources.items()}
            end: Any = caches.rows.offset
        else:
            rows = {kind: (*caches.rows(index), None) for kind, index in self._sources.items()}
            end = rows[FULL][0].shape[2]
        self._position = end if self.head.config.position == "next" else end - 1
        self._rows = {
            kind: (keys.astype(self.dtype), values.astype(self.dtype), mask)
            for kind, (keys, values, mask) in rows.items()
        }

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: one forward for each."""
        return Draft(mx.concatenate(self.draft_rows(size, None, pick)))

    def draft_rows(self, size: int, caches: RaggedCaches | None, pick: Pick) -> list[mx.array]:
        joined = self._seed  # (B, 2H)
        rows = self._rows
        self._rows = {}  # the next pass would copy the caches for a reader
        self.num_forwards += size
        tokens: list[mx.array] = []
        for _ in range(size):
            x = joined.astype(self.dtype)
            logits, hidden = self.head(x, rows, self._position, self.project)
            tokens.append(self.choose(logits, pick))
            if len(tokens) < size:
                start_early(tokens[-1], size)
                joined = self.joined(self._embed(tokens[-1]), hidden)
        return tokens


def text_of(target: nn.Module) -> gemma4_text.Model:
    """The text model of a target; ValueError where it is not a Gemma 4."""
    text = target.language_model if "language_model" in target else target
    if not isinstance(text, gemma4_text.Model):
        name = getattr(target, "model_type", type(target).__name__)
        raise ValueError(
            "this is an assistant of Gemma 4, which reads keys and values that only Gemma 4 has, "
            f"and the target is a {name} model: use a drafter made for this model."
        )
    return text


def sources(config: AssistantConfig, target: gemma4_text.Model) -> dict[str, int]:
    """The target's cache that layers of each type read: the last of that type with its own rows.

    The last ``num_kv_shared_layers`` layers have none. The full one is always
    among them, for it has a row for each position. Raises ValueError where heads do not fit.
    """
    args = target.args
    owning = list(args.layer_types or [])[: args.num_hidden_layers - args.num_kv_shared_layers]
    found = {kind: i for i, kind in enumerate(owning)}
    for kind in (*config.layer_types, FULL):
        width = config.global_head_dim if kind == FULL else config.head_dim
        own = target.layers[found[kind]].self_attn if kind in found else None
        fits = own is not None and (
            kind not in config.layer_types
            or (own.head_dim == width and config.num_heads % own.n_kv_heads == 0)
        )
        if not fits:
            has = "none" if own is None else f"{own.n_kv_heads} heads of width {own.head_dim}"
            raise ValueError(
                f"the assistant's {config.num_heads} heads of width {width} read {kind} layers, "
                f"of which the target has {has}: use the one made for this model."
            )
    return {kind: i for kind, i in found.items() if kind in (*config.layer_types, FULL)}


def recognise(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Recognise an assistant by the projections from and to the target's width."""
    bare = {name.removeprefix("model.") for name in names}
    return not bare.isdisjoint({"pre_projection.weight", "post_projection.weight"})


def convert(tensors: Tensors, config: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """See ``Kind.convert``. There is one table of tokens, whether the output is tied or not."""
    check(config, PUBLISHED, "config.json")
    text = config.get("text_config") or {}
    found = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix("model.").removeprefix("masked_embedding.")
        if "rotary_emb" not in bare:
            found[bare] = tensor
    output = found.pop("lm_head.weight", None)
    if output is not None and not config.get("tie_word_embeddings", True):
        found["embed_tokens.weight"] = output
    made = _config_from(found, config, text)
    ordering = found.pop(ORDERING, None)
    check_tensors(shapes_of(Assistant(made)), found)
    if made.num_centroids:
        if ordering is None or tuple(ordering.shape) != (made.vocab_size,):
            raise ValueError(
                f"the checkpoint lacks masked_embedding.{ORDERING} with {made.vocab_size} tokens; "
                "it is incomplete"
            )
        found[ORDERING] = ordering
    return made.to_dict(), found


def readings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The other convention of positions; see ``Kind.readings``."""
    other = "newest" if config["position"] == "next" else "next"
    return {f"{other} position": {"position": other}}


def _config_from(
    tensors: Tensors, config: Mapping[str, Any], text: Mapping[str, Any]
) -> AssistantConfig:
    """The config of a published checkpoint, with the sizes of its tensors."""
    for key, known in KNOWN.items():
        if text.get(key) and text[key] != known:
            raise ValueError(
                f"config.json has {key} {shown(text[key])}, which no known assistant of Gemma 4 "
                "has; converting without would change what it computes"
            )
    if "layer_types" not in text:
        raise ValueError("config.json has no text_config.layer_types, which an assistant needs")
    kinds = text["layer_types"]
    rows = partial(rows_of, tensors)
    widths = {kind: rows(f"layers.{i}.self_attn.q_norm.weight") for i, kind in enumerate(kinds)}
    head_dim = rows("layers.0.self_attn.q_norm.weight")
    has_clusters = config.get("use_ordered_embeddings", "centroids.weight" in tensors)
    made = {
        "hidden_size": rows("norm.weight"),
        "target_hidden_size": rows("post_projection.weight"),
        "vocab_size": rows("embed_tokens.weight"),
        "intermediate_size": rows("layers.0.mlp.gate_proj.weight"),
        "num_heads": max(rows("layers.0.self_attn.q_proj.weight") // head_dim, 1),
        "head_dim": widths.get(SLIDING, head_dim),
        "global_head_dim": widths.get(FULL, head_dim),
        "layer_types": kinds,
        "rope_parameters": text.get("rope_parameters"),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "num_centroids": rows("centroids.weight") if has_clusters else 0,
        "centroid_top_k": config.get("centroid_intermediate_top_k", 32) if has_clusters else 0,
    }
    return AssistantConfig.from_dict(made, "config.json")


def load(
    folder: Path, config: dict[str, Any], model: nn.Module, options: LoadOptions
) -> AssistantDrafter:
    """The drafter of a converted folder; see ``Kind.load``."""
    made = AssistantConfig.from_dict(config, folder / "config.json")
    weights = read_weights(folder)
    ordering = weights.pop(ORDERING, None)
    dtype = activation_dtype(find_embedding(model)[0])
    stored = config.get("quantization")
    head = read_module(partial(Assistant, made), weights, stored, options, dtype)
    if made.num_centroids:
        if ordering is None or ordering.shape != (made.vocab_size,):
            raise ValueError(
                f"the head's model.safetensors lacks {ORDERING}: convert the head again."
            )
        head.set_clusters(ordering)
    return AssistantDrafter(head, model)
