"""The command ``mlx_eagle.doctor``: the page of checks, or the report of the self-test."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..system.atomic_folder import check_writable
from ..system.cli_values import LARGEST, Range, add_version_flag, check_ranges, use_plain_words
from ..system.exit_codes import run_command
from .checks import check_all, expect
from .packages import is_well, say
from .self_test import document, sections, self_test

REPORT = "mlx-eagle-self-test.md"
RANGES = (
    Range("context", 1, LARGEST, "1 or more"),
    Range("ranks", 1, LARGEST, "the number of machines, 1 or more"),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the flags."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.doctor",
        description="Say what this machine is, what is wrong, and what to expect of a model.",
    )
    add_version_flag(parser)
    add = parser.add_argument
    add("--model", help="A target, folder or hub repo: what to expect of it here.")
    add("--draft-model", help="Its draft model: a converted head, auto or lookup.")
    context_help = "Whether a text of so many tokens fits, with --model."
    add("--context", type=int, metavar="TOKENS", help=context_help)
    ranks_help = "What to expect of --model on so many machines under mlx.launch."
    add("--ranks", type=int, default=1, metavar="N", help=ranks_help)
    add("--json", action="store_true", help="Print what was found as one JSON document.")
    test_help = "Try everything on this machine, in at most five minutes, and write a report."
    add("--self-test", action="store_true", help=test_help)
    out_help = "Where the report of --self-test goes (%(default)s)."
    add("--out", metavar="FILE", default=REPORT, help=out_help)
    use_plain_words(parser)
    return parser


def run_self_test(args: argparse.Namespace) -> bool:
    """Run the self-test and say where the report is; True if all is well."""
    file = Path(args.out).expanduser()
    figures = file.with_name(f"{file.stem}-measured.json")
    check_writable(file, "--out")
    figures.unlink(missing_ok=True)  # those of a run before
    tried = sections(figures)
    failed = self_test(tried, file)
    if args.json:
        print(json.dumps(document(tried)))
    else:
        said = f"{len(failed)} parts failed." if failed else "All parts passed."
        print(f"{said} The report is {file}: paste it into an issue.")
        if figures.exists():
            print(f"What was measured is also in {figures}, for the table of machines.")
    return not failed


def run(args: argparse.Namespace) -> bool:
    """Check and print; True if all is well."""
    if args.self_test:
        return run_self_test(args)
    check_ranges(args, RANGES)
    needy = {"draft-model": args.draft_model, "context": args.context, "ranks": args.ranks > 1}
    if args.model is None and any(needy.values()):
        flag = next(name for name, value in needy.items() if value)
        raise ValueError(f"--{flag} needs --model: name the target that it is about.")
    findings = check_all()
    if args.model is not None:
        findings += expect(args.model, args.draft_model, args.context, args.ranks)
    say(findings, args.json)
    return is_well(findings)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``mlx_eagle.doctor``; the exit code is 1 if something is wrong."""
    args = build_parser().parse_args(argv)

    def command() -> None:
        if not run(args):
            sys.exit(1)

    run_command(command)


if __name__ == "__main__":
    main()
