"""Summary of runs: medians and spread, rates per set, counts."""

from collections.abc import Iterable, Sequence
from statistics import median, quantiles
from typing import Any

from mlx_eagle.decoding.stats import Stats


def spread_of(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, quartiles and extremes of the values; None without any."""
    present = sorted(value for value in values if value is not None)
    if not present:
        return None
    low, high = present[0], present[-1]
    if len(present) > 1:
        low, _, high = quantiles(present, n=4, method="inclusive")
    return {
        "median": median(present),
        "q1": low,
        "q3": high,
        "min": present[0],
        "max": present[-1],
        "n": len(present),
    }


def median_seconds(runs: Sequence[Any]) -> float | None:
    """Seconds per token after the first, in the median run; None where nothing was timed."""
    rates = [run.seconds / run.num_timed for run in runs if run.tps is not None]
    return median(rates) if rates else None


def median_ratio(plain: Sequence[Any], runs: Sequence[Any]) -> float | None:
    """How much faster ``runs`` went, each than the plain one of its turn, in the median pair.

    Both of a pair met the same moments of the machine; medians of each would mix moments.
    """
    pairs = [(p, r) for p, r in zip(plain, runs, strict=True) if p.tps and r.tps]
    return median(run.tps / base.tps for base, run in pairs) if pairs else None


def cell_summary(cell: Any) -> dict[str, Any]:
    """One configuration on one prompt."""
    plain, drafted = median_seconds(cell.plain), median_seconds(cell.runs)
    stats = sum((run.stats for run in cell.runs), Stats())
    return {
        "set": cell.set_name,
        "id": cell.question.id,
        "drafter": cell.configuration.drafter,
        "configuration": cell.configuration.label,
        "prompt_tokens": len(cell.prompt),
        "output_tokens": len(cell.runs[0].tokens),
        "plain_tps": 1 / plain if plain else None,
        "tps": 1 / drafted if drafted else None,
        "speedup": median_ratio(cell.plain, cell.runs),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "repeatable": all(run.tokens == cell.runs[0].tokens for run in cell.runs),
    }


def total_tps(run_lists: Sequence[Sequence[Any]]) -> float | None:
    """Tokens per second over prompts: each prompt's tokens, in its median time."""
    num_tokens, seconds = 0, 0.0
    for runs in run_lists:
        per_token = median_seconds(runs)
        if per_token is not None:
            num_timed = median(run.num_timed for run in runs)
            num_tokens += num_timed
            seconds += num_timed * per_token
    return num_tokens / seconds if seconds else None


def configuration_summary(cells: Sequence[Any]) -> dict[str, Any]:
    """One configuration over the prompts of one set, or over all: speeds, acceptance, counts."""
    plain_runs = [run for cell in cells for run in cell.plain]
    runs = [run for cell in cells for run in cell.runs]
    plain_tps = total_tps([cell.plain for cell in cells])
    tps = total_tps([cell.runs for cell in cells])
    per_cell = [cell_summary(cell) for cell in cells]
    stats = sum((run.stats for run in runs), Stats())
    forwards = stats.num_target_forwards
    rounds = [
        run.seconds / run.stats.num_target_forwards
        for run in runs
        if run.tps is not None and run.stats.num_target_forwards
    ]
    return {
        "num_prompts": len(cells),
        "num_runs": len(runs),
        "output_tokens": sum(row["output_tokens"] for row in per_cell),
        "plain_tps": plain_tps,
        "tps": tps,
        "speedup": tps / plain_tps if tps and plain_tps else None,
        "plain_tps_spread": spread_of(run.tps for run in plain_runs),
        "tps_spread": spread_of(run.tps for run in runs),
        "speedup_by_prompt": spread_of(row["speedup"] for row in per_cell),
        "plain_ttft": spread_of(run.ttft for run in plain_runs),
        "ttft": spread_of(run.ttft for run in runs),
        "plain_peak_bytes": max(run.peak_bytes for run in plain_runs),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_position": stats.acceptance_by_position,
        "cumulative_acceptance_by_position": stats.cumulative_acceptance_by_position,
        "accepted_histogram": stats.accepted_histogram,
        "num_rounds": stats.num_rounds,
        "num_plain_steps": stats.num_plain_steps,
        "target_forwards_per_token": forwards / stats.num_emitted if stats.num_emitted else None,
        "head_forwards_per_round": (
            stats.num_head_forwards / stats.num_rounds if stats.num_rounds else 0.0
        ),
        "evals_per_round": stats.num_evals / forwards if forwards else None,
        "round_seconds": median(rounds) if rounds else None,
    }


def by_set(asked: Sequence[Any]) -> dict[str, list[Any]]:
    """Questions, or cells of one configuration, set by set in order of first appearance."""
    groups: dict[str, list[Any]] = {}
    for each in asked:
        groups.setdefault(each.set_name, []).append(each)
    return groups


def run_rows(cells: Sequence[Any], scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per run, for the CSV; ``scenario`` names context and temperature."""
    return [
        {
            **scenario,
            "set": cell.set_name,
            "id": cell.question.id,
            "drafter": cell.configuration.drafter,
            "configuration": cell.configuration.label,
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
        for role, runs in (("plain", cell.plain), ("speculative", cell.runs))
        for number, run in enumerate(runs)
    ]
