"""Both servers under load, in turns, from the flags to one document of results."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save_model

from mlx_eagle.decoding.setup import AUTO
from mlx_eagle.demo.pair import load_demo
from mlx_eagle.demo.target import CONFIG, FILES, WEIGHTS, demo_target_path

from .. import conditions
from ..measure import Settings
from ..questions import Question
from ..runner import PLAIN, WARM_UP_TOKENS, Configuration, make_configurations, schedule
from .clients import Load, chat_body, run_load
from .figures import ServingCell, answer_rows, serving_result
from .processes import Server, running

PLAIN_SERVER, OUR_SERVER = "mlx_lm.server", "mlx_eagle.server"
MODULES = {PLAIN_SERVER: "mlx_lm.server", OUR_SERVER: "mlx_eagle.server.__main__"}
Servers = Mapping[str, Server]


def check_clients(settings: Settings, questions: Sequence[Question]) -> None:
    """Raise ValueError where some clients would have nothing to ask."""
    if settings.clients and len(questions) < max(settings.clients):
        raise ValueError(
            f"--serve holds {max(settings.clients)}, but {len(questions)} prompts are taken: give "
            "fewer clients, or a larger --limit."
        )


def num_loads(settings: Settings) -> int:
    """Measured loads in all."""
    steps = schedule(_configurations(settings), settings.order)
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
    with plain_target(model) as target:
        commands = server_commands(model, target, draft_flags, settings)
        with running(commands) as servers:
            for num_clients in settings.clients:
                for cell in measure_clients(servers, num_clients, questions, settings, progress):
                    results.append(serving_result(cell, questions))
                    rows += answer_rows(cell, questions)
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
    if settings.recalibrate:
        ours += ["--num-draft-tokens", AUTO, "--recalibrate"]
    return {
        PLAIN_SERVER: [MODULES[PLAIN_SERVER], "--model", target, *flags],
        OUR_SERVER: [MODULES[OUR_SERVER], *ours, *flags],
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


def measure_clients(
    servers: Servers,
    num_clients: int,
    questions: Sequence[Question],
    settings: Settings,
    progress: Callable[[], None] = lambda: None,
) -> list[ServingCell]:
    """All repeats with so many clients, after a short load of each configuration."""
    configurations = _configurations(settings)
    cells = {c.label: ServingCell(num_clients, c) for c in configurations}
    short = min(settings.max_tokens, WARM_UP_TOKENS)
    for configuration in (PLAIN, *configurations):
        load(servers, configuration, num_clients, questions[:num_clients], short)
    for _ in range(settings.repeats):
        for configuration, owners in schedule(configurations, settings.order):
            run = load(servers, configuration, num_clients, questions, settings.max_tokens)
            for owner in owners:
                cell = cells[owner.label]
                (cell.plain if configuration is PLAIN else cell.runs).append(run)
            progress()
    return list(cells.values())


def load(
    servers: Servers,
    configuration: Configuration,
    num_clients: int,
    questions: Sequence[Question],
    max_tokens: int,
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


def _configurations(settings: Settings) -> list[Configuration]:
    return make_configurations(settings.sizes, settings.trees)
