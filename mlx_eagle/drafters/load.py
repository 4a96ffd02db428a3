"""LayerIds a converted head and attaching it to a target, with every check that can be made.

It reads the folder that the converter writes, and finds the embedding of an mlx-lm model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..system.hub import locate
from ..system.json_schema import read_object, shown
from ..system.safetensors import read_header
from ..target.ropes import evaluate_ropes
from ..target.sharding import find_stage
from .config import Eagle3Config
from .eagle3 import Eagle3Drafter, EagleDrafter
from .head import Eagle3Head
from .head_weights import build_head, quantize_now
from .parallel import ParallelDrafter

Linear = nn.Linear | nn.QuantizedLinear
Embedding = nn.Embedding | nn.QuantizedEmbedding
INTEGERS = (mx.int8, mx.int16, mx.int32, mx.int64)


@dataclass(frozen=True)
class TargetSizes:
    """What a head has to know of the model it drafts for."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    name: str = "the target"


def load_drafter(
    path_or_repo: str | Path,
    model: nn.Module,
    *,
    quantize_bits: int | None = None,
    quantize_group_size: int = 64,
    dtype: mx.Dtype | None = None,
    draft_cache: str = "exact",
    draft_window: int | None = None,
) -> EagleDrafter:
    """Load a converted head (a folder or a hub repo id) for ``model``, an mlx-lm model.

    ``quantize_bits`` quantizes an unquantized head while loading. ``dtype`` is that of the
    head's arithmetic, by default the target's own. ``draft_cache`` is "exact" or "lagging"
    (see ``Eagle3Drafter``), and of the head's cache only the newest ``draft_window`` slots are
    kept, beside the first few (None: all). A P-EAGLE head becomes a ``ParallelDrafter``.

    Raises ValueError, in one sentence, where the folder is not a converted head, is damaged,
    or does not belong to this target.
    """
    attached = load_head(
        path_or_repo,
        model,
        quantize_bits=quantize_bits,
        quantize_group_size=quantize_group_size,
        dtype=dtype,
    )
    parts = attached.head, attached.embed, attached.taps, attached.to_target
    if attached.head.config.mask_token_id is None:
        return Eagle3Drafter(*parts, draft_cache, draft_window)
    if draft_cache != "exact":
        raise ValueError(
            f"draft_cache is {draft_cache!r}, and the masked slots of a P-EAGLE head need every "
            "pair before them: leave it out."
        )
    return ParallelDrafter(*parts, draft_window)


@dataclass(frozen=True)
class AttachedHead:
    """A head and what it takes from its target.

    ``embed`` maps tokens (...,) to (..., h); ``to_target`` (Vd,) draft ids to target ids, None
    where they are the same.
    """

    head: Eagle3Head
    embed: Callable[[mx.array], mx.array]
    taps: tuple[int, ...]
    to_target: mx.array | None

    @property
    def ids(self) -> mx.array:
        """The target ids of all that can be drafted, (Vd,) int32."""
        if self.to_target is not None:
            return self.to_target
        return mx.arange(self.head.config.draft_vocab_size, dtype=mx.int32)


def load_head(
    path_or_repo: str | Path,
    model: nn.Module,
    *,
    quantize_bits: int | None = None,
    quantize_group_size: int = 64,
    dtype: mx.Dtype | None = None,
) -> AttachedHead:
    """Load a converted head and attach it to ``model``; see ``load_drafter``."""
    folder = locate(str(path_or_repo), ("*.json", "*.safetensors"))
    values = read_head_config(folder)
    config = Eagle3Config.from_dict(values, folder / "config.json")
    weights = _read_weights(folder)
    embedding, _ = find_embedding(model)
    sizes = sizes_of(model)
    to_target = _draft_ids(weights.pop("d2t", None), config, sizes.vocab_size)
    check_fit(config, sizes)
    if config.lm_head_source == "target_rows":
        weights.update(rows_of_lm_head(model, embedding, to_target))
    head = build_head(config, weights, values.get("quantization"))
    if quantize_bits is not None:
        quantize_now(head, values.get("quantization"), quantize_bits, quantize_group_size)
    _cast(head, dtype or activation_dtype(embedding))
    embed = embedding
    if config.embed_source == "file":
        embed = head.embed_tokens
    if config.lm_head_source == "target":
        head.share_lm_head(lm_head_of(model, embedding))
    mx.eval(head.parameters())
    evaluate_ropes(model)  # for threads other than this one; mlx-lm leaves them to the first pass
    return AttachedHead(head, embed, config.taps(sizes.num_layers), to_target)


def read_head_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a converted head; ValueError where it is missing or no head's."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: it is not a converted head.")
    values = read_object(path)
    kind = values.get("model_type")
    if kind != "eagle3":
        raise ValueError(
            f"{folder} holds a {shown(kind)} model, not a converted EAGLE-3 head: convert the "
            "checkpoint first with mlx_eagle.convert --hf-path SRC --mlx-path DST."
        )
    return values


