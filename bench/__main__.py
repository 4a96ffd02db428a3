"""The command ``mlx_eagle.bench``: check the flags, load, measure, print, write the files."""

import argparse
import csv
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_eagle.commands.flags import check_pipeline
from mlx_eagle.decoding.setup import AUTO
from mlx_eagle.demo.pair import load_demo
from mlx_eagle.draft_models import find_drafter, known_pairs, open_beside, split_name
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.system.atomic_folder import check_writable
from mlx_eagle.system.device import prepare_device
from mlx_eagle.system.exit_codes import USER_ERRORS
from mlx_eagle.system.loading import context_size, find_target, load
from mlx_eagle.system.progress import open_bar
from mlx_eagle.system.ranks import is_first, num_ranks, run_on_ranks

from . import conditions
from .conditions import DEMO_NAMES
from .configurations import num_runs
from .flags import ALL, build_parser, check_contexts, check_questions, draft_names, read_settings
from .measure import Measurement
from .questions import load_questions
from .report import PLOTS, report
from .report_file import read_report, report_of, write_report
from .runner import Models
from .serving import ServerMeasurement

Document = Mapping[str, Any]

EXTRA = "pip install 'mlx-eagle[bench]'"
NUM_LINES = 20  # lines of progress in all, if standard error is no terminal


def run(args: argparse.Namespace) -> None:
    """Check, load, measure, print, write; or check a report file that is there."""
    if args.check_report is not None:
        num_entries = len(read_report(args.check_report)["runs"])
        print(f"A report as it should be, with {num_entries} runs: {args.check_report}")
        return
    settings = read_settings(args)
    questions = load_questions(settings.prompts, settings.limit)
    check_questions(settings, questions)
    check_pipeline(args)
    for flag, given in (("--serve", settings.clients), ("--compare", args.compare)):
        if given and num_ranks() > 1:
            raise ValueError(
                f"{flag} is for one machine: leave it out, or start without mlx.launch."
            )
    check_files(args)
    prepare_device(args.exact)
    machine = conditions.machine()  # before the run, which would show in the load of the machine
    print(f"Loading {args.model or DEMO_NAMES['model']}.", file=sys.stderr)
    measurement: Measurement | ServerMeasurement
    if settings.clients:
        find_drafter(args.draft_model, args.model)
        measurement = ServerMeasurement(args, questions, settings)
    else:
        models, names = load_models(args)
        check_contexts(settings, context_size(models.target))
        measurement = Measurement(models, names, questions, settings)
    with counting(num_runs(measurement.groups(), settings)) as count:
        found, rows = measurement.run(count)
    if is_first():
        document = {
            "format": 1,
            "conditions": machine | found.pop("conditions"),
            "settings": asdict(settings),
            "scenarios": [],
            "batches": [],
            **found,
        }
        # Before anything is written: what took hours to measure is not lost to a full disk.
        print(report(document), flush=True)
        write_all(document, rows, args)


def check_files(args: argparse.Namespace) -> None:
    """Make the output folder; ValueError if a file that a flag asks for could not be written."""
    path = args.picture
    if path is not None and path.suffix not in (".png", ".svg"):
        raise ValueError(f"--picture is {path}: give the name of a .png or .svg file.")
    if path is not None and not has_matplotlib():
        raise ValueError(f"--picture needs matplotlib: {EXTRA}.")
    if is_first():
        with suppress(OSError):  # writing to it says why
            (args.out / PLOTS).mkdir(parents=True, exist_ok=True)
        files = {"--out": args.out / "report.md", "--picture": path, "--report": args.report}
        for flag, file in files.items():
            if file is not None:
                check_writable(file, flag)


def has_matplotlib() -> bool:
    """Whether plots can be drawn: matplotlib comes with an extra of its own."""
    return importlib.util.find_spec("matplotlib") is not None


