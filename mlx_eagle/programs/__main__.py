"""The command ``mlx_eagle.with``: any program that is written for mlx-lm, with a drafter.

``mlx_eagle.with -m mlx_lm.evaluate ...`` installs our loop and runs the module, as ``python -m``
does. (No module can have the command's name: ``with`` is a keyword of Python.)
"""

import argparse
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence

from ..decoding.setup import AUTO
from ..draft_models import find_drafter
from ..installation import installed
from ..system.cli_values import add_version_flag, use_plain_words
from ..system.device import prepare_device
from ..system.exit_codes import run_command


def build_parser() -> argparse.ArgumentParser:
    """The parser of the flags in front of the module's own."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.with",
        usage="%(prog)s [--draft-model NAME] -m MODULE ...",
        description="Run a Python program that uses mlx-lm, and draft for whatever it generates.",
    )
    add_version_flag(parser)
    parser.add_argument(
        "--draft-model",
        metavar="NAME",
        default=AUTO,
        help="What drafts: a folder or hub repo, mtp, lookup, or auto for the known drafter of "
        "each model that the program loads (default: auto).",
    )
    parser.add_argument(
        "-m",
        dest="module",
        metavar="MODULE",
        nargs=argparse.REMAINDER,
        help="The program, as python -m takes it, and all of its own arguments.",
    )
    use_plain_words(parser)
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Check the names before anything is loaded. Raises ValueError."""
    if not args.module:
        raise ValueError("no program is named: give -m MODULE, such as -m mlx_lm.evaluate.")
    if not _is_there(args.module[0]):
        raise ValueError(f"there is no module {args.module[0]}: install it, or look at its name.")
    find_drafter(args.draft_model)
    prepare_device()


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package above it, or a name that is none
        return False


def run_module(words: Sequence[str]) -> None:
    """Run a module with arguments, as ``python -m`` does.

    A command of mlx-lm is imported and called: loaded a second time as the main program, it would
    have functions of its own that nobody has replaced.
    """
    name = words[0]
    sys.argv = list(words)
    module = importlib.import_module(name) if name.startswith("mlx_lm.") else None
    if module is not None and hasattr(module, "main"):
        module.main()
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``mlx_eagle.with``."""
    args = build_parser().parse_args(argv)
    run_command(lambda: prepare(args))
    with installed(args.draft_model):
        run_module(args.module)  # whose errors are its own


if __name__ == "__main__":
    main()
