"""The report on a document of results: sentences, tables and plots, as blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_eagle.system.device import megabytes

from .conditions import conditions_table
from .markdown import Block, Folded, Heading, Image, Paragraph, Table
from .parity import parity_words
from .runner import TURN_TOKENS

Scenario = Mapping[str, Any]

TITLE = "mlx-eagle benchmark"

INTRO = (
    "Speculative decoding lets a small draft head guess the next k tokens, and the target model "
    "check all of them in one pass. The output is the target's own; what changes is how many "
    "passes it takes. This report compares it with plain decoding by mlx-lm on the same prompts."
)

METHOD = (
    "How it was measured: plain and speculative runs take turns on every prompt ({order}), after "
    "two warm-ups (repeats: {repeats}). Plain is the pipelined mlx_lm.stream_generate. Tokens per "
    "second count from the first token to the last, so prefill is not in them; the time to the "
    "first token is listed apart. A prompt's speed is that of its median run, its ratio the "
    "median of its runs, each against the plain run near it; a set's speed is the sum of its "
    "tokens over the sum of those times, its ratio that of such speeds. In brackets: first to "
    "third quartile of single runs, or of prompts where it says so. Of MT-bench, the first turn "
    "is asked. Peak memory is with target and head loaded, in plain runs too. Above temperature "
    "0 both draw with the same sampler and seed."
)

BATCHES = (
    "So many prompts of a set in one call of batch_generate: mlx-lm's own against the one with "
    "the drafter, greedy, in the same turns. Tokens per second are those of all outputs, after "
    "prefill as each counts it, then over the whole call; ours prefills prompt by prompt. "
    "Drafting events say when drafting was turned off for all sequences, tried again (probe) and "
    "turned on again. The mean acceptance length is 1 where the whole batch went to mlx-lm."
)

ORDERS = {
    "abba": "plain, speculative, speculative, plain for every configuration",
    "mirror": "plain, every configuration, then the same backwards; all configurations share the "
    "plain runs",
    "weave": f"plain and every configuration at once, {TURN_TOKENS} tokens each in turn, forwards "
    "and backwards, each with its own clock; all configurations share the plain run",
}

START = "Time to the first token (TTFT), and memory"

CAPTIONS = {
    "side_by_side": "Every draft model in its fastest configuration: speed (dashed: plain "
    "decoding), tokens per target forward, and peak memory without the others' weights.",
    "speedup": "Speedup and mean acceptance length (tau) against the draft length k. Points are "
    "measured; the dashed line is what the cost model makes of these costs and of the "
    "longest chain's acceptance.",
    "verify_cost": "Verify cost: the time of one target pass over R rows, in passes over one row. "
    "Speculation gains where this line is near the flat one, and cannot where it is near the "
    "linear one.",
    "acceptance": "How often the draft's token at each position was the target's own.",
    "round_time": "The median round in parts. Verify, draft and accept are timed apart in the "
    "same session; host is the rest of the measured round. Above each bar: tokens per round.",
    "tokens_per_second": "Speed by prompt set, plain and speculative.",
}

WORDS = {
    "k": "draft tokens per round",
    "mean acceptance length (tau)": "tokens emitted per target forward, the target's own one "
    "included; plain decoding: 1",
    "acceptance": "share of draft tokens accepted; by position, given the one before was accepted",
    "accepted lengths": "n:c means that c rounds accepted n draft tokens, over all runs",
    "c(R)": "time of a target pass over R rows, in passes over one row",
    "d": "time of one more draft step, in plain steps",
    "overhead": "accept pass, first logits and waiting for the host, beyond k d, in plain steps",
    "host and the rest": "the measured round less its parts, timed apart; below zero where the "
    "machine was busier then than during the runs",
    "predicted": "tau / (c(k+1) + k d + overhead)",
    "bound": "tau / (c(k+1) + k d): no overhead at all",
    "margin": "where two outputs part, how far the worse of their tokens is below the target's "
    "largest logit: near 0 is a tie, left to rounding",
}


def scenario_name(scenario: Scenario) -> str:
    """What is particular to one scenario, in words."""
    context = scenario["context"]
    length = "prompts as they are" if context is None else f"prompts padded to {context} tokens"
    temp = "greedy" if scenario["temp"] == 0 else f"temperature {scenario['temp']:g}"
    return f"{length}, {temp}"


def results(document: Mapping[str, Any]) -> list[Block]:
    """What is printed: a sentence per configuration, then speed, acceptance and batches."""
    parts: list[Block] = [Heading(TITLE, 1)]
    for scenario in document["scenarios"]:
        parts.append(Heading(f"Results: {scenario_name(scenario)}"))
        parts += [Paragraph(line) for line in headlines(scenario)]
        parts += side_by_side_blocks(scenario)
        parts += [speed_table(scenario), acceptance_table(scenario), parity_table(scenario)]
    return parts + batch_blocks(document)


def blocks(document: Mapping[str, Any], images: Sequence[Mapping[str, Path]] = ()) -> list[Block]:
    """The whole report, results first; ``images`` are a scenario's plots each, or none at all."""
    settings, scenarios = document["settings"], document["scenarios"]
    parts: list[Block] = [Heading(TITLE, 1)]
    for scenario in scenarios:
        parts += [Paragraph(line) for line in headlines(scenario)]
    for scenario, drawn in zip(scenarios, images or [{}] * len(scenarios), strict=True):
        parts.append(Heading(f"Results: {scenario_name(scenario)}"))
        parts += scenario_blocks(scenario, drawn)
    parts += batch_blocks(document)
    method = METHOD.format(order=ORDERS[settings["order"]], repeats=settings["repeats"])
    measured = [Paragraph(INTRO), Paragraph(method)]
    return [
        *parts,
        Heading("Conditions"),
        Folded("How it was measured", measured),
        Folded("Machine, versions, models and settings", [conditions_table(document)]),
        Folded("Words", [Table(["word", "meaning"], list(map(list, WORDS.items())))]),
    ]


