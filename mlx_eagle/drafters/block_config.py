"""Config of a drafter of blocks, and how it is read from both layouts of published configs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ..system.fields import (
    BOOL,
    INT_LIST,
    LIST,
    NUMBER,
    OBJECT,
    POSITIVE,
    TEXT,
    TEXTS,
    Table,
    check,
    list_of,
    number_above,
    one_of,
    shown,
    whole,
)
from .folder import LARGEST_WIDTH, SIZE, FolderConfig, Size, rows_of
from .kind import Tensor, Tensors
from .target_parts import TargetSizes

FEW = whole(1, 256)
Few = Annotated[int, FEW]
LAYER_IDS = list_of(whole(-1, 4096), "whole numbers from -1")
SCALINGS = ("linear", "llama3", "yarn")
ACTIVATION = one_of("silu", "gelu_pytorch_tanh")
SECTIONS: Table = {"transformer_layer_config": OBJECT, "dflash_config": OBJECT}
FLAGS = (
    "use_swa", "use_sliding_window", "sliding_window_non_causal", "causal", "is_causal",
    "dflash_query_causal", "dspark_bonus_anchor", "sample_from_anchor", "rope_is_neox_style",
)  # fmt: skip
"""Keys of a published config that are true or false."""
PUBLISHED: Table = {
    **dict.fromkeys(FLAGS, BOOL),
    "target_layer_ids": LAYER_IDS,
    "block_size": FEW,
    "input_embedding_scale": POSITIVE,
    "final_logit_softcapping": POSITIVE,
    "swa_window_size": SIZE,
    "selector_top_k": whole(1, 2**16),
    "aux_hidden_state_layer_ids": INT_LIST,
    "speculators_config": {"proposal_methods": LIST},
    "vocab_size": SIZE,
    "rope_parameters": {"rope_type": TEXT},
    "rope_scaling": OBJECT,
    "layer_types": TEXTS,
    "sliding_window": whole(),
}
"""Types of keys of a published config, in any section, beside those of our own names."""

MUSE_TYPE = "muse_glimmer_assistant"
MUSE: dict[str, Any] = {
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "vocab_size": 202048,
}
"""Defaults of transformers for keys that a Muse assistant's config leaves out."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(FolderConfig):
    """The ``config.json`` of a converted drafter of blocks.

    ``taps`` are as in ``Drafter``. Of the ``block_size`` slots of a block the first holds the
    newest token, and ``first_slot`` is the first that drafts one: 1, or 0 where every slot drafts
    what follows it.

    ``windows`` are the numbers of positions that each layer sees, 0: all; () if no layer has a
    window. A window reaches back from each "query", or from the "anchor", the newest token. In
    ``causal_layers`` a slot sees no later slots of its block.

    Embeddings are multiplied by ``embed_scale``, and if ``scales_as_target`` also by the
    target's own factor.
    """

    num_layers: Few
    num_heads: Few
    num_kv_heads: Few
    head_dim: Size
    intermediate_size: Size
    draft_vocab_size: Size
    taps: Annotated[tuple[int, ...], INT_LIST]
    mask_token_id: Annotated[int, whole(0, 2**24)]
    block_size: Few
    first_slot: Annotated[int, whole(0, 1)] = 1
    hidden_act: Annotated[str, ACTIVATION] = "silu"
    rms_norm_eps: Annotated[float, number_above(0, 1)] = 1e-6
    max_position_embeddings: Size = 32768
    rope_theta: Annotated[float, number_above(1, 1e15)] = 10000.0
    rope_scaling: Annotated[dict[str, Any] | None, OBJECT] = None
    rope_traditional: bool = False
    windows: Annotated[tuple[int, ...], INT_LIST] = ()
    window_from: Annotated[str, one_of("query", "anchor")] = "query"
    causal_layers: Annotated[tuple[int, ...], INT_LIST] = ()
    attention_bias: bool = False
    has_sinks: bool = False
    embed_scale: Annotated[float, POSITIVE] = 1.0
    scales_as_target: bool = True
    logit_softcap: Annotated[float | None, POSITIVE] = None
    embed_source: Annotated[str, one_of("target", "file")] = "target"
    lm_head_source: Annotated[str, one_of("target", "file")] = "target"

    def rules(self) -> Iterator[tuple[str, bool]]:
        layers = range(self.num_layers)
        yield "num_heads num_kv_heads", self.num_heads % self.num_kv_heads == 0
        yield "head_dim", self.head_dim % 2 == 0
        yield "num_heads head_dim", self.num_heads * self.head_dim <= LARGEST_WIDTH
        yield "taps hidden_size", 0 < len(self.taps) * self.hidden_size <= LARGEST_WIDTH
        yield "windows num_layers", len(self.windows) in (0, self.num_layers)
        yield "causal_layers num_layers", all(layer in layers for layer in self.causal_layers)
        yield "block_size first_slot", self.block_size > self.first_slot
        yield "draft_vocab_size vocab_size", self.draft_vocab_size <= self.vocab_size
        yield "mask_token_id vocab_size", self.mask_token_id < self.vocab_size

    def check_fit(self, target: TargetSizes) -> None:
        target.check_width("drafter", self.hidden_size)
        if max(self.taps) > target.num_layers:
            raise ValueError(
                f"the drafter taps layers {shown(self.taps)}, but the target has "
                f"{target.num_layers} layers: use the one made for this model."
            )
        target.check_vocabulary("drafter", self.vocab_size, self.mask_token_id)

    @property
    def longest_draft(self) -> int:
        return self.block_size - self.first_slot

    @property
    def has_d2t(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def window(self, layer: int) -> int | None:
        """Number of positions that a layer sees; None: all."""
        return (self.windows[layer] or None) if self.windows else None

    def sees_all(self, layer: int, length: int) -> bool:
        """Whether a block's slots see all ``length`` positions up to its end."""
        return layer not in self.causal_layers and length <= (self.window(layer) or length)


def readings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Other readings of a config, one changed field at a time; see ``Kind.readings``."""
    taps = list(config["taps"])
    layers = list(range(config["num_layers"]))
    is_causal = bool(config["causal_layers"])
    is_scaled = config["scales_as_target"]
    found: dict[str, dict[str, Any]] = {}
    for by in (1, -1):
        if min(taps) + by >= 0:
            found[f"taps {by:+d}"] = {"taps": [tap + by for tap in taps]}
    first = 1 - config["first_slot"]
    if config["block_size"] > first:
        found[f"slot {first} drafts first"] = {"first_slot": first}
    found["not causal" if is_causal else "causal"] = {"causal_layers": [] if is_causal else layers}
    found["raw embeddings" if is_scaled else "embeddings scaled as the target's"] = {
        "scales_as_target": not is_scaled
    }
    is_traditional = config["rope_traditional"]
    found[f"{'half' if is_traditional else 'neighbouring'} channels turned"] = {
        "rope_traditional": not is_traditional
    }
    return found


def bare_name(name: str) -> str:
    """The name of a tensor in our modules: model.encoder.fc.weight -> fc.weight"""
    bare = name.removeprefix("model.").replace("encoder.output_norm_enc.", "hidden_norm.")
    return bare.removeprefix("encoder.")


def known_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors under the names of our modules, without training leftovers."""
    found = {}
    for name, tensor in tensors.items():
        bare = bare_name(name)
        if bare != "t2d" and not bare.startswith("verifier_") and "rotary_emb" not in bare:
            found[bare] = tensor
    return found


def merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a published config in one dictionary, the more telling ones last."""
    check(config, SECTIONS, "config.json")
    inner, inside = (config.get(name) or {} for name in SECTIONS)
    settings = {k: v for part in (inner, config, inside) for k, v in part.items() if v is not None}
    check(settings, PUBLISHED, "config.json")
    return settings


def _need(settings: Mapping[str, Any], key: str) -> Any:
    if key not in settings:
        raise ValueError(f"config.json has no {key}, which a drafter of blocks needs; add it")
    return settings[key]


def sizes_from(tensors: Tensors) -> dict[str, Any]:
    """The fields that the shapes of the tensors tell."""
    attention = "layers.0.self_attn."
    head_dim = rows_of(tensors, f"{attention}q_norm.weight")
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    return {
        "hidden_size": rows_of(tensors, "norm.weight"),
        "num_layers": len(numbers),
        "num_heads": max(rows_of(tensors, f"{attention}q_proj.weight") // head_dim, 1),
        "num_kv_heads": max(rows_of(tensors, f"{attention}k_proj.weight") // head_dim, 1),
        "head_dim": head_dim,
        "intermediate_size": rows_of(tensors, "layers.0.mlp.gate_proj.weight"),
        "attention_bias": f"{attention}q_proj.bias" in tensors,
        "has_sinks": f"{attention}attention_sink_bias" in tensors,
        "embed_source": "file" if "embed_tokens.weight" in tensors else "target",
        "lm_head_source": "file" if "lm_head.weight" in tensors else "target",
    }


def rope_from(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields about rope; partial rotation and mrope are noise copied off a target."""
    rope = settings.get("rope_parameters") or {}
    scaling = settings.get("rope_scaling") or rope
    name = scaling.get("rope_type") or scaling.get("type") or "default"
    found: dict[str, Any] = {
        "rope_theta": rope.get("rope_theta") or settings.get("rope_theta") or 10000.0,
        "rope_traditional": settings.get("rope_is_neox_style") is False,
    }
    if name in ("default", "mrope", "proportional"):
        return found
    if name not in SCALINGS or not NUMBER.holds(scaling.get("factor")):
        raise ValueError(
            f"the drafter's rope is of type {shown(name)}; default, {', '.join(SCALINGS)} with a "
            "factor convert"
        )
    numbers = {k: v for k, v in scaling.items() if NUMBER.holds(v) and k != "rope_theta"}
    return found | {"rope_scaling": {"rope_type": name, **numbers}}


def windows_from(settings: Mapping[str, Any], num_layers: int, is_nested: bool) -> dict[str, Any]:
    """The fields about sliding layers, by the rules of the library that trained the drafter.

    z-lab: a sliding layer is causal in its block unless ``is_causal`` is false, other layers
    only if it is true. speculators: a sliding layer is causal unless
    ``sliding_window_non_causal``, and its window lies before the anchor. ModelOpt with
    ``use_swa``: a window on every layer.
    """
    layer_types = (settings.get("layer_types") or ["full_attention"] * num_layers)[:num_layers]
    size = settings.get("sliding_window") or settings.get("swa_window_size")
    is_off = settings.get("use_sliding_window") is False
    slides = [each == "sliding_attention" and bool(size) and not is_off for each in layer_types]
    slides += [False] * (num_layers - len(slides))
    if settings.get("use_swa") and not any(slides):
        return {"windows": (_need(settings, "swa_window_size"),) * num_layers}
    is_causal = settings.get("causal") or settings.get("dflash_query_causal")
    if is_nested:
        causal = [own and not settings.get("sliding_window_non_causal") for own in slides]
    else:
        said = settings.get("is_causal")
        causal = [said is not False if own else said is True for own in slides]
    return {
        "windows": tuple(size if own else 0 for own in slides) if any(slides) else (),
        "window_from": "anchor" if is_nested else "query",
        "causal_layers": tuple(i for i, own in enumerate(causal) if own or is_causal),
    }


def config_from(tensors: Tensors, config: Mapping[str, Any]) -> BlockConfig:
    """The config of a published checkpoint of DFlash."""
    is_muse = config.get("model_type") == MUSE_TYPE
    fields = fields_from(tensors, (MUSE if is_muse else {}) | merged(config))
    if is_muse:
        seen = [window and window + 1 for window in fields["windows"]]  # it counts the query apart
        fields |= {"windows": seen, "causal_layers": (), "scales_as_target": False}
    return BlockConfig.from_dict(fields, "config.json")


def first_slot_from(settings: Mapping[str, Any], default: int) -> int:
    """The slot that drafts the first token, by the surest key that a config has for it."""
    methods = (settings.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
    block_size = _need(settings, "block_size")
    if isinstance(drafted, int) and block_size - drafted in (0, 1):
        return int(block_size - drafted)
    if settings.get("sample_from_anchor") is not None:
        return 0 if settings["sample_from_anchor"] else 1
    if settings.get("dspark_bonus_anchor") is not None:
        return 1 if settings["dspark_bonus_anchor"] else 0
    return default


def fields_from(tensors: Tensors, settings: Mapping[str, Any], first: int = 1) -> dict[str, Any]:
    """The fields of all drafters of blocks, from published keys; ``first`` slot if none says."""
    is_nested = "transformer_layer_config" in settings
    sizes = sizes_from(tensors)
    if is_nested:
        taps = _need(settings, "aux_hidden_state_layer_ids")
        embeds: dict[str, Any] = {"scales_as_target": False}  # trained on the raw rows of a copy
    else:
        taps = [i + 1 for i in _need(settings, "target_layer_ids")]
        embeds = {"embed_scale": settings.get("input_embedding_scale")}
    vocab_size = _need(settings, "vocab_size")
    draft_vocab = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocab_size
    if draft_vocab < vocab_size and "d2t" not in tensors:
        raise ValueError(
            f"the draft vocabulary has {draft_vocab} of {vocab_size} tokens, and there is no d2t "
            "to map them; the checkpoint is incomplete"
        )
    return {
        **sizes,
        **embeds,
        **rope_from(settings),
        **windows_from(settings, sizes["num_layers"], is_nested),
        "taps": tuple(taps),
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab,
        "mask_token_id": _need(settings, "mask_token_id"),
        "block_size": _need(settings, "block_size"),
        "first_slot": first_slot_from(settings, first),
        "hidden_act": settings.get("hidden_act"),
        "rms_norm_eps": settings.get("rms_norm_eps"),
        "max_position_embeddings": settings.get("max_position_embeddings"),
        "logit_softcap": settings.get("final_logit_softcapping"),
    }
