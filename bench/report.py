"""The report on a document of results: sentences, tables and plots in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_eagle.system.device import load_note, megabytes

from .figures import Figure, joined, markdown_table, milliseconds, number, number3, table, times
from .parity import count_identical, largest_margin
from .serving import LOADS, WAITS, texts_identical
from .summary import (
    ACCEPTANCE,
    BATCH,
    COUNTS,
    PLACE,
    PROMPT,
    SIDE_BY_SIDE,
    SPEED,
    START,
    prompts_of,
    suffixed,
    views,
)

Scenario = Mapping[str, Any]
PLOTS = "plots"  # folder of the images, beside the report

METHOD = Path(__file__).parent / "method.md"
CAPTIONS = {
    "side_by_side": "Every draft model in its fastest configuration: speed, acceptance, memory",
    "speedup": "Speedup and mean acceptance length (tau) against the draft length k",
    "verify_cost": "Verify cost: the time of a target pass over R rows, in passes over one row",
    "acceptance": "Acceptance by position in the draft",
    "round_time": "The median round in parts, and its tokens",
    "tokens_per_second": "Speed by prompt set, plain and speculative",
    "serving": "All clients' tokens per second, and the time per token that a client sees",
}

SETTINGS = {
    "prompts": "prompt sets",
    "limit": "prompts per set (0: all)",
    "max_tokens": "tokens per answer, at most",
    "sizes": "draft lengths k",
    "copied": "draft lengths k with copies as well",
    "temps": "temperatures",
    "contexts": "tokens of context (None: prompts as they are)",
    "samples": "timings of each part",
}
"""Settings whose names are too short for a reader."""


TITLE = "# mlx-eagle benchmark"


def folded(words: str, *blocks: str) -> str:
    """Blocks that are shown only on demand, under these words."""
    return f"<details><summary>{words}</summary>\n\n{joined(blocks)}\n</details>"


# --- tables of what is measured elsewhere, or follows from several rows -------------------------


def rows_per_pass(stats: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the mean verify pass: the root and its drafts, which on a GPU decide the kernels."""
    rounds = sum(counts["num_rounds"] for counts in stats)
    drafted = sum(counts["num_drafted"] for counts in stats)
    return f"{1 + drafted / rounds:.1f}" if rounds else "1"


PARITY = (
    Figure("label", "configuration"),
    Figure("parity", "outputs identical to plain", count_identical),
    Figure("stats", "rows per pass", rows_per_pass),
    Figure("parity", "largest margin where not", largest_margin),
    Figure("repeatable", "same output in all repeats", lambda r: f"{sum(r)} of {len(r)}"),
)
COST = (
    Figure("rows", "rows R"),
    Figure("verify_seconds", "T(R) ms", milliseconds),
    Figure("verify_cost", "c(R)", number3),
    Figure("verify_build_seconds", "graph building ms", milliseconds),
    Figure("accept_seconds", "accept pass ms", milliseconds),
    Figure("host_seconds", "host wait ms", milliseconds),
    Figure("overhead", "overhead (plain steps)", number3),
)


def part(name: str, heading: str) -> Figure:
    """A part of the median round: milliseconds, and its share."""
    words = "{} ({:.0%})"
    return Figure("", heading, lambda r: words.format(milliseconds(r[name]), r[name] / r["round"]))


SPLIT = (
    Figure("label", "configuration"),
    Figure("round", "round ms", milliseconds),
    part("verify", "verify"),
    part("draft", "draft"),
    part("accept", "accept"),
    part("host", "host and the rest"),
)


PREDICTION = (
    *PLACE,
    Figure("mean_acceptance_length", "tau", number),
    Figure("predicted", "predicted", times),
    Figure("measured", "measured", times),
    Figure("error", "predicted/measured - 1", lambda e: "-" if e is None else f"{e:+.1%}"),
    Figure("bound", "bound", times),
    Figure("fraction_of_bound", "fraction of bound reached", number),
)


def figures(scenario: Scenario) -> list[Mapping[str, Any]]:
    """Figures of every set and configuration, then overall if there are several sets."""
    configurations = scenario["configurations"]
    names = list(configurations[0]["sets"])
    found = [(name, c, c["sets"][name]) for name in names for c in configurations]
    if len(names) > 1:
        found += [("overall", c, c["overall"]) for c in configurations]
    return [{"set": name, "configuration": c["label"], **own} for name, c, own in found]