def load_models(args: argparse.Namespace) -> tuple[Models, dict[str, str]]:
    """The models that the flags name, and their names for the report."""
    takes_all = ALL in draft_names(args)
    wanted = wanted_names(args)
    for name in () if takes_all else wanted:
        find_drafter(name, args.model)
    if args.compare is not None:
        find_target(args.compare[1])
    own = None
    if args.model is None:
        model, tokenizer, own = load_demo(dtype=args.dtype, quantize_bits=args.quantize_draft)
    else:
        model, tokenizer = load(args.model, dtype=args.dtype, pipeline=args.pipeline)
    options = {name: getattr(args, name) for name in ("draft_window", "draft_vocab")}
    options |= {"quantize_bits": args.quantize_draft, "target": args.model, "copies": False}
    drafters: dict[str, Drafter] = {}
    for given in wanted:
        try:
            opened, drafter = open_beside(own, given, model, tokenizer, **options)
        except USER_ERRORS as err:
            if not takes_all:
                raise
            print(f"{given} is left out: {' '.join(str(err).split())}", file=sys.stderr)
            continue
        name = opened or AUTO
        if split_name(name)[0] == AUTO:
            name = name.replace(AUTO, DEMO_NAMES["head"])
        if name in drafters:
            raise ValueError(f"--draft-model names {name} twice: give every draft model once.")
        drafters[name] = drafter
    if not drafters:
        raise ValueError(f"no known drafter of {args.model} can be opened: name another.")
    head = list(drafters)
    for what, value in (("window", args.draft_window), ("vocabulary", args.draft_vocab)):
        if value is not None:
            head.append(f"draft {what} {value}")
    names = {"model": args.model or DEMO_NAMES["model"], "head": ", ".join(head)}
    compared = None
    if args.compare is not None:
        names["compared"] = args.compare[1]
        compared = load_compared(args, tokenizer)
    return Models(model, tokenizer, with_short_names(drafters), compared), names


def load_compared(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> nn.Module:
    """Load the draft model of mlx-lm's own method, which ``--compare`` names."""
    compared, other = load(args.compare[1], dtype=args.dtype)
    if other.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{args.compare[1]} has a vocabulary of {other.vocab_size} tokens, the target one of "
            f"{tokenizer.vocab_size}: mlx-lm's own method needs a draft model with the target's "
            "tokenizer."
        )
    return compared


def wanted_names(args: argparse.Namespace) -> list[str | None]:
    """The names in ``--draft-model``, with those of all known drafters in place of "auto:all".

    None is the demo head. Raises ValueError where no drafter is known for the target.
    """
    given = draft_names(args)
    if args.model is None and ALL in given:
        raise ValueError(f"--draft-model {ALL} needs --model: the demo pair has one drafter.")
    if args.model is None or (given and ALL not in given):
        return list(given) or [None]
    known = [pair.head for pair in known_pairs(args.model)]
    if not known:
        raise ValueError(
            f"no public head is known here for {args.model}: name one with --draft-model, or see "
            "the known pairs with mlx_eagle.generate --list."
        )
    found = [each for name in given for each in (known if name == ALL else [name])]
    return list(dict.fromkeys(found)) or [AUTO]


def with_short_names(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """Drafters by the last part of their names, if these parts differ."""
    short = {name.rstrip("/").rpartition("/")[2]: drafter for name, drafter in drafters.items()}
    return short if len(short) == len(drafters) else dict(drafters)


@contextmanager
def counting(total: int) -> Iterator[Callable[[], None]]:
    """Show progress on standard error: each call counts one of ``total`` runs."""
    start = time.perf_counter()
    numbers = itertools.count(1)
    with open_bar(total, "bench", "run") as bar:  # of which nothing is seen but in a terminal

        def count() -> None:
            bar.update()
            done = next(numbers)
            # The i-th line is due once i in NUM_LINES of the runs are done.
            if bar.disable and done * NUM_LINES // total > (done - 1) * NUM_LINES // total:
                seconds = time.perf_counter() - start
                print(f"bench: {done} of {total} runs, {seconds:.0f} s", file=sys.stderr)

        yield count


def write_all(document: Document, rows: Sequence[Document], args: argparse.Namespace) -> None:
    """Write every file, and the plots if they can be drawn; the CSV has a row per run."""
    images: dict[str, Path] = {}
    if has_matplotlib():
        from . import plots  # here, because matplotlib takes a second, and may be missing

        if args.picture is not None:
            plots.draw_picture(document, args.picture)
        images = plots.draw_all(document, args.out / PLOTS)
    (args.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    with (args.out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (args.out / "report.md").write_text(report(document, images))
    plots_too = f", {PLOTS}/" if images else ""
    print(f"Written to {args.out}: report.md, results.json, results.csv{plots_too}")
    if args.picture is not None:
        print(f"Picture: {args.picture}")
    if args.report is not None:
        write_report(report_of(document, args.notes), args.report)
        print(f"Report for measured/: {args.report}; please send it with the issue form.")
    if not images:
        print(f"Without plots, which need matplotlib: {EXTRA}.")
    if args.json:
        print(json.dumps(brief(document)))


def brief(document: Document) -> Document:
    """The document without the figures of single prompts, for ``--json``."""
    scenarios = []
    for scenario in document["scenarios"]:
        found = [row["parity"]["identical"] for row in scenario["prompts"]]
        counts = {"identical": sum(found), "batch_size": len(found)}
        scenarios.append({k: v for k, v in scenario.items() if k != "prompts"} | counts)
    return {**document, "scenarios": scenarios}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``mlx_eagle.bench``."""
    args = build_parser().parse_args(argv)
    run_on_ranks(lambda: run(args))


if __name__ == "__main__":
    main()
