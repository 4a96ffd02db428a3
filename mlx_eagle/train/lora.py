"""Parameters that are trained: all that are wanted, or small matrices beside them (LoRA).

Hu et al. 2021, arXiv:2106.09685. The layers are mlx-lm's.
"""

from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

PARTS = ("lora_a", "lora_b")


def train_only(head: nn.Module, is_wanted: Callable[[str], bool]) -> None:
    """Freeze all parameters of a head but those whose names are wanted."""
    head.freeze()
    for path, module in head.named_modules():
        wanted = [key for key in module if is_wanted(f"{path}.{key}".lstrip("."))]
        module.unfreeze(recurse=False, keys=wanted)


def add_lora(head: nn.Module, is_wanted: Callable[[str], bool], rank: int, scale: float) -> None:
    """Put matrices of that rank beside every matrix that is wanted, and train only these."""
    found = [
        (path, LoRALinear.from_base(module, r=rank, scale=scale))
        for path, module in head.named_modules()
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and is_wanted(f"{path}.weight")
    ]
    head.update_modules(tree_unflatten(found))
    train_only(head, lambda name: name.endswith(PARTS))


def changes(head: nn.Module, initial: Callable[[], Mapping[str, mx.array]]) -> dict[str, mx.array]:
    """Return how much training has changed each parameter, by its name before LoRA, in float32.

    ``initial`` gives the parameters as they were.
    """
    trained = dict(tree_flatten(head.trainable_parameters()))
    added = {
        f"{path}.weight": module.scale * (module.lora_b.T @ module.lora_a.T)
        for path, module in head.named_modules()
        if isinstance(module, LoRALinear)
    }
    if added:
        return added
    before = initial()
    return {name: array - before[name] for name, array in trained.items()}
