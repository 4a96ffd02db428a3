"""Read what the config of a published head says: types of its keys, its taps, scales and rope.

After ``fields.check`` with one of the tables nothing has to check a type again. A key that is in
no table is read as text only. Taps end as boundary ids: id b is the residual stream entering layer
b, and b = N the one after the last layer, before the final norm. The target's rope never stands in
for a missing one.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import apply_yarn_mscale

from mlx_eagle.drafters.config import LATENT, default_ids, is_default, read_nested
from mlx_eagle.drafters.folder import SIZE
from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import (
    BOOL,
    COUNT,
    INT_LIST,
    LIST,
    OBJECT,
    TEXT,
    TEXTS,
    FieldType,
    Table,
    list_of,
    number_above,
    shown,
    whole,
)

FRACTION = number_above(0, 1)
BASE = number_above(1, 1e15)
POSITIVE = number_above(1e-6, 1e9)
WEIGHT = number_above(-1e6, 1e6)


def _keys(each: FieldType, names: str) -> Table:
    """A table with one type for all of these names."""
    return dict.fromkeys(names.split(), each)


SCALING: Table = {
    **_keys(TEXT, "rope_type type"),
    "rope_theta": BASE,
    **_keys(POSITIVE, "factor low_freq_factor high_freq_factor beta_fast beta_slow"),
    **_keys(POSITIVE, "original_max_position_embeddings attention_factor"),
    **_keys(WEIGHT, "mscale mscale_all_dim llama_4_scaling_beta"),
    "short_factor": list_of(POSITIVE, "numbers above 0"),
    "partial_rotary_factor": FRACTION,
    **_keys(BOOL, "truncate apply_yarn_scaling"),
}
HEAD: Table = {
    **dict.fromkeys(LATENT, COUNT),
    "llama_4_scaling": {"beta": WEIGHT, "original_max_position_embeddings": POSITIVE},
    **_keys(TEXT, "model_type hidden_act hidden_activation"),
    **_keys(SIZE, "hidden_size num_attention_heads num_key_value_heads head_dim rotary_dim"),
    **_keys(SIZE, "vocab_size max_position_embeddings"),
    **_keys(FRACTION, "rms_norm_eps partial_rotary_factor"),
    **_keys(BOOL, "qk_norm attention_bias mlp_bias use_sliding_window rope_interleave"),
    "layer_types": TEXTS,
    "sliding_window": COUNT,
    "rope_theta": BASE,
    "rope_scaling": SCALING,
    "rope_parameters": {**SCALING, "sliding_attention": SCALING, "full_attention": SCALING},
    **_keys(COUNT, "target_hidden_size draft_vocab_size num_target_layers num_aux_hidden_states"),
    **_keys(COUNT, "mask_token_id pard_token ptd_token_id"),
    **_keys(INT_LIST, "target_layer_ids eagle_aux_hidden_state_layer_ids"),
    **_keys(BOOL, "norm_before_fc norm_before_residual norm_output return_hidden_post_norm"),
    **_keys(BOOL, "fc_norm use_aux_norm use_input_layernorm_in_first_layer use_last_layernorm"),
    **_keys(BOOL, "embed_requires_grad parallel_drafting attention_k_eq_v"),
    "parallel_draft_step": whole(1, 1024),
    "early_stop_method": TEXT,
    "num_global_key_value_heads": SIZE,
    "final_logit_softcapping": POSITIVE,
}
STOP_TOKENS = FieldType(
    "a token or a list of tokens", lambda value: COUNT.holds(value) or INT_LIST.holds(value)
)
CONFIG: Table = {
    **HEAD,
    "architectures": TEXTS,
    **_keys(OBJECT, "quantization_config compression_config"),
    "eos_token_id": STOP_TOKENS,
    "eagle_config": HEAD,
    "transformer_layer_config": HEAD,
    "speculators_config": {"proposal_methods": LIST},
}
"""The config of a published head."""

SIZES = _keys(SIZE, "hidden_size n_embd d_model vocab_size num_hidden_layers n_layer n_layers")
TARGET: Table = {
    **SIZES,
    "text_config": SIZES,
    "quantization": OBJECT,
    "eos_token_id": STOP_TOKENS,
}
"""The config of a target."""
PACKING: Table = {"group_size": whole(1, 4096), "bits": whole(1, 16), "mode": TEXT}
"""The entry that says how a target's matrix is quantized."""

