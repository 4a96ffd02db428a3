"""Helpers of the scripts: imports of parts of packages, sizes, random weights, the files."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[2] / "tests" / "support" / "golden"
NUM_SLOTS = 10
NUM_STEPS = 1 + 4  # the extend pass and four draft steps
LAYER = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
IGNORED = ("embed_tokens", "lm_head")  # matrices that are not quantized, as in published heads
SOURCE = GOLDEN / "speculators-norm-before-residual"  # the head that is


class Stub(types.ModuleType):
    """A module that has every name, each an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of stubs for packages with these ``names``."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def stub(*names: str) -> None:
    """Let imports of these packages succeed if they are not installed."""
    sys.meta_path.append(StubFinder(names))  # last: asked only where no real package answers


def without_init(*names: str) -> None:
    """Make packages importable without running their ``__init__``, which imports a trainer."""
    (location,) = importlib.util.find_spec(names[0]).submodule_search_locations
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(location, *name.split(".")[1:]))]
        sys.modules[name] = package


def chosen(variants: dict) -> list[tuple[int, str]]:
    """Return (seed, variant) of the variants named on the command line, or of all."""
    return [(i, v) for i, v in enumerate(variants) if v in sys.argv[1:] or not sys.argv[1:]]


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Set random weights that bfloat16 holds exactly; norms are not 1, so that order shows."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            scale = 1.0 if name.startswith("embed") else weight.shape[1] ** -0.5
            weight.data = scale * torch.randn(weight.shape)
        elif name.endswith("bias"):
            weight.data = 0.3 * torch.randn(weight.shape)
        else:
            weight.data = 1 + 0.3 * torch.randn(weight.shape)
        # Only the parameters: rounding the whole model would round its rope tables too.
        weight.data = weight.data.to(torch.bfloat16).float()
    return model.eval()


def random_vocabulary(size: int, draft_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make t2d (size,) bool and d2t (draft_size,) int64 of a random draft vocabulary."""
    return vocabulary_of(torch.randperm(size)[:draft_size].sort().values, size)


def vocabulary_of(kept: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make t2d (size,) bool and d2t int64 for the tokens ``kept``, in order."""
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[kept] = True
    return t2d, kept - torch.arange(len(kept))


def random_inputs(vocab_size: int, feature_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens (T,) and features (T, 3 feature_size), later taps larger, as in real targets."""
    tokens = torch.randint(0, vocab_size, (NUM_SLOTS,))
    features = torch.randn(NUM_SLOTS, 3, feature_size) * torch.tensor([[[0.5], [2.0], [6.0]]])
    return tokens, features.reshape(NUM_SLOTS, -1)


def shifted(tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Return the tokens that draft step ``step`` feeds: tokens[t + step], 0 past the end."""
    return torch.cat([tokens[step:], tokens.new_zeros(step)])


def every_prefix(
    tokens: torch.Tensor, features: torch.Tensor, fuse: Callable, forward: Callable
) -> dict[str, torch.Tensor]:
    """Compute a head's logits (1 + 4, T, Vd), anew for every prefix, without a cache.

    ``fuse`` makes states of features; ``forward`` takes tokens and states of all slots, and
    returns their logits and the states that are fed back. Returned are all arrays to freeze.
    """
    logits = []
    for slot in range(NUM_SLOTS):
        fed = tokens[: slot + 1]
        states = fuse(features[: slot + 1])
        steps = []
        for step in range(NUM_STEPS):
            rows, outputs = forward(fed, states)
            steps.append(rows[-1])
            fed = torch.cat([fed, shifted(tokens, step + 1)[slot : slot + 1]])
            states = torch.cat([states, outputs[-1:]])
        logits.append(torch.stack(steps))
    return {"tokens": tokens, "features": features, "logits": torch.stack(logits, dim=1)}


def save_published(model: torch.nn.Module, folder: Path) -> None:
    """Write the checkpoint as the library itself does, without its code."""
    model.to(torch.bfloat16).save_pretrained(folder)
    for copied_code in folder.glob("*.py"):
        copied_code.unlink()


def report(folder: Path) -> None:
    """Print the size of a folder."""
    print(folder.name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


def freeze(
    model: torch.nn.Module,
    folder: Path,
    expected: dict[str, torch.Tensor],
    package: str,
    variant: str,
    seed: int,
) -> None:
    """Write the checkpoint, and beside it the arrays that the library computed."""
    assert all(torch.isfinite(value).all() for value in expected.values()), variant
    save_published(model, folder)
    versions = ", ".join(f"{name} {version(name)}" for name in (package, "torch", "transformers"))
    # One key only: the order of several, and so the file, would change from run to run.
    metadata = {"made_by": f"{variant}, seed {seed}, {versions}"}
    save_file(expected, folder / "expected.safetensors", metadata)
    report(folder)


def freeze_quantized(
    variant: str,
    quantize: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]],
    configs: dict[str, str],
) -> None:
    """Write ``quantized-VARIANT/``: SOURCE's tensors with its matrices quantized, and ``configs``.

    ``quantize`` returns the parts that are stored of a matrix, by name, and the floats that they
    stand for.
    """
    stored = {}
    floats = {}
    for name, tensor in load_file(SOURCE / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or module in IGNORED:
            stored[name] = tensor
            continue
        parts, dense = quantize(tensor)
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        floats[name] = dense.contiguous()
        assert torch.isfinite(dense.float().sum()), name
    folder = GOLDEN / f"quantized-{variant}"
    folder.mkdir(exist_ok=True)
    for file, text in configs.items():
        (folder / file).write_text(text)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(floats, folder / "dequantized.safetensors")
    report(folder)
