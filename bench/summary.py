"""Summary of runs of single prompts as plain data: figures by prompt set and by prompt."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_eagle.decoding.stats import Stats
from mlx_eagle.system.device import megabytes

from .configurations import Cell, Cells
from .costs import Costs
from .figures import (
    Figure,
    median_of,
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
from .parity import count_identical, largest_margin, parity_words
from .questions import by_set
from .runner import Models, Run

Result = Mapping[str, Any]
RunLists = Iterable[Sequence[Run]]
"""Runs of several prompts, of one kind: plain or not."""


# --- figures of cells: all of one configuration in a set, all there are, or one ------------------


def seconds_per_token(runs: Iterable[Run]) -> float | None:
    """Seconds per token after the first, in the median run; None if nothing was timed."""
    return median_of(ratio(1.0, run.tps) for run in runs)


def total_tps(run_lists: RunLists) -> float | None:
    """Tokens per second over several prompts: all tokens over the sum of median times."""
    num_tokens = 0.0
    seconds = 0.0
    for runs in run_lists:
        num_timed = median(run.num_timed for run in runs)
        per_token = seconds_per_token(runs)
        if per_token is not None:
            num_tokens += num_timed
            seconds += num_timed * per_token
    return ratio(num_tokens, seconds)


def stats_of(cells: Cells) -> Stats:
    """Counts of all runs of the configuration together."""
    return sum((run.stats for cell in cells for run in cell.runs), Stats())


def round_seconds(cells: Cells) -> float | None:
    """Seconds per target pass in the median run; None if nothing was timed."""
    timed = (run for cell in cells for run in cell.runs if run.tps is not None)
    return median_of(ratio(run.seconds, run.stats.num_target_forwards) for run in timed)


def both(
    name: str, of: Callable[[RunLists], Any], plain: str = "", runs: str = "", show: Any = number
) -> tuple[Figure, Figure]:
    """One figure of the plain runs, and of the others; ``plain`` and ``runs`` are headings."""
    return (
        Figure(f"plain_{name}", plain, show, lambda cells: of(cell.plain for cell in cells)),
        Figure(name, runs, show, lambda cells: of(cell.runs for cell in cells)),
    )


def speeds(
    name: str, of: Callable[[RunLists], Any], plain: str = "", runs: str = "", speedup: str = ""
) -> tuple[Figure, ...]:
    """Plain and drafted tokens per second, and their ratio; the last three are headings."""
    one, other = both(name, of, plain, runs)
    name = name.replace("tps", "speedup")
    return one, other, Figure(name, speedup, times, lambda c: ratio(other.of(c), one.of(c)))


def counted(name: str, heading: str = "", show: Any = str) -> Figure:
    """A figure of ``Stats``, over all runs."""
    return Figure(name, heading, show, lambda cells: getattr(stats_of(cells), name))


def per(part: str, whole: str, name: str, heading: str, show: Any = number) -> Figure:
    """The ratio of two counts of ``Stats``, over all runs; 0 without any."""

    def of(cells: Cells) -> float:
        stats = stats_of(cells)
        return ratio(getattr(stats, part), getattr(stats, whole)) or 0.0

    return Figure(name, heading, show, of)


def middle(spread: Mapping[str, float]) -> str:
    """The median in whole milliseconds."""
    return milliseconds(spread["median"], digits=0)


PLACE = (Figure("set", "set"), Figure("configuration", "configuration"))
SPEED = (
    *PLACE,
    Figure("num_prompts", of=len),
    Figure("output_tokens", of=lambda cells: sum(cell.runs[0].num_tokens for cell in cells)),
    Figure("round_seconds", of=round_seconds),
    *both("tps_spread", lambda lists: spread_of(run.tps for run in chain(*lists))),
    Figure("", "plain tok/s", lambda row: with_spread(row["plain_tps_spread"], row["plain_tps"])),
    Figure("", "speculative tok/s", lambda row: with_spread(row["tps_spread"], row["tps"])),
    *speeds("tps", total_tps, speedup="ratio"),
    Figure(
        "speedup_by_prompt",
        "ratio by prompt",
        with_spread,
        lambda cells: spread_of(cell.speedup for cell in cells),
    ),
    Figure("speedup_by_prompt", "worst prompt", lambda found: times((found or {}).get("min"))),
    Figure("num_runs", "runs", of=lambda cells: sum(len(cell.runs) for cell in cells)),
)
START = (
    *PLACE,
    *both("ttft", lambda lists: spread_of(run.ttft for run in chain(*lists)),
          "TTFT plain ms", "TTFT ms", middle),
    *both("peak_bytes", lambda lists: max(run.peak_bytes for run in chain(*lists)),
          "peak plain", "peak", megabytes),
)  # fmt: skip
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
    counted("cumulative_acceptance_by_position", "cumulative acceptance by position", numbers),
    per("num_target_forwards", "num_emitted",
        "target_forwards_per_token", "target forwards/token", number3),
    per("num_head_forwards", "num_rounds", "head_forwards_per_round", "head forwards/round"),
    per("num_evals", "num_target_forwards", "evals_per_round", "evals/round"),
)  # fmt: skip
GROUP = (*SPEED, *START, *ACCEPTANCE, *COUNTS)
"""Figures of a configuration over a set of prompts, or over all of them."""

BATCH = (
    Figure("batch", "prompts at once", of=lambda cells: cells[0].at_once),
    Figure("set", "set", of=lambda cells: cells[0].set_name),
    Figure("configuration", "configuration", of=lambda cells: cells[0].configuration.label),
    Figure("output_tokens", of=lambda cells: cells[0].runs[0].num_tokens),
    *speeds("tps_after_prefill", lambda lists: median(run.tps for run in chain(*lists)),
            "plain batch tok/s", "speculative tok/s", "ratio"),
    *speeds("tps", lambda lists: median(run.call_tps for run in chain(*lists)),
            "whole call: plain", "whole call: speculative", "whole call: ratio"),
    counted("mean_acceptance_length", "tau", number),
    counted("num_rounds"),
    counted("num_plain_steps"),
    Figure("num_runs", of=lambda cells: len(cells[0].runs)),
    Figure("parity", "outputs identical", count_identical, lambda cells: cells[0].parity),
    Figure("parity", "largest margin where not", largest_margin),
    Figure("drafting_events", "drafting events", lambda events: ", ".join(events) or "-",
           lambda cells: [event.what for event in cells[0].runs[0].stats.drafting_events]),
)  # fmt: skip
"""Figures of a configuration on a batch."""

NAMES = (
    Figure("set", of=lambda cells: cells[0].set_name),
    Figure("id", of=lambda cells: cells[0].questions[0].id),
    Figure("drafter", of=lambda cells: cells[0].configuration.drafter),
    Figure("", "prompt", lambda row: f"{row['set']}/{row['id']}"),
    Figure("configuration", "configuration", of=lambda cells: cells[0].configuration.label),
)
PROMPT = (
    *NAMES,
    Figure("prompt_tokens", "prompt tokens", of=lambda cells: len(cells[0].prompts[0])),
    Figure("output_tokens", "output tokens", of=lambda cells: cells[0].runs[0].num_tokens),
    *both("tps", total_tps, "plain tok/s", "speculative tok/s"),
    Figure("speedup", "ratio", times, lambda cells: cells[0].speedup),
    counted("mean_acceptance_length", "tau", number),
    Figure("repeatable", of=lambda cells: all(
        run.texts == cells[0].runs[0].texts for run in cells[0].runs)),
    Figure("stats", of=lambda cells: cells[0].runs[0].stats.to_dict()),
    Figure("parity", "parity", parity_words, lambda cells: cells[0].parity[0]),
)  # fmt: skip
"""Figures of a configuration on one prompt."""


def run_rows(cells: Cells, scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per run, for the CSV; ``scenario`` has context and temperature."""
    return [
        {
            **scenario,
            **row_of(NAMES, [cell]),
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
        for cell in cells
        for role, number, run in cell.numbered()
    ]


def configuration_result(cells: Cells, costs: Costs | None) -> dict[str, Any]:
    """One configuration, overall and per set; with prediction and time split for a fixed k."""
    configuration = cells[0].configuration
    size = configuration.size
    figures = {}
    for name, group in {"overall": cells, **by_set(cells)}.items():
        figures[name] = figure = row_of(GROUP, group)
        if costs is not None and configuration.kind == "chain" and size:
            tau = figure["mean_acceptance_length"]
            figure["prediction"] = costs.predict(tau, size, figure["speedup"])
            if figure["round_seconds"] is not None:
                figure["time_split"] = costs.time_split(size, figure["round_seconds"])
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
    models: Models, cells: Cells, costs: Mapping[str, Costs], context: int
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
        "output_tokens": spread_of(run.num_tokens for run in plain_runs),
        "plain_step_measured": seconds_per_token(plain_runs),
        "configurations": results,
        "drafters": drafters,
        "prompts": [row_of(PROMPT, [cell]) for cell in cells],
    }
    return scenario | {"side_by_side": side_by_side(models, scenario)}


# --- several drafters ----------------------------------------------------------------------------

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
