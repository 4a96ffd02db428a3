"""Configuration of an EAGLE head: the fields of a converted ``config.json``, every one resolved.

Tapped layers are counted in two ways:

    boundary          2  16  29      what enters that layer
    output-of-layer   1  15  28      what leaves it: one less for the same tensor

We keep boundary ids: b = N is what leaves the last of N layers. Under ``eagle_config``
producers write either, and only the target's depth tells which.
"""

from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any

from ..system.fields import (
    BOOL,
    COUNT,
    INT_LIST,
    NUMBER,
    POSITIVE,
    TEXT,
    Table,
    list_of,
    number_above,
    one_of,
    whole,
)
from .folder import LARGEST_WIDTH, SIZE, FolderConfig, Size
from .target_parts import TargetSizes

Few = Annotated[int, whole(1, 1024)]
LATENT: Table = dict.fromkeys(
    ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), SIZE
)
"""Sizes of multi-head latent attention; q_lora_rank is None where queries are not compressed."""
POSITION_SCALE: Table = {"beta": NUMBER, "original_max_position_embeddings": POSITIVE}


@dataclass(frozen=True)
class LayerIds:
    """Boundary ids, which of the two ways they were read in, and whether that is beyond doubt."""

    ids: tuple[int, ...]
    source: str
    is_certain: bool = True


def default_ids(num_layers: int) -> tuple[int, ...]:
    """The boundary ids of the official code: 32 layers -> (2, 16, 29)."""
    return (2, num_layers // 2, num_layers - 3)


def is_default(ids: tuple[int, ...], num_layers: int | None) -> bool:
    """Whether they are the default of a target of that depth, or of any where it is unknown."""
    return ids == default_ids(num_layers or (ids[-1] + 3))


def read_nested(ids: tuple[int, ...], num_layers: int | None) -> LayerIds:
    """Ids under ``eagle_config``, for a target of that depth.

    (24, 30, 36) is as it stands with 36 layers, where nothing leaves a layer 36; (1, 15, 28)
    with 32 is the default, counted by outputs: (2, 16, 29).
    """
    outputs = tuple(i + 1 for i in ids)
    if num_layers is not None and num_layers in ids:
        return LayerIds(ids, "nested-as-is")
    if ids[0] == 1 or is_default(outputs, num_layers):
        return LayerIds(outputs, "nested+1")
    if is_default(ids, num_layers):
        return LayerIds(ids, "nested-as-is")
    return LayerIds(outputs, "nested+1", is_certain=False)


SCALES = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "partial_rotary_factor",
)  # fmt: skip
"""Numbers above 0 of a rope's scaling."""
ROPE: Table = {
    "type": TEXT,
    "theta": number_above(1, 1e15),
    "dims": SIZE,
    "traditional": BOOL,
    "scaling": {
        "type": one_of("linear", "dynamic", "llama3", "yarn", "longrope", "proportional"),
        **dict.fromkeys(SCALES, POSITIVE),
        **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER),
        **dict.fromkeys(("short_factor", "long_factor"), list_of(POSITIVE, "numbers above 0")),
    },
}


