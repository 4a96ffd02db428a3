"""Checkpoints of a training run: written whole or not at all, found again, one run at a time.

What is in them is the trainer's business.
"""

import fcntl
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
from .student import write_head

FOLDER = "checkpoints"
STATE, FACTS = "state.safetensors", "state.json"
LOCK = "training.lock"


class Checkpoints:
    """The checkpoints of the run in ``output``, of which the last ``keep`` stay."""

    def __init__(self, output: Path, keep: int = 2):
        self._folder = output / FOLDER
        self._keep = keep

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint; None where there is none."""
        return max(self._all(), default=None)

    def save(
        self,
        iteration: int,
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        files: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint, whose folder appears when all of it is there.

        ``state`` is a tree of arrays, ``facts`` what JSON can say; ``files`` are a head's
        ``config`` and ``weights``, so that the checkpoint is a head that can be used.
        Whatever ends the writing early leaves the checkpoints before as they were.
        """
        path = self._folder / f"{iteration:07d}"
        scratch = self._folder / f".{path.name}.{os.getpid()}"
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(".*"):  # by processes that were killed while they wrote
            shutil.rmtree(left, ignore_errors=True)
        try:
            scratch.mkdir()
            write_head(scratch, **files)
            save_arrays(scratch / STATE, dict(tree_flatten(state)))
            text = json.dumps({"iteration": iteration, **facts}, indent=4, sort_keys=True)
            (scratch / FACTS).write_text(text + "\n", encoding="utf-8")
            # On the disk, and not only on its way there, before the folder takes its name.
            for written in scratch.iterdir():
                with written.open("rb") as file:
                    os.fsync(file.fileno())
            if path.exists():  # of a run that was begun again from an earlier one
                shutil.rmtree(path)
            os.replace(scratch, path)
        except OSError as err:
            raise OSError(err.errno, err.strerror, str(self._folder)) from err
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

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
        numbered = (path for path in self._folder.glob("[0-9]*") if path.name.isdecimal())
        return sorted(path for path in numbered if (path / FACTS).is_file())


def load_checkpoint(
    path: Path, expected: Mapping[str, Any], facts: Mapping[str, type]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the facts of a checkpoint; ValueError where it is damaged.

    ``expected`` is a tree with arrays of the names, shapes and types that the state has to have,
    and ``facts`` has the types of the facts.
    """
    wanted = dict(tree_flatten(expected))
    try:
        arrays = mx.load(str(path / STATE))
        found = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except (RuntimeError, OSError, ValueError) as err:  # RecursionError is a RuntimeError
        raise _damaged(path, str(err).strip().splitlines()[0]) from err
    for name, kind in facts.items():
        if not isinstance(found, dict) or type(found.get(name)) is not kind:
            raise _damaged(path, f"{FACTS} has no {name}")
    # Names before the tree: a number in one of them would be the length of a list.
    for name in wanted.keys() | arrays.keys():
        there, own = arrays.get(name), wanted.get(name)
        if there is None or own is None:
            raise _damaged(path, f"{STATE} {'lacks' if there is None else 'has'} {name[:80]}")
        if there.shape != own.shape or there.dtype != own.dtype:
            raise _damaged(path, f"{name} is {there.dtype}{list(there.shape)} in {STATE}")
    return tree_unflatten([(name, arrays[name]) for name in wanted]), found


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} cannot be read ({reason}): remove it to go on from the checkpoint before."
    )


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Within, no other run writes to ``output``; ValueError where one does already.

    A folder that was made for it, and that nothing was put into, is removed.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / LOCK
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise ValueError(
                f"another run is writing to {output}: wait for its end, or give another --output."
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if not any(output.iterdir()):
                output.rmdir()
