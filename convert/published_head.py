"""Read what a published head says of itself: tensors by canonical names, and keys of its config.

Types are checked before, with the tables in ``schema.py``; the rotary embedding is in ``rope.py``.
Taps end as boundary ids: id b is the residual stream entering layer b, and b = N the one after
the last layer, before the final norm. Configs number them in two ways (see ``read_nested``).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_eagle.drafters.config import default_ids, is_default, read_nested
from mlx_eagle.drafters.folder import rows_of
from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import COUNT, shown

from .checkpoint import AnyTarget
from .families import Family, hidden_size
from .rope import scaling_entry, scaling_type

# transformers' class defaults, for configs that were saved as the difference from them.
CLASS_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096},
}
COPIED = ("qk_norm", "attention_bias", "mlp_bias")
"""Keys about layers that most trainers copy from the target's config."""
TAPS = "eagle_aux_hidden_state_layer_ids"
P_EAGLE = re.compile(r"P-?[Ee]agle")
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
ATTENTION = "layers.0.self_attn."
ENTRANCES = ("k_proj", "kv_a_proj_with_mqa", "q_proj", "q_a_proj")
"""Matrices that take what a layer attends from."""


@dataclass(frozen=True)
class Overrides:
    """Settings that the user knows better than the checkpoint; None leaves one to the rules."""

    aux_layers: tuple[int, ...] | None = None
    aux_offset: int | None = None
    rope_theta: float | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    num_layers: int | None = None
    mask_token_id: int | None = None


NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class PublishedHead:
    """A head as published: tensors by canonical names, unread, and the keys of its config.

    ``settings`` are these keys in one dictionary (see ``merge_settings``). ``target`` is the
    model it was trained for, if known. Doubts are added to ``notes``, each a sentence for the
    user.
    """

    family: Family
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    target: AnyTarget | None = None
    overrides: Overrides = NO_OVERRIDES
    notes: list[str] = field(default_factory=list)

    @property
    def hidden_size(self) -> int:
        return hidden_size(self.tensors)

    @property
    def num_layers(self) -> int:
        """Its number of layers; ValueError if one between them is missing."""
        return count_layers(self.tensors)

    def rows(self, name: str) -> int:
        """The rows of a matrix of layer 0's attention; ValueError if it is missing."""
        return rows_of(self.tensors, f"{ATTENTION}{name}.weight")

    def asks_for(self, tensor: str, key: str) -> bool:
        """True if layer 0 has the tensor or the config asks for it, so that it must be there."""
        return f"layers.0.{tensor}" in self.tensors or bool(self.settings.get(key))

    def input_width(self, index: int) -> int | None:
        """The width of what a layer attends from; None if it has no attention known here."""
        for name in ENTRANCES:
            matrix = self.tensors.get(f"layers.{index}.self_attn.{name}.weight")
            if matrix is not None:
                return matrix.shape[-1]
        return None

    def window_fields(self) -> dict[str, Any]:
        """The width of sliding attention, None without it, and the layers that see everything."""
        kinds = (self.settings.get("layer_types") or [])[: self.num_layers]
        size = self.settings.get("sliding_window") if "sliding_attention" in kinds else None
        if self.settings.get("use_sliding_window") is False:
            size = None
        full = [i for i, kind in enumerate(kinds) if size and kind != "sliding_attention"]
        return {"sliding_window": size, "full_attention_layers": tuple(full)}

    def softmax_scale(self, latent: Mapping[str, Any] | None) -> float | None:
        """DeepSeek's scale of the scores under yarn, None for the usual one.

        Mistral's heads do without (apply_scale).
        """
        scaling = scaling_entry(self.settings)
        weight = scaling.get("mscale_all_dim") or 0
        factor = scaling.get("factor") or 1
        if latent is None or scaling_type(scaling) != "yarn" or not weight or factor <= 1:
            return None
        if scaling.get("apply_yarn_scaling") is False:
            return None
        width = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
        return float((0.1 * weight * math.log(factor) + 1) ** 2 / math.sqrt(width))

    def position_scale(self) -> dict[str, Any] | None:
        """The growth of queries with their position, in Mistral's keys or in transformers'."""
        entry = self.settings.get("llama_4_scaling") or {}
        scaling = scaling_entry(self.settings)
        beta = entry.get("beta", scaling.get("llama_4_scaling_beta"))
        original = entry.get("original_max_position_embeddings")
        original = original or scaling.get("original_max_position_embeddings")
        if not beta or not original:
            return None
        return {"beta": float(beta), "original_max_position_embeddings": float(original)}

    def tokens_hint(self) -> int | None:
        """The number of tokens that speculators' config proposes to draft."""
        methods = (self.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        hint = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
        return hint if COUNT.holds(hint) else None

    def mask_token(self, vocab_size: int) -> int | None:
        """The token in the masked slots of a P-EAGLE head, None for other heads.

        Raises ValueError if config and tensors contradict each other about it.
        """
        settings = self.settings
        is_declared = (
            settings.get("speculators_model_type") == "peagle"
            or settings.get("parallel_drafting")
            or "pard_token" in settings
            or "ptd_token_id" in settings
            or any(P_EAGLE.match(name) for name in settings.get("architectures", ()))
        )
        if "mask_hidden" not in self.tensors:
            if is_declared:
                raise ValueError(
                    "the head drafts in parallel (P-EAGLE), says its config, and the checkpoint "
                    "lacks mask_hidden; it is incomplete"
                )
            return None
        token = next((settings[key] for key in MASK_TOKENS if key in settings), None)
        if token is None:
            raise ValueError(
                "the head drafts in parallel (P-EAGLE), and its config names no mask_token_id "
                "(nor ptd_token_id or pard_token); give the one it was trained with as "
                "--mask-token-id"
            )
        if token >= vocab_size:
            raise ValueError(
                f"the head masks with token {token}, and its vocabulary has {vocab_size}; give "
                "the one it was trained with as --mask-token-id"
            )
        return token

    def written_taps(self) -> tuple[tuple[int, ...], str]:
        """The ids of taps in the config, and their place there; () if it names none."""
        nested = self.config.get("eagle_config") or {}
        for ids, place in (
            (self.config.get("target_layer_ids"), "target_layer_ids+1"),
            (self.config.get(TAPS), "top-level"),
            (nested.get(TAPS), "nested"),
        ):
            if ids:
                return tuple(ids), place
        return (), "default"

    @property
    def target_depth(self) -> int | None:
        """The target's number of layers, None if unknown."""
        return self.target.num_layers if self.target else self.settings.get("num_target_layers")

    def tap_fields(self, num_aux: int) -> dict[str, Any]:
        """The fields about taps, of a head that fuses ``num_aux`` features.

        An override wins over the config. Raises ValueError for ids that cannot be.
        """
        if self.overrides.aux_layers is not None and self.overrides.aux_offset is not None:
            raise ValueError("give --aux-layers or --aux-offset, not both")
        written, place = self.written_taps()
        ids, source = self._read_taps(written, place)
        self._check_taps(ids, source, num_aux)
        is_open = place == "nested" and self.target_depth is None and source != "override"
        return {
            "aux_boundary_ids": ids,
            "aux_ids_source": source,
            "aux_nested_ids": written if is_open else None,
        }

    def _read_taps(
        self, written: tuple[int, ...], place: str
    ) -> tuple[tuple[int, ...] | None, str]:
        """Boundary ids and their origin; None for the default ids of an unknown target."""
        depth = self.target_depth
        default = default_ids(depth) if depth else None
        outputs = tuple(i + 1 for i in written)
        if self.overrides.aux_layers is not None:
            return tuple(self.overrides.aux_layers), "override"
        if self.overrides.aux_offset is not None:
            base = written or default
            if base is None:
                raise ValueError(
                    "--aux-offset needs ids to shift, and the config names none: give --target too"
                )
            return tuple(i + self.overrides.aux_offset for i in base), "override"
        if place == "target_layer_ids+1":
            return outputs, place
        if place == "nested":
            reading = read_nested(written, depth)
            if not reading.is_certain:
                self._doubt_taps(written, reading.ids)
            return reading.ids, reading.source
        if written and written[0] == 1 and is_default(outputs, depth):
            self.notes.append(
                f"the taps {shown(written)} look like numbers of layer outputs that a converter "
                "copied; taken as written; if acceptance is low try --aux-offset 1"
            )
        return written or default, place

    def _doubt_taps(self, written: tuple[int, ...], ids: tuple[int, ...]) -> None:
        """Note that ids could be numbers of layers or of their outputs, read as ``ids``."""
        text = shown(written)
        if self.target_depth is None:
            self.notes.append(
                f"what the taps {text} mean depends on the target's depth, so it is settled when "
                "the head meets its target; give --target to settle it now"
            )
        else:
            self.notes.append(
                f"the taps {text} fit neither numbering; read as outputs of these layers, so "
                f"{shown(ids)}; if acceptance is low try --aux-layers "
                f"{text[1:-1].replace(' ', '')}"
            )

    def _check_taps(self, ids: tuple[int, ...] | None, source: str, num_aux: int) -> None:
        if ids is None:
            if num_aux != 3:
                raise ValueError(
                    f"fc fuses {num_aux} features and the config names no taps; give --aux-layers"
                )
            return
        taps = f"taps {shown(ids)} ({source})"
        if len(ids) != num_aux:
            raise ValueError(
                f"{len(ids)} {taps}, but fc fuses {num_aux} features; give --aux-layers with as "
                "many"
            )
        # The default of a shallow target names a layer twice, as the official code does.
        in_order = sorted(ids) if source == "default" else sorted(set(ids))
        if min(ids) < 0 or list(ids) != in_order:
            raise ValueError(f"the {taps} are not ascending numbers from 0; give --aux-layers")
        if self.target_depth is not None and ids[-1] > self.target_depth:
            raise ValueError(
                f"the {taps} go beyond the target's {self.target_depth} layers; this head belongs "
                "to another target, or give --aux-layers"
            )


def count_layers(tensors: Mapping[str, Tensor]) -> int:
    """The number of layers; ValueError if one between them is missing."""
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if numbers != set(map(str, range(len(numbers)))):
        raise ValueError(
            f"the checkpoint's layers are {shown(sorted(numbers))}, expected numbers from 0 "
            "without a gap; it is incomplete"
        )
    return len(numbers)


def merge_settings(config: Mapping[str, Any], family: Family, num_layers: int) -> dict[str, Any]:
    """All keys of a config in one dictionary, nulls dropped; EAGLE's own keys win.

    ``num_layers`` is the checkpoint's number of layers. A list of layer types of another length
    was copied from the target's config, and is dropped.
    """
    nested = config.get("transformer_layer_config") or {}
    # speculators builds a Qwen3Config where no model_type is written.
    kind = nested.get("model_type", "qwen3") if nested else "llama"
    sections = (
        CLASS_DEFAULTS.get(kind, CLASS_DEFAULTS["llama"]),
        family.defaults,
        nested,
        config,
        config.get("eagle_config") or {},
    )
    settings = {k: v for section in sections for k, v in section.items() if v is not None}
    if family.is_gemma:
        rope = settings.get("rope_parameters") or {}
        settings["rope_parameters"] = rope.get("full_attention", rope)
        if settings.get("attention_k_eq_v") and "num_global_key_value_heads" in settings:
            settings["num_key_value_heads"] = settings["num_global_key_value_heads"]
    if family.describes_layers:
        return settings | {"qk_norm": nested.get("model_type") == "qwen3"}
    if len(settings.get("layer_types", ())) != num_layers:
        settings.pop("layer_types", None)
    return {key: value for key, value in settings.items() if key not in COPIED}
