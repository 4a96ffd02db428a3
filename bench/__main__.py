"""``python -m mlx_eagle.bench``: loading, measuring, printing, and the files of the results."""

import argparse
import csv
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_eagle.commands.flags import known_drafter, say_known_head, with_known_head
from mlx_eagle.decoding.setup import AUTO
from mlx_eagle.demo.pair import load_demo
from mlx_eagle.draft_models import find_drafter, open_beside, split_name
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.pairs import pair_for
from mlx_eagle.system.device import prepare_device
from mlx_eagle.system.loading import context_size, load

from ..system.exit_codes import run_command
from ..system.progress import open_bar
from . import report, serving
from .flags import (
    build_parser,
    check_contexts,
    check_models,
    check_serving,
    draft_names,
    read_settings,
)
from .measure import Measurement, Settings, check_batches
from .questions import Question, load_questions
from .report import PLOTS
from .runner import Models
from .serving import check_clients, measure_serving, num_loads

PICTURES = (".png", ".svg")
EXTRA = "pip install 'mlx-eagle[bench]'"
NUM_LINES = 20  # of progress, where standard error is no terminal
DEMO_NAMES = {"model": "SmolLM2-135M-Instruct (demo)", "head": "demo head"}


@contextmanager
def counting(total: int) -> Iterator[Callable[[], None]]:
    """Inside, a call says that one more of ``total`` runs is done; on standard error."""
    if sys.stderr.isatty():
        with open_bar(total, "bench", "run") as bar:
            yield lambda: bar.update()
        return
    start, done = time.perf_counter(), 0

    def count() -> None:
        nonlocal done
        done += 1
        # The i-th line is due once i in NUM_LINES of the runs are done.
        if done * NUM_LINES // total > (done - 1) * NUM_LINES // total:
            seconds = time.perf_counter() - start
            print(f"bench: {done} of {total} runs, {seconds:.0f} s", file=sys.stderr, flush=True)

    yield count


def prepare_folder(path: str) -> Path:
    """The output folder, made and tried; ValueError where it cannot be written."""
    folder = Path(path).expanduser()
    try:
        (folder / PLOTS).mkdir(parents=True, exist_ok=True)
        probe = folder / "results.json.tmp"
        probe.touch()
        probe.unlink()
    except OSError as err:
        raise ValueError(
            f"--out {path} cannot be written ({err.strerror}): give a folder that you may write "
            "to."
        ) from err
    return folder


def load_models(args: argparse.Namespace) -> tuple[Models, dict[str, str]]:
    """What the flags name, and how to call it in the report."""
    names = dict(DEMO_NAMES)
    wanted = draft_names(args) or (None if args.model is None else AUTO,)
    if not draft_names(args) and args.model is not None and known_drafter(args.model) is None:
        pair_for(args.model)  # which says that there is none
    heads = {name: with_known_head(name, args.model, copies=False) for name in wanted}
    for head in heads.values():
        find_drafter(head)
    if args.model is None:
        model, tokenizer, own = load_demo(dtype=args.dtype)
    else:
        (model, tokenizer), own = load(args.model, dtype=args.dtype), None
        names["model"] = args.model
    drafters = {}
    for given, head in heads.items():
        drafter = open_beside(
            own, head, model, tokenizer, draft_window=args.draft_window, target=args.model
        )
        say_known_head(given, args.model, copies=False)
        name = DEMO_NAMES["head"]
        if head is not None:
            name = head.replace(AUTO, name) if split_name(head)[0] == AUTO else head
        if name in drafters:
            raise ValueError(f"--draft-model names {name} twice: give every draft model once.")
        drafters[name] = drafter
    names["head"] = ", ".join(drafters)
    if args.draft_window is not None:
        names["head"] += f", draft window {args.draft_window}"
    compared = None
    if args.compare is not None:
        compared, other = load(args.compare[1], dtype=args.dtype)
        names["compared"] = args.compare[1]
        if other.vocab_size != tokenizer.vocab_size:
            raise ValueError(
                f"{args.compare[1]} has a vocabulary of {other.vocab_size} tokens, the target one "
                f"of {tokenizer.vocab_size}: mlx-lm's own method needs a draft model with the "
                "target's tokenizer."
            )
    return Models(model, tokenizer, with_short_names(drafters), compared), names


