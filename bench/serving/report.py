"""The report on servers: tables, words, and a plot, from the document of results."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_eagle.system.render import Block, Folded, Heading, Image, Paragraph, Table

from ..tables import conditions_table, milliseconds, number, times

TITLE = "mlx-eagle benchmark of the server"
PLOT = "serving"

METHOD = (
    "How it was measured: mlx_lm.server, without a drafter, and mlx_eagle.server run side by side "
    "on this machine with the same target, and only one of them is asked at a time. So many "
    "clients send the prompts of the sets over HTTP as streamed, greedy chats, each the next one "
    "as soon as it has its answer. The servers take turns ({order}; repeats: {repeats}), after a "
    "short load of each. Both decode as many requests together as there are clients, and keep the "
    "caches of one earlier prompt. Tokens per second are those of all clients over the whole "
    "load, prompts included; the ratio is the median over pairs of loads. Time per token is that "
    "of an answer from its first token to its last; a pause is the time between two pieces of a "
    "stream; the time to the first token (TTFT) counts from the request."
)

ORDERS = {
    "abba": "plain, drafted, drafted, plain for every configuration",
    "mirror": "plain, every configuration, then the same backwards; all configurations share the "
    "plain loads",
}

CAPTION = (
    "All clients' tokens per second, and the time per token that a client sees: the median "
    "answer's, and up to the worst answer's, against the number of clients."
)


def results(document: Mapping[str, Any]) -> list[Block]:
    """What is printed: a sentence per row, and the tables."""
    rows = document["serving"]
    lines = [Paragraph(line) for line in headlines(rows)]
    return [Heading(TITLE, 1), *lines, speed_table(rows), waits_table(rows)]


def blocks(document: Mapping[str, Any], images: Sequence[Path] = ()) -> list[Block]:
    """The whole report; ``images`` is the plot, or nothing."""
    settings = document["settings"]
    method = METHOD.format(order=ORDERS[settings["order"]], repeats=settings["repeats"])
    return [
        *results(document),
        *(Image(image, CAPTION) for image in images),
        Heading("Conditions"),
        Folded("How it was measured", [Paragraph(method)]),
        Folded("Machine, versions, models and settings", [conditions_table(document)]),
    ]


def headlines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence per number of clients and configuration."""
    for row in rows:
        same = row["num_prompts"] - len(row["differing"])
        yield (
            f"{clients(row)}, {row['configuration']}: {times(row['speedup'])} the tokens per "
            f"second of mlx_lm.server, mean acceptance length (tau) "
            f"{number(row['mean_acceptance_length'])}; {same} of {row['num_prompts']} texts "
            "identical."
        )


def clients(row: Mapping[str, Any]) -> str:
    return "1 client" if row["clients"] == 1 else f"{row['clients']} clients"


def speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Tokens per second of all clients together, acceptance and parity."""
    header = ["clients", "configuration", "mlx_lm.server tok/s", "mlx_eagle.server tok/s", "ratio",
              "tau", "texts identical", "loads"]  # fmt: skip
    lines = [
        [
            str(row["clients"]),
            row["configuration"],
            number(row["plain"]["tps"]),
            number(row["speculative"]["tps"]),
            times(row["speedup"]),
            number(row["mean_acceptance_length"]),
            f"{row['num_prompts'] - len(row['differing'])} of {row['num_prompts']}",
            str(row["num_runs"]),
        ]
        for row in rows
    ]
    return Table(header, lines)


def waits_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What a client waits for, in milliseconds, the median answer and the worst."""
    kinds = {
        "seconds_per_token": "time per token",
        "longest_pause": "longest pause",
        "ttft": "TTFT",
    }
    header = ["clients", "configuration"]
    header += [f"{words} ms: {who}" for words in kinds.values() for who in ("plain", "drafted")]
    lines = [
        [
            str(row["clients"]),
            row["configuration"],
            *(
                typical_and_worst(row[who][kind])
                for kind in kinds
                for who in ("plain", "speculative")
            ),
        ]
        for row in rows
    ]
    return Table(header, lines)


def typical_and_worst(values: Mapping[str, float] | None) -> str:
    """ "50 [70]": the median, and in brackets the worst, in milliseconds."""
    if values is None:
        return "-"
    return f"{milliseconds(values['median'], 0)} [{milliseconds(values['worst'], 0)}]"
