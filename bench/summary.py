"""Summary of runs as plain data: figures by prompt set, by prompt and by batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_eagle.decoding.stats import Stats

from .configurations import Cell, Cells
from .costs import Costs, curve, predict, time_split
from .figures import median_of, ratio, spread_of
from .questions import by_set
from .runner import Models, Run

Result = Mapping[str, Any]
COUNTS = (
    "mean_acceptance_length", "acceptance_rate", "acceptance_by_position", "num_rounds",
    "num_plain_steps", "accepted_histogram", "cumulative_acceptance_by_position",
)  # fmt: skip
"""Figures of ``Stats`` that are shown of a configuration."""


def seconds_per_token(runs: Iterable[Run]) -> float | None:
    """Seconds per token after the first, in the median run; None if nothing was timed."""
    return median_of(ratio(1.0, run.tps) for run in runs)


def total_tps(run_lists: Iterable[Sequence[Run]]) -> float | None:
    """Tokens per second over several prompts: all tokens over the sum of median times."""
    per_token = [
        (median(r.num_timed for r in runs), seconds_per_token(runs)) for runs in run_lists
    ]
    timed = [(num, seconds) for num, seconds in per_token if seconds is not None]
    return ratio(sum(num for num, _ in timed), sum(num * seconds for num, seconds in timed))


def stats_of(cells: Cells) -> Stats:
    """Counts of all runs of the configuration together."""
    return sum((run.stats for cell in cells for run in cell.runs), Stats())


def group_figures(cells: Cells) -> dict[str, Any]:
    """Figures of a configuration over a set of prompts, or over all of them."""
    stats = stats_of(cells)
    found: dict[str, Any] = {name: getattr(stats, name) for name in COUNTS}
    lists = zip(*(cell.both for cell in cells), strict=True)
    for prefix, own in zip(("plain_", ""), lists, strict=True):
        runs = list(chain(*own))
        found[f"{prefix}tps"] = total_tps(own)
        found[f"{prefix}tps_spread"] = spread_of(run.tps for run in runs)
        found[f"{prefix}ttft"] = spread_of(run.ttft for run in runs)
        found[f"{prefix}peak_bytes"] = max(run.peak_bytes for run in runs)
    timed = (run for run in runs if run.tps is not None)
    return found | {
        "num_prompts": len(cells),
        "output_tokens": sum(cell.runs[0].num_tokens for cell in cells),
        "num_runs": len(runs),
        "round_seconds": median_of(ratio(r.seconds, r.stats.num_target_forwards) for r in timed),
        "speedup": ratio(found["tps"], found["plain_tps"]),
        "speedup_by_prompt": spread_of(cell.speedup for cell in cells),
        "target_forwards_per_token": ratio(stats.num_target_forwards, stats.num_emitted),
        "head_forwards_per_round": ratio(stats.num_head_forwards, stats.num_rounds) or 0.0,
        "evals_per_round": ratio(stats.num_evals, stats.num_target_forwards),
    }


def batch_figures(cell: Cell) -> dict[str, Any]:
    """Figures of a configuration on a batch."""
    first = cell.runs[0]
    stats = stats_of([cell])
    found: dict[str, Any] = {
        "batch": cell.at_once,
        "set": cell.set_name,
        "configuration": cell.configuration.label,
        "output_tokens": first.num_tokens,
        "mean_acceptance_length": stats.tau,
        "num_rounds": stats.num_rounds,
        "num_plain_steps": stats.num_plain_steps,
        "num_runs": len(cell.runs),
        "parity": cell.parity,
        "drafting_events": [event.what for event in first.stats.drafting_events],
    }
    for clock, of in (("tps_after_prefill", "tps"), ("tps", "call_tps")):
        plain, drafted = (median_of(getattr(run, of) for run in each) for each in cell.both)
        speedup = clock.replace("tps", "speedup")
        found |= {f"plain_{clock}": plain, clock: drafted, speedup: ratio(drafted, plain)}
    return found


def name_of(cell: Cell) -> dict[str, Any]:
    """Prompt and configuration of a cell with one prompt."""
    return {
        "set": cell.set_name,
        "id": cell.questions[0].id,
        "drafter": cell.configuration.drafter,
        "configuration": cell.configuration.label,
    }


def prompt_figures(cell: Cell) -> dict[str, Any]:
    """Figures of a configuration on one prompt."""
    first = cell.runs[0]
    return {
        **name_of(cell),
        "prompt_tokens": len(cell.prompts[0]),
        "output_tokens": first.num_tokens,
        "plain_tps": total_tps([cell.plain]),
        "tps": total_tps([cell.runs]),
        "speedup": cell.speedup,
        "mean_acceptance_length": stats_of([cell]).tau,
        "repeatable": all(run.texts == first.texts for run in cell.runs),
        "stats": first.stats.to_dict(),
        "parity": cell.parity[0],
    }


def run_rows(cell: Cell) -> Iterator[dict[str, Any]]:
    """A row per run, for the CSV."""
    for role, number, run in cell.numbered():
        yield {
            **name_of(cell),
            "role": role,
            "run": number,
            "prompt_tokens": len(cell.prompts[0]),
            "output_tokens": run.num_tokens,
            "timed_tokens": run.num_timed,
            "seconds": run.seconds,
            "tokens_per_second": run.tps,
            "ttft": run.ttft,
            "peak_bytes": run.peak_bytes,
            "mean_acceptance_length": run.stats and run.stats.tau,
        }


def configuration_result(cells: Cells, costs: Costs | None) -> dict[str, Any]:
    """One configuration, overall and per set; with prediction and time split for a fixed k."""
    configuration = cells[0].configuration
    size = configuration.size
    figures = {}
    for name, group in {"overall": cells, **by_set(cells)}.items():
        figures[name] = figure = group_figures(group)
        if costs is not None and configuration.kind == "chain" and size:
            tau = figure["mean_acceptance_length"]
            figure["prediction"] = predict(costs, tau, size, figure["speedup"])
            if figure["round_seconds"] is not None:
                figure["time_split"] = time_split(costs, size, figure["round_seconds"])
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
    models: Models, rows: Sequence[Cells], costs: Mapping[str, Costs]
) -> dict[str, Any]:
    """One scenario: every configuration, every prompt, and every drafter's ``costs``.

    ``rows`` have the cells of one prompt each, in the order of the configurations.
    """
    results = []
    for cells in zip(*rows, strict=True):
        results.append(configuration_result(cells, costs.get(cells[0].configuration.drafter)))
    drafters = []
    for name, found in costs.items():
        own = chains(result for result in results if result["drafter"] == name)
        points = curve(found, own[-1]["overall"]["acceptance_by_position"]) if own else []
        drafters.append({"name": name, "costs": found, "curve": points})
    plain_runs = [run for row in rows for cell in row for run in cell.plain]
    scenario = {
        "prompt_tokens": spread_of(len(row[0].prompts[0]) for row in rows),
        "output_tokens": spread_of(run.num_tokens for run in plain_runs),
        "plain_step_measured": seconds_per_token(plain_runs),
        "configurations": results,
        "drafters": drafters,
        "prompts": [prompt_figures(cell) for row in rows for cell in row],
    }
    return scenario | {"side_by_side": side_by_side(models, scenario)}


# --- several drafters ----------------------------------------------------------------------------


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
