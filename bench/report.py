"""The report on a document of results, in Markdown: sentences, tables and plots."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from mlx_eagle.system.device import megabytes

from .parity import count_identical, largest_margin, parity_words
from .runner import TURN_TOKENS

Scenario = Mapping[str, Any]
Columns = Mapping[str, Callable[[Any], str]]
"""Columns of a table by their headings: what each shows of a row."""

PLOTS = "plots"  # the folder of the images, beside the report

TITLE = "mlx-eagle benchmark"

INTRO = (
    "Speculative decoding lets a small draft head guess the next k tokens, and the target model "
    "check all of them in one pass. The output is the target's own; what changes is how many "
    "passes it takes. This report compares it with plain decoding by mlx-lm on the same prompts."
)

METHOD = (
    "How it was measured: plain and speculative runs take turns on every prompt ({order}), after "
    "a whole text of each, which is not counted (repeats: {repeats}). Plain is the pipelined "
    "mlx_lm.stream_generate. Tokens per second count from the first token to the last, so "
    "prefill is not in them; the time to the first token is listed apart. A prompt's speed is "
    "that of its median run, its ratio the median of its runs, each against the plain run near "
    "it; a set's speed is the sum of its tokens over the sum of those times, its ratio that of "
    "such speeds. In brackets: first to third quartile of single runs, or of prompts where it "
    "says so. Of MT-bench, the first turn is asked. Peak memory is with target and head loaded, "
    "in plain runs too. Above temperature 0 both draw with the same sampler and seed."
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
    "weave": f"plain and every configuration at once, {TURN_TOKENS} tokens each in turn, in an "
    "order drawn anew for each turn, each with its own clock; all configurations share the plain "
    "run",
}

START_WORDS = "Time to the first token (TTFT), and memory"

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


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; each row is one line, and bars inside cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        shown = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def table(columns: Columns, rows: Iterable[Any]) -> str:
    """The same from what each column shows of a row."""
    return markdown_table(list(columns), [[show(x) for show in columns.values()] for x in rows])


def titled(heading: str, columns: Columns, rows: Sequence[Any]) -> list[str]:
    """A heading and that table; nothing without rows."""
    return [heading, table(columns, rows)] if rows else []


def joined(blocks: Iterable[str]) -> str:
    """Headings, paragraphs and tables below each other; empty ones are left out."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def image(file: Path | None, caption: str) -> str:
    """A plot in the folder ``PLOTS``; nothing where it was not drawn."""
    return "" if file is None else f"![{caption}]({PLOTS}/{file.name})"


def folded(words: str, *blocks: str) -> str:
    """Blocks that are shown on demand only, under these words."""
    return f"<details><summary>{words}</summary>\n\n{joined(blocks)}\n</details>"


def scenario_name(scenario: Scenario) -> str:
    """What is particular to one scenario, in words."""
    context = scenario["context"]
    length = "prompts as they are" if context is None else f"prompts padded to {context} tokens"
    temp = "greedy" if scenario["temp"] == 0 else f"temperature {scenario['temp']:g}"
    return f"{length}, {temp}"


def results(document: Mapping[str, Any]) -> str:
    """What is printed: a sentence per configuration, then speed, acceptance and batches."""
    parts = [f"# {TITLE}"]
    for scenario in document["scenarios"]:
        parts += [f"## Results: {scenario_name(scenario)}", *headlines(scenario)]
        parts += titled("### Side by side", SIDE_BY_SIDE, scenario["side_by_side"])
        parts += [figures_table(scenario, SPEED), figures_table(scenario, ACCEPTANCE)]
        parts.append(parity_table(scenario))
    return joined([*parts, *batch_blocks(document)])


def full_report(document: Mapping[str, Any], images: Sequence[Mapping[str, Path]] = ()) -> str:
    """The whole report, results first; ``images`` are a scenario's plots each, or none at all."""
    settings, scenarios = document["settings"], document["scenarios"]
    parts = [f"# {TITLE}"]
    for scenario in scenarios:
        parts += headlines(scenario)
    for scenario, drawn in zip(scenarios, images or [{}] * len(scenarios), strict=True):
        parts.append(f"## Results: {scenario_name(scenario)}")
        parts += scenario_blocks(scenario, drawn)
    method = METHOD.format(order=ORDERS[settings["order"]], repeats=settings["repeats"])
    return joined(
        [
            *parts,
            *batch_blocks(document),
            "## Conditions",
            folded("How it was measured", INTRO, method),
            folded("Machine, versions, models and settings", conditions_table(document)),
            folded("Words", markdown_table(["word", "meaning"], list(WORDS.items()))),
        ]
    )