def batch_blocks(document: Mapping[str, Any]) -> list[Block]:
    """What was measured of several prompts at once, if anything was."""
    if not document["batches"]:
        return []
    return [Heading("Batches"), Paragraph(BATCHES), batch_table(document["batches"])]


def headlines(scenario: Scenario) -> Iterator[str]:
    """A sentence per configuration."""
    for configuration in scenario["configurations"]:
        overall, label = configuration["overall"], configuration["label"]
        if overall["speedup"] is None:
            yield f"{label}: the outputs are too short to be timed."
            continue
        sets = ", ".join(
            f"{name} {times(f['speedup'])}" for name, f in configuration["sets"].items()
        )
        rows = [row for row in scenario["prompts"] if row["configuration"] == label]
        same = sum(row["parity"]["identical"] for row in rows)
        yield (
            f"{label} ({scenario_name(scenario)}): {times(overall['speedup'])} over plain "
            f"decoding ({sets}), mean acceptance length (tau) "
            f"{overall['mean_acceptance_length']:.2f}; the worst prompt "
            f"{times(overall['speedup_by_prompt']['min'])}; {same} of {len(rows)} outputs "
            "identical to plain decoding's."
        )


def scenario_blocks(scenario: Scenario, images: Mapping[str, Path]) -> list[Block]:
    """Tables and plots of one scenario."""

    def image(name: str, last: str = "") -> list[Block]:
        return [Image(images[name + last], CAPTIONS[name])] if name + last in images else []

    prompts = prompts_table(scenario)
    lengths = ", ".join(
        f"{what} {_range(scenario[key])} tokens"
        for what, key in (("prompts", "prompt_tokens"), ("outputs", "output_tokens"))
    )
    parts = [
        *side_by_side_blocks(scenario),
        *image("side_by_side"),
        Paragraph(f"Lengths: {lengths}."),
        Heading("Speed", 3),
        speed_table(scenario),
        *image("tokens_per_second"),
        Folded(START, [start_table(scenario)]),
        Heading("Acceptance", 3),
        acceptance_table(scenario),
        Folded("Accepted lengths and forward passes", [counts_table(scenario)]),
    ]
    for number, view in enumerate(views(scenario), 1):
        last = f"-drafter{number}" if len(scenario["drafters"]) > 1 else ""
        parts += [
            Heading(f"Cost of a round{with_name(scenario, view)}", 3),
            Paragraph(costs_sentence(view)),
            cost_table(view),
            *image("verify_cost", last),
            *split_blocks(view),
            *image("round_time", last),
            *prediction_blocks(view),
            *image("speedup", last),
            *image("acceptance", last),
        ]
    return [
        *parts,
        Heading("Parity", 3),
        parity_table(scenario),
        Folded(f"Every prompt ({len(scenario['prompts'])} rows)", [prompts]),
    ]


