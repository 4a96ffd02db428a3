"""The command ``mlx_eagle.train.answers``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ...system.command import run_command
from ...system.device import prepare_device
from ...system.version import add_version_flag
from ..regenerate import answer_file
from ..target_model import load_target
from . import TEMPERATURES, AnswerSettings, parse_temperatures, read_prompts


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.train.answers",
        description="Let a model answer prompts, many at once, as data to train its head on.",
    )
    add_version_flag(parser)
    add = parser.add_argument
    defaults = AnswerSettings()
    add("--model", required=True, help="Folder or hub repo of the target.")
    add("--prompts", required=True, help='JSONL with "prompt" or "messages" on each line.')
    add("--output", required=True, help="JSONL to write or to go on with: DATA/train.jsonl.")
    add("--adapter-path", help="Adapters of the target, as mlx_lm.lora writes them.")
    add("--trust-remote-code", action="store_true", help="Let the target bring code of its own.")
    shown = ",".join(map(str, TEMPERATURES))
    add(
        "--temps",
        type=parse_temperatures,
        default=TEMPERATURES,
        metavar="T,T",
        help=f"Every prompt is answered once at each of these temperatures (default {shown}).",
    )
    add("--max-tokens", type=int, default=defaults.max_tokens, help="Most tokens of an answer.")
    add(
        "--max-prompt-tokens",
        type=int,
        default=defaults.max_prompt_tokens,
        help="Longer prompts are passed over.",
    )
    add("--rows", type=int, default=defaults.rows, help="Answers that are decoded at once.")
    add("--seed", type=int, default=defaults.seed, help="Seed of the order and of the sampling.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Answer; exit with 2 and one sentence on errors a user can cause."""
    args = make_parser().parse_args(argv)

    def answer() -> None:
        settings = AnswerSettings(
            args.temps, args.max_tokens, args.max_prompt_tokens, args.rows, args.seed
        )
        prompts = Path(args.prompts).expanduser()
        read_prompts(prompts)  # before the model, which takes a while
        prepare_device()
        model, tokenizer, _ = load_target(args.model, args.adapter_path, args.trust_remote_code)
        answer_file(model, tokenizer, prompts, Path(args.output).expanduser(), settings)

    run_command(answer)


if __name__ == "__main__":
    main()
