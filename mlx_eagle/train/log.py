"""Training log: lines, a bar, ``training.csv``, the page of its curves and the head's card."""

import csv
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from ..convert.publish import WHAT_IT_IS, by_depth, card
from ..system.atomic_folder import new_file
from ..system.terminal import open_bar
from .evaluation import Evaluation, Generated

CSV, PAGE = "training.csv", "training.html"
CHARTS = {
    "loss": (
        "Loss",
        "Loss over the batches: all steps of the training-time test together, and each.",
    ),
    "match": (
        "Acceptance by depth",
        "How often the draft at each depth is the text's own token, on what is held out.",
    ),
    "mean_acceptance_length": (
        "Mean acceptance length (tau)",
        "Mean acceptance length that drafts of k tokens would have, on what is held out.",
    ),
}
"""Of the table's columns that are charts on the page: title and caption."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 820px; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #8884; text-align: left; }
figure { margin: 2rem 0; }
figcaption { opacity: .7; font-size: .9rem; }
svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: currentColor; }
svg .title { font-size: 15px; font-weight: 600; }
svg .x { text-anchor: middle; }
svg .y { text-anchor: end; }
svg polyline, svg path { fill: none; stroke-width: 1.6; }
svg .grid { stroke: #8884; stroke-width: 1; }
"""

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
        with new_file(self._path) as draft, draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def say(self, line: str) -> None:
        if not self._quiet:
            with tqdm.external_write_mode():
                print(line, flush=True)

    def advance(self, tokens_per_second: float) -> None:
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(f"{tokens_per_second:.0f} tokens/s")

    def training(
        self,
        iteration: int,
        losses: list[float],
        rate: float,
        norm: float,
        speed: float,
        total: int,
        left: float,
    ) -> None:
        """A report: the mean loss of each step since the last one, and the seconds to go."""
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
            f"Peak mem {peak:.3f} GB, {duration(left)} left"
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


def duration(seconds: float) -> str:
    """75 -> "75 s"; 7500 -> "2 h 5 min" """
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def make_card(name: str, facts: Mapping[str, Any]) -> str:
    """The card of a trained head; ``facts`` as they stand under ``training`` in its config."""
    shown = {
        "Target": facts["target"],
        "Began as": facts["init"] or "a fresh head",
        "Sequences": facts["num_sequences"],
        "Batches": f"{facts['iterations']} of {facts['batch_size']}",
        "Tokens seen": facts["trained_tokens"],
        "Draft vocabulary": f"{facts['draft_vocab_size']} tokens, {facts['coverage']:.2%} of the "
        "answers",
        "Recipe": f"training-time test of {facts['ttt_steps']} steps, loss {facts['loss']}, "
        f"learning rate {facts['learning_rate']:g}",
    }
    sections = []
    if evaluation := facts["evaluation"]:
        sections += [
            f"On {evaluation['num_sequences']} sequences that were held out:",
            _by_depth(
                {
                    "match at that depth": evaluation["match"],
                    "mean acceptance length": evaluation["lengths"],
                }
            ),
        ]
    if generated := facts["generated"]:
        sections += [
            f"Decoding {generated['num_answers']} held-out prompts greedily, up to "
            f"{generated['max_tokens']} tokens each:",
            _by_depth({"mean acceptance length": generated["lengths"]}),
        ]
    usage = "mlx_eagle.generate --model TARGET --draft-model THIS_FOLDER --prompt Hello"
    title = f"A draft head {WHAT_IT_IS.format(made='trained')}"
    return card(name, title, shown, [*sections, f"```\n{usage}\n```"])


def _by_depth(rows: Mapping[str, Sequence[float]]) -> str:
    """Figures for each depth k from 1."""
    depths = range(1, len(next(iter(rows.values()))) + 1)
    shown = {name: [f"{figure:.3f}" for figure in figures] for name, figures in rows.items()}
    return by_depth("k", list(map(str, depths)), shown)


