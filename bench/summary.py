"""Summary of runs of single prompts as plain data: figures by prompt set and by prompt."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_eagle.decoding.stats import Stats
from mlx_eagle.system.device import megabytes

from .costs import Costs
from .figures import (
    Figure,
    median_of,
    median_ratio,
    milliseconds,
    number,
    number3,
    numbers,
    ratio,
    row_of,
    spread_of,
    times,
    with_spread,
)
from .parity import count_identical, largest_margin, parities, parity_words
from .questions import by_set
from .runner import BatchRun, Models, Run
from .turns import Cell

Result = Mapping[str, Any]


def median_seconds(runs: Sequence[Run]) -> float | None:
    """Seconds per token after the first, in the median run; None if nothing was timed."""
    return median_of(run.seconds / run.num_timed for run in runs if run.tps is not None)


def total_tps(run_lists: Iterable[Sequence[Run]]) -> float | None:
    """Tokens per second over several prompts: all tokens over the sum of median times."""
    num_tokens = 0.0
    seconds = 0.0
    for runs in run_lists:
        num_timed = median(run.num_timed for run in runs)
        per_token = median_seconds(runs)
        if per_token is not None:
            num_tokens += num_timed
            seconds += num_timed * per_token
    return ratio(num_tokens, seconds)


class CellGroup:
    """Cells of one configuration: all of a set, or all there are."""

    def __init__(self, cells: Sequence[Cell]):
        self.cells = cells
        self.plain = [run for cell in cells for run in cell.plain]
        self.runs = [run for cell in cells for run in cell.runs]
        self.stats = sum((cell.stats for cell in cells), Stats())
        self.plain_tps = total_tps(cell.plain for cell in cells)
        self.tps = total_tps(cell.runs for cell in cells)

    def round_seconds(self) -> float | None:
        """Seconds per target pass in the median run; None if nothing was timed."""
        timed = (run for run in self.runs if run.tps is not None)
        return median_of(ratio(run.seconds, run.stats.num_target_forwards) for run in timed)


def counted(name: str, heading: str = "", show: Any = str) -> Figure:
    """A figure of ``Stats``, over all runs of a group."""
    return Figure(name, heading, show, lambda g: getattr(g.stats, name))


def middle(spread: Mapping[str, float]) -> str:
    """The median in whole milliseconds."""
    return milliseconds(spread["median"], 0)


PLACE = (Figure("set", "set"), Figure("configuration", "configuration"))
SPEED = (
    *PLACE,
    Figure("num_prompts", of=lambda g: len(g.cells)),
    Figure("output_tokens", of=lambda g: sum(len(cell.runs[0].tokens) for cell in g.cells)),
    Figure("plain_tps", of=lambda g: g.plain_tps),
    Figure("tps", of=lambda g: g.tps),
    Figure("plain_tps_spread", of=lambda g: spread_of(run.tps for run in g.plain)),
    Figure("tps_spread", of=lambda g: spread_of(run.tps for run in g.runs)),
    Figure("round_seconds", of=CellGroup.round_seconds),
    Figure("", "plain tok/s", lambda row: with_spread(row["plain_tps_spread"], row["plain_tps"])),
    Figure("", "speculative tok/s", lambda row: with_spread(row["tps_spread"], row["tps"])),
    Figure("speedup", "ratio", times, lambda g: ratio(g.tps, g.plain_tps)),
    Figure(
        "speedup_by_prompt",
        "ratio by prompt",
        with_spread,
        lambda g: spread_of(median_ratio(*cell.both) for cell in g.cells),
    ),
    Figure("speedup_by_prompt", "worst prompt", lambda found: times((found or {}).get("min"))),
    Figure("num_runs", "runs", of=lambda g: len(g.runs)),
)
START = (
    *PLACE,
    Figure("plain_ttft", "TTFT plain ms", middle, lambda g: spread_of(r.ttft for r in g.plain)),
    Figure("ttft", "TTFT ms", middle, lambda g: spread_of(run.ttft for run in g.runs)),
    Figure(
        "plain_peak_bytes", "peak plain", megabytes, lambda g: max(r.peak_bytes for r in g.plain)
    ),
    Figure("peak_bytes", "peak", megabytes, lambda g: max(run.peak_bytes for run in g.runs)),
)
ACCEPTANCE = (
    *PLACE,
    counted("mean_acceptance_length", "mean acceptance length (tau)", number),
    counted("acceptance_rate", "acceptance", number),
    counted("acceptance_by_position", "by position", numbers),
)
COUNTS = (
    *PLACE,
    counted("num_rounds"),
    counted("num_plain_steps"),
    counted("accepted_histogram", "accepted lengths",
            lambda counts: " ".join(f"{kept}:{n}" for kept, n in enumerate(counts)) or "-"),
    counted(
        "cumulative_acceptance_by_position", "cumulative acceptance by position", numbers
    ),
    Figure("target_forwards_per_token", "target forwards/token", number3,
           lambda g: ratio(g.stats.num_target_forwards, g.stats.num_emitted)),
    Figure("head_forwards_per_round", "head forwards/round", number,
           lambda g: ratio(g.stats.num_head_forwards, g.stats.num_rounds) or 0.0),
    Figure("evals_per_round", "evals/round", number,
           lambda g: ratio(g.stats.num_evals, g.stats.num_target_forwards)),
)  # fmt: skip
GROUP = (*SPEED, *START, *ACCEPTANCE, *COUNTS)
"""Figures of a configuration over a set of prompts, or over all of them."""


def speeds(name: str, plain: str, drafted: str, speedup: str) -> tuple[Figure, ...]:
    """Plain and drafted speed by one clock of ``BatchRun``, each the median run's; their ratio."""

    def speed(runs: Sequence[BatchRun]) -> float:
        return median(getattr(run, name) for run in runs)

    return (
        Figure(f"plain_{name}", plain, number, lambda cell: speed(cell.plain)),
        Figure(name, drafted, number, lambda cell: speed(cell.runs)),
        Figure(name.replace("tps", "speedup"), speedup, times,
               lambda cell: ratio(speed(cell.runs), speed(cell.plain))),
    )  # fmt: skip


