"""What the make_*.py scripts share: stubs for unused imports, random weights, the files."""

import importlib.abc
import importlib.machinery
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[2] / "tests" / "support" / "golden"
NUM_SLOTS = 10
NUM_STEPS = 1 + 4  # the extend pass and four draft steps


class Stub(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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
    """Let the imports of these packages succeed where they are not installed."""
    sys.meta_path.append(StubFinder(names))  # last: asked only where no real package answers


def chosen(variants: dict) -> list[tuple[int, str]]:
    """(seed, variant) of those named on the command line, or of all."""
    return [(i, v) for i, v in enumerate(variants) if v in sys.argv[1:] or not sys.argv[1:]]


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Random weights that bfloat16 holds exactly; norms away from 1, so that order shows."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            scale = 1.0 if name.startswith("embed") else weight.shape[1] ** -0.5
            weight.data = scale * torch.randn(weight.shape)
        elif name.endswith("bias"):
            weight.data = 0.3 * torch.randn(weight.shape)
        else:
            weight.data = 1 + 0.3 * torch.randn(weight.shape)
        # The parameters alone: a model rounded as a whole rounds its rope tables too.
        weight.data = weight.data.to(torch.bfloat16).float()
    return model.eval()


def random_vocabulary(size: int, draft_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """t2d (size,) bool and d2t (draft_size,) int64 of a random draft vocabulary."""
    kept = torch.randperm(size)[:draft_size].sort().values
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[kept] = True
    return t2d, kept - torch.arange(draft_size)


def random_inputs(vocab_size: int, feature_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens (T,) and features (T, 3 feature_size), the later taps larger, as in real targets."""
    tokens = torch.randint(0, vocab_size, (NUM_SLOTS,))
    features = torch.randn(NUM_SLOTS, 3, feature_size) * torch.tensor([[[0.5], [2.0], [6.0]]])
    return tokens, features.reshape(NUM_SLOTS, -1)


def shifted(tokens: torch.Tensor, step: int) -> torch.Tensor:
    """The tokens that draft step ``step`` feeds: tokens[t + step], 0 past the end."""
    return torch.cat([tokens[step:], tokens.new_zeros(step)])


def freeze(
    model: torch.nn.Module,
    folder: Path,
    expected: dict[str, torch.Tensor],
    package: str,
    variant: str,
    seed: int,
) -> None:
    """Write the checkpoint as the library itself does, and beside it what it computed."""
    assert all(torch.isfinite(value).all() for value in expected.values()), variant
    model.to(torch.bfloat16).save_pretrained(folder)
    for copied_code in folder.glob("*.py"):
        copied_code.unlink()
    versions = ", ".join(f"{name} {version(name)}" for name in (package, "torch", "transformers"))
    # One key: with more of them their order, and so the file, would change from run to run.
    metadata = {"made_by": f"{variant}, seed {seed}, {versions}"}
    save_file(expected, folder / "expected.safetensors", metadata)
    print(folder.name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")
