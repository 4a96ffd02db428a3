"""The report: which tables and words are made of a document of results."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .parity import verdict_text
from .render import Block, Heading, Image, Table, Text
from .runner import TURN_TOKENS
from .tables import (
    acceptance_table,
    batch_table,
    conditions_table,
    cost_table,
    parity_table,
    prediction_table,
    primitives_table,
    prompts_table,
    speed_table,
    split_table,
    times,
)

TITLE = "mlx-eagle benchmark"

INTRO = (
    "Speculative decoding lets a small draft head guess the next k tokens, and the target model "
    "check all of them in one pass. The text is the target's own; what changes is how many passes "
    "it takes. This report compares it with plain decoding by mlx-lm on the same prompts."
)

METHOD = (
    "How it was measured: plain and speculative runs take turns on every prompt ({order}), after "
    "two warm-ups (repeats: {repeats}). Plain is the pipelined mlx_lm.stream_generate. "
    "Tokens per second count from the first token to the last, so prefill is not in them "
    "(time to the first token is listed apart). A prompt's speed is that of its median run, its "
    "ratio the median of its runs, each against the plain run beside it; a set's speed is the sum "
    "of its tokens over the sum of those times, its ratio that of such speeds. In brackets: first "
    "to third quartile of single runs, or of prompts where it says so. Of MT-bench, the first turn "
    "is asked. Peak memory is with target and head loaded, in plain runs too. Above temperature 0 "
    "both draw with the same sampler and seed."
)

BATCHES = (
    "So many prompts of a set in one call of batch_generate: mlx-lm's own against the one with the "
    "drafter, greedy, in the same turns. Tokens per second are those of all texts, after prefill as "
    "each counts it, then over the whole call; ours prefills text by text. Pace says when all "
    "texts together were decoded plainly (park), tried again (probe), drafted again (wake); tau is "
    "1 where the whole batch went to mlx-lm."
)

ORDERS = {
    "abba": "plain, speculative, speculative, plain for every arm",
    "mirror": "plain, every arm, then the same backwards; all arms share the plain runs",
    "weave": f"plain and every arm at once, {TURN_TOKENS} tokens each in turn, forwards and "
    "backwards, each with its own clock; all arms share the plain run",
}

CAPTIONS = {
    "speedup": "Speedup and tau against the draft length k. Points are measured; the dashed line "
    "is what the cost model makes of the calibrated costs and of the longest chain's acceptance.",
    "verify_cost": "Verify cost: the time of one target pass over R rows, in passes over one row. "
    "Speculation gains where this line is near the flat one, and cannot where it is near the "
    "linear one.",
    "acceptance": "How often the draft's token at each position was the target's own.",
    "round_time": "The median round in parts. Verify, draft and accept are timed alone in the "
    "same session; host is the rest of the measured round. Above each bar: tokens a round gives.",
    "tokens_per_second": "Speed by prompt set, plain beside speculative.",
}

WORDS = [
    ["k", "draft tokens a round"],
    ["tau", "tokens emitted per target forward, the new one included; plain decoding: 1"],
    ["acceptance", "share of draft tokens kept; by position given the one before was kept"],
    ["accepted lengths", "n:c means that c rounds kept n draft tokens, over all runs"],
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
    ["margin", "difference of the target's two largest logits: near 0 is a tie, left to rounding"],
]


def scenario_name(scenario: Mapping[str, Any]) -> str:
    """What is particular to one scenario, in words."""
    context = scenario["context"]
    length = "prompts as they are" if context is None else f"prompts padded to {context} tokens"
    temp = "greedy" if scenario["temp"] == 0 else f"temperature {scenario['temp']:g}"
    return f"{length}, {temp}"


def blocks(
    document: Mapping[str, Any], draw: Callable[[Mapping[str, Any], int], Mapping[str, Path]]
) -> list[Block]:
    """The whole report; ``draw(scenario, number)`` makes a scenario's plots."""
    settings, scenarios = document["settings"], document["scenarios"]
    parts: list[Block] = [Heading(TITLE, 1), Text(INTRO)]
    for scenario in scenarios:
        parts += [Text(line) for line in headlines(scenario)]
    parts += [Heading("Conditions"), conditions_table(document)]
    order = ORDERS[settings["order"]]
    parts.append(Text(METHOD.format(order=order, repeats=settings["repeats"])))
    for number, scenario in enumerate(scenarios):
        parts.append(Heading(f"Results: {scenario_name(scenario)}"))
        parts += scenario_blocks(scenario, draw(scenario, number))
    if document["batches"]:
        parts += [Heading("Batches"), Text(BATCHES), batch_table(document["batches"])]
    parts += [Heading("Words"), Table(["word", "meaning"], WORDS)]
    return parts


def headlines(scenario: Mapping[str, Any]) -> Iterator[str]:
    """A sentence an arm."""
    for configuration in scenario["arms"]:
        overall = configuration["overall"]
        if overall["speedup"] is None:
            yield f"{configuration['label']}: the texts are too short to be timed."
            continue
        sets = ", ".join(f"{name} {times(f['speedup'])}" for name, f in configuration["sets"].items())
        rows = [row for row in scenario["prompts"] if row["arm"] == configuration["label"]]
        same = sum(row["parity"]["identical"] for row in rows)
        yield (
            f"{configuration['label']} ({scenario_name(scenario)}): {times(overall['speedup'])} over plain "
            f"decoding ({sets}), {overall['tau']:.2f} tokens per target forward; the worst prompt "
            f"{times(overall['speedup_by_prompt']['min'])}; {same} of {len(rows)} texts identical "
            "to plain decoding's."
        )


def scenario_blocks(scenario: Mapping[str, Any], images: Mapping[str, Path]) -> list[Block]:
    """Tables and plots of one scenario."""

    def image(name: str) -> list[Block]:
        return [Image(images[name], CAPTIONS[name])] if name in images else []

    lengths = ", ".join(
        f"{what} {_range(scenario[key])} tokens"
        for what, key in (("prompts", "prompt_tokens"), ("outputs", "output_tokens"))
    )
    return [
        Text(f"Lengths: {lengths}."),
        Heading("Speed", 3),
        speed_table(scenario),
        *image("speedup"),
        *image("tokens_per_second"),
        Heading("Acceptance", 3),
        acceptance_table(scenario),
        *image("acceptance"),
        Heading("Cost of a round", 3),
        Text(calibration_sentence(scenario)),
        cost_table(scenario),
        *image("verify_cost"),
        *_optional(split_table(scenario)),
        *image("round_time"),
        *_prediction(scenario),
        Heading("Graph primitives", 3),
        Text(
            "Operations in the lazily built graph: what the host issues for one step. Norm, "
            "rotary embedding and attention count as one each, as on a GPU; the last column is "
            "what this device makes of them. Kernels leave out views such as a transposition. "
            "Aim: a verify pass at most 1.05 plain steps plus the taps, a draft step at most 30."
        ),
        primitives_table(scenario),
        Heading("Parity", 3),
        parity_table(scenario),
        prompts_table(scenario, verdict_text),
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