BATCH = (
    Figure("batch", "prompts at once", of=lambda cell: cell.at_once),
    Figure("set", "set", of=lambda cell: cell.set_name),
    Figure("configuration", "configuration", of=lambda cell: cell.configuration.label),
    Figure("output_tokens", of=lambda cell: cell.runs[0].num_tokens),
    *speeds("tps_after_prefill", "plain batch tok/s", "speculative tok/s", "ratio"),
    *speeds("tps", "whole call: plain", "whole call: speculative", "whole call: ratio"),
    counted("mean_acceptance_length", "tau", number),
    counted("num_rounds"),
    counted("num_plain_steps"),
    Figure("num_runs", of=lambda cell: len(cell.runs)),
    Figure("parity", "outputs identical", count_identical),  # which needs the target
    Figure("parity", "largest margin where not", largest_margin),
    Figure("drafting_events", "drafting events", lambda events: ", ".join(events) or "-",
           lambda cell: cell.runs[0].events),
)  # fmt: skip
"""Figures of a configuration on a batch."""

NAMES = (
    Figure("set", of=lambda cell: cell.set_name),
    Figure("id", of=lambda cell: cell.questions[0].id),
    Figure("drafter", of=lambda cell: cell.configuration.drafter),
    Figure("", "prompt", lambda row: f"{row['set']}/{row['id']}"),
    Figure("configuration", "configuration", of=lambda cell: cell.configuration.label),
)
PROMPT = (
    *NAMES,
    Figure("prompt_tokens", "prompt tokens", of=lambda cell: len(cell.prompts[0])),
    Figure("output_tokens", "output tokens", of=lambda cell: len(cell.runs[0].tokens)),
    Figure("plain_tps", "plain tok/s", number, lambda cell: total_tps([cell.plain])),
    Figure("tps", "speculative tok/s", number, lambda cell: total_tps([cell.runs])),
    Figure("speedup", "ratio", times, lambda cell: median_ratio(*cell.both)),
    Figure("mean_acceptance_length", "tau", number, lambda cell: cell.stats.tau),
    Figure("repeatable", of=lambda cell: all(r.tokens == cell.runs[0].tokens for r in cell.runs)),
    Figure("stats", of=lambda cell: cell.runs[0].stats.to_dict()),
    Figure("parity", "parity", parity_words),  # which needs the target
)
"""Figures of a configuration on one prompt."""


def run_rows(cells: Sequence[Cell], scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per run, for the CSV; ``scenario`` has context and temperature."""
    return [
        {
            **scenario,
            **row_of(NAMES, cell),
            "role": role,
            "run": number,
            "prompt_tokens": len(cell.prompts[0]),
            "output_tokens": len(run.tokens),
            "timed_tokens": run.num_timed,
            "seconds": run.seconds,
            "tokens_per_second": run.tps,
            "ttft": run.ttft,
            "peak_bytes": run.peak_bytes,
            "mean_acceptance_length": run.stats and run.stats.tau,
        }
        for cell in cells
        for role, number, run in cell.numbered()
    ]


def configuration_result(cells: Sequence[Cell], costs: Costs | None) -> dict[str, Any]:
    """One configuration, overall and per set; with prediction and time split for a fixed k."""
    configuration = cells[0].configuration
    size = configuration.size
    figures = {}
    for name, group in {"overall": cells, **by_set(cells)}.items():
        figure = row_of(GROUP, CellGroup(group))
        if costs is not None and configuration.kind == "chain" and size:
            tau = figure["mean_acceptance_length"]
            figure["prediction"] = costs.predict(tau, size, figure["speedup"])
            if figure["round_seconds"] is not None:
                figure["time_split"] = costs.time_split(size, figure["round_seconds"])
        figures[name] = figure
    return {
        "label": configuration.label,
        "drafter": configuration.drafter,
        "kind": configuration.kind,
        "num_draft_tokens": size,
        "exact": configuration.options.get("exact", False),
        "overall": figures.pop("overall"),
        "sets": figures,
    }


def scenario_summary(
    models: Models, cells: Sequence[Cell], costs: Mapping[str, Costs], context: int
) -> dict[str, Any]:
    """One scenario: every configuration, every prompt, and every drafter's ``costs``.

    The costs were timed on ``context`` tokens.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.configuration.label, []).append(cell)
    results = [
        configuration_result(own, costs.get(own[0].configuration.drafter))
        for own in groups.values()
    ]
    drafters = []
    for name, found in costs.items():
        own = chains(result for result in results if result["drafter"] == name)
        curve = found.curve(own[-1]["overall"]["acceptance_by_position"]) if own else []
        timed = {"context": context, **found.to_dict()}
        drafters.append({"name": name, "costs": timed, "curve": curve})
    plain_runs = [run for cell in cells for run in cell.plain]
    scenario = {
        "prompt_tokens": spread_of(len(cell.prompts[0]) for cell in next(iter(groups.values()))),
        "output_tokens": spread_of(len(run.tokens) for run in plain_runs),
        "plain_step_measured": median_seconds(plain_runs),
        "configurations": results,
        "drafters": drafters,
        "prompts": [row_of(PROMPT, c, parity=parities(models.target, c)[0]) for c in cells],
    }
    return scenario | {"side_by_side": side_by_side(models, scenario)}