# transformers' class defaults, for configs that were saved as the difference from them.
CLASS_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096},
}
TAPS = "eagle_aux_hidden_state_layer_ids"
P_EAGLE = re.compile(r"P-?[Ee]agle")
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
DEFAULT_THETA = 10000.0
ROPE_KEYS = {
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim",
}
"""The keys that mlx-lm's ``initialize_rope`` reads, by type of scaling."""
# In text without images all position components of mrope are equal, so it is plain rope.
PLAIN = ("default", "none", "mrope")


@dataclass(frozen=True)
class Overrides:
    """Settings that the user knows better than the checkpoint; None leaves one to the rules."""

    aux_layers: tuple[int, ...] | None = None
    rope_theta: float | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    num_layers: int | None = None
    mask_token_id: int | None = None


NO_OVERRIDES = Overrides()


def renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of some keys, under new names, without nulls."""
    return {new: values[old] for old, new in names.items() if values.get(old) is not None}


def written_taps(config: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    """The ids of taps in a config, and their place there; () if it names none."""
    nested = config.get("eagle_config") or {}
    for ids, place in (
        (config.get("target_layer_ids"), "target_layer_ids+1"),
        (config.get(TAPS), "top-level"),
        (nested.get(TAPS), "nested"),
    ):
        if ids:
            return tuple(ids), place
    return (), "default"


def read_taps(
    config: Mapping[str, Any],
    num_aux: int,
    depth: int | None,
    overrides: Overrides,
    notes: list[str],
) -> dict[str, Any]:
    """The fields about taps, of a head that fuses ``num_aux`` features.

    ``depth`` is the target's number of layers, if known. An override wins over the config. Doubts
    are added to ``notes``. Raises ValueError for ids that cannot be.
    """
    written, source = written_taps(config)
    outputs = tuple(i + 1 for i in written)
    open_ids = None
    ids = written or (default_ids(depth) if depth else None)
    if overrides.aux_layers is not None:
        ids = tuple(overrides.aux_layers)
        source = "override"
    elif source == "target_layer_ids+1":
        ids = outputs
    elif source == "nested":
        reading = read_nested(written, depth)
        ids = reading.ids
        source = reading.source
        open_ids = written if depth is None else None
        if not reading.is_certain:
            notes.append(_doubt_about_taps(written, ids, depth))
    elif written and written[0] == 1 and is_default(outputs, depth):
        notes.append(
            f"the taps {shown(written)} look like numbers of layer outputs that a converter "
            "copied; taken as written; if acceptance is low try --aux-layers "
            f"{','.join(map(str, outputs))}"
        )
    _check_taps(ids, source, num_aux)
    return {"aux_boundary_ids": ids, "aux_ids_source": source, "aux_nested_ids": open_ids}


def _doubt_about_taps(written: tuple[int, ...], ids: tuple[int, ...], depth: int | None) -> str:
    """The note that ids could be numbers of layers or of their outputs, read as ``ids``."""
    text = shown(written)
    if depth is None:
        return (
            f"what the taps {text} mean depends on the target's depth, so it is settled when the "
            "head meets its target; give --target to settle it now"
        )
    return (
        f"the taps {text} fit neither numbering; read as outputs of these layers, so "
        f"{shown(ids)}; if acceptance is low try --aux-layers {text[1:-1].replace(' ', '')}"
    )


def _check_taps(ids: tuple[int, ...] | None, source: str, num_aux: int) -> None:
    """Raise ValueError for ids that a head of ``num_aux`` features cannot have."""
    if ids is None:
        if num_aux != 3:
            raise ValueError(
                f"fc fuses {num_aux} features and the config names no taps; give "
                "mlx_eagle.convert --aux-layers"
            )
        return
    taps = f"taps {shown(ids)} ({source})"
    if len(ids) != num_aux:
        raise ValueError(
            f"{len(ids)} {taps}, but fc fuses {num_aux} features; give mlx_eagle.convert "
            "--aux-layers with as many"
        )
    # The default of a shallow target names a layer twice, as the official code does.
    in_order = sorted(ids) if source == "default" else sorted(set(ids))
    if min(ids) < 0 or list(ids) != in_order:
        raise ValueError(
            f"the {taps} are not ascending numbers from 0; give mlx_eagle.convert --aux-layers"
        )


def tokens_hint(config: Mapping[str, Any]) -> int | None:
    """The number of tokens that speculators' config proposes to draft."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    hint = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
    return hint if COUNT.holds(hint) else None


