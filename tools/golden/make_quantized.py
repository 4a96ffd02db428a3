"""Freeze heads that the PyPI package ``compressed-tensors`` quantized, and their floats.

    pip install torch "compressed-tensors==0.20.0"
    python tools/golden/make_quantized.py [VARIANT ...]

Writes ``quantized-VARIANT/``, among the golden heads of the tests: ``config.json`` and
``model.safetensors`` of the head in ``speculators-norm-before-residual``, its matrices as the
library's own compressor stores them, and ``dequantized.safetensors``, the floats that its
decompressor makes of those. Embedding and lm_head stay as they are, as in published heads.
"""

import json
import sys
from functools import partial

import torch
from common import IGNORED, SOURCE, freeze_quantized
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.utils import calculate_qparams

INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP4 = {**FP8, "num_bits": 4}

# variant: (format, arguments for the weights, dtype of the scales)
VARIANTS = {
    "w4a16": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 32}, torch.bfloat16),
    "w4a16-channel": ("pack-quantized", {**INT4, "strategy": "channel"}, torch.float16),
    "w4a16-asymmetric": (
        "pack-quantized",
        {**INT4, "symmetric": False, "strategy": "group", "group_size": 16},
        torch.bfloat16,
    ),
    "w3a16": (
        "pack-quantized",
        {**INT4, "num_bits": 3, "strategy": "group", "group_size": 32},
        torch.float32,
    ),
    "w8a8": ("int-quantized", {**INT4, "num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "fp8-tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, torch.float32),
    "fp8-channel": ("float-quantized", {**FP8, "strategy": "channel"}, torch.bfloat16),
    "fp8-block": (
        "float-quantized",
        {**FP8, "strategy": "block", "block_structure": [24, 20]},
        torch.bfloat16,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            **FP4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        torch.float32,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        torch.bfloat16,
    ),
}


def in_groups(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Group the numbers that share a scale: (scale rows, scale columns, numbers)."""
    rows, columns = weight.shape
    match str(args.strategy):
        case "tensor":
            return weight.reshape(1, 1, -1)
        case "channel":
            return weight[:, None]
        case "block":
            down, across = args.block_structure
            pad = (0, -columns % across, 0, -rows % down)
            blocks = torch.nn.functional.pad(weight, pad)
            blocks = blocks.unflatten(1, (-1, across)).unflatten(0, (-1, down))
            return blocks.transpose(1, 2).flatten(2)
        case _:
            return weight.unflatten(1, (-1, args.group_size))


def parameters(weight: torch.Tensor, args: QuantizationArgs, dtype: torch.dtype) -> dict:
    """Compute scales and zero points from the smallest and largest numbers."""
    groups = in_groups(weight.float(), args)
    low = groups.amin(-1)
    high = groups.amax(-1)
    found = {}
    if str(args.strategy) == "tensor_group":
        found["weight_global_scale"] = torch.tensor([448 * 6.0]) / weight.abs().max()
        scale = torch.maximum(high, -low) / 6 * found["weight_global_scale"]
        scale = scale.clamp(2.0**-6).to(torch.float8_e4m3fn).float()
    elif args.scale_dtype == torch.uint8:
        largest = torch.maximum(high, -low)
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    else:
        scale, zero = calculate_qparams(low, high, args)
        if not args.symmetric:
            found["weight_zero_point"] = zero.to(torch.int8)
    if str(args.strategy) == "tensor":
        scale = scale.reshape(1)
    return found | {"weight_scale": scale.to(dtype)}


def compressed(scheme: QuantizationScheme, dtype: torch.dtype, weight: torch.Tensor) -> tuple:
    """Compress a matrix; return the parts to store, and the floats."""
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    packed = compressor.compress(
        {"weight": weight, **parameters(weight, scheme.weights, dtype)}, scheme
    )
    return packed, compressor.decompress(packed, scheme)["weight"]


def main() -> None:
    torch.set_num_threads(1)
    for variant in sys.argv[1:] or VARIANTS:
        form, args, dtype = VARIANTS[variant]
        weights = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
        config = json.loads((SOURCE / "config.json").read_text())
        entry = QuantizationConfig(
            config_groups={"group_0": scheme},
            quant_method="compressed-tensors",
            format=form,
            quantization_status="compressed",
            ignore=list(IGNORED),
        )
        config["quantization_config"] = json.loads(entry.model_dump_json(exclude_none=True))
        configs = {"config.json": json.dumps(config, indent=2) + "\n"}
        freeze_quantized(variant, partial(compressed, scheme, dtype), configs)


if __name__ == "__main__":
    main()
