"""Summary of runs as plain data: speeds and their spread, acceptance, counts, one row per run."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_eagle.decoding.stats import Stats

from .configurations import Configuration
from .costs import Costs
from .parity import compare
from .questions import by_set, typical_context
from .runner import Models
from .turns import Cell

COUNTS = (
    "mean_acceptance_length",
    "acceptance_rate",
    "acceptance_by_position",
    "cumulative_acceptance_by_position",
    "accepted_histogram",
    "num_rounds",
    "num_plain_steps",
)
"""Figures of ``Stats`` that each configuration shows."""


def spread_of(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, quartiles and extremes of the values that are not None; None without any."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    found = np.percentile(present, [50, 25, 75, 0, 100]).tolist()
    return dict(zip(("median", "q1", "q3", "min", "max"), found, strict=True), n=len(present))


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part`` over ``whole``; None if either is missing or ``whole`` is 0."""
    return part / whole if part is not None and whole else None


def median_seconds(runs: Sequence[Any]) -> float | None:
    """Seconds per token after the first, in the median run; None if nothing was timed."""
    rates = [run.seconds / run.num_timed for run in runs if run.tps is not None]
    return median(rates) if rates else None


def median_ratio(plain: Sequence[Any], runs: Sequence[Any]) -> float | None:
    """Speedup in the median pair of neighbouring runs, one plain and one not.

    Both runs of a pair meet the same moments of the machine; medians of each kind would compare
    different moments.
    """
    pairs = [(p, r) for p, r in zip(plain, runs, strict=True) if p.tps and r.tps]
    return median(run.tps / base.tps for base, run in pairs) if pairs else None


def total_tps(run_lists: Sequence[Sequence[Any]]) -> float | None:
    """Tokens per second over several prompts: all tokens over the sum of median times."""
    num_tokens = 0.0
    seconds = 0.0
    for runs in run_lists:
        per_token = median_seconds(runs)
        if per_token is not None:
            num_timed = median(run.num_timed for run in runs)
            num_tokens += num_timed
            seconds += num_timed * per_token
    return ratio(num_tokens, seconds)


def names_of(cell: Cell) -> dict[str, str]:
    """Prompt and configuration of a cell."""
    return {
        "set": cell.set_name,
        "id": cell.question.id,
        "drafter": cell.configuration.drafter,
        "configuration": cell.configuration.label,
    }


def cell_summary(cell: Cell) -> dict[str, Any]:
    """One configuration on one prompt."""
    stats = sum((run.stats for run in cell.runs), Stats())
    return names_of(cell) | {
        "prompt_tokens": len(cell.prompt),
        "output_tokens": len(cell.runs[0].tokens),
        "plain_tps": total_tps([cell.plain]),
        "tps": total_tps([cell.runs]),
        "speedup": median_ratio(cell.plain, cell.runs),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "repeatable": all(run.tokens == cell.runs[0].tokens for run in cell.runs),
    }


def configuration_summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """One configuration over all prompts of a set, or over all prompts."""
    plain_runs = [run for cell in cells for run in cell.plain]
    runs = [run for cell in cells for run in cell.runs]
    plain_tps = total_tps([cell.plain for cell in cells])
    tps = total_tps([cell.runs for cell in cells])
    stats = sum((run.stats for run in runs), Stats())
    forwards = stats.num_target_forwards
    timed = [run for run in runs if run.tps is not None and run.stats.num_target_forwards]
    rounds = [run.seconds / run.stats.num_target_forwards for run in timed]
    figures = {
        "num_prompts": len(cells),
        "num_runs": len(runs),
        "output_tokens": sum(len(cell.runs[0].tokens) for cell in cells),
        "plain_tps": plain_tps,
        "tps": tps,
        "speedup": ratio(tps, plain_tps),
        "speedup_by_prompt": spread_of(median_ratio(c.plain, c.runs) for c in cells),
        **{name: getattr(stats, name) for name in COUNTS},
        "target_forwards_per_token": ratio(forwards, stats.num_emitted),
        "head_forwards_per_round": ratio(stats.num_head_forwards, stats.num_rounds) or 0.0,
        "evals_per_round": ratio(stats.num_evals, forwards),
        "round_seconds": median(rounds) if rounds else None,
    }
    for prefix, own in (("plain_", plain_runs), ("", runs)):
        figures[f"{prefix}tps_spread"] = spread_of(run.tps for run in own)
        figures[f"{prefix}ttft"] = spread_of(run.ttft for run in own)
        figures[f"{prefix}peak_bytes"] = max(run.peak_bytes for run in own)
    return figures