def mask_token(settings: Mapping[str, Any], vocab_size: int, has_mask: bool) -> int | None:
    """The token in the masked slots of a P-EAGLE head, None for other heads.

    ``has_mask`` says whether the checkpoint holds the state of these slots. Raises ValueError if
    it and the config contradict each other.
    """
    is_declared = (
        settings.get("speculators_model_type") == "peagle"
        or settings.get("parallel_drafting")
        or settings.keys() & {"pard_token", "ptd_token_id"}
        or any(P_EAGLE.match(name) for name in settings.get("architectures", ()))
    )
    if not has_mask:
        if is_declared:
            raise ValueError(
                "the head drafts in parallel (P-EAGLE), says its config, and the checkpoint "
                "lacks mask_hidden; it is incomplete"
            )
        return None
    token = next((settings[key] for key in MASK_TOKENS if key in settings), None)
    if token is None:
        raise ValueError(
            "the head drafts in parallel (P-EAGLE), and its config names no mask_token_id (nor "
            "ptd_token_id or pard_token); give the one it was trained with as --mask-token-id"
        )
    if token >= vocab_size:
        raise ValueError(
            f"the head masks with token {token}, and its vocabulary has {vocab_size}; give the "
            "one it was trained with as --mask-token-id"
        )
    return token