SIDE_BY_SIDE = (
    Figure("drafter", "draft model"),
    Figure("", "fastest with", lambda row: way_of(row["configuration"], row["drafter"])),
    Figure("tps", "tok/s", number),
    Figure("speedup", "ratio", times),
    Figure("speedup_of_worst_prompt", "worst prompt", times),
    Figure("mean_acceptance_length", "tau", number),
    Figure("weight_bytes", "weights", lambda size: megabytes(size) if size else "none"),
    Figure("peak_bytes", "peak memory", megabytes),
    Figure("", "outputs identical", lambda row: f"{row['identical']} of {row['num_prompts']}"),
)


def side_by_side(models: Models, scenario: Result) -> list[dict[str, Any]]:
    """Each of several drafters in its fastest configuration, the fastest drafter first.

    ``peak_bytes`` leave out the weights of the other draft models, which were loaded as well.
    """
    if len(models.drafters) < 2:
        return []
    weights = {name: weights_of(drafter.modules()) for name, drafter in models.drafters.items()}
    compared = {} if models.compared is None else weights_of([models.compared])
    loaded = dict(chain(compared.items(), *(own.items() for own in weights.values())))
    rows = []
    for name, own in weights.items():
        ways = [r for r in scenario["configurations"] if r["drafter"] == name]
        best = max(ways, key=lambda result: result["overall"]["speedup"] or 0.0)
        overall = best["overall"]
        if not overall["speedup"]:
            continue
        parities = [row["parity"] for row in prompts_of(scenario, best)]
        shown = ("tps", "plain_tps", "speedup", "mean_acceptance_length")
        rows.append(
            {
                "drafter": name,
                "configuration": best["label"],
                **{key: overall[key] for key in shown},
                "speedup_of_worst_prompt": overall["speedup_by_prompt"]["min"],
                "weight_bytes": sum(own.values()),
                "peak_bytes": overall["peak_bytes"] + sum(own.values()) - sum(loaded.values()),
                "identical": sum(parity["identical"] for parity in parities),
                "num_prompts": len(parities),
            }
        )
    return sorted(rows, key=lambda row: -row["speedup"])


def weights_of(modules: Iterable[nn.Module]) -> dict[int, int]:
    """Bytes of each array of weights, by its identity: drafters may share arrays."""
    arrays = (tree_flatten(module.parameters()) for module in modules)
    return {id(array): array.nbytes for found in arrays for _, array in found}


# --- reading a summary: for the report, the plots and the report file ----------------------------


def prompts_of(scenario: Result, configuration: Result) -> list[Result]:
    """Figures of the prompts of one configuration."""
    label = configuration["label"]
    return [row for row in scenario["prompts"] if row["configuration"] == label]


def chains(results: Iterable[Result]) -> list[Result]:
    """Configurations with a fixed k above 0, shortest first."""
    found = [each for each in results if each["kind"] == "chain" and each["num_draft_tokens"]]
    return sorted(found, key=lambda each: each["num_draft_tokens"])


def way_of(label: str, drafter: str) -> str:
    """The label of a configuration without the name of its drafter."""
    return label.removeprefix(f"{drafter}, ")


def suffixed(parts: Sequence[Any], word: str = "") -> list[tuple[str, Any]]:
    """Each of several parts with a suffix for the files of its plots: "-1", "-2" and so on."""
    many = len(parts) > 1
    return [(f"-{word}{i}" if many else "", part) for i, part in enumerate(parts, 1)]


def views(scenario: Result) -> list[tuple[str, Result]]:
    """The scenario as each drafter has it, with a suffix for the files of its plots."""
    found = []
    for suffix, drafter in suffixed(scenario["drafters"], "drafter"):
        own = [c for c in scenario["configurations"] if c["drafter"] == drafter["name"]]
        found.append((suffix, {**scenario, **drafter, "configurations": own}))
    return found
