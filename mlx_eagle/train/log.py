"""Log of a run: lines for people, a progress bar, ``training.csv``, and services such as wandb."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.tuner import callbacks
from tqdm import tqdm

from ..system.atomic_folder import new_file
from ..system.progress import open_bar
from ..system.ranks import is_first
from .evaluation import Evaluation, Generated
from .settings import TrainSettings

CSV = "training.csv"
NAMES = {"loss": "train_loss", "peak_memory_gb": "peak_memory"}
"""Names that mlx-lm's trainer reports figures by, where those of their columns are others."""


def check_services(report_to: str | None) -> None:
    """Raise ValueError for services in ``--report-to`` that are not known, or not installed."""
    for name in filter(None, map(str.strip, (report_to or "").lower().split(","))):
        if name not in callbacks.SUPPORT_CALLBACK:
            known = " or ".join(callbacks.SUPPORT_CALLBACK)
            raise ValueError(f"--report-to names {name}: give {known}, or both with a comma.")
        if getattr(callbacks, name) is None:
            raise ValueError(f"--report-to {name} takes a package: pip install {name}.")


class TrainingLog:
    """Rows of ``training.csv`` in ``output``, and the same figures for people and services.

    A run that resumes behind batch ``iteration`` keeps the rows up to there, and later ones are
    removed. On every rank but the first nothing is said, written or reported.
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
        self._recent: list[tuple[np.ndarray, int, float]] = []  # since the last report
        self._bar = tqdm(disable=True)
        self._services = callbacks.TrainingCallback()
        if not self._is_quiet:
            self._cut(iteration)
            self._bar = open_bar(settings.iters, "Training", "batch")
            how = (settings.report_to, settings.project_name, str(output), asdict(settings))
            self._services = callbacks.get_reporting_callbacks(*how) or self._services
        self._bar.update(iteration)
        self.close = self._bar.close

    def _cut(self, iteration: int) -> None:
        """Write the table anew, without the rows after ``iteration``."""
        kept = []
        if iteration and self._path.exists():
            whole = self._path.read_text().rpartition("\n")[0]  # a full disk cuts a line short
            kept = [
                line
                for line in whole.splitlines()[1:]
                if (number := line.partition(",")[0]).isdigit() and int(number) <= iteration
            ]
        with new_file(self._path) as draft:
            draft.write_text("\n".join([",".join(self._columns), *kept, ""]))

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
        self._bar.update()
        self._bar.set_postfix_str(f"{num_tokens / seconds:.0f} tokens/s")
        if iteration % settings.steps_per_report and iteration < settings.iters:
            return
        all_losses, tokens, times = zip(*self._recent, strict=True)
        self._recent = []
        means = np.mean(all_losses, axis=0).tolist()
        each = sum(times) / len(times)
        row = figures | _numbered("loss", means)
        row["loss"] = sum(means)
        row["tokens_per_second"] = round(sum(tokens) / sum(times), 1)
        row["iterations_per_second"] = round(1 / each, 3)  # for services only
        row["peak_memory_gb"] = round(mx.get_peak_memory() / 1e9, 3)
        self._write(iteration, row, self._services.on_train_loss_report)
        left = tqdm.format_interval((settings.iters - iteration) * each)
        self.say(
            f"Iter {iteration}: Train loss {row['loss']:.3f}, first step {means[0]:.3f}, "
            f"Learning Rate {row['learning_rate']:.3e}, "
            f"Tokens/sec {row['tokens_per_second']:.1f}, Trained Tokens {row['trained_tokens']}, "
            f"Peak mem {row['peak_memory_gb']:.3f} GB, {left} left"
        )

    def evaluation(self, iteration: int, found: Evaluation) -> None:
        """Report the figures on held-out sequences."""
        row = _numbered("match", found.match)
        row |= _numbered("mean_acceptance_length", found.lengths)
        self._write(iteration, row, self._services.on_val_loss_report)
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

    def _write(
        self, iteration: int, figures: dict[str, float], report: Callable[[dict[str, float]], None]
    ) -> None:
        row = {"iteration": iteration} | figures
        if not self._is_quiet:
            with self._path.open("a") as file:
                print(*(row.get(name, "") for name in self._columns), sep=",", file=file)
            report({NAMES.get(name, name): value for name, value in row.items()})


def _numbered(name: str, values: Sequence[float]) -> dict[str, float]:
    """Name the figures of each step: "loss", (3, 2) -> {"loss_1": 3, "loss_2": 2}."""
    return {f"{name}_{number}": value for number, value in enumerate(values, start=1)}


def _shown(lengths: Sequence[float]) -> str:
    figures = " ".join(f"{length:.3f}" for length in lengths)
    return f"mean acceptance length for k = 1 ... {len(lengths)}: {figures}"
