"""Build the config of an EAGLE head, group by group, from its tensors and its published config.

Order of trust: the shapes of tensors, then EAGLE's own keys, then general ones, because a config
is often a copy of the target's. Nothing of the weights is read here but the vocabulary map.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_eagle.drafters.config import (
    AttentionFields,
    Eagle3Config,
    FusionFields,
    LayerFields,
    ParallelFields,
)
from mlx_eagle.drafters.folder import check_tensors, rows_of
from mlx_eagle.drafters.head import GATED
from mlx_eagle.drafters.head_weights import stored_shapes
from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.drafters.target_parts import TargetSizes
from mlx_eagle.system.fields import shown

from .checkpoint import DraftCheckpoint
from .families import Family, count_layers, find_family, hidden_size
from .published_config import (
    CLASS_DEFAULTS,
    DEFAULT_THETA,
    NO_OVERRIDES,
    Overrides,
    mask_token,
    position_scale,
    read_rope,
    read_taps,
    softmax_scale,
    tokens_hint,
    window_fields,
    written_taps,
)
from .stored import LazyTensor
from .vocabulary import read_vocabulary

DEFAULT_HEADS = 32
COPIED = ("qk_norm", "attention_bias", "mlp_bias")
"""Keys about layers that most trainers copy from the target's config."""
ATTENTION = "layers.0.self_attn."
ENTRANCES = ("k_proj", "kv_a_proj_with_mqa", "q_proj", "q_a_proj")
"""Matrices that take what a layer attends from."""


@dataclass(frozen=True)
class Resolved:
    """A head: its config, and its tensors, which are unread.

    ``target_ids`` (Vd,) are those of the draft ids, ascending; None if both are the same.
    ``notes`` are doubts, each a sentence for the user. ``trimmed`` says how the draft vocabulary
    was cut down, if it was (see ``trim.py``).
    """

    family: Family
    config: Eagle3Config
    tensors: dict[str, Tensor]
    target_ids: np.ndarray | None
    notes: tuple[str, ...]
    trimmed: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PublishedHead:
    """A head as published: tensors by canonical names, unread, and the keys of its config.

    ``settings`` are these keys in one dictionary (see ``read_settings``). ``target`` is the
    model it was trained for, if known. Doubts are added to ``notes``, each a sentence for the
    user.
    """

    family: Family
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    tensors: dict[str, Tensor]
    target: TargetSizes | None = None
    overrides: Overrides = NO_OVERRIDES
    notes: list[str] = field(default_factory=list)

    def rows(self, name: str) -> int:
        """The rows of a matrix of layer 0's attention; ValueError if it is missing."""
        return rows_of(self.tensors, f"{ATTENTION}{name}.weight")

    def asks_for(self, tensor: str, key: str) -> bool:
        """True if layer 0 has the tensor or the config asks for it, so that it must be there."""
        return f"layers.0.{tensor}" in self.tensors or bool(self.settings.get(key))

    def input_width(self, index: int) -> int | None:
        """The width of what a layer attends from; None if it has no attention known here."""
        names = (f"layers.{index}.self_attn.{name}.weight" for name in ENTRANCES)
        return next((self.tensors[n].shape[-1] for n in names if n in self.tensors), None)


