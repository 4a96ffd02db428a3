"""Summary of runs: medians and spread, rates per set, counts, predictions.

A prediction is the speedup that should come out, from costs and acceptance: E tokens per round,
against the time of a round in units of one plain step, E / (c(k + 1) + k d + overhead).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.acceptance_stats import expected_tokens
from mlx_eagle.drafters.tree import DraftShape


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


@dataclass(frozen=True)
class Costs:
    """Medians in seconds. ``verify`` and ``accept`` by rows R, ``propose`` by draft length.

    ``verify`` may go beyond ``accept``, for trees. ``*_build`` is the host's time for building
    the same graph.
    """

    verify: Mapping[int, float]
    accept: Mapping[int, float]
    propose: Mapping[int, float]
    verify_build: Mapping[int, float]
    propose_build: Mapping[int, float]

    @classmethod
    def of(cls, samples: Any) -> "Costs":
        """Medians of ``part_timing.Samples``."""

        def medians(timings: Mapping[int, Any], part: str) -> dict[int, float]:
            return {size: median(getattr(t, part) for t in timings[size]) for size in timings}

        return cls(
            medians(samples.verify, "run"),
            medians(samples.accept, "run"),
            medians(samples.propose, "run"),
            medians(samples.verify, "build"),
            medians(samples.propose, "build"),
        )

    @property
    def plain_step(self) -> float:
        """T(1), the unit of everything below."""
        return self.verify[1]

    def c(self, num_rows: int) -> float:
        """Verify cost c(R) = T(R) / T(1)."""
        return self.verify[num_rows] / self.plain_step

    @property
    def chain_step(self) -> float:
        """Seconds that one more draft token takes: head forward, logits, pick."""
        return max(0.0, _slope(self.propose))

    @property
    def d(self) -> float:
        """A chain step in plain steps."""
        return self.chain_step / self.plain_step

    def draft(self, size: int) -> float:
        """Seconds of a draft of ``size`` tokens after the accept pass, which ran the head once."""
        return self.propose[1] + (size - 1) * self.chain_step if size else 0.0

    def host(self, size: int) -> float:
        """Seconds that a round waits for the host.

        It builds the draft while the device runs the accept pass before it, and the verify pass
        while the device drafts.
        """
        if not size:
            return 0.0
        drafting = self.propose_build[1] + (size - 1) * max(0.0, _slope(self.propose_build))
        busy = self.accept[size + 1] + self.draft(size)
        drafted = max(drafting, self.accept[size + 1]) + self.draft(size)
        return max(drafted, drafting + self.verify_build[size + 1]) - busy

    def overhead(self, size: int) -> float:
        """What a round costs beyond c(k + 1) + k d, in plain steps."""
        accept = self.accept[size + 1] if size else 0.0
        rest = accept + self.draft(size) - size * self.chain_step + self.host(size)
        return rest / self.plain_step

    def round(self, size: int) -> float:
        """A round with ``size`` drafts, in plain steps."""
        return self.c(size + 1) + size * self.d + self.overhead(size)

    def speedup(self, tau: float, size: int) -> float:
        """Predicted speedup where the mean acceptance length is ``tau``."""
        return tau / self.round(size)

    def bound(self, tau: float, size: int) -> float:
        """The speedup without any overhead: tau / (c(k + 1) + k d)."""
        return tau / (self.c(size + 1) + size * self.d)

    def to_dict(self) -> dict[str, Any]:
        """Everything that was measured, and what follows from it."""
        return {
            "verify_seconds": dict(self.verify),
            "verify_cost": {rows: self.c(rows) for rows in self.verify},
            "verify_build_seconds": dict(self.verify_build),
            "accept_seconds": dict(self.accept),
            "draft_seconds": dict(self.propose),
            "draft_build_seconds": dict(self.propose_build),
            "plain_step_seconds": self.plain_step,
            "chain_step_seconds": self.chain_step,
            "d": self.d,
            "host_seconds": {rows - 1: self.host(rows - 1) for rows in self.accept},
            "overhead": {rows - 1: self.overhead(rows - 1) for rows in self.accept},
        }


def _slope(seconds: Mapping[int, float]) -> float:
    """Seconds per token between the shortest and the longest draft."""
    low, high = min(seconds), max(seconds)
    return (seconds[high] - seconds[low]) / (high - low)


def predict(costs: Costs, tau: float, size: int, measured: float | None) -> dict[str, Any]:
    """Predicted and measured speedup, their distance, the bound and the fraction reached."""
    predicted, bound = costs.speedup(tau, size), costs.bound(tau, size)
    return {
        "mean_acceptance_length": tau,
        "predicted": predicted,
        "measured": measured,
        "error": None if measured is None else predicted / measured - 1.0,
        "bound": bound,
        "fraction_of_bound": None if measured is None else measured / bound,
    }


def curve(costs: Costs, alphas: Sequence[float]) -> list[dict[str, float]]:
    """Mean acceptance length (tau) and speedup against k, from one acceptance by position."""
    points = []
    for size in range(1, max(costs.accept)):
        tau = expected_tokens(alphas, DraftShape(size))
        speedup, bound = costs.speedup(tau, size), costs.bound(tau, size)
        points.append(
            {"k": size, "mean_acceptance_length": tau, "speedup": speedup, "bound": bound}
        )
    return points


def time_split(costs: Costs, size: int, round_seconds: float) -> dict[str, float]:
    """One measured round in seconds: calibrated parts, and the rest, which is the host's.

    ``host`` may come out below zero where the parts were slower by themselves than in the run.
    """
    verify, draft, accept = costs.verify[size + 1], costs.draft(size), costs.accept[size + 1]
    parts = {"verify": verify, "draft": draft, "accept": accept}
    return {**parts, "host": round_seconds - sum(parts.values()), "round": round_seconds}
