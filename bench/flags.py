"""Flags of ``mlx_eagle.bench``: reading them, and refusing those that make no sense."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from mlx_eagle.commands.flags import (
    DRAFT_WINDOW,
    OWN_FLAGS,
    PIPELINE,
)
from mlx_eagle.decoding.setup import AUTO
from mlx_eagle.draft_models import LOOKUP, split_name
from mlx_eagle.drafters.output_rows import read_draft_vocab
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.system.cli_values import (
    LARGEST,
    LARGEST_SEED,
    Range,
    add_version_flag,
    check_ranges,
    flag_of,
    use_plain_words,
)

from .questions import SETS, Question, by_set

Value = TypeVar("Value")
CLIENTS = "1,2,4,8"
MOST_NOTES = 300  # characters, as report_file.schema.json has it
ALL = "auto:all"  # every known drafter of the target
NOT_SERVED = ("batch", "compare", "context", "exact", "picture", "report", "with_lookup")
"""Flags that mean nothing with ``--serve``."""
RANGES = (
    DRAFT_WINDOW,
    Range("limit", 0, LARGEST, "0 or more"),
    Range("max_tokens", 2, LARGEST, "2 or more"),
    Range("repeats", 1, LARGEST, "1 or more"),
    Range("seed", 0, LARGEST_SEED, "a whole number from 0 to 2**64 - 1"),
)
TREES = (
    "WIDTHxDEPTH:NODES with no more nodes than can be grown, such as 3x3:7, or a static tree "
    "(eagle1, root2:5, 3/2+1), or auto"
)


@dataclass(frozen=True)
class Settings:
    """The flags that shape the runs. ``samples``: timings of every part, over all prompts."""

    prompts: tuple[str, ...] = SETS
    limit: int = 10
    max_tokens: int = 128
    sizes: tuple[int | str, ...] = (3,)
    copied: tuple[int | str, ...] = ()
    exact: bool = False
    temps: tuple[float, ...] = (0.0,)
    trees: tuple[str, ...] = ()
    contexts: tuple[int | None, ...] = (None,)
    repeats: int = 3
    order: str = "abba"
    seed: int = 0
    samples: int = 15
    batches: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the flags; lists are given with commas."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.bench",
        description="Measure plain against speculative decoding, interleaved, and report it.",
    )
    add_version_flag(parser)
    add = parser.add_argument
    add("--model", help="Folder or hub repo of the target. Default: the demo pair.")
    words = "As for mlx_eagle.generate; several with commas are shown side by side, and auto:all "
    add("--draft-model", metavar="NAME,...", help=f"{words}is every known drafter of --model.")
    for name in ("draft-window", "draft-vocab", "quantize-draft", "dtype"):
        add(f"--{name}", **OWN_FLAGS[name])
    add("--pipeline", **PIPELINE)
    words = f"{', '.join(SETS)}, or JSONL files; repeatable (default: all three sets)."
    add("--prompts", action="append", default=[], metavar="NAME,...", help=words)
    words = "Maximum prompts per set, evenly spread over it; 0: all (%(default)s)."
    add("--limit", type=int, default=10, help=words)
    add("--max-tokens", type=int, default=128, help="Maximum tokens per answer (%(default)s).")
    words = "Draft tokens per step; auto picks the length per step (%(default)s)."
    add("--num-draft-tokens", default="3", metavar="K,...", help=words)
    words = "Also draft these lengths with copies from the text, as HEAD+lookup does."
    add("--with-lookup", metavar="K,...", help=words)
    add("--temp", default="0", metavar="T,...", help="Temperatures; 0 is greedy (0).")
    words = "Also draft trees: WIDTHxDEPTH:NODES."
    add("--tree", action="append", default=[], metavar="SHAPE,...", help=words)
    add("--context", metavar="N,...", help="Pad prompts to that many tokens.")
    words = "Also draft the same chains and trees with every row computed as a plain step."
    add("--exact", action="store_true", help=words)
    words = "Also decode N prompts of each set at once, greedily, against mlx-lm's batch."
    add("--batch", metavar="N,...", help=words)
    words = "Measure only the server, with N clients at once, greedily, over HTTP, against "
    words += f"mlx_lm.server ({CLIENTS})."
    add("--serve", nargs="?", const=CLIENTS, metavar="N,...", help=words)
    add("--repeats", type=int, default=3, help="Runs of every prompt (%(default)s).")
    words = "abba: plain B B plain for every configuration; mirror: plain B C C B plain; weave: "
    words += "all at once, a few tokens each in turn, where other work disturbs (%(default)s)."
    add("--order", choices=("abba", "mirror", "weave"), default="abba", help=words)
    add("--seed", type=int, default=0, help="Seed for temperatures above 0.")
    add_file = partial(add, type=lambda text: Path(text).expanduser(), metavar="FILE")
    add_file("--out", default="bench-results", metavar="DIR", help="Output folder (%(default)s).")
    add_file("--picture", help="Also draw the speed per prompt set into this PNG or SVG file.")
    add_file("--report", help="Also write the figures as a small JSON file, to be sent in.")
    words = "What a reader of --report should know, such as other work on the machine."
    add("--notes", default="", metavar="TEXT", help=words)
    add_file("--check-report", help="Only check such a file, and measure nothing.")
    add("--json", action="store_true", help="Print the results as JSON in the last line.")
    add("--baseline", choices=["mlx-lm"], default="mlx-lm", help="The plain decoding.")
    words = "Also run mlx-lm's own speculative decoding with this draft model."
    add("--compare", nargs=2, metavar=("mlx-lm-draft", "MODEL"), help=words)
    use_plain_words(parser)
    return parser


def read_list(
    flag: str, text: str | None, convert: Callable[[str], Value], wanted: str
) -> tuple[Value, ...]:
    """Convert the parts of a comma list, () for None; ValueError names the part that is wrong."""
    if text is None:
        return ()
    values = []
    for part in map(str.strip, text.split(",")):
        try:
            values.append(convert(part))
        except ValueError as err:
            raise ValueError(f"{flag} holds {part!r}: give {wanted}.") from err
    if "" in values:
        raise ValueError(f"{flag} holds '': give {wanted}.")
    if len(set(values)) < len(values):
        raise ValueError(f"{flag} is {text}: give every value once.")
    return tuple(values)


def _number(text: str, low: int, kind: type = int) -> Any:
    value = kind(text)
    if not low <= value < inf:
        raise ValueError
    return value


def _length(text: str, low: int) -> int | str:
    return text if text == AUTO else _number(text, low)


def _tree(text: str) -> str:
    if text != AUTO:
        parse_tree(text)
    return text


LISTS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "prompts": ("prompts", str, f"{', '.join(SETS)} or a file"),
    "sizes": ("num_draft_tokens", partial(_length, low=0), "0 or more, or auto"),
    "copied": ("with_lookup", partial(_length, low=1), "1 or more, or auto"),
    "temps": ("temp", partial(_number, low=0, kind=float), "0 (greedy) or more"),
    "trees": ("tree", _tree, TREES),
    "contexts": ("context", partial(_number, low=2), "numbers of tokens above 1"),
    "batches": ("batch", partial(_number, low=1), "numbers of prompts, 1 or more"),
    "clients": ("serve", partial(_number, low=1), "numbers of clients, 1 or more"),
}
"""Settings that are lists: the flag, how a part of it is read, and the words for it."""


def read_settings(args: argparse.Namespace) -> Settings:
    """Read the flags as settings; ValueError, in one sentence, if they make no sense."""
    check_ranges(args, RANGES)
    read_draft_vocab(args.draft_vocab)
    found: dict[str, Any] = {}
    for name, (flag, convert, wanted) in LISTS.items():
        given = getattr(args, flag)
        text = (",".join(given) or None) if isinstance(given, list) else given
        found[name] = read_list(flag_of(flag), text, convert, wanted)
    for name in ("limit", "max_tokens", "repeats", "order", "seed", "exact"):
        found[name] = getattr(args, name)
    settings = Settings(**{name: value for name, value in found.items() if value != ()})
    check_flags(args, settings)
    return settings


def check_flags(args: argparse.Namespace, settings: Settings) -> None:
    """Raise ValueError for flags that do not go together."""
    names = draft_names(args)
    for name in names if args.with_lookup is not None else ():
        if name == LOOKUP or split_name(name)[1]:
            raise ValueError(
                f"--with-lookup adds copies from the text, which --draft-model {name} makes "
                "already: leave one of them out."
            )
    if args.compare is not None and args.compare[0] != "mlx-lm-draft":
        raise ValueError(
            f"--compare is {args.compare[0]!r}: give mlx-lm-draft and an ordinary draft model."
        )
    if args.notes and args.report is None:
        raise ValueError("--notes goes into the file of --report: give that as well.")
    if len(args.notes) > MOST_NOTES:
        raise ValueError(f"--notes has {len(args.notes)} characters: give {MOST_NOTES} at most.")
    if settings.clients:
        check_served(args, settings)


def check_served(args: argparse.Namespace, settings: Settings) -> None:
    """Raise ValueError for flags that do not go with ``--serve``."""
    if len(draft_names(args)) > 1 or ALL in draft_names(args):
        raise ValueError(
            f"--serve measures one draft model, but --draft-model is {args.draft_model}: give one."
        )
    for name in NOT_SERVED:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"{flag_of(name)} does not go with --serve: leave one of them out.")
    if settings.temps != (0.0,):
        raise ValueError(
            f"--temp is {args.temp}: with --serve all is greedy, so that texts can be compared."
        )
    if settings.order == "weave":
        raise ValueError("--order weave does not go with --serve: give abba or mirror.")


def check_questions(settings: Settings, questions: Sequence[Question]) -> None:
    """Raise ValueError if there are too few prompts for a batch or for the clients."""
    for name, group in by_set(questions).items():
        if settings.batches and len(group) < max(settings.batches):
            raise ValueError(
                f"--batch holds {max(settings.batches)}, but {len(group)} prompts of {name} are "
                "taken: give a smaller batch, or a larger --limit where the set has more."
            )
    if settings.clients and len(questions) < max(settings.clients):
        raise ValueError(
            f"--serve holds {max(settings.clients)}, but {len(questions)} prompts are taken: give "
            "fewer clients, or a larger --limit."
        )


def draft_names(args: argparse.Namespace) -> tuple[str, ...]:
    """The draft models that ``--draft-model`` names; () without it."""
    text = args.draft_model
    if text is not None and Path(text).expanduser().exists():  # with a comma, perhaps
        return (text,)
    return read_list("--draft-model", text, str, "names of draft models")


def check_contexts(settings: Settings, limit: int | None) -> None:
    """Raise ValueError if a text would be longer than the target's ``limit``."""
    longest = max((context for context in settings.contexts if context is not None), default=0)
    if limit is not None and longest and longest + settings.max_tokens > limit:
        raise ValueError(
            f"--context holds {longest}, but the target takes {limit} tokens, of which "
            f"--max-tokens {settings.max_tokens} are for the answer: give at most "
            f"{limit - settings.max_tokens}."
        )
