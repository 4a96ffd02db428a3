"""The benchmark of the server: both servers under load in turns, figures, and their report."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save_model

from mlx_eagle.demo.pair import CONFIG, FILES, WEIGHTS, demo_target_path, load_demo

from . import conditions
from .measure import Settings
from .questions import Question
from .report import (
    Columns,
    conditions_table,
    folded,
    image,
    joined,
    milliseconds,
    number,
    table,
    times,
)
from .runner import (
    PLAIN,
    WARM_UP_TOKENS,
    Configuration,
    Turns,
    make_configurations,
    repeat_turns,
    schedule,
)
from .servers import Answer, Load, Server, chat_body, run_load, running
from .summary import median_ratio

PLAIN_SERVER, OUR_SERVER = "mlx_lm.server", "mlx_eagle.server"
Servers = Mapping[str, Server]

TITLE = "mlx-eagle benchmark of the server"

METHOD = (
    "How it was measured: mlx_lm.server, without a drafter, and mlx_eagle.server run side by side "
    "on this machine with the same target, and only one of them is asked at a time. So many "
    "clients send the prompts of the sets over HTTP as streamed, greedy chats, each the next one "
    "as soon as it has its answer. The servers take turns ({order}; repeats: {repeats}), after a "
    "short load of each. Both decode as many requests at once as there are clients, and keep the "
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


def check_clients(settings: Settings, questions: Sequence[Question]) -> None:
    """Raise ValueError where some clients would have nothing to ask."""
    if settings.clients and len(questions) < max(settings.clients):
        raise ValueError(
            f"--serve holds {max(settings.clients)}, but {len(questions)} prompts are taken: give "
            "fewer clients, or a larger --limit."
        )


def num_loads(settings: Settings) -> int:
    """Measured loads in all."""
    steps = schedule(make_configurations(settings.sizes, settings.trees), settings.order)
    return len(settings.clients) * settings.repeats * len(steps)


def measure_serving(
    model: str | None,
    draft_flags: Mapping[str, Any],
    names: dict[str, str],
    questions: Sequence[Question],
    settings: Settings,
    progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Start both servers and load them in turns: the document, and a row per answer.

    ``model`` and ``draft_flags`` are what the flags of the benchmark say, None where they say
    nothing; without a model it is the demo pair.
    """
    machine = conditions.machine()  # before the run: it notes the load of the machine
    results, rows = [], []
    configurations = make_configurations(settings.sizes, settings.trees)
    short = min(settings.max_tokens, WARM_UP_TOKENS)
    with (
        plain_target(model) as target,
        running(server_commands(model, target, draft_flags, settings)) as servers,
    ):
        for num_clients in settings.clients:
            cells = [Turns(configuration=configuration) for configuration in configurations]
            warm_up = partial(load, servers, num_clients, questions[:num_clients], short)
            measured = partial(load, servers, num_clients, questions, settings.max_tokens)
            for _ in repeat_turns(cells, settings, warm_up, measured):
                progress()
            for cell in cells:
                results.append(serving_result(num_clients, cell, questions))
                rows += answer_rows(num_clients, cell, questions)
    document = {
        "format": 1,
        "conditions": {**machine, **names},
        "settings": asdict(settings),
        "scenarios": [],
        "batches": [],
        "serving": results,
    }
    return document, rows


def server_commands(
    model: str | None, target: str, draft_flags: Mapping[str, Any], settings: Settings
) -> dict[str, list[str]]:
    """The module and the flags of each server: both decode as many requests at once as there are
    clients, and keep no prompt that is asked again later.
    """
    most = str(max(settings.clients))
    flags = ["--decode-concurrency", most, "--prompt-concurrency", most]
    flags += ["--prompt-cache-size", "1", "--log-level", "WARNING"]
    ours = ["--usage-stats"]
    for flag, value in {"--model": model, **draft_flags}.items():
        ours += [] if value is None else [flag, str(value)]
    return {
        PLAIN_SERVER: ["mlx_lm.server", "--model", target, *flags],
        OUR_SERVER: ["mlx_eagle.server.__main__", *ours, *flags],
    }


@contextmanager
def plain_target(model: str | None) -> Iterator[str]:
    """What mlx_lm.server is to load: the model, or a folder with the demo pair's target.

    On a CPU that target has other weights than the folder in the user's cache, see ``load_demo``;
    they are written for as long as the block lasts.
    """
    if model is not None:
        yield model
        return
    source = demo_target_path()
    if mx.default_device() == mx.gpu:
        yield str(source)
        return
    with tempfile.TemporaryDirectory(prefix="mlx-eagle-") as folder:
        print("Writing the demo target for mlx_lm.server.", file=sys.stderr)
        write_demo_target(source, Path(folder))
        yield folder


def write_demo_target(source: Path, folder: Path) -> None:
    """The demo target as ``load_demo`` has it on a CPU: dense, in float32."""
    target, _, _ = load_demo()
    save_model(folder, target)
    for name in FILES:
        if name not in (WEIGHTS, CONFIG) and (source / name).exists():
            shutil.copy(source / name, folder / name)
    config = json.loads((source / CONFIG).read_text())
    config.pop("quantization", None)
    (folder / CONFIG).write_text(json.dumps(config))


def load(
    servers: Servers,
    num_clients: int,
    questions: Sequence[Question],
    max_tokens: int,
    configuration: Configuration,
) -> Load:
    """All questions to mlx_lm.server if the configuration is plain, else to ours."""
    server = servers[PLAIN_SERVER if configuration is PLAIN else OUR_SERVER]
    options = request_fields(configuration)
    bodies = [chat_body(question.text, max_tokens, **options) for question in questions]
    return run_load(server.address, bodies, num_clients, server.check)