def with_short_names(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """By the last part of their names, where that tells them apart."""
    short = {name.rstrip("/").rpartition("/")[2]: drafter for name, drafter in drafters.items()}
    return short if len(short) == len(drafters) else dict(drafters)


def run(args: argparse.Namespace) -> None:
    """Check, load, measure, print, write."""
    settings = read_settings(args)
    check_models(args)
    check_serving(args, settings)
    check_picture(args.picture)
    questions = load_questions(settings.prompts, settings.limit)
    check_batches(settings.batches, questions)
    check_clients(settings, questions)
    folder = prepare_folder(args.out)
    prepare_device()
    measured = measure_servers if settings.clients else measure_models
    document, rows = measured(args, questions, settings)
    words = serving if settings.clients else report
    # Before anything is written: what took hours to measure is not lost to a full disk.
    print(words.results(document), flush=True)
    images = draw(document, folder, args.picture) if has_matplotlib() else []
    write_all(document, rows, words.full_report(document, images), folder)
    plots = f", {PLOTS}/" if images else ""
    print(f"Written to {folder}: report.md, results.json, results.csv{plots}")
    if args.picture is not None:
        print(f"Picture: {args.picture}")
    if not images:
        print(f"Without plots, which need matplotlib: {EXTRA}.")
    if args.json:
        print(json.dumps(brief(document)))


def measure_models(
    args: argparse.Namespace, questions: Sequence[Question], settings: Settings
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Load what the flags name and measure it, saying how far it is."""
    print(f"Loading {args.model or DEMO_NAMES['model']}.", file=sys.stderr)
    models, names = load_models(args)
    check_contexts(settings, context_size(models.target))
    measurement = Measurement(models, questions, settings)
    with counting(measurement.num_runs()) as count:
        return measurement.run(names, count)


def measure_servers(
    args: argparse.Namespace, questions: Sequence[Question], settings: Settings
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same for ``--serve``: the models are loaded by the servers."""
    names = {
        "model": args.model or DEMO_NAMES["model"],
        "head": args.draft_model or DEMO_NAMES["head"],
    }
    flags = {"--draft-model": args.draft_model, "--draft-window": args.draft_window}
    print(f"Starting two servers of {names['model']}.", file=sys.stderr)
    with counting(num_loads(settings)) as count:
        return measure_serving(args.model, flags, names, questions, settings, count)


def check_picture(file: str | None) -> None:
    """Raise ValueError where ``--picture`` could not be drawn."""
    if file is None:
        return
    path = Path(file).expanduser()
    if path.suffix not in PICTURES or not path.parent.is_dir():
        raise ValueError(
            f"--picture is {file}: give the name of a {' or '.join(PICTURES)} file in a folder "
            "that exists."
        )
    if not has_matplotlib():
        raise ValueError(f"--picture needs matplotlib: {EXTRA}.")


def has_matplotlib() -> bool:
    """Whether plots can be drawn: matplotlib comes with an extra of its own."""
    return importlib.util.find_spec("matplotlib") is not None


def write_all(
    document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], text: str, folder: Path
) -> None:
    """Write every file but the plots: the CSV has a row per run."""
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "report.md").write_text(text)


def draw(document: Mapping[str, Any], folder: Path, picture: str | None) -> list[dict[str, Path]]:
    """The plots of the servers, or of every scenario with the picture."""
    from . import plots  # here, because matplotlib takes a second, and may be missing

    if "serving" in document:
        return [{"serving": plots.draw_serving(document["serving"], folder / PLOTS)}]
    if picture is not None:
        plots.draw_picture(document, Path(picture).expanduser())
    many = len(document["scenarios"]) > 1
    return [
        plots.draw_all(scenario, folder / PLOTS, f"-{number + 1}" if many else "")
        for number, scenario in enumerate(document["scenarios"])
    ]


def brief(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without the figures of single prompts, for ``--json``."""
    scenarios = [
        {key: value for key, value in scenario.items() if key != "prompts"}
        | {"identical": [row["parity"]["identical"] for row in scenario["prompts"]].count(True),
           "batch_size": len(scenario["prompts"])}
        for scenario in document["scenarios"]
    ]  # fmt: skip
    return {**document, "scenarios": scenarios}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``mlx_eagle.bench``."""
    args = build_parser().parse_args(argv)
    run_command(lambda: run(args))


if __name__ == "__main__":
    main()
