"""Checkpoints of a training run: written whole or not at all, and found again.

What is in them is the trainer's business.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..system.safetensors import save_arrays

FOLDER = "checkpoints"
STATE, FACTS = "state.safetensors", "state.json"


class Checkpoints:
    """The checkpoints of the run in ``output``, of which the last ``keep`` stay."""

    def __init__(self, output: Path, keep: int = 2):
        self._folder = output / FOLDER
        self._keep = keep

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint; None where there is none."""
        found = self._all()
        return found[-1] if found else None

    def save(
        self,
        iteration: int,
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        files: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint and return its folder, which appears when all of it is there.

        ``state`` is a tree of arrays, ``facts`` what JSON can say; ``files`` are a head's
        ``config`` and ``weights``, so that the checkpoint is a head that can be used.
        Whatever ends the writing early leaves the checkpoints before as they were.
        """
        path = self._folder / f"{iteration:07d}"
        scratch = self._folder / f".{path.name}.{os.getpid()}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        try:
            scratch.mkdir()
            arrays = dict(tree_flatten(state))
            for name, tree in ((STATE, arrays), ("model.safetensors", files["weights"])):
                save_arrays(scratch / name, tree)
                _flush(scratch / name)
            _save_text(scratch / "config.json", files["config"])
            _save_text(scratch / FACTS, {"iteration": iteration, **facts})
            if path.exists():  # of a run that was begun again from an earlier one
                shutil.rmtree(path)
            os.replace(scratch, path)
        except OSError as err:
            raise OSError(err.errno, err.strerror, str(self._folder)) from err
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    @contextmanager
    def explaining(self, output: Path) -> Iterator[None]:
        """Within, what cannot be written is a ValueError that says how to go on."""
        try:
            yield
        except BrokenPipeError:  # the reader of what the run says, not a disk
            raise
        except OSError as err:
            good = self.latest()
            way_on = "no checkpoint was saved yet; make room, and start again"
            if good is not None:
                way_on = f"the last good checkpoint is {good}; make room, and go on with --resume"
            raise ValueError(
                f"{err.filename or output} cannot be written to ({err.strerror or err}): {way_on}."
            ) from err

    def _all(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("[0-9]*") if (path / FACTS).is_file())

    def _clean(self) -> None:
        """Remove what processes left behind that were killed while they wrote."""
        for left in self._folder.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the facts of a checkpoint; ValueError where it is damaged."""
    try:
        arrays = mx.load(str(path / STATE))
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except (RuntimeError, OSError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ValueError(
            f"{path} cannot be read ({reason}): remove it to go on from the checkpoint before."
        ) from err
    return tree_unflatten(list(arrays.items())), facts


def _save_text(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    """On the disk, and not only on its way there, before the folder takes its name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
