"""Checkpoints that a run resumes from, written completely or not at all, and its folder's lock."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..drafters.folder import write_files
from ..system.atomic_folder import CannotWrite, discard_folder, locked, new_folder, remove_orphans
from ..system.safetensors import save_arrays

FOLDER = "checkpoints"
STATE = "state.safetensors"
FACTS = "state.json"


class Checkpoints:
    """Checkpoints of the run in ``output``; the newest ``keep`` of them stay."""

    def __init__(self, output: Path, keep: int = 2):
        self.output = output
        self._folder = output / FOLDER
        self._keep = keep

    def latest(self) -> Path | None:
        """Return the folder of the newest checkpoint, None if there is none."""
        return max(self._all(), default=None)

    def to_begin_with(self, resume: bool) -> Path | None:
        """Return the folder to ``resume`` from, None to begin.

        Raises ValueError if the output lacks what is needed, or holds what would be spoilt.
        """
        found = self.latest()
        if resume and found is None:
            raise ValueError(
                f"{self.output} holds no checkpoint to go on from: leave out --resume."
            )
        if found is not None and not resume:
            raise ValueError(
                f"{self.output} holds a run up to batch {int(found.name)}: go on with --resume, "
                "or give another --output."
            )
        if found is None and any(self.output.glob("*.safetensors")):
            raise ValueError(f"{self.output} is there already: give another --output.")
        return found

    def save(
        self,
        iteration: int,
        state: Mapping[str, mx.array],
        facts: Mapping[str, Any],
        files: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint, whose folder appears when all of it is there.

        ``state`` are arrays, ``facts`` is anything that JSON can hold; ``files`` are a
        head's ``config`` and ``weights``, so that the checkpoint can be used as a head. If the
        writing ends early for any reason, the older checkpoints are as they were.
        """
        path = self._folder / f"{iteration:07d}"
        remove_orphans(self._folder.glob(".*"))  # of processes that were killed while they wrote
        discard_folder(path)  # of a run that began again from an earlier checkpoint
        with new_folder(path) as draft:
            write_files(draft, **files)
            save_arrays(draft / STATE, state)
            text = json.dumps({"iteration": iteration, **facts}, indent=4, sort_keys=True)
            (draft / FACTS).write_text(text + "\n", encoding="utf-8")
            # On the disk, and not only on its way there, before the folder takes its name.
            for written in draft.iterdir():
                with written.open("rb") as file:
                    os.fsync(file.fileno())
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn a failure to write into a ValueError that says how to resume."""
        try:
            yield
        except BrokenPipeError:  # of a reader of the run's lines, not of a disk
            raise
        except (OSError, CannotWrite) as err:
            found = str(err)  # of a folder that could not be written
            if isinstance(err, OSError):
                where = err.filename or self.output
                found = f"{where} cannot be written to ({err.strerror or err})"
            good = self.latest()
            way_on = "no checkpoint was saved yet; make room, and start again"
            if good is not None:
                way_on = f"the last good checkpoint is {good}; make room, and go on with --resume"
            raise ValueError(f"{found}: {way_on}.") from err

    def _all(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("[0-9]*") if path.name.isdecimal())


def load_checkpoint(
    path: Path, expected: Mapping[str, mx.array], facts: Mapping[str, type]
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Return the state and the facts of a checkpoint; ValueError if it is damaged.

    ``expected`` are arrays whose names, shapes and types the state must have; ``facts`` are the
    types of the facts.
    """
    try:
        arrays = mx.load(str(path / STATE))
        found = json.loads((path / FACTS).read_text(encoding="utf-8"))
        for name, kind in facts.items():
            if not isinstance(found, dict) or type(found.get(name)) is not kind:
                raise ValueError(f"{FACTS} has no {name}")
        there, own = (
            {name: f"{x.dtype}{list(x.shape)}" for name, x in part.items()}
            for part in (arrays, expected)
        )
        for name, _ in there.items() ^ own.items():
            what, wanted = (part.get(name, "nothing") for part in (there, own))
            raise ValueError(f"{STATE} has {what} named {name[:80]}, expected {wanted}")
    except (RuntimeError, OSError, ValueError) as err:  # RecursionError is a RuntimeError
        reason = str(err).strip().splitlines()[0]
        raise ValueError(
            f"{path} cannot be read ({reason}): remove it to go on from the checkpoint before."
        ) from err
    return arrays, found


@contextmanager
def kept_from_others(output: Path) -> Iterator[None]:
    """Keep other runs from writing to ``output``; ValueError if one is doing so.

    If the folder is empty in the end, because nothing was put into it, it is removed.
    """

    def refuse() -> None:
        raise ValueError(
            f"another run is writing to {output}: wait for its end, or give another --output."
        )

    with locked(output, on_wait=refuse):
        if not os.access(output, os.W_OK):
            raise ValueError(
                f"{output} cannot be written: name a folder that you may write to by --output."
            )
        try:
            yield
        finally:
            if not any(output.iterdir()):
                output.rmdir()
