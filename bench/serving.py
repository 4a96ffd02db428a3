"""Serving: mlx_lm.server and mlx_eagle.server under the load of several clients, in turns."""

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save_model

from mlx_eagle.demo.pair import CONFIG, demo_target_path, load_demo
from mlx_eagle.system.cli_values import flag_of

from .conditions import DEMO_NAMES
from .configurations import PLAIN, Cell, Cells, Configuration, make_configurations, run_turns
from .figures import ratio, spread_of
from .flags import Settings
from .questions import Question
from .runner import WARM_UP_TOKENS
from .servers import Answer, Load, Server, chat_body, run_load, running

PLAIN_SERVER = "mlx_lm.server"
OUR_SERVER = "mlx_eagle.server"


@dataclass(frozen=True)
class ServerMeasurement:
    """Flags, questions and settings of a benchmark of the server."""

    args: Namespace
    questions: Sequence[Question]
    settings: Settings

    def groups(self) -> list[list[Cell]]:
        """Chains and trees that our server is asked for, at every number of clients."""
        found = make_configurations(self.settings)
        clients = self.settings.clients
        return [[Cell(each, self.questions, at_once=n) for each in found] for n in clients]

    def run(self, progress: Callable[[], None]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Start both servers and load them in turns: results, and a row per answer.

        ``progress`` is called after every load.
        """
        most = self.settings.max_tokens
        groups = self.groups()
        with (
            plain_target(self.args.model) as target,
            running(server_commands(self.args, target, self.settings)) as servers,
        ):

            def run_all(cells: Cells, steps: list[Configuration]) -> Iterator[Load]:
                return (load(servers, cells[0].at_once, self.questions, most, c) for c in steps)

            for cells in groups:
                n = cells[0].at_once
                for each in (PLAIN, *(cell.configuration for cell in cells)):
                    load(servers, n, self.questions[:n], min(most, WARM_UP_TOKENS), each)
                run_turns([cells], self.settings, run_all, progress)
        cells = list(chain(*groups))
        names = {"model": self.args.model, "head": self.args.draft_model}
        names = {key: name or DEMO_NAMES[key] for key, name in names.items()}
        results = [row_of(cell) for cell in cells]
        return {"conditions": names, "serving": results}, list(chain(*map(answer_rows, cells)))


def server_commands(args: Namespace, target: str, settings: Settings) -> dict[str, list[str]]:
    """Module and flags of each server.

    Both decode as many requests at once as there are clients, and keep the caches of one prompt
    only, so that no prompt is known from an earlier load.
    """
    most = str(max(settings.clients))
    flags = ["--decode-concurrency", most, "--prompt-concurrency", most]
    flags += ["--prompt-cache-size", "1", "--log-level", "WARNING"]
    ours = ["--usage-stats"]
    for name in ("model", "draft_model", "draft_window", "draft_vocab", "quantize_draft"):
        value = getattr(args, name)
        if value is not None:
            ours += [flag_of(name), str(value or "none")]
    return {
        PLAIN_SERVER: ["mlx_lm.server", "--model", target, *flags],
        OUR_SERVER: ["mlx_eagle.server.__main__", *ours, *flags],
    }


@contextmanager
def plain_target(model: str | None) -> Iterator[str]:
    """The model that mlx_lm.server is to load; without a name, the demo pair's target.

    On a CPU ``load_demo`` unpacks that target to float32; a folder with these weights exists until
    the block ends.
    """
    if model is not None or mx.default_device() == mx.gpu:
        yield model or str(demo_target_path())
        return
    source = demo_target_path()
    with tempfile.TemporaryDirectory(prefix="mlx-eagle-") as folder:
        print("Writing the demo target for mlx_lm.server.", file=sys.stderr)
        target, tokenizer, _ = load_demo()
        save_model(folder, target)
        tokenizer.save_pretrained(folder)
        config = json.loads((source / CONFIG).read_text())
        config.pop("quantization", None)
        Path(folder, CONFIG).write_text(json.dumps(config))
        yield folder


def load(
    servers: Mapping[str, Server],
    num_clients: int,
    questions: Sequence[Question],
    max_tokens: int,
    configuration: Configuration,
) -> Load:
    """Send all questions to mlx_lm.server if the configuration is plain, else to ours."""
    server = servers[PLAIN_SERVER if configuration is PLAIN else OUR_SERVER]
    fields = configuration.options
    if configuration.kind == "tree":
        fields = {"tree": configuration.label.removeprefix("tree ")}
    bodies = [chat_body(question.text, max_tokens, **fields) for question in questions]
    return run_load(server, bodies, num_clients)


# --- figures ------------------------------------------------------------------------------------


def acceptance_length(answers: Iterable[Answer]) -> float | None:
    """Tokens per target pass over all answers, from each one's own; None if none has it.

    The first token of an answer belongs to the prompt: 9 tokens at 2.0 are 4 passes.
    """
    taus = [(each.output_tokens - 1, each.mean_acceptance_length) for each in answers]
    known = [(num_tokens, tau) for num_tokens, tau in taus if tau]
    return ratio(sum(num for num, _ in known), sum(num / tau for num, tau in known))


def load_figures(loads: Sequence[Load]) -> dict[str, Any]:
    """Speed of the median load; median and worst waiting times of all clients in seconds."""
    figures: dict[str, Any] = {
        "tps": median(load.tps for load in loads),
        "output_tokens": sum(answer.output_tokens for answer in loads[0].answers),
    }
    for name in ("seconds_per_token", "longest_pause", "ttft"):
        spread = spread_of(getattr(answer, name) for load in loads for answer in load.answers)
        figures[name] = spread and {"median": spread["median"], "worst": spread["max"]}
    return figures


def row_of(cell: Cell) -> dict[str, Any]:
    """Figures of a configuration with so many clients."""
    answers = zip(cell.questions, cell.plain[0].answers, cell.runs[0].answers, strict=True)
    return {
        **place_of(cell),
        "num_prompts": len(cell.questions),
        "plain": load_figures(cell.plain),
        "speculative": load_figures(cell.runs),
        "speedup": cell.speedup,
        "mean_acceptance_length": acceptance_length(
            answer for load in cell.runs for answer in load.answers
        ),
        "differing": [question.name for question, one, other in answers if one.text != other.text],
        "num_runs": len(cell.runs),
    }


def place_of(cell: Cell) -> dict[str, Any]:
    return {"clients": cell.at_once, "configuration": cell.configuration.label}


def answer_rows(cell: Cell) -> Iterator[dict[str, Any]]:
    """A row per answer, for the CSV."""
    for role, count, run in cell.numbered():
        for question, answer in zip(cell.questions, run.answers, strict=True):
            place = {"role": role, "run": count, "set": question.set_name, "id": question.id}
            figures = asdict(answer)
            del figures["text"]
            yield place_of(cell) | place | figures
