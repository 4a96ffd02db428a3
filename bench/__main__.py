"""``python -m mlx_eagle.bench``: flags, loading, progress, and the files that are written."""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlx_lm.utils import load

from mlx_eagle.commands.flags import known_head
from mlx_eagle.decoding.limits import AUTO
from mlx_eagle.demo.pair import load_demo
from mlx_eagle.draft_models import open_drafter
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.system.command import run_command
from mlx_eagle.system.device import print_blas_note
from mlx_eagle.system.progress import open_bar
from mlx_eagle.system.version import add_version_flag

from .batched import check_batches
from .measure import Settings, measure, num_runs
from .questions import SETS, Question, load_questions
from .runner import ORDERS, Models, make_configurations

Value = TypeVar("Value")
DEMO_NAMES = {"model": "SmolLM2-135M-Instruct (demo)", "head": "demo head"}
PLOTS = "plots"
TREES = (
    "WIDTHxDEPTH:NODES with no more nodes than can be grown, such as 4x5:16, or a static tree "
    "(eagle1, root2:5, 3/2+1), or auto"
)


def build_parser() -> argparse.ArgumentParser:
    """The flags; lists are given with commas."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.bench",
        description="Measure plain against speculative decoding, interleaved, and report it.",
    )
    add_version_flag(parser)
    add = parser.add_argument
    add("--model", help="Folder or hub repo of the target. Default: the demo pair.")
    add("--draft-model", help="As for mlx_eagle.generate: an EAGLE head, auto, lookup, a model.")
    add(
        "--prompts",
        action="append",
        metavar="NAME,...",
        help=f"{', '.join(SETS)}, or JSONL files; repeatable (default: all three sets).",
    )
    limit_help = "Most prompts a set, evenly spread over it; 0: all (%(default)s)."
    add("--limit", type=int, default=10, help=limit_help)
    add("--max-tokens", type=int, default=128, help="Most tokens an answer (%(default)s).")
    add("--num-draft-tokens", default="3", metavar="K,...", help="Draft lengths, or auto (3).")
    add("--temp", default="0", metavar="T,...", help="Temperatures; 0 is greedy (0).")
    tree_help = "Trees: WIDTHxDEPTH:NODES."
    add("--tree", action="append", default=[], metavar="SPEC,...", help=tree_help)
    add("--context", metavar="N,...", help="Pad prompts to that many tokens.")
    batch_help = "Also so many prompts of each set at once, against mlx-lm's batch; greedy."
    add("--batch", metavar="N,...", help=batch_help)
    add("--repeats", type=int, default=3, help="Times that every prompt is run so (%(default)s).")
    add(
        "--order",
        choices=ORDERS,
        default="abba",
        help="abba: plain B B plain for every arm; mirror: plain B C C B plain; weave: all at once, "
        "a few tokens each in turn, where other work disturbs (%(default)s).",
    )
    add("--seed", type=int, default=0, help="Seed where the temperature is above 0.")
    add("--out", default="bench-results", metavar="DIR", help="Where results go (%(default)s).")
    add("--baseline", choices=["mlx-lm"], default="mlx-lm", help="What plain decoding is.")
    add(
        "--compare",
        nargs=2,
        metavar=("mlx-lm-draft", "MODEL"),
        help="Also run mlx-lm's own speculative decoding with this draft model.",
    )
    return parser


def read_list(
    flag: str, text: str, convert: Callable[[str], Value], wanted: str
) -> tuple[Value, ...]:
    """The parts of a comma list; ValueError naming the one that cannot be converted."""
    values = []
    for part in text.split(","):
        try:
            values.append(convert(part.strip()))
        except ValueError as err:
            raise ValueError(f"{flag} holds {part.strip()!r}: give {wanted}.") from err
    if len(set(values)) < len(values):
        raise ValueError(f"{flag} is {text}: give every value once.")
    return tuple(values)


def _at_least(low: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if value < low:
            raise ValueError
        return value

    return convert


def _size(text: str) -> int | str:
    return text if text == AUTO else _at_least(0)(text)


def _temp(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _tree(text: str) -> str:
    if text != AUTO:
        parse_tree(text)
    return text


def _name(text: str) -> str:
    if not text:
        raise ValueError
    return text


def read_settings(args: argparse.Namespace) -> Settings:
    """The flags as settings; ValueError, in one sentence, where they make no sense."""
    for flag, value, low in (
        ("--limit", args.limit, 0),
        ("--max-tokens", args.max_tokens, 2),
        ("--repeats", args.repeats, 1),
    ):
        if value < low:
            raise ValueError(f"{flag} is {value}: give {low} or more.")
    contexts: tuple[int | None, ...] = (None,)
    if args.context is not None:
        contexts = read_list("--context", args.context, _at_least(2), "numbers of tokens above 1")
    batches: tuple[int, ...] = ()
    if args.batch is not None:
        batches = read_list("--batch", args.batch, _at_least(1), "numbers of prompts, 1 or more")
    names = ",".join(args.prompts) if args.prompts else ",".join(SETS)
    trees = ",".join(args.tree)
    return Settings(
        prompts=read_list("--prompts", names, _name, f"{', '.join(SETS)} or a file"),
        limit=args.limit,
        max_tokens=args.max_tokens,
        sizes=read_list("--num-draft-tokens", args.num_draft_tokens, _size, "0 or more, or auto"),
        temps=read_list("--temp", args.temp, _temp, "0 (greedy) or more"),
        trees=read_list("--tree", trees, _tree, TREES) if trees else (),
        contexts=contexts,
        repeats=args.repeats,
        order=args.order,
        seed=args.seed,
        batches=batches,
    )


def check_models(args: argparse.Namespace) -> None:
    """Raise ValueError for model flags that do not go together."""
    if args.model is not None and args.draft_model is None:
        raise ValueError(
            "--model needs --draft-model: name a head for it, or 'auto' for a known one."
        )
    if args.compare is not None and args.compare[0] != "mlx-lm-draft":
        raise ValueError(
            f"--compare is {args.compare[0]!r}: give mlx-lm-draft and an ordinary draft model."
        )


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
            f"--out {path} cannot be written ({err.strerror}): give a folder that you may write to."
        ) from err
    return folder


def load_models(args: argparse.Namespace) -> tuple[Models, dict[str, str]]:
    """What the flags name, and how to call it in the report."""
    names = dict(DEMO_NAMES)
    if args.model is None:
        model, tokenizer, drafter = load_demo()
    else:
        model, tokenizer = load(args.model)
        names["model"] = args.model
    head = args.draft_model
    if head == AUTO:
        head = None if args.model is None else known_head(args.model)
    if head is not None:
        drafter = open_drafter(head, model, tokenizer)
        names["head"] = head
    compared = None
    if args.compare is not None:
        compared, other = load(args.compare[1])
        names["compared"] = args.compare[1]
        if other.vocab_size != tokenizer.vocab_size:
            raise ValueError(
                f"{args.compare[1]} has a vocabulary of {other.vocab_size} tokens, the target one "
                f"of {tokenizer.vocab_size}: mlx-lm's own method needs a draft model with the "
                "target's tokenizer."
            )
    return Models(model, tokenizer, drafter, compared), names


def run(args: argparse.Namespace) -> None:
    """Check, load, measure, write, print."""
    settings = read_settings(args)
    check_models(args)
    questions = load_questions(settings.prompts, settings.limit)
    check_batches(settings.batches, questions)
    folder = prepare_folder(args.out)
    print_blas_note()
    print(f"Loading {args.model or DEMO_NAMES['model']}.", file=sys.stderr)
    models, names = load_models(args)
    document, rows = measure_with_bar(models, names, questions, settings)
    print(write_all(document, rows, folder))
    print(f"Written to {folder}: report.md, report.html, results.json, results.csv, {PLOTS}/")
    print(json.dumps(brief(document)))


def measure_with_bar(
    models: Models, names: dict[str, str], questions: Sequence[Question], settings: Settings
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``measure`` under a progress bar."""
    configurations = make_configurations(settings.sizes, settings.trees, models.compared is not None)
    total = num_runs(settings, questions, configurations)
    with open_bar(total, "bench", "run") as bar:
        return measure(models, names, questions, settings, lambda _: bar.update())


def write_all(
    document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path
) -> str:
    """Write every file of the report; its Markdown."""
    # Here, not above: matplotlib takes a second, which a wrong flag should not cost.
    from . import plots, render, report

    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    write_csv(folder / "results.csv", rows)
    many = len(document["scenarios"]) > 1

    def draw(scenario: Mapping[str, Any], number: int) -> Mapping[str, Path]:
        return plots.draw_all(scenario, folder / PLOTS, f"-{number + 1}" if many else "")

    blocks = report.blocks(document, draw)
    markdown = render.markdown(blocks, folder)
    (folder / "report.md").write_text(markdown)
    (folder / "report.html").write_text(render.html_page(report.TITLE, blocks))
    return markdown


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row a run."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def brief(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without the figures of single prompts: the last line that is printed."""
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