def _read_weights(folder: Path) -> dict[str, mx.array]:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{folder} has no model.safetensors: convert the head again.")
    try:
        read_header(path)
        return dict(mx.load(str(path)))
    except (RuntimeError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ValueError(
            f"{path} cannot be read ({reason}): it is damaged or cut short, copy or convert "
            "it again."
        ) from err


def sizes_of(model: nn.Module) -> TargetSizes:
    """The sizes of an mlx-lm model; of a pipelined one all processes must ask at once."""
    embedding, vocab_size = find_embedding(model)
    with mx.stream(generation_stream):
        return TargetSizes(_num_columns(embedding), find_stage(model).num_layers, vocab_size)


def find_embedding(model: nn.Module) -> tuple[Embedding, int]:
    """The module that embeds tokens in an mlx-lm model, and its number of rows.

    It is the embedding as wide as the residual stream; of several, the one with most rows
    (position tables are shorter than vocabularies).
    """
    found = [m for _, m in model.named_modules() if isinstance(m, Embedding)]
    if not found:
        raise ValueError(
            "the target has no token embedding that a draft head could share: this model is "
            "not supported."
        )
    embedding = max(found, key=lambda m: m.weight.shape[0])
    return embedding, embedding.weight.shape[0]


def _num_columns(module: Linear | Embedding) -> int:
    """Input width of a matrix, packed or not."""
    columns = module.weight.shape[-1]
    return columns * 32 // module.bits if "scales" in module else columns


def lm_head_of(model: nn.Module, embedding: Embedding) -> Callable[[mx.array], mx.array]:
    """The target's output projection: its own matrix, or the embedding where they are tied."""
    shape = (embedding.weight.shape[0], _num_columns(embedding))
    for name, module in model.named_modules():
        if not (isinstance(module, Linear) and name.endswith("lm_head")):
            continue
        if (module.weight.shape[0], _num_columns(module)) == shape:
            return module
    return embedding.as_linear


def rows_of_lm_head(
    model: nn.Module, embedding: Embedding, to_target: mx.array
) -> dict[str, mx.array]:
    """The rows of the target's output projection that the draft vocabulary names."""
    source = lm_head_of(model, embedding)
    module = source if isinstance(source, nn.Module) else embedding
    weight = module.weight
    if "scales" in module:
        rows = [module[k][to_target] for k in ("weight", "scales", "biases")]
        weight = mx.dequantize(*rows, group_size=module.group_size, bits=module.bits)
        return {"lm_head.weight": weight}
    return {"lm_head.weight": weight[to_target]}


def _draft_ids(offsets: mx.array | None, config: Eagle3Config, vocab_size: int) -> mx.array | None:
    """Target id of every draft id, (Vd,) int32, from the stored offsets; None for identity."""
    if offsets is None:
        if config.has_d2t:
            raise ValueError(
                f"the head drafts {config.draft_vocab_size} of {config.vocab_size} tokens but "
                "its d2t table is missing: convert it again."
            )
        return None
    if offsets.dtype not in INTEGERS or offsets.shape != (config.draft_vocab_size,):
        raise ValueError(
            f"the head's d2t table is {tuple(offsets.shape)} of {offsets.dtype}, expected "
            f"{config.draft_vocab_size} whole numbers: convert the head again."
        )
    ids = offsets.astype(mx.int64) + mx.arange(offsets.shape[0], dtype=mx.int64)
    low, high = ids.min().item(), ids.max().item()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"the head's d2t table reaches token {high if low >= 0 else low}, but the target "
            f"has {vocab_size} tokens: this head was made for another target."
        )
    return ids.astype(mx.int32)


def check_fit(config: Eagle3Config, target: TargetSizes) -> None:
    """Raise ValueError where head and target do not belong together."""
    vocab_size, num_layers = target.vocab_size, target.num_layers
    if config.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"the head was made for a target of hidden size {config.target_hidden_size}, but "
            f"this target's is {target.hidden_size}: use the head trained for this model."
        )
    if not config.has_d2t and config.draft_vocab_size > vocab_size:
        raise ValueError(
            f"the head drafts {config.draft_vocab_size} tokens, but the target has "
            f"{vocab_size}: use the head trained for this model."
        )
    # Vocabularies may be padded differently, so only a clear mismatch is an error.
    if abs(config.vocab_size - vocab_size) > max(1024, vocab_size // 100):
        raise ValueError(
            f"the head was made for a vocabulary of {config.vocab_size} tokens, but the "
            f"target's has {vocab_size}: use the head trained for this model."
        )
    if config.mask_token_id is not None and config.mask_token_id >= vocab_size:
        raise ValueError(
            f"the head masks with token {config.mask_token_id}, but the target has {vocab_size}: "
            "use the head trained for this model."
        )
    taps = config.taps(num_layers)
    deepest = num_layers if config.uses_aux else num_layers + 1
    if not taps or min(taps) < 0 or max(taps) > deepest or len(taps) != config.num_aux:
        raise ValueError(
            f"the head taps layers {list(taps)} ({config.num_aux} features), but the target "
            f"has {num_layers} layers: use the head trained for this model, or, where this is "
            "it, convert it again with --target MODEL, or with the taps in --aux-layers."
        )


def activation_dtype(embedding: Embedding) -> mx.Dtype:
    return (embedding.scales if "scales" in embedding else embedding.weight).dtype


def _cast(head: Eagle3Head, dtype: mx.Dtype) -> None:
    """Give every float array of the head one dtype; packed integers stay."""
    head.set_dtype(dtype)
