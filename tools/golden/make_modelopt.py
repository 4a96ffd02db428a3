"""Freeze heads that the PyPI package ``nvidia-modelopt`` quantized, and their floats.

    pip install torch "nvidia-modelopt==0.47.0"
    python tools/golden/make_modelopt.py [VARIANT ...]

Writes ``quantized-modelopt-VARIANT/``, among the golden heads of the tests, as make_quantized.py
does, with the ``hf_quant_config.json`` of the library's exports. Its functions dequantize to
float32, so that only the stored numbers are rounded.
"""

import json
import sys

import torch
from common import IGNORED, SOURCE, freeze_quantized
from modelopt.torch.export.quant_utils import to_quantized_weight
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

BLOCK = 16


def fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Quantize a matrix to FP8 with one scale; return the parts to store, and the floats."""
    scale = weight.float().abs().max() / 448
    stored = to_quantized_weight(weight.float(), scale, "fp8")
    tensor = FP8QTensor(weight.shape, torch.float32, stored)
    parts = {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
    return parts, tensor.dequantize(torch.float32, scale=scale)


def nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Quantize a matrix to NVFP4; return the parts to store, and the floats."""
    scale, second = NVFP4QTensor.get_weights_scaling_factor(weight.float(), BLOCK)
    stored = to_quantized_weight(weight.float(), scale, "nvfp4", second, BLOCK)
    tensor = NVFP4QTensor(weight.shape, torch.float32, stored)
    floats = tensor.dequantize(
        torch.float32, scale=scale, double_scale=second, block_sizes={-1: BLOCK}
    )
    parts = {"weight": stored, "weight_scale": scale, "weight_scale_2": second}
    return {**parts, "input_scale": torch.tensor(0.01)}, floats


VARIANTS = {"fp8": fp8, "nvfp4": nvfp4}


def main() -> None:
    torch.set_num_threads(1)
    for variant in sys.argv[1:] or VARIANTS:
        algorithm = {"quant_algo": variant.upper(), "exclude_modules": list(IGNORED)}
        entry = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": algorithm}
        configs = {
            "config.json": (SOURCE / "config.json").read_text(),
            "hf_quant_config.json": json.dumps(entry, indent=2) + "\n",
        }
        freeze_quantized(f"modelopt-{variant}", VARIANTS[variant], configs)


if __name__ == "__main__":
    main()
