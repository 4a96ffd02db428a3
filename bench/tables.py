"""The report's tables, from the document of results: figures set as text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_eagle.system.render import Table

Scenario = Mapping[str, Any]


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


def conditions_table(document: Mapping[str, Any]) -> Table:
    """Machine, versions, models, then the settings."""
    conditions, settings = document["conditions"], document["settings"]
    rows = []
    for name, value in conditions.items():
        if name.endswith("_bytes"):
            rows.append(
                [name.removesuffix("_bytes").replace("_", " ") + " size", megabytes(value)]
            )
        elif name.endswith("_parameters"):
            rows.append([name.replace("_", " "), f"{value / 1e6:.1f} M"])
        else:
            rows.append([name.replace("_", " "), str(value)])
    sizes = ", ".join(map(str, settings["sizes"]))
    limit = settings["limit"] or "all"
    rows += [
        ["draft lengths k", sizes],
        ["with copies as well, k", ", ".join(map(str, settings["copied"])) or "none"],
        ["trees", ", ".join(settings["trees"]) or "none"],
        ["temperature", ", ".join(f"{temp:g}" for temp in settings["temps"])],
        ["prompt sets", f"{', '.join(settings['prompts'])}; {limit} prompts per set"],
        ["context", ", ".join("as it is" if c is None else str(c) for c in settings["contexts"])],
        ["output", f"at most {settings['max_tokens']} tokens, the end-of-text token honoured"],
        ["batches", ", ".join(map(str, settings["batches"])) or "none"],
        ["clients", ", ".join(map(str, settings["clients"])) or "none"],
        ["repeats", f"{settings['repeats']}, order {settings['order']}"],
    ]
    return Table(["condition", "value"], rows)


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def speed_table(scenario: Scenario) -> Table:
    """Tokens per second, plain and drafted, and their ratio."""
    header = [
        "set", "configuration", "plain tok/s", "speculative tok/s", "ratio", "ratio by prompt",
        "worst prompt", "runs",
    ]  # fmt: skip
    rows = []
    for name, configuration, f in figures(scenario):
        by_prompt = f["speedup_by_prompt"]
        rows.append(
            [
                name,
                configuration["label"],
                with_spread(f["plain_tps_spread"], number, f["plain_tps"]),
                with_spread(f["tps_spread"], number, f["tps"]),
                times(f["speedup"]),
                with_spread(by_prompt, number),
                "-" if by_prompt is None else times(by_prompt["min"]),
                str(f["num_runs"]),
            ]
        )
    return Table(header, rows)


def start_table(scenario: Scenario) -> Table:
    """Time to the first token (TTFT), calibration apart from it, and peak memory."""
    header = [
        "set", "configuration", "TTFT plain ms", "TTFT ms", "calibration ms", "peak plain", "peak",
    ]  # fmt: skip
    rows = [
        [
            name,
            configuration["label"],
            milliseconds(f["plain_ttft"]["median"], 0),
            milliseconds(f["ttft"]["median"], 0),
            milliseconds(f["calibration_seconds"], 0),
            megabytes(f["plain_peak_bytes"]),
            megabytes(f["peak_bytes"]),
        ]
        for name, configuration, f in figures(scenario)
    ]
    return Table(header, rows)


def acceptance_table(scenario: Scenario) -> Table:
    """How much of the drafts was accepted."""
    header = ["set", "configuration", "mean acceptance length (tau)", "acceptance", "by position"]
    rows = [
        [
            name,
            configuration["label"],
            number(f["mean_acceptance_length"]),
            number(f["acceptance_rate"]),
            _list(f["acceptance_by_position"]),
        ]
        for name, configuration, f in figures(scenario)
    ]
    return Table(header, rows)


def counts_table(scenario: Scenario) -> Table:
    """Accepted lengths, and the forward passes and evaluations that the outputs took."""
    header = [
        "set", "configuration", "accepted lengths", "cumulative acceptance by position",
        "target forwards/token", "head forwards/round", "evals/round",
    ]  # fmt: skip
    rows = [
        [
            name,
            configuration["label"],
            " ".join(f"{n}:{c}" for n, c in enumerate(f["accepted_histogram"])) or "-",
            _list(f["cumulative_acceptance_by_position"]),
            number(f["target_forwards_per_token"], 3),
            number(f["head_forwards_per_round"]),
            number(f["evals_per_round"]),
        ]
        for name, configuration, f in figures(scenario)
    ]
    return Table(header, rows)


def _list(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"


def cost_table(scenario: Scenario) -> Table:
    """By rows R: verify pass, accept pass, and what the host adds to a round of k = R - 1."""
    costs = scenario["calibration"]
    header = [
        "rows R", "T(R) ms", "c(R)", "graph building ms", "accept pass ms", "host wait ms",
        "overhead (plain steps)",
    ]  # fmt: skip
    rows = []
    for size in costs["verify_seconds"]:
        host = costs["host_seconds"].get(size - 1)
        rows.append(
            [
                str(size),
                milliseconds(costs["verify_seconds"][size]),
                number(costs["verify_cost"][size], 3),
                milliseconds(costs["verify_build_seconds"][size]),
                milliseconds(costs["accept_seconds"].get(size)),
                milliseconds(host),
                number(costs["overhead"].get(size - 1), 3),
            ]
        )
    return Table(header, rows)


def split_table(scenario: Scenario) -> Table | None:
    """Milliseconds and shares of the median round; None without a chain."""
    rows = []
    for configuration in scenario["configurations"]:
        split = configuration["overall"].get("time_split")
        if split is not None:
            parts = ("verify", "draft", "accept", "host")
            shares = [f"{milliseconds(split[p])} ({split[p] / split['round']:.0%})" for p in parts]
            rows.append([configuration["label"], milliseconds(split["round"]), *shares])
    header = ["configuration", "round ms", "verify", "draft", "accept", "host and the rest"]
    return Table(header, rows) if rows else None


def prediction_table(scenario: Scenario) -> Table | None:
    """Predicted against measured speedup, and the bound; None without a chain."""
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
    return Table(header, rows) if rows else None


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


def prompts_table(scenario: Scenario, parity_words: Callable[[Mapping[str, Any]], str]) -> Table:
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