@dataclass(frozen=True, kw_only=True)
class AttentionFields:
    """Attention of a head's layers, and its rotary embedding.

    ``latent`` holds the sizes of multi-head latent attention (see ``LATENT``), None for
    grouped-query attention. ``position_scale`` (``beta``, ``original_max_position_embeddings``)
    makes queries longer from that position on.

    ``rope`` holds ``type``, ``theta``, ``dims`` (rotated channels), ``traditional`` (the two
    channels of a pair are neighbours) and ``scaling``, the dictionary that mlx-lm's
    ``initialize_rope`` takes (None for plain rope).
    """

    num_heads: Few
    num_kv_heads: Few
    head_dim: Size
    qk_norm: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    latent: Annotated[dict[str, Any] | None, LATENT] = None
    softmax_scale: Annotated[float | None, POSITIVE] = None  # of the scores; None: head_dim**-0.5
    position_scale: Annotated[dict[str, Any] | None, POSITION_SCALE] = None
    values: Annotated[str, one_of("projected", "keys")] = "projected"  # keys: before their norm
    value_norm: bool = False  # without a weight
    sliding_window: Annotated[int | None, SIZE] = None
    full_attention_layers: Annotated[tuple[int, ...], INT_LIST] = ()  # they have no window
    rope: Annotated[dict[str, Any], ROPE] = field(
        default_factory=lambda: {"type": "default", "theta": 10000.0}
    )

    def attention_rules(self) -> Iterator[tuple[str, bool]]:
        """Rules of attention, a part of ``rules``."""
        dims = self.rope.get("dims") or self.head_dim
        yield "rope", self.rope.get("theta") is not None
        yield "num_heads num_kv_heads", self.num_heads % self.num_kv_heads == 0
        yield "head_dim rope", dims % 2 == 0 and dims <= self.head_dim
        for name, table in (("latent", LATENT), ("position_scale", POSITION_SCALE)):
            found = getattr(self, name)
            needed = table.keys() - {"q_lora_rank"}
            yield name, found is None or all(found.get(key) is not None for key in needed)
        if self.latent is not None:
            rotated = self.latent["qk_rope_head_dim"]
            plain = self.latent["qk_nope_head_dim"]
            fits = plain + rotated == self.head_dim and self.rope.get("dims") == rotated
            yield "head_dim latent rope", fits


@dataclass(frozen=True, kw_only=True)
class FusionFields:
    """Features of the target that a head takes, and the matrix that fuses them.

    ``aux_boundary_ids`` are taps: id b is the residual stream entering target layer b, and
    b = N (the target's layer count) is what enters its final norm. They are None if the
    checkpoint names none, and then mean {2, N//2, N-3} of the target it is attached to.
    ``aux_nested_ids`` are ids as the checkpoint wrote them, if the target's depth has yet to
    tell what they mean (see ``read_nested``); ``aux_boundary_ids`` is then the likelier reading.

    If ``uses_aux`` is false the one feature is the target's state after its final norm.
    ``fc_input`` says what the fusion matrix takes: the features, once per pair (EAGLE-3);
    embedding and state, at every step (EAGLE-1); or that there is none.
    """

    target_hidden_size: Size
    num_aux: Few = 3
    aux_boundary_ids: Annotated[tuple[int, ...] | None, INT_LIST] = None
    aux_ids_source: Annotated[str, TEXT] = "default"
    aux_nested_ids: Annotated[tuple[int, ...] | None, INT_LIST] = None
    uses_aux: bool = True
    pre_fc_norm: Annotated[str, one_of("none", "concat", "per_feature")] = "none"
    fc_input: Annotated[str, one_of("features", "embedding_and_state", "none")] = "features"
    fc_bias: bool = False
    fusion_norm: bool = False  # the embedding is normed before the fusion

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """The taps for a target of that many layers, low to high."""
        if not self.uses_aux:
            return (num_target_layers + 1,)
        if self.aux_nested_ids:
            return read_nested(self.aux_nested_ids, num_target_layers).ids
        if self.aux_boundary_ids is not None:
            return self.aux_boundary_ids
        return default_ids(num_target_layers)


@dataclass(frozen=True, kw_only=True)
class VocabularyFields:
    """Vocabularies of a head, and the origins of its two tables."""

    vocab_size: Size
    draft_vocab_size: Size
    has_d2t: bool = True
    embed_source: Annotated[str, one_of("file", "target")] = "target"
    lm_head_source: Annotated[str, one_of("file", "target", "target_rows")] = "file"


@dataclass(frozen=True, kw_only=True)
class ParallelFields:
    """Tokens that are drafted at once.

    With a ``mask_token_id`` a draft is one forward pass (P-EAGLE); ``num_parallel_heads`` add
    that many tokens after the last step of a chain (ModelOpt).
    """

    mask_token_id: Annotated[int | None, whole(0, 2**24)] = None
    num_parallel_heads: Annotated[int, whole(0, 1024)] = 0
    parallel_head_layers: Few = 1
    parallel_head_bias: bool = False
    parallel_outputs: Few = 1  # their output matrices: one for all, or one for each
    speculative_tokens_hint: Annotated[int | None, COUNT] = None


