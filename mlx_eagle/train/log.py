"""Training log: lines, a bar, ``training.csv``, the page of its curves and the head's card."""

import csv
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..convert.card import TAGS
from ..system.drawing import BLUE, EXTRA, STYLE, has_matplotlib
from ..system.progress import open_bar
from ..system.render import Block, Heading, Image, Paragraph, Table, html_page
from .evaluate import Evaluation, Generated

CSV, PAGE = "training.csv", "training.html"
CAPTIONS = {
    "loss": "Loss over the batches: all steps of the training-time test together, and each.",
    "match": "How often the draft at each depth is the text's own token, on what is held out.",
    "length": "Mean acceptance length that drafts of k tokens would have, on what is held out.",
}

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Lines by their names: numbers of batches, and what stands at each."""


class TrainingLog:
    """Rows of ``training.csv`` in ``output``, and the same in lines for people.

    ``quiet``: neither lines nor rows, for all ranks but the first. Rows after ``iteration``,
    of a run that was stopped and is gone on with, are cut off.
    """

    def __init__(self, output: Path, num_steps: int, iters: int, iteration: int, quiet: bool):
        depths = range(1, num_steps + 1)
        self._columns = [
            "iteration",
            "loss",
            *(f"loss_{depth}" for depth in depths),
            "learning_rate",
            "grad_norm",
            "trained_tokens",
            "tokens_per_second",
            "peak_memory_gb",
            *(f"match_{depth}" for depth in depths),
            *(f"mean_acceptance_length_{depth}" for depth in depths),
        ]
        self._path = output / CSV
        self._quiet = quiet
        self._bar = None
        if not quiet:
            self._cut(iteration)
            self._bar = open_bar(iters, "Training", "batch")
            self._bar.update(iteration)

    def _cut(self, iteration: int) -> None:
        """Keep the rows up to ``iteration``, and write the head of the table."""
        rows: list[dict[str, str]] = []
        if iteration and self._path.exists():
            whole = self._path.read_text().rpartition("\n")[0]  # a full disk cuts a line short
            for row in csv.DictReader(whole.splitlines()):
                if (row["iteration"] or "").isdigit() and int(row["iteration"]) <= iteration:
                    rows.append(row)
        scratch = self._path.with_name(f".{CSV}.{os.getpid()}")
        try:
            with scratch.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            os.replace(scratch, self._path)
        finally:
            scratch.unlink(missing_ok=True)

    def say(self, line: str) -> None:
        if self._quiet:
            return
        if self._bar is not None and not self._bar.disable:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def advance(self, tokens_per_second: float | None = None) -> None:
        if self._bar is not None:
            self._bar.update()
            if tokens_per_second is not None:
                self._bar.set_postfix_str(f"{tokens_per_second:.0f} tokens/s")

    def training(
        self,
        iteration: int,
        losses: list[float],
        rate: float,
        norm: float,
        speed: float,
        total: int,
    ) -> None:
        """A report: the mean loss of each step since the last one."""
        peak = mx.get_peak_memory() / 1e9
        self._write(
            iteration=iteration,
            loss=sum(losses),
            learning_rate=rate,
            grad_norm=norm,
            trained_tokens=total,
            tokens_per_second=round(speed, 1),
            peak_memory_gb=round(peak, 3),
            **{f"loss_{i}": loss for i, loss in enumerate(losses, start=1)},
        )
        self.say(
            f"Iter {iteration}: Train loss {sum(losses):.3f}, first step {losses[0]:.3f}, "
            f"Learning Rate {rate:.3e}, Tokens/sec {speed:.1f}, Trained Tokens {total}, "
            f"Peak mem {peak:.3f} GB"
        )

    def evaluation(self, iteration: int, found: Evaluation) -> None:
        self._write(
            iteration=iteration,
            **{f"match_{i}": x for i, x in enumerate(found.match, start=1)},
            **{f"mean_acceptance_length_{i}": x for i, x in enumerate(found.lengths, start=1)},
        )
        match = " ".join(f"{share:.3f}" for share in found.match)
        lengths = " ".join(f"{length:.3f}" for length in found.lengths)
        self.say(
            f"Iter {iteration}: Val on {found.num_sequences} sequences: match by depth {match}; "
            f"mean acceptance length for k = 1 ... {len(found.lengths)}: {lengths}"
        )

    def generated(self, found: Generated) -> None:
        lengths = " ".join(f"{length:.3f}" for length in found.lengths)
        self.say(
            f"Generated {found.num_answers} answers of up to {found.max_tokens} tokens: mean "
            f"acceptance length for k = 1 ... {len(found.lengths)}: {lengths}"
        )

    def _write(self, **values: float) -> None:
        if self._quiet:
            return
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(values)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def make_card(name: str, facts: Mapping[str, Any]) -> str:
    """The card of a trained head; ``facts`` as they stand under ``training`` in its config."""
    lines = [
        "---",
        "library_name: mlx",
        "tags:",
        *(f"- {tag}" for tag in TAGS),
        "---",
        "",
        f"# {name}",
        "",
        "A draft head for speculative decoding, trained by mlx-eagle. It is no model of its own: "
        "it drafts tokens that its target accepts or replaces.",
        "",
        "| | |",
        "|---|---|",
        f"| Target | {facts['target']} |",
        f"| Began as | {facts['init'] or 'a fresh head'} |",
        f"| Sequences | {facts['num_sequences']} |",
        f"| Batches | {facts['iterations']} of {facts['batch_size']} |",
        f"| Tokens seen | {facts['trained_tokens']} |",
        f"| Draft vocabulary | {facts['draft_vocab_size']} tokens, "
        f"{facts['coverage']:.2%} of the answers |",
        f"| Recipe | training-time test of {facts['ttt_steps']} steps, loss {facts['loss']}, "
        f"learning rate {facts['learning_rate']:g} |",
    ]
    evaluation = facts.get("evaluation")
    if evaluation:
        rows = {
            "match at that depth": evaluation["match"],
            "mean acceptance length": evaluation["lengths"],
        }
        said = f"On {evaluation['num_sequences']} sequences that were held out:"
        lines += ["", said, "", *_by_depth(rows)]
    generated = facts.get("generated")
    if generated:
        said = (
            f"Decoding {generated['num_answers']} held-out prompts greedily, up to "
            f"{generated['max_tokens']} tokens each:"
        )
        lines += ["", said, "", *_by_depth({"mean acceptance length": generated["lengths"]})]
    usage = "mlx_eagle.generate --model TARGET --draft-model THIS_FOLDER --prompt Hello"
    return "\n".join([*lines, "", "```", usage, "```"]) + "\n"


def _by_depth(rows: dict[str, list[float]]) -> list[str]:
    """A table of named figures, one for each depth k from 1."""
    depths = range(1, len(next(iter(rows.values()))) + 1)
    return [
        "| k | " + " | ".join(map(str, depths)) + " |",
        "|---" * (len(depths) + 1) + "|",
        *(
            f"| {name} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |"
            for name, figures in rows.items()
        ),
    ]


def write_page(output: str | Path) -> Path:
    """Draw ``training.csv`` in the folder of a run; the page, one HTML file beside it.

    Raises ValueError where matplotlib is missing, or there is no such table to read.
    """
    folder = Path(output).expanduser()
    if not has_matplotlib():
        raise ValueError(f"{PAGE} needs matplotlib: {EXTRA}.")
    table = folder / CSV
    if not table.is_file():
        raise ValueError(f"{folder} has no {CSV}: name the --output of a training run.")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    curves = {
        "loss": lines_of(rows, "loss"),
        "match": lines_of(rows, "match"),
        "length": lines_of(rows, "mean_acceptance_length"),
    }
    with tempfile.TemporaryDirectory() as scratch:
        blocks: list[Block] = [Heading(f"Training of {folder.resolve().name}", 1)]
        blocks += _last(curves)
        blocks += [
            Image(_draw(name, lines, Path(scratch) / f"{name}.svg"), CAPTIONS[name])
            for name, lines in curves.items()
            if lines
        ]
        text = html_page(folder.resolve().name, blocks)
    page, draft = folder / PAGE, folder / f".{PAGE}.{os.getpid()}"
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, page)
    finally:
        draft.unlink(missing_ok=True)
    return page


def lines_of(rows: Sequence[Mapping[str, str]], what: str) -> Series:
    """Columns ``what`` and ``what_1``, ``what_2`` ... against the batches; no empty ones.

    [{"iteration": "5", "loss": "2", "loss_1": "1.5", "match_1": ""}], "loss" ->
    {"loss": ([5], [2.0]), "1": ([5], [1.5])}
    """
    lines = {}
    for column in rows[0] if rows else ():
        stem, _, depth = column.rpartition("_")
        if column != what and not (stem == what and depth.isdecimal()):
            continue
        found = [(int(row["iteration"]), float(row[column])) for row in rows if row[column]]
        if found:
            batches, values = zip(*found, strict=True)
            lines[column if column == what else depth] = (list(batches), list(values))
    return lines


def _last(curves: Mapping[str, Series]) -> list[Block]:
    """The last figures on what is held out, as a table."""
    match, length = curves["match"], curves["length"]
    if not match:
        return [Paragraph("Nothing was held out, so nothing was evaluated.")]
    number = next(iter(match.values()))[0][-1]
    rows = [
        [depth, f"{match[depth][1][-1]:.3f}", f"{length[depth][1][-1]:.3f}"] for depth in match
    ]
    return [
        Paragraph(f"On what is held out, after {number} batches:"),
        Table(["k", "match at that depth", "mean acceptance length"], rows),
    ]


def _draw(name: str, lines: Series, path: Path) -> Path:
    import matplotlib  # here, because it takes a second, and may be missing
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 4.2))
        axes = figure.subplots()
        shades = matplotlib.colormaps["viridis"]
        depths = [label for label in lines if label.isdecimal()]
        for label, (batches, values) in lines.items():
            if label in depths:
                colour = shades(0.9 * depths.index(label) / max(1, len(depths) - 1))
                words = f"k = {label}" if name == "length" else f"depth {label}"
                axes.plot(batches, values, "o-", ms=3, lw=1.4, color=colour, label=words)
            else:
                axes.plot(batches, values, lw=2.2, color=BLUE, label="all")
        titles = {
            "loss": "Loss",
            "match": "Acceptance by depth",
            "length": "Mean acceptance length (tau)",
        }
        axes.set(xlabel="batches", title=titles[name])
        axes.set_ylim(bottom=1.0 if name == "length" else 0.0)
        axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, bbox_inches="tight")
    return path