def views(scenario: Scenario) -> list[dict[str, Any]]:
    """The scenario as each drafter has it: its own configurations, costs and curve."""
    return [
        {
            **scenario,
            **drafter,
            "configurations": [
                c for c in scenario["configurations"] if c["drafter"] == drafter["name"]
            ],
        }
        for drafter in scenario["drafters"]
    ]


def with_name(scenario: Scenario, view: Scenario) -> str:
    """ ", lookup", where there are several drafters."""
    return f", {view['name']}" if len(scenario["drafters"]) > 1 else ""


def side_by_side_blocks(scenario: Scenario) -> list[Block]:
    """Each of several drafters in its fastest configuration."""
    rows = [
        [
            row["drafter"],
            row["configuration"].removeprefix(f"{row['drafter']}, "),
            number(row["tps"]),
            times(row["speedup"]),
            times(row["speedup_of_worst_prompt"]),
            number(row["mean_acceptance_length"]),
            megabytes(row["weight_bytes"]) if row["weight_bytes"] else "none",
            megabytes(row["peak_bytes"]),
            f"{row['identical']} of {row['num_prompts']}",
        ]
        for row in scenario["side_by_side"]
    ]
    header = ["draft model", "fastest with", "tok/s", "ratio", "worst prompt", "tau", "weights",
              "peak memory", "outputs identical"]  # fmt: skip
    return [Heading("Side by side", 3), Table(header, rows)] if rows else []


def _range(spread: Mapping[str, float]) -> str:
    return f"{spread['min']:.0f} to {spread['max']:.0f} (median {spread['median']:.0f})"


def costs_sentence(scenario: Scenario) -> str:
    """What a plain step and a draft step cost, and how near the former is to the runs'."""
    costs = scenario["costs"]
    sentence = (
        f"Timed between the runs, on {costs['context']} tokens of context: one plain step "
        f"takes {1e3 * costs['plain_step_seconds']:.1f} ms, one draft step "
        f"{1e3 * costs['chain_step_seconds']:.1f} ms (d = {costs['d']:.3f})."
    )
    measured = scenario["plain_step_measured"]
    if measured is not None:
        sentence += f" In the plain runs a token took {1e3 * measured:.1f} ms."
    return sentence


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A ratio: "1.25x"."""
    return "-" if value is None else f"{value:.2f}x"


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{digits}f}"


def with_spread(
    spread: Mapping[str, float] | None, show: Callable[[float], str], middle: float | None = None
) -> str:
    """ "5.1 [4.9-5.3]": the median, or ``middle`` in its place, and the quartiles."""
    if spread is None:
        return "-"
    middle = spread["median"] if middle is None else middle
    return f"{show(middle)} [{show(spread['q1'])}-{show(spread['q3'])}]"


def figures(scenario: Scenario) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(set, configuration, figures) for every set, then overall where there are several sets."""
    names = list(scenario["configurations"][0]["sets"]) if scenario["configurations"] else []
    for name in names:
        for configuration in scenario["configurations"]:
            yield name, configuration, configuration["sets"][name]
    if len(names) > 1:
        for configuration in scenario["configurations"]:
            yield "overall", configuration, configuration["overall"]