def _heads(head: PublishedHead) -> dict[str, Any]:
    """The sizes of grouped-query attention: heads, key heads, and their width."""
    settings = head.settings
    query_rows = head.rows("q_proj")
    key_rows = head.rows("k_proj")
    norm = head.tensors.get(f"{ATTENTION}q_norm.weight")
    width = norm.rows if norm is not None else settings.get("head_dim")
    num_heads = settings.get("num_attention_heads")
    num_heads = num_heads or (query_rows // width if width else DEFAULT_HEADS)
    width = width or query_rows // num_heads
    if not width:
        raise ValueError(f"q_proj has {query_rows} rows for {num_heads} heads; fix the config")
    num_kv_heads = settings.get("num_key_value_heads", max(key_rows // width, 1))
    if num_heads % num_kv_heads or width % 2:
        raise ValueError(
            f"the head has {num_heads} heads of width {width} and {num_kv_heads} key heads, "
            "expected an even width and a whole number of heads per key head; fix the config"
        )
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": width}
    return sizes | {"latent": None}


def _latent_heads(head: PublishedHead) -> dict[str, Any]:
    """The sizes of DeepSeek's attention; only the number of heads is from the config."""
    rank = head.rows("kv_a_layernorm")
    rope = head.rows("kv_a_proj_with_mqa") - rank
    is_compressed = f"{ATTENTION}q_a_proj.weight" in head.tensors
    query_rank = head.rows("q_a_layernorm") if is_compressed else None
    num_heads = head.settings.get("num_attention_heads", DEFAULT_HEADS)
    head_dim = head.rows("q_b_proj" if is_compressed else "q_proj") // num_heads
    latent = {
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": head.rows("kv_b_proj") // num_heads - (head_dim - rope),
    }
    if min(size for size in latent.values() if size is not None) < 1 or rope % 2:
        raise ValueError(
            f"the head's latent attention would have {num_heads} heads of "
            f"{latent['qk_nope_head_dim']} and {rope} channels and values of "
            f"{latent['v_head_dim']}; fix num_attention_heads in its config"
        )
    for name, size in latent.items():
        stated = head.settings.get(name)
        if stated not in (None, size):
            raise ValueError(f"config.json says {name} {stated}, and the tensors have {size}")
    sizes = {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim}
    return {**sizes, "latent": latent}


def _attention(head: PublishedHead) -> AttentionFields:
    settings = head.settings
    tensors = head.tensors
    is_latent = f"{ATTENTION}kv_a_proj_with_mqa.weight" in tensors
    sizes = _latent_heads(head) if is_latent else _heads(head)
    turning = sizes["latent"]["qk_rope_head_dim"] if is_latent else sizes["head_dim"]
    has_bias = head.asks_for("self_attn.q_proj.bias", "attention_bias")
    own_values = f"{ATTENTION}v_proj.weight" in tensors
    factors = tensors.get("rope_freqs.weight")
    return AttentionFields(
        **sizes,
        qk_norm=head.asks_for("self_attn.q_norm.weight", "qk_norm"),
        attention_bias=has_bias or f"{ATTENTION}kv_a_proj_with_mqa.bias" in tensors,
        attention_out_bias=head.asks_for("self_attn.o_proj.bias", "attention_bias"),
        values="keys" if head.family.is_gemma and not own_values else "projected",
        softmax_scale=softmax_scale(settings, sizes["latent"]),
        position_scale=position_scale(settings),
        **window_fields(settings, count_layers(head.tensors)),
        rope=read_rope(settings, turning, is_latent, head.overrides.rope_theta, factors),
    )


def _layers(head: PublishedHead) -> LayerFields:
    settings = head.settings
    tensors = head.tensors
    is_gemma = head.family.is_gemma
    optional = head.family.has_optional_norms
    h = hidden_size(head.tensors)
    if settings.get("hidden_size", h) != h:
        raise ValueError(
            f"config.json says hidden_size {settings['hidden_size']}, and layers.0 puts out {h} "
            "channels"
        )
    activation = settings.get("hidden_act") or settings.get("hidden_activation") or "silu"
    if activation not in GATED:
        raise ValueError(
            f"the head's activation is {shown(activation)}; {', '.join(GATED)} are known"
        )
    num_layers = count_layers(tensors)
    widths = {head.input_width(i) for i in range(num_layers)}
    every = num_layers > 1 and widths == {2 * h}
    has_final = "norm.weight" in tensors
    final_norm = has_final if optional else settings.get("use_last_layernorm", True)
    norm_output = settings.get("norm_output", settings.get("return_hidden_post_norm", False))
    return LayerFields(
        hidden_size=h,
        num_layers=num_layers,
        intermediate_size=rows_of(tensors, "layers.0.mlp.gate_proj.weight"),
        max_position_embeddings=settings["max_position_embeddings"],
        rms_norm_eps=settings["rms_norm_eps"],
        hidden_act=activation,
        mlp_bias=head.asks_for("mlp.gate_proj.bias", "mlp_bias"),
        layer_input="every" if every else "first",
        layer_scalar="layers.0.layer_scalar" in tensors,
        embedding_norm=settings.get("use_input_layernorm_in_first_layer", True),
        state_norm=not optional or "layers.0.hidden_norm.weight" in tensors,
        norm_before_residual=settings.get("norm_before_residual", False),
        final_norm=final_norm,
        norm_output=final_norm and norm_output,
        embed_scale=h**0.5 if is_gemma else 1.0,
        logit_softcap=settings.get("final_logit_softcapping") if is_gemma else None,
    )


def _feature_sizes(head: PublishedHead) -> tuple[int, int]:
    """The number of features that fc fuses, and the width of each."""
    h = hidden_size(head.tensors)
    settings = head.settings
    width = head.tensors["fc.weight"].shape[-1]
    num_taps = len(head.overrides.aux_layers or written_taps(head.config)[0])
    num_taps = num_taps or settings.get("num_aux_hidden_states")
    # Without a table of its own the head uses the target's, so their widths are the same.
    shares_embedding = "embed_tokens.weight" not in head.tensors
    if settings.get("target_hidden_size"):
        size = settings["target_hidden_size"]
    elif shares_embedding or (num_taps and width % h == 0):
        size = h
    elif head.target is not None:
        size = head.target.hidden_size
    else:
        size = max(width // (num_taps or 3), 1)
    if width % size:
        raise ValueError(
            f"fc takes {width} channels, which are no whole number of features of width {size}; "
            "the head belongs to another target, or its target_hidden_size is wrong"
        )
    return width // size, size


def _fusion(head: PublishedHead) -> FusionFields:
    """The fields about the features of the target that are fused: taps, width and norms."""
    settings = head.settings
    tensors = head.tensors
    num_aux = 1
    size = hidden_size(head.tensors)
    taps: dict[str, Any] = {"aux_ids_source": "final norm"}
    if head.family.fixed.get("uses_aux", True):
        num_aux, size = _feature_sizes(head)
        depth = head.target.num_layers if head.target else settings.get("num_target_layers")
        taps = read_taps(head.config, num_aux, depth, head.overrides, head.notes)
    norm = "none"
    if "input_norm.weight" in tensors or settings.get("norm_before_fc"):
        norm = "concat"
    elif "fc_norm.0.weight" in tensors or settings.get("fc_norm") or settings.get("use_aux_norm"):
        norm = "per_feature"
    return FusionFields(
        num_aux=num_aux,
        target_hidden_size=size,
        **taps,
        pre_fc_norm=norm,
        fc_bias="fc.bias" in tensors,
        fusion_norm="embedding_norm.weight" in tensors,
    )


def _parallel(head: PublishedHead, vocab_size: int) -> ParallelFields:
    """The fields about tokens drafted at once: P-EAGLE's mask, and ModelOpt's parallel heads."""
    tensors = head.tensors
    places = [name.split(".") for name in tensors if name.startswith("parallel_heads.")]
    number = len({place[1] for place in places})
    wanted = head.settings.get("parallel_draft_step")
    if wanted not in (None, number + 1):
        raise ValueError(
            f"config.json says parallel_draft_step {wanted}, and the checkpoint has {number} "
            "parallel draft heads; it is incomplete"
        )
    return ParallelFields(
        num_parallel_heads=number,
        parallel_head_layers=max((int(place[3]) for place in places), default=0) + 1,
        parallel_head_bias=any(place[-1] == "bias" for place in places),
        parallel_outputs=max(1, sum(name.startswith("parallel_outputs.") for name in tensors)),
        mask_token_id=mask_token(head.settings, vocab_size, "mask_hidden" in tensors),
        speculative_tokens_hint=tokens_hint(head.config),
    )


def _check_tables(config: Eagle3Config, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a table is missing that the head cannot share with its target."""
    if settings.get("embed_requires_grad") and config.embed_source != "file":
        raise ValueError(
            "the head was trained with an embedding of its own (embed_requires_grad), "
            "which the checkpoint lacks"
        )
    tables = {"an embed_tokens": config.embed_source, "an lm_head": config.lm_head_source}
    shared = [table for table, source in tables.items() if source != "file"]
    if shared and config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"the head is {config.hidden_size} wide and its target {config.target_hidden_size}, "
            f"so it needs {shared[0]} of its own, which the checkpoint lacks"
        )


def read_settings(
    config: Mapping[str, Any], family: Family, num_layers: int, overrides: Overrides
) -> dict[str, Any]:
    """All keys of a config in one dictionary, as a head of that family means them, no nulls.

    EAGLE's own keys win over general ones, and overrides over all. A list of layer types of
    another length than ``num_layers``, the checkpoint's, was copied from the target's config, and
    is dropped.
    """
    nested = config.get("transformer_layer_config") or {}
    # speculators builds a Qwen3Config where no model_type is written.
    model_type = nested.get("model_type", "qwen3") if nested else "llama"
    defaults = CLASS_DEFAULTS.get(model_type, CLASS_DEFAULTS["llama"])
    settings: dict[str, Any] = {}
    for section in (defaults, family.defaults, nested, config, config.get("eagle_config") or {}):
        settings |= {key: value for key, value in section.items() if value is not None}
    rope = settings.get("rope_parameters") or {}
    # Nested by layer type, it is the entry that trainers take; of Gemma's layers the global ones.
    types = ("full_attention", "sliding_attention")
    types = types if family.is_gemma else types[::-1]
    settings["rope_parameters"] = next((rope[t] for t in types if rope.get(t) is not None), rope)
    global_heads = settings.get("num_global_key_value_heads")
    if family.is_gemma and settings.get("attention_k_eq_v") and global_heads:
        settings["num_key_value_heads"] = global_heads
    if family.describes_layers:
        settings["qk_norm"] = nested.get("model_type") == "qwen3"
    else:
        copied = len(settings.get("layer_types", ())) != num_layers
        for key in (*COPIED, *(("layer_types",) if copied else ())):
            settings.pop(key, None)
    return settings | {key: value for key, value in vars(overrides).items() if value is not None}


def _drop_layers(tensors: dict[str, Tensor], num_layers: int, wanted: int | None) -> None:
    """Drop layers beyond the ``wanted`` number; None keeps every layer."""
    if wanted is None:
        return
    if not 1 <= wanted <= num_layers:
        raise ValueError(f"--num-layers {wanted}: the checkpoint has {num_layers}")
    surplus = tuple(f"layers.{i}." for i in range(wanted, num_layers))
    for name in [name for name in tensors if name.startswith(surplus)]:
        del tensors[name]


def _name_norms(head: PublishedHead) -> None:
    """Call the one norm of a layer without embedding ``hidden_norm``, whatever it came as."""
    for i in range(count_layers(head.tensors)):
        if head.input_width(i) == hidden_size(head.tensors):
            norm = head.tensors.pop(f"layers.{i}.input_layernorm.weight", None)
            if norm is not None:
                head.tensors.setdefault(f"layers.{i}.hidden_norm.weight", norm)


def _drop_early_stop(head: PublishedHead) -> None:
    """Drop the rows of AngelSlim's fc that say when to stop thinking, not what to draft.

    Its trainer takes them from a flag, so the config may not mention them.
    """
    h = hidden_size(head.tensors)
    tensors = head.tensors
    surplus = tensors["fc.weight"].rows - h if "fc.weight" in tensors else 0
    is_known = head.settings.get("early_stop_method") or surplus <= head.family.num_stop_rows
    if surplus <= 0 or not is_known:
        return
    head.notes.append(
        f"{surplus} rows of fc that estimate when to stop thinking are left out: drafts do not "
        "depend on them"
    )
    for name in tensors.keys() & {"fc.weight", "fc.bias"}:
        shape = (h, *tensors[name].shape[1:])
        tensors[name] = LazyTensor(tensors[name], lambda w: w[:h], shape)


def keep_outputs(tensors: dict[str, Tensor], kept: np.ndarray, num_tokens: int) -> None:
    """Keep the rows ``kept`` (n,) of matrices with one for each of ``num_tokens`` tokens."""
    rows = mx.array(kept)
    for name, output in tensors.items():
        is_output = name == "lm_head.weight" or name.startswith("parallel_outputs.")
        if is_output and output.rows == num_tokens:
            shape = (len(kept), *output.shape[1:])
            tensors[name] = LazyTensor(output, lambda w: w[rows], shape)


def _unpermute(rows: mx.array, num_heads: int) -> mx.array:
    """Undo llama.cpp's row order: each head's pairs (0, 1), (2, 3) ... -> its two halves."""
    width = rows.shape[0] // num_heads
    return rows.reshape(num_heads, width // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _reorder(head: PublishedHead, config: Eagle3Config, ids: np.ndarray | None) -> None:
    """Put rows in the order of their use: heads in halves, outputs of the draft's tokens only."""
    tensors = head.tensors
    tensors.pop("rope_freqs.weight", None)  # which the config holds by now
    if head.family.has_interleaved_heads and config.latent is None:
        for i in range(config.num_layers):
            for part, count in (("q", config.num_heads), ("k", config.num_kv_heads)):
                name = f"layers.{i}.self_attn.{part}_proj.weight"
                matrix = tensors.get(name)
                if matrix is not None:
                    turn = partial(_unpermute, num_heads=count)
                    tensors[name] = LazyTensor(matrix, turn, matrix.shape)
    if ids is not None:
        keep_outputs(tensors, ids, config.vocab_size)
    if "mask_hidden" in tensors:  # (1, 1, F) in most files
        mask = tensors["mask_hidden"]
        tensors["mask_hidden"] = LazyTensor(mask, lambda w: w.reshape(-1), (mask.size,))


def _doubts(head: PublishedHead, config: Eagle3Config, ids: np.ndarray | None) -> list[str]:
    """Notes about what the published config leaves open or may say wrongly."""
    family = head.family
    found = []
    if ids is not None and ids[-1] == len(ids) - 1:
        found.append(
            f"d2t is all zeros: the draft vocabulary is taken to be the first {len(ids)} ids; if "
            "acceptance is near zero the map was lost"
        )
    if family.residual_order_unknown and "norm_before_residual" not in head.settings:
        found.append(
            "the config does not say norm_before_residual; taken as false, the class default; "
            "if acceptance is low try --norm-before-residual"
        )
    is_plain = config.norm_output and config.pre_fc_norm == "none"
    if is_plain and family.norm_output_unknown and head.overrides.norm_output is None:
        found.append(
            "norm_output is set without fc_norm; SpecForge before September 2026 meant plain "
            "EAGLE-3 by that; if acceptance is low try --no-norm-output"
        )
    trained = None
    if family.rope_base_unknown:
        trained = "AngelSlim may have trained"
    elif config.latent is not None and config.rope["type"] == "yarn" and config.uses_aux:
        trained = "a head with latent attention and yarn was probably trained (by TorchSpec)"
    if trained is not None and config.rope["theta"] != DEFAULT_THETA:
        found.append(
            f"{trained} with rope base 10000 whatever its config says; if acceptance is low try "
            "--rope-theta 10000"
        )
    return found


def resolve(
    checkpoint: DraftCheckpoint,
    target: TargetSizes | None = None,
    overrides: Overrides = NO_OVERRIDES,
) -> Resolved:
    """Work out which head the checkpoint holds.

    With ``target`` the taps become definite and both are checked against each other. Raises
    ValueError, one sentence, for whatever is refused, missing or contradictory.
    """
    family, tensors = find_family(checkpoint)
    num_layers = count_layers(tensors)
    settings = read_settings(checkpoint.config, family, num_layers, overrides)
    _drop_layers(tensors, num_layers, overrides.num_layers)
    head = PublishedHead(family, checkpoint.config, settings, tensors, target, overrides)
    _name_norms(head)
    _drop_early_stop(head)
    vocabulary, ids = read_vocabulary(tensors, settings)
    if not family.owns_embedding:
        vocabulary = replace(vocabulary, embed_source="target")
    for name in ("d2t", "t2d", *(() if family.owns_embedding else ("embed_tokens.weight",))):
        tensors.pop(name, None)
    values: dict[str, Any] = {"family": family.name}
    for group in (_layers(head), _attention(head), _fusion(head), vocabulary):
        values |= vars(group)
    values |= vars(_parallel(head, vocabulary.vocab_size)) | family.fixed
    config = Eagle3Config(**values)
    _reorder(head, config, ids)
    check_tensors(stored_shapes(config), tensors)
    _check_tables(config, settings)
    if target is not None:
        config.check_fit(target)
        if ids is not None and ids[-1] >= target.vocab_size:
            raise ValueError(
                f"the head drafts token {ids[-1]}, and {target.name} has only "
                f"{target.vocab_size} tokens; give the target it was trained for"
            )
    notes = (*head.notes, *_doubts(head, config, ids))
    return Resolved(family, config, tensors, ids, notes)
