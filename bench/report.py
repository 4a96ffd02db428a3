"""The report on a document of results: sentences, tables and plots in Markdown."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from mlx_eagle.system.device import megabytes

from .parity import count_identical, largest_margin, parity_words

Scenario = Mapping[str, Any]
Columns = Mapping[str, Callable[[Any], str]]
"""Columns of a table by their headings: each shows a part of a row."""

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


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; each row is one line, and bars inside cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        shown = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def table(columns: Columns, rows: Iterable[Any], heading: str = "") -> str:
    """A table of rows by its columns, below a heading if there is one; nothing without rows."""
    cells = [[show(row) for show in columns.values()] for row in rows]
    return f"{heading}\n\n{markdown_table(list(columns), cells)}".strip() if cells else ""


def joined(blocks: Iterable[str]) -> str:
    """Headings, paragraphs and tables below each other; empty ones are left out."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def folded(words: str, *blocks: str) -> str:
    """Blocks that are shown only on demand, under these words."""
    return f"<details><summary>{words}</summary>\n\n{joined(blocks)}\n</details>"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number with ``digits`` after the point; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def times(value: float | None) -> str:
    """A ratio: "1.25x"."""
    return number(value, unit="x")


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    """Seconds as milliseconds; "-" for None."""
    return number(None if seconds is None else 1e3 * seconds, digits)


def with_spread(spread: Mapping[str, float] | None, middle: float | None = None) -> str:
    """ "5.10 [4.90-5.30]": the median, or ``middle`` in its place, and the quartiles."""
    if spread is None:
        return "-"
    middle = spread["median"] if middle is None else middle
    return f"{number(middle)} [{number(spread['q1'])}-{number(spread['q3'])}]"


def waiting(name: str, role: str) -> Callable[[Mapping[str, Any]], str]:
    """Column of a server's waiting times in milliseconds: "50 [70]", the median and the worst."""

    def show(row: Mapping[str, Any]) -> str:
        found = row[role][name]
        if found is None:
            return "-"
        return f"{milliseconds(found['median'], 0)} [{milliseconds(found['worst'], 0)}]"

    return show


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"