def with_prompts(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Every configuration with the figures and the parity of its own prompts."""
    for configuration in scenario["configurations"]:
        own = prompts_of(scenario, configuration)
        lists = {name: [row[name] for row in own] for name in ("parity", "repeatable", "stats")}
        yield {**configuration, **lists}


def cost_rows(costs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Costs by rows R; host and overhead are those of a round with k = R - 1 drafts."""
    for rows in costs["verify_seconds"]:
        at = {"host_seconds": rows - 1, "overhead": rows - 1}
        names = [figure.name for figure in COST[1:]]
        yield {"rows": rows} | {name: costs[name].get(at.get(name, rows)) for name in names}


def condition_rows(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Machine, versions and models, then the settings."""
    for name, value in document["conditions"].items():
        words = name.replace("_", " ")
        if name == "drafters":
            for facts in value:
                size = f"{facts['parameters'] / 1e6:.1f} M parameters, {megabytes(facts['bytes'])}"
                text = f"{facts['precision']}, {size}" if facts["bytes"] else facts["precision"]
                yield f"drafter {facts['name']}", text
        elif name.endswith("_bytes"):
            yield f"{words.removesuffix(' bytes')} size", megabytes(value)
        elif name.endswith("_parameters"):
            yield words, f"{value / 1e6:.1f} M"
        else:
            yield words, str(value)
    for name, value in document["settings"].items():
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value)) or "none"
        yield SETTINGS.get(name, name.replace("_", " ")), str(value)


# --- the report ---------------------------------------------------------------------------------


def results(document: Mapping[str, Any]) -> str:
    """The part that is printed: a sentence per configuration, speed, acceptance, parity."""
    blocks = [TITLE, load_note(document["conditions"]["load_average"])]
    for scenario in document["scenarios"]:
        blocks += [f"## Results: {scenario_name(scenario)}", *headlines(scenario)]
        blocks += which_to_take(scenario)
        blocks += [table(described, figures(scenario)) for described in (SPEED, ACCEPTANCE)]
        blocks.append(table(PARITY, with_prompts(scenario)))
    return joined([*blocks, *other_blocks(document)])


def full_report(document: Mapping[str, Any], images: Mapping[str, Path]) -> str:
    """The whole report, results first; ``images`` are the plots that were drawn, by name."""
    scenarios = document["scenarios"]
    blocks = [TITLE, load_note(document["conditions"]["load_average"])]
    blocks += chain(*map(headlines, scenarios))
    for suffix, scenario in suffixed(scenarios):
        blocks.append(f"## Results: {scenario_name(scenario)}")
        blocks += scenario_blocks(scenario, images, suffix)
    conditions = markdown_table(["condition", "value"], condition_rows(document))
    return joined(
        [
            *blocks,
            *other_blocks(document),
            image(images, "serving"),
            "## Conditions",
            folded("How it was measured, and the words", METHOD.read_text(encoding="utf-8")),
            folded("Machine, versions, models and settings", conditions),
        ]
    )


def which_to_take(scenario: Scenario) -> list[str]:
    """A table of several draft models and a sentence about the fastest; nothing for one."""
    rows = scenario["side_by_side"]
    if not rows:
        return []
    best = rows[0]
    speedup = f"{best['speedup']:.2f}x of plain."
    sentence = f"Take {best['drafter']}, {best['configuration']}: {speedup}"
    if best["speedup"] <= 1:
        sentence = f"Take none: the fastest, {best['drafter']}, is at {speedup}"
    return [table(SIDE_BY_SIDE, rows, "### Side by side"), sentence]


def image(images: Mapping[str, Path], name: str, suffix: str = "") -> str:
    """A plot with its caption; nothing if it was not drawn."""
    file = images.get(name + suffix)
    return "" if file is None else f"![{CAPTIONS[name]}]({PLOTS}/{file.name})"


def scenario_name(scenario: Scenario) -> str:
    """Context and temperature of a scenario in words."""
    context = scenario["context"]
    length = "prompts as they are" if context is None else f"prompts padded to {context} tokens"
    temp = "greedy" if scenario["temp"] == 0 else f"temperature {scenario['temp']:g}"
    return f"{length}, {temp}"


def headlines(scenario: Scenario) -> Iterator[str]:
    """A sentence per configuration."""
    for configuration in with_prompts(scenario):
        overall = configuration["overall"]
        label = configuration["label"]
        if overall["speedup"] is None:
            yield f"{label}: the outputs are too short to be timed."
            continue
        speedups = {name: own["speedup"] for name, own in configuration["sets"].items()}
        sets = ", ".join(f"{name} {times(speedup)}" for name, speedup in speedups.items())
        yield (
            f"{label} ({scenario_name(scenario)}): {times(overall['speedup'])} over plain "
            f"decoding ({sets}), "
            f"mean acceptance length (tau) {number(overall['mean_acceptance_length'])}; the worst "
            f"prompt {times(overall['speedup_by_prompt']['min'])}; "
            f"{count_identical(configuration['parity'])} outputs identical to plain decoding's."
        )


def scenario_blocks(scenario: Scenario, images: Mapping[str, Path], suffix: str) -> Iterator[str]:
    """Tables and plots of one scenario, whose plots have this ``suffix`` in their names."""
    rows = figures(scenario)
    yield from which_to_take(scenario)
    yield image(images, "side_by_side", suffix)
    words = "{min:.0f} to {max:.0f} (median {median:.0f}) tokens"
    prompts = words.format(**scenario["prompt_tokens"])
    yield f"Lengths: prompts {prompts}, outputs {words.format(**scenario['output_tokens'])}."
    yield table(SPEED, rows, "### Speed")
    yield image(images, "tokens_per_second", suffix)
    yield folded("Time to the first token (TTFT), and memory", table(START, rows))
    yield table(ACCEPTANCE, rows, "### Acceptance")
    yield folded("Accepted lengths and forward passes", table(COUNTS, rows))
    for drafter, view in views(scenario):
        yield from cost_blocks(view, images, drafter, suffix)
    yield table(PARITY, with_prompts(scenario), "### Parity")
    rows = scenario["prompts"]
    yield folded(f"Every prompt ({len(rows)} rows)", table(PROMPT, rows))


def cost_blocks(
    view: Scenario, images: Mapping[str, Path], drafter: str, suffix: str
) -> Iterator[str]:
    """Costs of one drafter, and the speedup that they predict."""
    last = drafter + suffix
    costs = view["costs"]
    yield "### Cost of a round" + (f", {view['name']}" if drafter else "")
    sentence = (
        f"Timed between the runs, on {costs['context']} tokens of context: one plain step "
        f"takes {milliseconds(costs['plain_step_seconds'])} ms, one draft step "
        f"{milliseconds(costs['chain_step_seconds'])} ms (d = {number3(costs['d'])})."
    )
    if view["plain_step_measured"] is not None:
        measured = milliseconds(view["plain_step_measured"])
        sentence += f" In the plain runs a token took {measured} ms."
    yield sentence
    yield table(COST, cost_rows(costs))
    yield image(images, "verify_cost", last)
    timed = [c for c in view["configurations"] if "time_split" in c["overall"]]
    yield table(SPLIT, [{"label": c["label"], **c["overall"]["time_split"]} for c in timed])
    yield image(images, "round_time", last)
    predicted = [{**row, **row["prediction"]} for row in figures(view) if "prediction" in row]
    yield table(PREDICTION, predicted, "### Predicted and measured")
    yield image(images, "speedup", last)
    yield image(images, "acceptance", last)


def other_blocks(document: Mapping[str, Any]) -> Iterator[str]:
    """Batches of prompts, and servers under load, if they were measured."""
    yield table(BATCH, document["batches"], "## Batches")
    rows = document.get("serving", [])
    for row in rows:
        clients = "1 client" if row["clients"] == 1 else f"{row['clients']} clients"
        yield (
            f"{clients}, {row['configuration']}: {times(row['speedup'])} the tokens per second of "
            "mlx_lm.server, mean acceptance length (tau) "
            f"{number(row['mean_acceptance_length'])}; {texts_identical(row)} texts identical."
        )
    yield table(LOADS, rows)
    yield table(WAITS, rows)
