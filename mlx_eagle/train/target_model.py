"""The target of a training run, as mlx-lm loads it."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model


def load_target(
    name: str, adapter_path: str | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """The model, its tokenizer and its ``config.json``; ValueError where it cannot be loaded.

    On a CPU the weights are dequantized to float32, since other types are many times slower
    there.
    """
    path = Path(name).expanduser()
    try:
        model, tokenizer, config = mlx_lm.load(
            str(path) if path.exists() else name,
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code},
            return_config=True,
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, OSError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ValueError(f"the target {name} cannot be loaded: {reason}") from err
    if mx.default_device() == mx.cpu:
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    return model, tokenizer, config
