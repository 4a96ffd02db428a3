"""Parts of a target that drafters share: its embedding, its output projection, its sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..target.sharding import find_stage
from ..target.taps import Target

Linear = nn.Linear | nn.QuantizedLinear
Embedding = nn.Embedding | nn.QuantizedEmbedding


@dataclass(frozen=True)
class TargetSizes:
    """What a head has to know of the model it drafts for."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    name: str = "the target"


def sizes_of(model: nn.Module) -> TargetSizes:
    """The sizes of an mlx-lm model; of a pipelined one all processes must ask at once."""
    embedding, vocab_size = find_embedding(model)
    with mx.stream(generation_stream):
        return TargetSizes(_num_columns(embedding), find_stage(model).num_layers, vocab_size)


NOT_OF_TOKENS = ("wpe", "_per_layer")  # of GPT-2's positions; for each layer of a small Gemma


def find_embedding(model: nn.Module) -> tuple[Embedding, int]:
    """The module that embeds tokens in an mlx-lm model, and its number of rows.

    It is the widest one, as wide as the residual stream: those of several tokens at once
    (LongCat's n-grams) are narrower, however many rows they have. Others say by their names that
    they are not of tokens: see ``NOT_OF_TOKENS``.
    """
    modules = model.named_modules()
    found = [m for n, m in modules if isinstance(m, Embedding) and not n.endswith(NOT_OF_TOKENS)]
    if not found:
        raise ValueError(
            "the target has no token embedding that a draft head could share: this model is "
            "not supported."
        )
    embedding = max(found, key=_num_columns)
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
    weight: mx.array = module.weight[to_target]
    if "scales" in module:
        scales, biases = module["scales"][to_target], module["biases"][to_target]
        weight = mx.dequantize(weight, scales, biases, module.group_size, module.bits)
    return {"lm_head.weight": weight}


def draft_output(model: nn.Module, ids: mx.array) -> Callable[[mx.array], mx.array]:
    """The rows ``ids`` (Vd,) of the target's output projection, (K, h) -> (K, Vd), as packed."""
    embedding, _ = find_embedding(model)
    source = lm_head_of(model, embedding)
    module = source if isinstance(source, nn.Module) else embedding
    names = ("weight", "scales", "biases", "bias")
    rows = {name: module[name][ids] for name in names if module.get(name) is not None}

    def project(states: mx.array) -> mx.array:
        if "scales" in rows:
            packed = rows["weight"], rows["scales"], rows.get("biases")
            size, bits, mode = module.group_size, module.bits, module.mode
            out = mx.quantized_matmul(
                states, *packed, transpose=True, group_size=size, bits=bits, mode=mode
            )
        else:
            out = states @ rows["weight"].T
        return out + rows["bias"] if "bias" in rows else out

    return project


def embedding_scale(model: nn.Module) -> float:
    """By what a model multiplies its embeddings before the first layer: Gemma by sqrt(H).

    Measured on a token; 1 where what enters the first layer is not its embedding times a number.
    """
    embedding, _ = find_embedding(model)
    token = mx.array([1])
    with mx.stream(generation_stream):
        _, entering = Target(model, (0,))(token, make_prompt_cache(model))
        assert entering is not None
        own, seen = embedding(token).astype(mx.float32), entering.astype(mx.float32)
        factor = float((own * seen).sum().item() / max((own * own).sum().item(), 1e-20))
        is_scaled = mx.allclose(seen, factor * own, rtol=0.02, atol=0.02 * factor).item()
    return factor if is_scaled and abs(factor - 1) > 0.01 else 1.0


def activation_dtype(embedding: Embedding) -> mx.Dtype:
    return (embedding.scales if "scales" in embedding else embedding.weight).dtype
