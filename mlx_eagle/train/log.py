"""Log of a run: lines for people, a progress bar, and the table ``training.csv``."""

import csv
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from ..system.atomic_folder import new_file
from ..system.progress import open_bar
from .evaluation import Evaluation, Generated

CSV = "training.csv"


class TrainingLog:
    """Rows of ``training.csv`` in ``output``, and the same figures in lines for people.

    A run that resumes behind batch ``iteration`` keeps the rows up to there, and later ones are
    removed. A ``quiet`` log writes neither lines nor rows: that of every rank but the first.
    """

    def __init__(self, output: Path, num_steps: int, iters: int, iteration: int, quiet: bool):
        empty = [0.0] * num_steps
        self._columns = [
            "iteration",
            "loss",
            *_numbered("loss", empty),
            *("learning_rate", "grad_norm", "trained_tokens", "tokens_per_second"),
            "peak_memory_gb",
            *_numbered("match", empty),
            *_numbered("mean_acceptance_length", empty),
        ]
        self._path = output / CSV
        self._quiet = quiet
        if not quiet:
            self._cut(iteration)
        self._bar = tqdm(disable=True) if quiet else open_bar(iters, "Training", "batch")
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
        if not self._quiet:
            with tqdm.external_write_mode():
                print(line, flush=True)

    def advance(self, tokens_per_second: float) -> None:
        """Move the bar on by a batch."""
        self._bar.update()
        self._bar.set_postfix_str(f"{tokens_per_second:.0f} tokens/s")

    def training(
        self, iteration: int, losses: Sequence[float], left: float, **figures: float
    ) -> None:
        """Report the mean loss of each step since the last report, and the seconds to go.

        ``figures`` are those of other columns.
        """
        row = {"loss": sum(losses), "peak_memory_gb": round(mx.get_peak_memory() / 1e9, 3)}
        row |= figures
        self._write(iteration, row | _numbered("loss", losses))
        self.say(
            f"Iter {iteration}: Train loss {row['loss']:.3f}, first step {losses[0]:.3f}, "
            f"Learning Rate {row['learning_rate']:.3e}, "
            f"Tokens/sec {row['tokens_per_second']:.1f}, "
            f"Trained Tokens {row['trained_tokens']}, "
            f"Peak mem {row['peak_memory_gb']:.3f} GB, {duration(left)} left"
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
        if not self._quiet:
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