def figures_table(
    scenario: Scenario, header: list[str], cells: Callable[[Mapping[str, Any]], list[str]]
) -> Table:
    """A row of ``cells`` for every set and configuration."""
    rows = [[name, c["label"], *cells(f)] for name, c, f in figures(scenario)]
    return Table(["set", "configuration", *header], rows)


def speed_table(scenario: Scenario) -> Table:
    """Tokens per second, plain and drafted, and their ratio."""

    def cells(f: Mapping[str, Any]) -> list[str]:
        by_prompt = f["speedup_by_prompt"]
        return [
            with_spread(f["plain_tps_spread"], number, f["plain_tps"]),
            with_spread(f["tps_spread"], number, f["tps"]),
            times(f["speedup"]),
            with_spread(by_prompt, number),
            "-" if by_prompt is None else times(by_prompt["min"]),
            str(f["num_runs"]),
        ]

    header = ["plain tok/s", "speculative tok/s", "ratio", "ratio by prompt", "worst prompt",
              "runs"]  # fmt: skip
    return figures_table(scenario, header, cells)


def start_table(scenario: Scenario) -> Table:
    """Time to the first token (TTFT), and peak memory."""

    def cells(f: Mapping[str, Any]) -> list[str]:
        waits = [milliseconds(f[key]["median"], 0) for key in ("plain_ttft", "ttft")]
        return [*waits, megabytes(f["plain_peak_bytes"]), megabytes(f["peak_bytes"])]

    return figures_table(scenario, ["TTFT plain ms", "TTFT ms", "peak plain", "peak"], cells)


def acceptance_table(scenario: Scenario) -> Table:
    """How much of the drafts was accepted."""

    def cells(f: Mapping[str, Any]) -> list[str]:
        tau, rate = number(f["mean_acceptance_length"]), number(f["acceptance_rate"])
        return [tau, rate, _list(f["acceptance_by_position"])]

    header = ["mean acceptance length (tau)", "acceptance", "by position"]
    return figures_table(scenario, header, cells)


def counts_table(scenario: Scenario) -> Table:
    """Accepted lengths, and the forward passes and evaluations that the outputs took."""

    def cells(f: Mapping[str, Any]) -> list[str]:
        return [
            " ".join(f"{n}:{c}" for n, c in enumerate(f["accepted_histogram"])) or "-",
            _list(f["cumulative_acceptance_by_position"]),
            number(f["target_forwards_per_token"], 3),
            number(f["head_forwards_per_round"]),
            number(f["evals_per_round"]),
        ]

    header = ["accepted lengths", "cumulative acceptance by position", "target forwards/token",
              "head forwards/round", "evals/round"]  # fmt: skip
    return figures_table(scenario, header, cells)


