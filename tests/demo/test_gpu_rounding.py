"""Rounding of a GPU where it differs from a CPU's, emulated on the demo pair.

The formulas are those of MLX's quantized.h and quantized.cpp, in plain NumPy.
"""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

import mlx_eagle
from mlx_eagle.convert import convert

HEAD = Path(__file__).parents[1] / "data" / "eagle3-smollm2-135m-instruct"
SHIPPED = Path(mlx_eagle.__file__).parent / "demo" / "head" / "model.safetensors"
PROMPTS = Path(__file__).parents[2] / "bench" / "prompts"
GROUP = 64


def to_even(x: np.ndarray) -> np.ndarray:
    """``std::rint``, as the CPU rounds."""
    return np.rint(x)


def away_from_zero(x: np.ndarray) -> np.ndarray:
    """Metal's ``round``."""
    return np.sign(x) * np.floor(np.abs(x) + np.float32(0.5))


def codes(weights: np.ndarray, bits: int, rounded) -> np.ndarray:
    """Quantize a matrix to codes (rows, columns), each group by its end farther from zero."""
    largest_code = np.float32(2**bits - 1)
    w = weights.astype(np.float32).reshape(-1, GROUP)
    low = w.min(axis=1, keepdims=True)
    high = w.max(axis=1, keepdims=True)
    scale = np.maximum((high - low) / largest_code, np.float32(1e-7))
    from_low = np.abs(low) > np.abs(high)
    scale = np.where(from_low, scale, -scale)
    edge = np.where(from_low, low, high)
    steps = rounded(edge / scale)
    is_zero = steps == 0
    scale = np.where(is_zero, scale, edge / np.where(is_zero, 1, steps))
    bias = np.where(is_zero, np.float32(0), edge)
    found = np.clip(rounded((w - bias) / scale), 0, largest_code)
    return found.reshape(weights.shape).astype(np.uint8)


def unpacked(packed: mx.array, bits: int) -> np.ndarray:
    """Unpack codes (rows, columns): each row is a stream of bits, the lowest of a code first."""
    stream = np.unpackbits(np.array(packed).view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(packed.shape[0], -1, bits) @ (1 << np.arange(bits, dtype=np.uint8))


def test_a_conversion_on_a_gpu_would_give_other_codes(tmp_path):
    """Heads are quantized on the CPU: the shipped codes are its own, and Metal has others."""
    convert(str(HEAD), str(tmp_path / "dense"), quantize=False)
    dense = mx.load(str(tmp_path / "dense" / "model.safetensors"))
    shipped = mx.load(str(SHIPPED))
    total = 0
    as_cpu = 0
    as_metal = 0
    for name in [n for n in shipped if shipped[n].dtype == mx.uint32]:
        weights = np.array(dense[name])
        bits = 32 * shipped[name].shape[-1] // weights.shape[-1]
        found = unpacked(shipped[name], bits)
        total += found.size
        as_cpu += int((codes(weights, bits, to_even) != found).sum())
        as_metal += int((codes(weights, bits, away_from_zero) != found).sum())
    assert as_cpu == 0
    assert 1e-4 < as_metal / total < 1e-3


def quantized_target(dtype: mx.Dtype, as_matrix: bool) -> nn.Module:
    """Load the demo target in float32, with the weights that a GPU multiplies in ``dtype``.

    A packed weight is scale * code + bias. The kernel for few rows takes it in float32; the
    kernel for many rows (``as_matrix``) rounds it to ``dtype`` first.
    """
    model, _, _ = mlx_eagle.load_demo(dtype, quantized=True)

    def unpack(path: str, module: nn.Module) -> nn.Module:
        if not isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            return module
        scales, biases = (module[name].astype(mx.float32) for name in ("scales", "biases"))
        how = {"group_size": module.group_size, "bits": module.bits}
        weight = mx.dequantize(module.weight, scales, biases, **how)
        if as_matrix:
            weight = weight.astype(dtype).astype(mx.float32)
        is_linear = isinstance(module, nn.QuantizedLinear)
        dense = nn.Linear(1, 1, bias=False) if is_linear else nn.Embedding(1, 1)
        dense.weight = weight
        return dense

    leaves = tree_map_with_path(unpack, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def texts(tokenizer, num_tokens: int = 90) -> list[list[int]]:
    """Encode four questions, repeated up to a length."""
    lines = (PROMPTS / "mt_bench.jsonl").read_text().splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines[:4]]
    return [(tokenizer.encode(text) * 9)[:num_tokens] for text in questions]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype, most, largest", [(mx.bfloat16, 8, 0.5), (mx.float16, 1, 0.08)])
def test_rounded_weights_change_ties_only(dtype, most, largest):
    """Beyond the rows of the vector kernel, logits differ, and a choice where two are close."""
    _, tokenizer, _ = mlx_eagle.load_demo(mx.float32)
    prompts = mx.array(texts(tokenizer))
    exact, rounded = (quantized_target(dtype, as_matrix)(prompts) for as_matrix in (False, True))
    change = mx.abs(exact - rounded).max(axis=-1)
    best = mx.argmax(exact, axis=-1)
    other = mx.argmax(rounded, axis=-1)
    margins = mx.take_along_axis(exact, mx.stack([best, other], axis=-1), axis=-1)
    margin = margins[..., 0] - margins[..., 1]
    parted = best != other
    assert 0 < change.max().item() < largest
    assert parted.sum().item() <= most
    assert mx.all(margin <= 2 * change).item(), "a choice changed that was no tie"