def _rows_per_pass(prompts: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the mean verify pass: the root and its drafts, which on a GPU decide the kernels."""
    rounds = sum(row["stats"]["num_rounds"] for row in prompts)
    drafted = sum(row["stats"]["num_drafted"] for row in prompts)
    return f"{1 + drafted / rounds:.1f}" if rounds else "1"


def _part(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Column of a part of the median round: milliseconds, and its share."""

    def show(split: Mapping[str, Any]) -> str:
        return f"{milliseconds(split[name])} ({split[name] / split['round']:.0%})"

    return show


# --- tables -------------------------------------------------------------------------------------

PLACE: Columns = {"set": itemgetter("set"), "configuration": itemgetter("configuration")}
SPEED: Columns = PLACE | {
    "plain tok/s": lambda f: with_spread(f["plain_tps_spread"], f["plain_tps"]),
    "speculative tok/s": lambda f: with_spread(f["tps_spread"], f["tps"]),
    "ratio": lambda f: times(f["speedup"]),
    "ratio by prompt": lambda f: with_spread(f["speedup_by_prompt"]),
    "worst prompt": lambda f: times((f["speedup_by_prompt"] or {}).get("min")),
    "runs": lambda f: str(f["num_runs"]),
}
START: Columns = PLACE | {
    "TTFT plain ms": lambda f: milliseconds(f["plain_ttft"]["median"], 0),
    "TTFT ms": lambda f: milliseconds(f["ttft"]["median"], 0),
    "peak plain": lambda f: megabytes(f["plain_peak_bytes"]),
    "peak": lambda f: megabytes(f["peak_bytes"]),
}
ACCEPTANCE: Columns = PLACE | {
    "mean acceptance length (tau)": lambda f: number(f["mean_acceptance_length"]),
    "acceptance": lambda f: number(f["acceptance_rate"]),
    "by position": lambda f: _list(f["acceptance_by_position"]),
}
COUNTS: Columns = PLACE | {
    "accepted lengths": lambda f: (
        " ".join(f"{n}:{c}" for n, c in enumerate(f["accepted_histogram"])) or "-"
    ),
    "cumulative acceptance by position": lambda f: _list(f["cumulative_acceptance_by_position"]),
    "target forwards/token": lambda f: number(f["target_forwards_per_token"], 3),
    "head forwards/round": lambda f: number(f["head_forwards_per_round"]),
    "evals/round": lambda f: number(f["evals_per_round"]),
}
COST: Columns = {
    "rows R": lambda row: str(row["rows"]),
    "T(R) ms": lambda row: milliseconds(row["verify_seconds"]),
    "c(R)": lambda row: number(row["verify_cost"], 3),
    "graph building ms": lambda row: milliseconds(row["verify_build_seconds"]),
    "accept pass ms": lambda row: milliseconds(row["accept_seconds"]),
    "host wait ms": lambda row: milliseconds(row["host_seconds"]),
    "overhead (plain steps)": lambda row: number(row["overhead"], 3),
}
SPLIT: Columns = {
    "configuration": itemgetter("label"),
    "round ms": lambda split: milliseconds(split["round"]),
    "verify": _part("verify"),
    "draft": _part("draft"),
    "accept": _part("accept"),
    "host and the rest": _part("host"),
}
PREDICTION: Columns = PLACE | {
    "tau": lambda f: number(f["prediction"]["mean_acceptance_length"]),
    "predicted": lambda f: times(f["prediction"]["predicted"]),
    "measured": lambda f: times(f["prediction"]["measured"]),
    "predicted/measured - 1": lambda f: (
        "-" if f["prediction"]["error"] is None else f"{f['prediction']['error']:+.1%}"
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
PARITY: Columns = {
    "configuration": itemgetter("label"),
    "outputs identical to plain": lambda row: count_identical(row["parity"]),
    "rows per pass": lambda row: _rows_per_pass(row["prompts"]),
    "largest margin where not": lambda row: largest_margin(row["parity"]),
    "same output in all repeats": lambda row: (
        f"{sum(prompt['repeatable'] for prompt in row['prompts'])} of {len(row['prompts'])}"
    ),
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
CLIENTS: Columns = {
    "clients": lambda row: str(row["clients"]),
    "configuration": itemgetter("configuration"),
}
LOADS: Columns = CLIENTS | {
    "mlx_lm.server tok/s": lambda row: number(row["plain"]["tps"]),
    "mlx_eagle.server tok/s": lambda row: number(row["speculative"]["tps"]),
    "ratio": lambda row: times(row["speedup"]),
    "tau": lambda row: number(row["mean_acceptance_length"]),
    "texts identical": lambda row: f"{num_same(row)} of {row['num_prompts']}",
    "loads": lambda row: str(row["num_runs"]),
}
WAITS: Columns = CLIENTS | {
    "time per token ms: plain": waiting("seconds_per_token", "plain"),
    "time per token ms: drafted": waiting("seconds_per_token", "speculative"),
    "longest pause ms: plain": waiting("longest_pause", "plain"),
    "longest pause ms: drafted": waiting("longest_pause", "speculative"),
    "TTFT ms: plain": waiting("ttft", "plain"),
    "TTFT ms: drafted": waiting("ttft", "speculative"),
}


def figures(scenario: Scenario) -> list[Mapping[str, Any]]:
    """Figures of every set and configuration, then overall if there are several sets."""
    configurations = scenario["configurations"]
    names = list(configurations[0]["sets"]) if configurations else []
    found = [(name, c, c["sets"][name]) for name in names for c in configurations]
    if len(names) > 1:
        found += [("overall", c, c["overall"]) for c in configurations]
    return [{"set": name, "configuration": c["label"], **own} for name, c, own in found]


def with_prompts(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Every configuration with the figures and the parity of its own prompts."""
    for configuration in scenario["configurations"]:
        label = configuration["label"]
        own = [row for row in scenario["prompts"] if row["configuration"] == label]
        yield {**configuration, "prompts": own, "parity": [row["parity"] for row in own]}


def suffixed(parts: Sequence[Any], word: str = "") -> list[tuple[str, Any]]:
    """Each of several parts with a suffix for the files of its plots: "-1", "-2" and so on."""
    many = len(parts) > 1
    return [(f"-{word}{i}" if many else "", part) for i, part in enumerate(parts, 1)]


def views(scenario: Scenario) -> list[tuple[str, Scenario]]:
    """The scenario as each drafter has it, with a suffix for the files of its plots."""
    found = []
    for suffix, drafter in suffixed(scenario["drafters"], "drafter"):
        own = [c for c in scenario["configurations"] if c["drafter"] == drafter["name"]]
        found.append((suffix, {**scenario, **drafter, "configurations": own}))
    return found


def cost_rows(costs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Costs by rows R; host and overhead are those of a round with k = R - 1 drafts."""
    for rows in costs["verify_seconds"]:
        row = {"rows": rows}
        for name in ("verify_seconds", "verify_cost", "verify_build_seconds", "accept_seconds"):
            row[name] = costs[name].get(rows)
        for name in ("host_seconds", "overhead"):
            row[name] = costs[name].get(rows - 1)
        yield row


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


def num_same(row: Mapping[str, Any]) -> int:
    """Number of texts that are the same from both servers."""
    return row["num_prompts"] - len(row["differing"])


# --- the report ---------------------------------------------------------------------------------


def results(document: Mapping[str, Any]) -> str:
    """The part that is printed: a sentence per configuration, speed, acceptance, parity."""
    blocks = ["# mlx-eagle benchmark"]
    for scenario in document["scenarios"]:
        rows = figures(scenario)
        blocks += [f"## Results: {scenario_name(scenario)}", *headlines(scenario)]
        blocks.append(table(SIDE_BY_SIDE, scenario["side_by_side"], "### Side by side"))
        blocks += [table(SPEED, rows), table(ACCEPTANCE, rows)]
        blocks.append(table(PARITY, with_prompts(scenario)))
    return joined([*blocks, *other_blocks(document)])


def full_report(document: Mapping[str, Any], images: Mapping[str, Path]) -> str:
    """The whole report, results first; ``images`` are the plots that were drawn, by name."""
    scenarios = document["scenarios"]
    blocks = ["# mlx-eagle benchmark"]
    for scenario in scenarios:
        blocks += headlines(scenario)
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
        sets = ", ".join(
            f"{name} {times(f['speedup'])}" for name, f in configuration["sets"].items()
        )
        yield (
            f"{label} ({scenario_name(scenario)}): {times(overall['speedup'])} over plain "
            f"decoding ({sets}), mean acceptance length (tau) "
            f"{overall['mean_acceptance_length']:.2f}; the worst prompt "
            f"{times(overall['speedup_by_prompt']['min'])}; "
            f"{count_identical(configuration['parity'])} outputs identical to plain decoding's."
        )


def scenario_blocks(scenario: Scenario, images: Mapping[str, Path], suffix: str) -> Iterator[str]:
    """Tables and plots of one scenario, whose plots have this ``suffix`` in their names."""
    rows = figures(scenario)
    yield table(SIDE_BY_SIDE, scenario["side_by_side"], "### Side by side")
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
        f"takes {1e3 * costs['plain_step_seconds']:.1f} ms, one draft step "
        f"{1e3 * costs['chain_step_seconds']:.1f} ms (d = {costs['d']:.3f})."
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
    predicted = [row for row in figures(view) if "prediction" in row]
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
            f"{number(row['mean_acceptance_length'])}; {num_same(row)} of {row['num_prompts']} "
            "texts identical."
        )
    yield table(LOADS, rows)
    yield table(WAITS, rows)