def window_fields(settings: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The width of sliding attention, None without it, and the layers that see everything."""
    types = (settings.get("layer_types") or [])[:num_layers]
    is_used = settings.get("use_sliding_window") is not False and "sliding_attention" in types
    size = settings.get("sliding_window") if is_used else None
    full = [i for i, each in enumerate(types) if size and each != "sliding_attention"]
    return {"sliding_window": size, "full_attention_layers": tuple(full)}


def softmax_scale(settings: Mapping[str, Any], latent: Mapping[str, Any] | None) -> float | None:
    """DeepSeek's scale of the scores under yarn, None for the usual one.

    Mistral's heads do without (apply_scale).
    """
    name, entry = _scaling(settings)
    if latent is None or name != "yarn" or entry.get("apply_yarn_scaling") is False:
        return None
    usual = (latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]) ** -0.5
    scale: float = apply_yarn_mscale(usual, _known(name, entry))
    return None if scale == usual else scale


def position_scale(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The growth of queries with their position, in Mistral's keys or in transformers'."""
    entry = settings.get("llama_4_scaling") or {}
    _, scaling = _scaling(settings)
    beta = entry.get("beta", scaling.get("llama_4_scaling_beta"))
    key = "original_max_position_embeddings"
    original = entry.get(key) or scaling.get(key)
    return {"beta": float(beta), key: float(original)} if beta and original else None


def _scaling(settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The type of a rope's scaling, and the entry that says it; "default" and {} without one."""
    entry = settings.get("rope_scaling") or settings["rope_parameters"]
    name = entry.get("rope_type") or entry.get("type") or "default"
    return "yarn" if name == "deepseek_yarn" else name, entry


def _explicit(factors: Sequence[float], max_positions: int, scale: float = 1.0) -> dict[str, Any]:
    """Scaling that multiplies each wavelength by its factor, (dims / 2,), and q, k by ``scale``.

    It is written as mlx-lm's longrope, whose scale is sqrt(ln max_positions / ln original).
    """
    return {
        "type": "longrope",
        "original_max_position_embeddings": max_positions ** (1 / scale**2),
        "short_factor": list(factors),
        "long_factor": list(factors),
    }


def _known(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: entry[key] for key in ROPE_KEYS[name].split() if entry.get(key) is not None}
    return {"type": name, **values}


def _yarn(entry: Mapping[str, Any], theta: float, dims: int, max_positions: int) -> dict[str, Any]:
    scaling = _known("yarn", entry)
    original = scaling.setdefault("original_max_position_embeddings", max_positions)
    factor = scaling.setdefault("factor", max_positions / original)
    attention = entry.get("attention_factor")
    if attention is not None and factor > 1:
        # mlx-lm scales by (0.1 mscale ln factor + 1) over the same with mscale_all_dim.
        scaling["mscale"] = (attention - 1) / (0.1 * math.log(factor))
        scaling["mscale_all_dim"] = 0
    if entry.get("truncate") is not False:
        return scaling

    def channel(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    # The ramp ends between channels; mlx-lm's rounds the ends.
    low = max(channel(scaling.get("beta_fast", 32)), 0)
    high = min(channel(scaling.get("beta_slow", 1)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    factors = 1 / (ramp / factor + 1 - ramp)
    growth = math.log(max(factor, 1))
    scale = 0.1 * scaling.get("mscale", 1) * growth + 1
    scale /= 0.1 * scaling.get("mscale_all_dim", 0) * growth + 1
    return _explicit(factors.tolist(), max_positions, scale)


def _longrope(entry: Mapping[str, Any], dims: int, max_positions: int) -> dict[str, Any]:
    """Longrope (Phi-3, MiniCPM4) by its factors for texts of the original length.

    Heads are trained on these. For longer texts transformers takes other factors, which a cache
    of rotated keys cannot follow.
    """
    factors = entry.get("short_factor")
    if factors is None or len(factors) != dims // 2:
        raise ValueError(
            f"the head's rope is longrope with {len(factors or ())} numbers in short_factor, "
            f"expected {dims // 2}"
        )
    scaling = _explicit(factors, max_positions, entry.get("attention_factor") or 1.0)
    key = "original_max_position_embeddings"
    is_written = entry.get("attention_factor") is None and entry.get(key) is not None
    return scaling | ({key: entry[key]} if is_written else {})


def _stored_factors(factors: Tensor, dims: int, max_positions: int) -> dict[str, Any]:
    """Scaling by the divisors of frequencies in a GGUF file, as llama.cpp stores llama3's."""
    values = np.array(factors.read().astype(mx.float32))
    if values.shape != (dims // 2,) or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(
            f"rope_freqs.weight is of the shape {shown(values.shape)}, expected {dims // 2} "
            "numbers above 0"
        )
    return _explicit(values.tolist(), max_positions)


def _simple(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Scaling that mlx-lm takes as the config writes it."""
    if name not in ROPE_KEYS:
        raise ValueError(
            f"the head's rope is of type {shown(name)}; only default, mrope, proportional, "
            f"longrope, {', '.join(ROPE_KEYS)} convert"
        )
    if entry.get("factor") is None:
        raise ValueError(f"the head's rope is {name} without a factor; add one to its config")
    return _known(name, entry)


def read_rope(
    settings: Mapping[str, Any],
    head_dim: int,
    is_latent: bool,
    theta: float | None = None,
    factors: Tensor | None = None,
) -> dict[str, Any]:
    """``Eagle3Config.rope``: type, theta, dims and the scaling that ``initialize_rope`` takes.

    ``theta`` overrides the config's base. ``head_dim`` are the channels that may turn.
    ``factors`` (dims / 2,) are a GGUF file's. Raises ValueError for a type of scaling that mlx-lm
    does not have, and for numbers that make no rope.
    """
    own = settings["rope_parameters"]
    name, entry = _scaling(settings)
    if theta is None:
        theta = own.get("rope_theta") or settings.get("rope_theta") or DEFAULT_THETA
    partial = own.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
    turned = 1.0 if name == "proportional" else partial
    dims = settings.get("rotary_dim") or int(head_dim * turned)
    if not BASE.holds(theta):
        raise ValueError(f"the base of the head's rope is {shown(theta)}, expected {BASE.words}")
    if dims % 2 or not 0 < dims <= head_dim:
        raise ValueError(
            f"the head's rope turns {dims} of {head_dim} channels, expected an even number of them"
        )
    max_positions = settings["max_position_embeddings"]
    scaling: dict[str, Any] | None = None
    try:
        if factors is not None:
            name = "factors"
            scaling = _stored_factors(factors, dims, max_positions)
        elif name == "yarn":
            scaling = _yarn(entry, float(theta), dims, max_positions)
        elif name == "longrope":
            scaling = _longrope(entry, dims, max_positions)
        elif name == "proportional":  # as if all channels turned, but the slow ones stand still
            factor = float(entry.get("factor") or 1)
            scaling = {"type": name, "partial_rotary_factor": float(partial), "factor": factor}
        elif name in PLAIN:
            name = "default"
        else:
            scaling = _simple(name, entry)
    except ArithmeticError as err:
        raise ValueError(f"the head's rope cannot be as its config says ({err})") from err
    resolved = {"type": name, "theta": float(theta), "dims": dims, "scaling": scaling}
    if not is_latent or not settings.get("rope_interleave", True):
        return resolved
    if (scaling or {}).get("type") == "longrope":
        raise ValueError(
            "the head's rope turns neighbouring channels by factors of their own, which mlx-lm "
            "does not have; drop truncate from its config, a difference of less than a channel"
        )
    return resolved | {"traditional": True}