def _list(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"


def cost_table(scenario: Scenario) -> Table:
    """By rows R: verify pass, accept pass, and what the host adds to a round of k = R - 1."""
    costs = scenario["costs"]
    header = [
        "rows R", "T(R) ms", "c(R)", "graph building ms", "accept pass ms", "host wait ms",
        "overhead (plain steps)",
    ]  # fmt: skip
    rows = [
        [
            str(size),
            milliseconds(costs["verify_seconds"][size]),
            number(costs["verify_cost"][size], 3),
            milliseconds(costs["verify_build_seconds"][size]),
            milliseconds(costs["accept_seconds"].get(size)),
            milliseconds(costs["host_seconds"].get(size - 1)),
            number(costs["overhead"].get(size - 1), 3),
        ]
        for size in costs["verify_seconds"]
    ]
    return Table(header, rows)


def split_blocks(scenario: Scenario) -> list[Block]:
    """Milliseconds and shares of the median round; nothing without a chain."""
    rows = []
    for configuration in scenario["configurations"]:
        split = configuration["overall"].get("time_split")
        if split is not None:
            parts = ("verify", "draft", "accept", "host")
            shares = [f"{milliseconds(split[p])} ({split[p] / split['round']:.0%})" for p in parts]
            rows.append([configuration["label"], milliseconds(split["round"]), *shares])
    header = ["configuration", "round ms", "verify", "draft", "accept", "host and the rest"]
    return [Table(header, rows)] if rows else []


def prediction_blocks(scenario: Scenario) -> list[Block]:
    """Predicted against measured speedup, and the bound; nothing without a chain."""
    header = ["set", "configuration", "tau", "predicted", "measured", "predicted/measured - 1",
              "bound", "fraction of bound reached"]  # fmt: skip
    rows = []
    for name, configuration, f in figures(scenario):
        if "prediction" in f:
            p = f["prediction"]
            error = "-" if p["error"] is None else f"{p['error']:+.1%}"
            rows.append(
                [
                    name,
                    configuration["label"],
                    number(p["mean_acceptance_length"]),
                    times(p["predicted"]),
                    times(p["measured"]),
                    error,
                    times(p["bound"]),
                    number(p["fraction_of_bound"]),
                ]
            )
    return [Heading("Predicted and measured", 3), Table(header, rows)] if rows else []


def parity_table(scenario: Scenario) -> Table:
    """How many outputs are the same, and the largest margin where one is not.

    Beside it the rows of a verify pass, on the mean: on a GPU they decide which kernels multiply.
    """
    rows = []
    for configuration in scenario["configurations"]:
        mine = [
            row for row in scenario["prompts"] if row["configuration"] == configuration["label"]
        ]
        apart = [row["parity"] for row in mine if not row["parity"]["identical"]]
        margins = [parity["margin"] for parity in apart]
        rows.append(
            [
                configuration["label"],
                f"{len(mine) - len(apart)} of {len(mine)}",
                _rows_per_pass([row["stats"] for row in mine]),
                "-" if not margins else f"{max(margins):.2g}",
                f"{sum(row['repeatable'] for row in mine)} of {len(mine)}",
            ]
        )
    header = ["configuration", "outputs identical to plain", "rows per pass",
              "largest margin where not", "same output in all repeats"]  # fmt: skip
    return Table(header, rows)


def _rows_per_pass(stats: Sequence[Mapping[str, Any]]) -> str:
    """The root and the drafts that were verified with it, per round that had any."""
    rounds = sum(counts["num_rounds"] for counts in stats)
    drafted = sum(counts["num_drafted"] for counts in stats)
    return f"{1 + drafted / rounds:.1f}" if rounds else "1"


def batch_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Batches: tokens per second of the whole call and after prefill, and parity."""
    header = ["prompts at once", "set", "configuration", "plain batch tok/s",
              "speculative tok/s", "ratio",
              "whole call: plain", "speculative", "ratio", "tau", "outputs identical",
              "largest margin where not", "drafting events"]  # fmt: skip
    lines = []
    for row in rows:
        margins = [p["margin"] for p in row["parity"] if not p["identical"]]
        lines.append(
            [
                str(row["batch"]),
                row["set"],
                row["configuration"],
                number(row["plain_tps_after_prefill"]),
                number(row["tps_after_prefill"]),
                times(row["speedup_after_prefill"]),
                number(row["plain_tps"]),
                number(row["tps"]),
                times(row["speedup"]),
                number(row["mean_acceptance_length"]),
                f"{row['batch'] - len(margins)} of {row['batch']}",
                "-" if not margins else f"{max(margins):.2g}",
                ", ".join(row["drafting_events"]) or "-",
            ]
        )
    return Table(header, lines)


def prompts_table(scenario: Scenario) -> Table:
    """Every prompt and configuration, with its parity."""
    rows = [
        [
            f"{row['set']}/{row['id']}",
            row["configuration"],
            str(row["prompt_tokens"]),
            str(row["output_tokens"]),
            number(row["plain_tps"]),
            number(row["tps"]),
            times(row["speedup"]),
            number(row["mean_acceptance_length"]),
            parity_words(row["parity"]),
        ]
        for row in scenario["prompts"]
    ]
    header = ["prompt", "configuration", "prompt tokens", "output tokens", "plain tok/s",
              "speculative tok/s", "ratio", "tau", "parity"]  # fmt: skip
    return Table(header, rows)