def request_fields(configuration: Configuration) -> dict[str, Any]:
    """How to draft, in the fields of a request; none for plain decoding."""
    if configuration.kind == "tree":
        return {"tree": configuration.label.removeprefix("tree ")}
    return configuration.options


def serving_result(num_clients: int, cell: Turns, questions: Sequence[Question]) -> dict[str, Any]:
    """One configuration with so many clients, and mlx-lm's server under the same load."""
    pairs = zip(questions, cell.plain[0].answers, cell.runs[0].answers, strict=True)
    return {
        "clients": num_clients,
        "configuration": cell.configuration.label,
        "num_prompts": len(questions),
        "num_runs": len(cell.runs),
        "plain": load_figures(cell.plain),
        "speculative": load_figures(cell.runs),
        "speedup": median_ratio(cell.plain, cell.runs),
        "mean_acceptance_length": acceptance_length(answers_of(cell.runs)),
        "differing": [q.name for q, plain, ours in pairs if plain.text != ours.text],
    }


def load_figures(loads: Sequence[Load]) -> dict[str, Any]:
    """The speed of the median load, and what the clients of all loads waited for, in seconds."""
    answers = answers_of(loads)
    return {
        "tps": median(load.tps for load in loads),
        "output_tokens": sum(answer.num_tokens for answer in loads[0].answers),
        "seconds_per_token": typical_and_worst(answer.seconds_per_token for answer in answers),
        "longest_pause": typical_and_worst(answer.longest_pause for answer in answers),
        "ttft": typical_and_worst(answer.ttft for answer in answers),
    }


def answers_of(loads: Iterable[Load]) -> list[Answer]:
    return [answer for load in loads for answer in load.answers]


def typical_and_worst(values: Iterable[float | None]) -> dict[str, float] | None:
    """The median and the largest of those that are there; None without any."""
    present = [value for value in values if value is not None]
    return {"median": median(present), "worst": max(present)} if present else None


def acceptance_length(answers: Iterable[Answer]) -> float | None:
    """Tokens per target pass over all answers, from each one's own; None where none says it.

    The first token of an answer belongs to the prompt: 9 tokens at 2.0 are 4 passes.
    """
    known = [(answer.num_tokens - 1, answer.tau) for answer in answers if answer.tau]
    passes = sum(num_tokens / tau for num_tokens, tau in known if tau)
    return sum(num_tokens for num_tokens, _ in known) / passes if passes else None


def answer_rows(
    num_clients: int, cell: Turns, questions: Sequence[Question]
) -> list[dict[str, Any]]:
    """A row per answer, for the CSV."""
    return [
        {
            "clients": num_clients,
            "configuration": cell.configuration.label,
            "role": role,
            "run": number,
            "set": question.set_name,
            "id": question.id,
            "output_tokens": answer.num_tokens,
            "ttft": answer.ttft,
            "seconds": answer.ended,
            "seconds_per_token": answer.seconds_per_token,
            "longest_pause": answer.longest_pause,
            "mean_acceptance_length": answer.tau,
        }
        for role, loads in (("plain", cell.plain), ("speculative", cell.runs))
        for number, load in enumerate(loads)
        for question, answer in zip(questions, load.answers, strict=True)
    ]


def results(document: Mapping[str, Any]) -> str:
    """What is printed: a sentence per row, and the tables."""
    rows = document["serving"]
    return joined([f"# {TITLE}", *headlines(rows), table(LOADS, rows), table(WAITS, rows)])


def full_report(document: Mapping[str, Any], images: Sequence[Mapping[str, Path]] = ()) -> str:
    """The whole report; ``images`` has the plot, or nothing."""
    settings = document["settings"]
    method = METHOD.format(order=ORDERS[settings["order"]], repeats=settings["repeats"])
    rest = [
        *(image(drawn["serving"], CAPTION) for drawn in images),
        "## Conditions",
        folded("How it was measured", method),
        folded("Machine, versions, models and settings", conditions_table(document)),
    ]
    return results(document) + "\n" + joined(rest)


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


LOADS: Columns = {
    "clients": lambda row: str(row["clients"]),
    "configuration": lambda row: row["configuration"],
    "mlx_lm.server tok/s": lambda row: number(row["plain"]["tps"]),
    "mlx_eagle.server tok/s": lambda row: number(row["speculative"]["tps"]),
    "ratio": lambda row: times(row["speedup"]),
    "tau": lambda row: number(row["mean_acceptance_length"]),
    "texts identical": lambda row: (
        f"{row['num_prompts'] - len(row['differing'])} of {row['num_prompts']}"
    ),
    "loads": lambda row: str(row["num_runs"]),
}
"""Tokens per second of all clients, acceptance and parity."""


def _waits(kind: str, who: str) -> Callable[[Mapping[str, Any]], str]:
    """What shows "50 [70]" of a row: the median, and in brackets the worst, in milliseconds."""

    def show(row: Mapping[str, Any]) -> str:
        found = row[who][kind]
        if found is None:
            return "-"
        return f"{milliseconds(found['median'], 0)} [{milliseconds(found['worst'], 0)}]"

    return show


WAITS: Columns = {
    **dict(islice(LOADS.items(), 2)),
    "time per token ms: plain": _waits("seconds_per_token", "plain"),
    "time per token ms: drafted": _waits("seconds_per_token", "speculative"),
    "longest pause ms: plain": _waits("longest_pause", "plain"),
    "longest pause ms: drafted": _waits("longest_pause", "speculative"),
    "TTFT ms: plain": _waits("ttft", "plain"),
    "TTFT ms: drafted": _waits("ttft", "speculative"),
}
"""What a client waits for, the median answer and the worst."""