def conditions_table(document: Mapping[str, Any]) -> str:
    """Machine, versions, models, then the settings."""
    rows: list[tuple[str, str]] = []
    for name, value in document["conditions"].items():
        words = name.replace("_", " ")
        if name == "drafters":
            rows += [(f"drafter {facts['name']}", _weight_words(facts)) for facts in value]
        elif name.endswith("_bytes"):
            rows.append((f"{words.removesuffix(' bytes')} size", megabytes(value)))
        elif name.endswith("_parameters"):
            rows.append((words, f"{value / 1e6:.1f} M"))
        else:
            rows.append((words, str(value)))
    settings = document["settings"]

    def listed(name: str) -> str:
        return ", ".join(map(str, settings[name])) or "none"

    rows += [
        ("draft lengths k", listed("sizes")),
        ("with copies as well, k", listed("copied")),
        ("trees", listed("trees")),
        ("temperature", ", ".join(f"{temp:g}" for temp in settings["temps"])),
        ("prompt sets", f"{listed('prompts')}; {settings['limit'] or 'all'} prompts per set"),
        ("context", listed("contexts").replace("None", "as it is")),
        ("output", f"at most {settings['max_tokens']} tokens, the end-of-text token honoured"),
        ("batches", listed("batches")),
        ("clients", listed("clients")),
        ("repeats", f"{settings['repeats']}, order {settings['order']}"),
    ]
    return markdown_table(["condition", "value"], rows)


def _weight_words(facts: Mapping[str, Any]) -> str:
    """ "float16, 12.3 M parameters, 24.6 MB"; "no weights" """
    if not facts["bytes"]:
        return str(facts["precision"])
    size = f"{facts['parameters'] / 1e6:.1f} M parameters, {megabytes(facts['bytes'])}"
    return f"{facts['precision']}, {size}"


def batch_blocks(document: Mapping[str, Any]) -> list[str]:
    """What was measured of several prompts at once, if anything was."""
    rows = document["batches"]
    return ["## Batches", BATCHES, table(BATCH, rows)] if rows else []


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
        same = count_identical([row["parity"] for row in rows])
        yield (
            f"{label} ({scenario_name(scenario)}): {times(overall['speedup'])} over plain "
            f"decoding ({sets}), mean acceptance length (tau) "
            f"{overall['mean_acceptance_length']:.2f}; the worst prompt "
            f"{times(overall['speedup_by_prompt']['min'])}; {same} outputs "
            "identical to plain decoding's."
        )


def scenario_blocks(scenario: Scenario, images: Mapping[str, Path]) -> Iterator[str]:
    """Tables and plots of one scenario."""

    def plot(name: str, last: str = "") -> str:
        return image(images.get(name + last), CAPTIONS[name])

    lengths = ", ".join(
        f"{what} {_range(scenario[key])} tokens"
        for what, key in (("prompts", "prompt_tokens"), ("outputs", "output_tokens"))
    )
    yield from titled("### Side by side", SIDE_BY_SIDE, scenario["side_by_side"])
    yield plot("side_by_side")
    yield f"Lengths: {lengths}."
    yield "### Speed"
    yield figures_table(scenario, SPEED)
    yield plot("tokens_per_second")
    yield folded(START_WORDS, figures_table(scenario, START))
    yield "### Acceptance"
    yield figures_table(scenario, ACCEPTANCE)
    yield folded("Accepted lengths and forward passes", figures_table(scenario, COUNTS))
    for view in views(scenario):
        last = view["suffix"]
        yield "### Cost of a round" + (f", {view['name']}" if last else "")
        yield costs_sentence(view)
        yield cost_table(view)
        yield plot("verify_cost", last)
        yield split_table(view)
        yield plot("round_time", last)
        predicted = [f for f in figures(view) if "prediction" in f]
        yield from titled("### Predicted and measured", PREDICTION, predicted)
        yield plot("speedup", last)
        yield plot("acceptance", last)
    yield "### Parity"
    yield parity_table(scenario)
    prompts = scenario["prompts"]
    yield folded(f"Every prompt ({len(prompts)} rows)", table(PROMPT, prompts))


