"""Log of a run: lines for people, a progress bar, and the table ``training.csv``."""

import csv
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from ..system.atomic_folder import new_file
from ..system.progress import open_bar
from ..system.ranks import is_first
from .evaluation import Evaluation, Generated
from .settings import TrainSettings

CSV = "training.csv"
FIRST = 4  # batches before the run says how long it will take


class TrainingLog:
    """Rows of ``training.csv`` in ``output``, and the same figures in lines for people.

    A run that resumes behind batch ``iteration`` keeps the rows up to there, and later ones are
    removed. On every rank but the first it writes neither lines nor rows.
    """

    def __init__(self, output: Path, num_steps: int, settings: TrainSettings, iteration: int):
        empty = [0.0] * num_steps
        self._columns = [
            "iteration", "loss", *_numbered("loss", empty), "learning_rate", "grad_norm",
            "trained_tokens", "tokens_per_second", "peak_memory_gb", *_numbered("match", empty),
            *_numbered("mean_acceptance_length", empty),
        ]  # fmt: skip
        self._path = output / CSV
        self._settings = settings
        self._is_quiet = not is_first()
        self._num = 0  # batches of this run
        self._seconds = 0.0  # of these
        self._recent: list[tuple[np.ndarray, int, float]] = []  # since the last report
        if self._is_quiet:
            self._bar = tqdm(disable=True)
        else:
            self._cut(iteration)
            self._bar = open_bar(settings.iters, "Training", "batch")
        self._bar.update(iteration)
        self.close = self._bar.close

    def _cut(self, iteration: int) -> None:
        """Write the table anew, without the rows after ``iteration``."""
        rows: list[dict[str, str]] = []
        if iteration and self._path.exists():
            whole = self._path.read_text().rpartition("\n")[0]  # a full disk cuts a line short
            for row in csv.DictReader(whole.splitlines()):
                if (row["iteration"] or "").isdigit() and int(row["iteration"]) <= iteration:
                    rows.append(row)
        with new_file(self._path) as draft, draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        if not self._is_quiet:
            with tqdm.external_write_mode():
                print(line, flush=True)

    def learnt(
        self, iteration: int, losses: np.ndarray, num_tokens: int, seconds: float, **figures: float
    ) -> None:
        """Move the bar on by a batch; if a report is due, report all batches since the last one.

        ``losses`` (num_steps,) are those of the batch; ``figures`` are those of other columns.
        """
        settings = self._settings
        self._recent.append((losses, num_tokens, seconds))
        # The first batch, which compiles, says nothing about the others.
        self._seconds = seconds if self._num < 2 else self._seconds + seconds
        self._num += 1
        left = duration((settings.iters - iteration) * self._seconds / max(1, self._num - 1))
        speed = f"{num_tokens / seconds:.0f} tokens"
        self._bar.update()
        self._bar.set_postfix_str(f"{speed}/s")
        if self._num == FIRST:
            self.say(f"{speed} per second: {left} left.")
        if iteration % settings.steps_per_report and iteration < settings.iters:
            return
        all_losses, tokens, times = zip(*self._recent, strict=True)
        self._recent = []
        means = np.mean(all_losses, axis=0).tolist()
        row = figures | _numbered("loss", means)
        row["loss"] = sum(means)
        row["tokens_per_second"] = round(sum(tokens) / sum(times), 1)
        row["peak_memory_gb"] = round(mx.get_peak_memory() / 1e9, 3)
        self._write(iteration, row)
        self.say(
            f"Iter {iteration}: Train loss {row['loss']:.3f}, first step {means[0]:.3f}, "
            f"Learning Rate {row['learning_rate']:.3e}, "
            f"Tokens/sec {row['tokens_per_second']:.1f}, Trained Tokens {row['trained_tokens']}, "
            f"Peak mem {row['peak_memory_gb']:.3f} GB, {left} left"
        )

    def evaluation(self, iteration: int, found: Evaluation) -> None:
        """Report the figures on held-out sequences."""
        lengths = _numbered("mean_acceptance_length", found.lengths)
        self._write(iteration, _numbered("match", found.match) | lengths)
        match = " ".join(f"{share:.3f}" for share in found.match)
        self.say(
            f"Iter {iteration}: Val on {found.num_sequences} sequences: match by depth {match}; "
            f"{_shown(found.lengths)}"
        )

    def generated(self, found: Generated, before: Generated | None) -> None:
        """Say how much the finished head has accepted when it decodes, and the given one before.

        No row is written.
        """
        self.say(
            f"Generated {found.num_answers} answers of up to {found.max_tokens} tokens: "
            f"{_shown(found.lengths)}"
        )
        if before is None:
            return
        pairs = enumerate(zip(before.lengths, found.lengths, strict=True), start=1)
        shown = ", ".join(f"k = {k}: {old:.2f} -> {new:.2f}" for k, (old, new) in pairs)
        way_on = ""
        if found.lengths[-1] <= before.lengths[-1]:
            way_on = " It did not rise: try a smaller --learning-rate, or more texts."
        self.say(f"Mean acceptance length (tau) before and after, at {shown}.{way_on}")

    def _write(self, iteration: int, figures: dict[str, float]) -> None:
        if not self._is_quiet:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow({"iteration": iteration} | figures)


def _numbered(name: str, values: Sequence[float]) -> dict[str, float]:
    """Name the figures of each step: "loss", (3, 2) -> {"loss_1": 3, "loss_2": 2}."""
    return {f"{name}_{number}": value for number, value in enumerate(values, start=1)}


def _shown(lengths: Sequence[float]) -> str:
    figures = " ".join(f"{length:.3f}" for length in lengths)
    return f"mean acceptance length for k = 1 ... {len(lengths)}: {figures}"


def duration(seconds: float) -> str:
    """Write a time for people: 75 -> "75 s"; 7500 -> "2 h 5 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