@dataclass(frozen=True, kw_only=True)
class LayerFields:
    """Sizes, norms, biases and scales of a head outside of attention."""

    hidden_size: Size
    num_layers: Few
    intermediate_size: Size
    max_position_embeddings: Size = 2048
    rms_norm_eps: Annotated[float, number_above(0, 1)] = 1e-6
    hidden_act: Annotated[str, one_of("silu", "gelu", "gelu_pytorch_tanh")] = "silu"
    mlp_bias: bool = False
    # The layers that see the embedding beside the state.
    layer_input: Annotated[str, one_of("first", "every", "none")] = "first"
    layer_scalar: bool = False  # a layer's output is multiplied by a number of its own
    branch_norms: bool = False  # the outputs of attention and MLP are normed too, as in Gemma
    embedding_norm: bool = True  # the embedding is normed before attention
    state_norm: bool = True  # layer 0 norms its state before attention
    norm_before_residual: bool = False
    final_norm: bool = True
    norm_output: bool = False
    embed_scale: Annotated[float, POSITIVE] = 1.0
    logit_softcap: Annotated[float | None, POSITIVE] = None


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(
    LayerFields, AttentionFields, FusionFields, VocabularyFields, ParallelFields, FolderConfig
):
    """The ``config.json`` of a converted EAGLE head: fields in groups, flat as in the file."""

    model_type: Annotated[str, TEXT] = "eagle3"
    family: Annotated[str, TEXT] = "unknown"

    def unsaid(self, said: Collection[str], **others: Any) -> dict[str, Any]:
        """Fields with other values than a layout means that has words only for those ``said``.

        Returns these values by name: the defaults, and ``others``.
        """
        meant = {each.name: each.default for each in fields(self) if each.name not in said}
        known = {name: value for name, value in meant.items() if value is not MISSING} | others
        return {name: value for name, value in known.items() if getattr(self, name) != value}

    def rules(self) -> Iterator[tuple[str, bool]]:
        yield from self.attention_rules()
        yield "mask_token_id vocab_size", (self.mask_token_id or 0) < self.vocab_size
        outputs = (1, self.num_parallel_heads)
        yield "parallel_outputs num_parallel_heads", self.parallel_outputs in outputs
        width = self.num_aux * self.target_hidden_size
        yield "num_aux target_hidden_size", width <= LARGEST_WIDTH
        yield "num_heads head_dim", self.num_heads * self.head_dim <= LARGEST_WIDTH
        yield "hidden_size", 2 * self.hidden_size <= LARGEST_WIDTH

    def check_fit(self, target: TargetSizes) -> None:
        vocab_size = target.vocab_size
        num_layers = target.num_layers
        target.check_width("head", self.target_hidden_size)
        if not self.has_d2t and self.draft_vocab_size > vocab_size:
            raise ValueError(
                f"the head drafts {self.draft_vocab_size} tokens, but the target has "
                f"{vocab_size}: use the head trained for this model."
            )
        target.check_vocabulary("head", self.vocab_size, self.mask_token_id)
        taps = self.taps(num_layers)
        deepest = num_layers if self.uses_aux else num_layers + 1
        if not taps or min(taps) < 0 or max(taps) > deepest or len(taps) != self.num_aux:
            raise ValueError(
                f"the head taps layers {list(taps)} ({self.num_aux} features), but the target "
                f"has {num_layers} layers: use the head trained for this model, or, where this is "
                "it, convert it again with --target MODEL, or with the taps in --aux-layers."
            )

    @property
    def targets(self) -> str:
        h = self.target_hidden_size
        return f"for targets of hidden size {h} with {self.vocab_size} tokens"
