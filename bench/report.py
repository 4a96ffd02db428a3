"""The report: which tables and words are made of a document of results."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_eagle.system.render import Block, Folded, Heading, Image, Paragraph, Table

from .parity import parity_words
from .runner import TURN_TOKENS
from .tables import (
    acceptance_table,
    batch_table,
    conditions_table,
    cost_table,
    counts_table,
    parity_table,
    prediction_table,
    prompts_table,
    speed_table,
    split_table,
    start_table,
    times,
)

TITLE = "mlx-eagle benchmark"

INTRO = (
    "Speculative decoding lets a small draft head guess the next k tokens, and the target model "
    "check all of them in one pass. The output is the target's own; what changes is how many "
    "passes it takes. This report compares it with plain decoding by mlx-lm on the same prompts."
)

METHOD = (
    "How it was measured: plain and speculative runs take turns on every prompt ({order}), after "
    "two warm-ups (repeats: {repeats}). Plain is the pipelined mlx_lm.stream_generate. "
    "Tokens per second count from the first token to the last, so prefill is not in them; the "
    "time to the first token is listed apart, and so is what auto takes to measure the cost of "
    "rounds. A prompt's speed is that of its median run, its ratio the median of its runs, each "
    "against the plain run beside it; a set's speed is the sum of its tokens over the sum of "
    "those times, its ratio that of such speeds. In brackets: first to third quartile of single "
    "runs, or of prompts where it says so. Of MT-bench, the first turn is asked. Peak memory is "
    "with target and head loaded, in plain runs too. Above temperature 0 both draw with the same "
    "sampler and seed."
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

START = "Time to the first token (TTFT), calibration in the longest run, and memory"

CAPTIONS = {
    "speedup": "Speedup and mean acceptance length (tau) against the draft length k. Points are "
    "measured; the dashed line is what the cost model makes of the calibrated costs and of the "
    "longest chain's acceptance.",
    "verify_cost": "Verify cost: the time of one target pass over R rows, in passes over one row. "
    "Speculation gains where this line is near the flat one, and cannot where it is near the "
    "linear one.",
    "acceptance": "How often the draft's token at each position was the target's own.",
    "round_time": "The median round in parts. Verify, draft and accept are timed alone in the "
    "same session; host is the rest of the measured round. Above each bar: tokens per round.",
    "tokens_per_second": "Speed by prompt set, plain beside speculative.",
}

WORDS = [
    ["k", "draft tokens per round"],
    [
        "mean acceptance length (tau)",
        "tokens emitted per target forward, the target's own one included; plain decoding: 1",
    ],
    [
        "acceptance",
        "share of draft tokens accepted; by position, given the one before was accepted",
    ],
    ["accepted lengths", "n:c means that c rounds accepted n draft tokens, over all runs"],
    ["c(R)", "time of a target pass over R rows, in passes over one row"],
    ["d", "time of one more draft step, in plain steps"],
    ["overhead", "accept pass, first logits and waiting for the host, beyond k d, in plain steps"],
    [
        "host and the rest",
        "the measured round less its calibrated parts; below zero where the machine was busier "
        "during calibration than during the runs",
    ],
    ["predicted", "tau / (c(k+1) + k d + overhead)"],
    ["bound", "tau / (c(k+1) + k d): no overhead at all"],
    [
        "margin",
        "where two outputs part, how far the worse of their tokens is below the target's largest "
        "logit: near 0 is a tie, left to rounding",
    ],
]


def scenario_name(scenario: Mapping[str, Any]) -> str:
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
        Folded("Words", [Table(["word", "meaning"], WORDS)]),
    ]


def batch_blocks(document: Mapping[str, Any]) -> list[Block]:
    """What was measured of several prompts at once, if anything was."""
    if not document["batches"]:
        return []
    return [Heading("Batches"), Paragraph(BATCHES), batch_table(document["batches"])]


def headlines(scenario: Mapping[str, Any]) -> Iterator[str]:
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


def scenario_blocks(scenario: Mapping[str, Any], images: Mapping[str, Path]) -> list[Block]:
    """Tables and plots of one scenario."""

    def image(name: str) -> list[Block]:
        return [Image(images[name], CAPTIONS[name])] if name in images else []

    prompts = prompts_table(scenario, parity_words)
    lengths = ", ".join(
        f"{what} {_range(scenario[key])} tokens"
        for what, key in (("prompts", "prompt_tokens"), ("outputs", "output_tokens"))
    )
    return [
        Paragraph(f"Lengths: {lengths}."),
        Heading("Speed", 3),
        speed_table(scenario),
        *image("speedup"),
        *image("tokens_per_second"),
        Folded(START, [start_table(scenario)]),
        Heading("Acceptance", 3),
        acceptance_table(scenario),
        Folded("Accepted lengths and forward passes", [counts_table(scenario)]),
        *image("acceptance"),
        Heading("Cost of a round", 3),
        Paragraph(calibration_sentence(scenario)),
        cost_table(scenario),
        *image("verify_cost"),
        *_optional(split_table(scenario)),
        *image("round_time"),
        *_prediction(scenario),
        Heading("Parity", 3),
        parity_table(scenario),
        Folded(f"Every prompt ({len(scenario['prompts'])} rows)", [prompts]),
    ]


def _optional(table: Table | None) -> list[Block]:
    return [] if table is None else [table]


def _prediction(scenario: Mapping[str, Any]) -> list[Block]:
    table = prediction_table(scenario)
    return [] if table is None else [Heading("Predicted and measured", 3), table]


def _range(spread: Mapping[str, float]) -> str:
    return f"{spread['min']:.0f} to {spread['max']:.0f} (median {spread['median']:.0f})"


def calibration_sentence(scenario: Mapping[str, Any]) -> str:
    """What the calibration found, and how near its plain step is to the measured one."""
    costs = scenario["calibration"]
    sentence = (
        f"Calibrated between the runs, on {costs['context']} tokens of context: one plain step "
        f"takes {1e3 * costs['plain_step_seconds']:.1f} ms, one draft step "
        f"{1e3 * costs['chain_step_seconds']:.1f} ms (d = {costs['d']:.3f})."
    )
    measured = scenario["plain_step_measured"]
    if measured is not None:
        sentence += f" In the plain runs a token took {1e3 * measured:.1f} ms."
    return sentence