def views(scenario: Scenario) -> list[dict[str, Any]]:
    """The scenario as each drafter has it, and a ``suffix`` for the files of its plots."""
    several = len(scenario["drafters"]) > 1
    return [
        {
            **scenario,
            **drafter,
            "suffix": f"-drafter{number}" if several else "",
            "configurations": [
                c for c in scenario["configurations"] if c["drafter"] == drafter["name"]
            ],
        }
        for number, drafter in enumerate(scenario["drafters"], 1)
    ]


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


def figures(scenario: Scenario) -> list[Mapping[str, Any]]:
    """The figures of every set, then overall where there are several sets.

    With each the names of its ``set`` and its ``configuration``.
    """
    configurations = scenario["configurations"]
    names = list(configurations[0]["sets"]) if configurations else []
    found = [(name, c, c["sets"][name]) for name in names for c in configurations]
    if len(names) > 1:
        found += [("overall", c, c["overall"]) for c in configurations]
    return [{"set": name, "configuration": c["label"], **own} for name, c, own in found]


def figures_table(scenario: Scenario, columns: Columns) -> str:
    """Those columns of every set and configuration."""
    return table(PLACE | columns, figures(scenario))


def _list(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"


PLACE: Columns = {"set": itemgetter("set"), "configuration": itemgetter("configuration")}
SPEED: Columns = {
    "plain tok/s": lambda f: with_spread(f["plain_tps_spread"], number, f["plain_tps"]),
    "speculative tok/s": lambda f: with_spread(f["tps_spread"], number, f["tps"]),
    "ratio": lambda f: times(f["speedup"]),
    "ratio by prompt": lambda f: with_spread(f["speedup_by_prompt"], number),
    "worst prompt": lambda f: times((f["speedup_by_prompt"] or {}).get("min")),
    "runs": lambda f: str(f["num_runs"]),
}
START: Columns = {
    "TTFT plain ms": lambda f: milliseconds(f["plain_ttft"]["median"], 0),
    "TTFT ms": lambda f: milliseconds(f["ttft"]["median"], 0),
    "peak plain": lambda f: megabytes(f["plain_peak_bytes"]),
    "peak": lambda f: megabytes(f["peak_bytes"]),
}
ACCEPTANCE: Columns = {
    "mean acceptance length (tau)": lambda f: number(f["mean_acceptance_length"]),
    "acceptance": lambda f: number(f["acceptance_rate"]),
    "by position": lambda f: _list(f["acceptance_by_position"]),
}
COUNTS: Columns = {
    "accepted lengths": lambda f: (
        " ".join(f"{n}:{c}" for n, c in enumerate(f["accepted_histogram"])) or "-"
    ),
    "cumulative acceptance by position": lambda f: _list(f["cumulative_acceptance_by_position"]),
    "target forwards/token": lambda f: number(f["target_forwards_per_token"], 3),
    "head forwards/round": lambda f: number(f["head_forwards_per_round"]),
    "evals/round": lambda f: number(f["evals_per_round"]),
}
PREDICTION: Columns = PLACE | {
    "tau": lambda f: number(f["prediction"]["mean_acceptance_length"]),
    "predicted": lambda f: times(f["prediction"]["predicted"]),
    "measured": lambda f: times(f["prediction"]["measured"]),
    "predicted/measured - 1": lambda f: (
        "-" if (error := f["prediction"]["error"]) is None else f"{error:+.1%}"
    ),
    "bound": lambda f: times(f["prediction"]["bound"]),
    "fraction of bound reached": lambda f: number(f["prediction"]["fraction_of_bound"]),
}
SIDE_BY_SIDE: Columns = {
    "draft model": itemgetter("drafter"),
    "fastest with": lambda row: row["configuration"].removeprefix(f"{row['drafter']}, "),
    "tok/s": lambda row: number(row["tps"]),
    "ratio": lambda row: times(row["speedup"]),
    "worst prompt": lambda row: times(row["speedup_of_worst_prompt"]),
    "tau": lambda row: number(row["mean_acceptance_length"]),
    "weights": lambda row: megabytes(row["weight_bytes"]) if row["weight_bytes"] else "none",
    "peak memory": lambda row: megabytes(row["peak_bytes"]),
    "outputs identical": lambda row: f"{row['identical']} of {row['num_prompts']}",
}
BATCH: Columns = {
    "prompts at once": lambda row: str(row["batch"]),
    **PLACE,
    "plain batch tok/s": lambda row: number(row["plain_tps_after_prefill"]),
    "speculative tok/s": lambda row: number(row["tps_after_prefill"]),
    "ratio": lambda row: times(row["speedup_after_prefill"]),
    "whole call: plain": lambda row: number(row["plain_tps"]),
    "whole call: speculative": lambda row: number(row["tps"]),
    "whole call: ratio": lambda row: times(row["speedup"]),
    "tau": lambda row: number(row["mean_acceptance_length"]),
    "outputs identical": lambda row: count_identical(row["parity"]),
    "largest margin where not": lambda row: largest_margin(row["parity"]),
    "drafting events": lambda row: ", ".join(row["drafting_events"]) or "-",
}
PROMPT: Columns = {
    "prompt": lambda row: f"{row['set']}/{row['id']}",
    "configuration": itemgetter("configuration"),
    "prompt tokens": lambda row: str(row["prompt_tokens"]),
    "output tokens": lambda row: str(row["output_tokens"]),
    "plain tok/s": lambda row: number(row["plain_tps"]),
    "speculative tok/s": lambda row: number(row["tps"]),
    "ratio": lambda row: times(row["speedup"]),
    "tau": lambda row: number(row["mean_acceptance_length"]),
    "parity": lambda row: parity_words(row["parity"]),
}


def cost_table(scenario: Scenario) -> str:
    """By rows R: verify pass, accept pass, and what the host adds to a round of k = R - 1."""
    costs = scenario["costs"]
    columns: Columns = {
        "rows R": str,
        "T(R) ms": lambda rows: milliseconds(costs["verify_seconds"][rows]),
        "c(R)": lambda rows: number(costs["verify_cost"][rows], 3),
        "graph building ms": lambda rows: milliseconds(costs["verify_build_seconds"][rows]),
        "accept pass ms": lambda rows: milliseconds(costs["accept_seconds"].get(rows)),
        "host wait ms": lambda rows: milliseconds(costs["host_seconds"].get(rows - 1)),
        "overhead (plain steps)": lambda rows: number(costs["overhead"].get(rows - 1), 3),
    }
    return table(columns, costs["verify_seconds"])


def split_table(scenario: Scenario) -> str:
    """Milliseconds and shares of the median round; nothing without a chain."""
    parts = {"verify": "verify", "draft": "draft", "accept": "accept", "host and the rest": "host"}
    rows = []
    for configuration in scenario["configurations"]:
        split = configuration["overall"].get("time_split")
        if split is not None:
            shares = (
                f"{milliseconds(split[part])} ({split[part] / split['round']:.0%})"
                for part in parts.values()
            )
            rows.append([configuration["label"], milliseconds(split["round"]), *shares])
    return markdown_table(["configuration", "round ms", *parts], rows) if rows else ""


def parity_table(scenario: Scenario) -> str:
    """How many outputs are the same, and the largest margin where one is not.

    Beside it the rows of a verify pass, on the mean: on a GPU they decide which kernels multiply.
    """
    rows = []
    for configuration in scenario["configurations"]:
        label = configuration["label"]
        own = [row for row in scenario["prompts"] if row["configuration"] == label]
        parities = [row["parity"] for row in own]
        repeatable = f"{sum(row['repeatable'] for row in own)} of {len(own)}"
        per_pass = _rows_per_pass([row["stats"] for row in own])
        rows.append(
            [label, count_identical(parities), per_pass, largest_margin(parities), repeatable]
        )
    header = ["configuration", "outputs identical to plain", "rows per pass",
              "largest margin where not", "same output in all repeats"]  # fmt: skip
    return markdown_table(header, rows)


def _rows_per_pass(stats: Sequence[Mapping[str, Any]]) -> str:
    """The root and the drafts that were verified with it, per round that had any."""
    rounds = sum(counts["num_rounds"] for counts in stats)
    drafted = sum(counts["num_drafted"] for counts in stats)
    return f"{1 + drafted / rounds:.1f}" if rounds else "1"