def write_page(output: str | Path) -> Path:
    """Draw ``training.csv`` in the folder of a run; the page, one HTML file beside it.

    Raises ValueError where there is no such table to read.
    """
    folder = Path(output).expanduser()
    table = folder / CSV
    if not table.is_file():
        raise ValueError(f"{folder} has no {CSV}: name the --output of a training run.")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        curves = {column: lines_of(rows, column) for column in CHARTS}
    except ValueError as err:
        raise ValueError(f"{table} cannot be read ({err}): it is not as the run left it.") from err
    name = html.escape(folder.resolve().name)
    figures = "".join(
        f"<figure>{_chart(title, curves[column])}<figcaption>{caption}</figcaption></figure>\n"
        for column, (title, caption) in CHARTS.items()
        if curves[column]
    )
    text = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>Training of {name}</title>\n<style>{STYLE}</style>\n"
        f"<h1>Training of {name}</h1>\n{_last(curves)}{figures}</html>\n"
    )
    with new_file(folder / PAGE) as draft:
        draft.write_text(text, encoding="utf-8")
    return folder / PAGE


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


def _last(curves: Mapping[str, Series]) -> str:
    """The last figures on what is held out, as a table."""
    match, length = curves["match"], curves["mean_acceptance_length"]
    if not match:
        return "<p>Nothing was held out, so nothing was evaluated.</p>\n"
    number = next(iter(match.values()))[0][-1]
    rows = "".join(
        f"<tr><td>{depth}<td>{match[depth][1][-1]:.3f}<td>{length[depth][1][-1]:.3f}"
        for depth in match
    )
    return (
        f"<p>On what is held out, after {number} batches:</p>\n<table>"
        f"<tr><th>k<th>match at that depth<th>mean acceptance length{rows}</table>\n"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to at least ``high``, five to twelve: 0, 0.2, ... 1."""
    step = 10.0 ** math.floor(math.log10((high - low) or 1.0))
    while (high - low) / step < 5:
        step /= 2 if f"{step:e}"[0] != "5" else 2.5
    first = math.floor(low / step + 1e-9)
    count = math.ceil((high - low) / step - 1e-9)
    return [round((first + i) * step, 10) for i in range(count + 1)]


def _chart(title: str, lines: Series) -> str:
    """Lines over batches as an SVG of its own, with axes, names and every value to point at."""
    width, height, left, right, top, bottom = 760, 340, 56, 96, 34, 44
    most = max(max(batches) for batches, _ in lines.values())
    values = [v for _, values in lines.values() for v in values if math.isfinite(v)] or [0.0]
    low = 1.0 if title.startswith("Mean") else 0.0
    across = [x for x in _ticks(0, most or 1) if x == int(x)]
    up = _ticks(min(low, *values), max(low + 1e-3, *values))

    def at(batch: float, value: float) -> tuple[float, float]:
        x = left + batch / across[-1] * (width - left - right)
        return x, top + (up[-1] - value) / (up[-1] - up[0]) * (height - top - bottom)

    parts = [f'<text class="title" x="{left}" y="18">{title}</text>']
    for tick in across:
        x, y = at(tick, up[0])
        parts.append(f'<text class="x" x="{x:.1f}" y="{y + 18:.1f}">{tick:g}</text>')
    for tick in up:
        x, y = at(0, tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}H{width - right}"/>')
        parts.append(f'<text class="y" x="{x - 8:.1f}" y="{y + 4:.1f}">{tick:g}</text>')
    x, y = at(across[-1] / 2, up[0])
    parts.append(f'<text class="x" x="{x:.1f}" y="{y + 38:.1f}">batches</text>')
    for number, (label, (batches, values)) in enumerate(lines.items()):
        colour = f"hsl({260 - 200 * number / max(1, len(lines) - 1):.0f} 65% 45%)"
        pairs = zip(batches, values, strict=True)
        points = [(*at(b, v), b, v) for b, v in pairs if math.isfinite(v)]
        words = "all" if not label.isdecimal() else f"k = {label}"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        parts.append(f'<polyline stroke="{colour}" points="{path}"/>')
        parts += [
            f'<circle fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
            f"<title>{words}, batch {b:g}: {v:.4g}</title></circle>"
            for x, y, b, v in points
        ]
        row = top + 8 + 18 * number
        parts.append(f'<path stroke="{colour}" d="M{width - right + 12} {row}h16"/>')
        parts.append(f'<text x="{width - right + 34}" y="{row + 4}">{words}</text>')
    shape = f'viewBox="0 0 {width} {height}" role="img" aria-label="{title}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>{"".join(parts)}</svg>'