def configuration_result(
    configuration: Configuration, cells: Sequence[Cell], costs: Costs | None
) -> dict[str, Any]:
    """One configuration, overall and per set; with prediction and time split for a fixed k."""
    size = configuration.size
    figures = {}
    for name, group in {"overall": cells, **by_set(cells)}.items():
        figure = configuration_summary(group)
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
        "overall": figures.pop("overall"),
        "sets": figures,
    }


def chains(results: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Configurations with a fixed k above 0, shortest first."""
    found = [each for each in results if each["kind"] == "chain" and each["num_draft_tokens"]]
    return sorted(found, key=lambda each: each["num_draft_tokens"])


def scenario_summary(
    models: Models,
    configurations: Sequence[Configuration],
    cells: Sequence[Cell],
    costs: Mapping[str, Costs],
    max_tokens: int,
) -> dict[str, Any]:
    """One scenario: every configuration, every drafter's ``costs``, every prompt."""
    prompts = list({cell.question: cell.prompt for cell in cells}.values())
    results = []
    for configuration in configurations:
        own = [cell for cell in cells if cell.configuration == configuration]
        results.append(configuration_result(configuration, own, costs.get(configuration.drafter)))
    checked = []
    for cell in cells:
        texts = (cell.plain[0].tokens, cell.runs[0].tokens)
        parity = compare(models.target, cell.prompt, *texts)
        stats = cell.runs[0].stats.to_dict()
        checked.append(cell_summary(cell) | {"parity": parity, "stats": stats})
    drafters = []
    context = len(typical_context(prompts, max_tokens))
    for name, found in costs.items():
        own = chains(result for result in results if result["drafter"] == name)
        curve = found.curve(own[-1]["overall"]["acceptance_by_position"]) if own else []
        timed = {"context": context, **found.to_dict()}
        drafters.append({"name": name, "costs": timed, "curve": curve})
    plain_runs = [run for cell in cells for run in cell.plain]
    return {
        "prompt_tokens": spread_of(map(len, prompts)),
        "output_tokens": spread_of(len(run.tokens) for run in plain_runs),
        "plain_step_measured": median_seconds(plain_runs),
        "configurations": results,
        "drafters": drafters,
        "side_by_side": side_by_side(models, results, checked),
        "prompts": checked,
    }


def side_by_side(
    models: Models, results: Sequence[Mapping[str, Any]], checked: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
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
        ways = [r for r in results if r["drafter"] == name and r["overall"]["speedup"]]
        if not ways:
            continue
        best = max(ways, key=lambda result: result["overall"]["speedup"])
        overall = best["overall"]
        parities = [row["parity"] for row in checked if row["configuration"] == best["label"]]
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


def run_rows(cells: Sequence[Cell], scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per run, for the CSV; ``scenario`` has context and temperature."""
    return [
        {
            **scenario,
            **names_of(cell),
            "role": role,
            "run": number,
            "prompt_tokens": len(cell.prompt),
            "output_tokens": len(run.tokens),
            "timed_tokens": run.num_timed,
            "seconds": run.seconds,
            "tokens_per_second": run.tps,
            "ttft": run.ttft,
            "peak_bytes": run.peak_bytes,
            "mean_acceptance_length": run.stats and run.stats.mean_acceptance_length,
        }
        for cell in cells
        for role, number, run in cell.numbered()
    ]
