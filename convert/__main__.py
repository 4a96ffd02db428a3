"""The command line of the converter: ``mlx_eagle.convert``."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mlx_eagle.drafters.output_rows import read_draft_vocab
from mlx_eagle.system.cli_values import (
    LARGEST,
    Range,
    add_version_flag,
    check_ranges,
    layer_numbers,
    use_plain_words,
)
from mlx_eagle.system.device import prepare_device
from mlx_eagle.system.exit_codes import run_command
from mlx_eagle.system.progress import Bar

from .pipeline import DTYPES, convert
from .publish import to_pytorch
from .published_config import Overrides
from .stitch import stitch
from .trim import Trim

RANGES = (
    Range("rope_theta", 1.0, 1e30, "a number from 1 to 1e30"),
    Range("num_layers", 1, LARGEST, "1 or more"),
    Range("mask_token_id", 0, LARGEST, "0 or more"),
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.convert",
        description="Convert a drafter to MLX: an EAGLE, DFlash or DSpark head, an assistant of "
        "Gemma 4, or the MTP layers of a model.",
    )
    add_version_flag(parser)
    yes_no = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--hf-path", "--model", help="folder, GGUF file or hub id of a published drafter")
    add("--mlx-path", default="mlx_model", help="folder to write; it must not exist yet")
    add("-q", "--quantize", action=yes_no, default=True, help="quantize (the default)")
    add("--q-bits", type=int, help="bits per weight (default: 4; fusion and output matrix 6)")
    add("--q-group-size", type=int, default=64, help="weights per scale (default 64)")
    add(
        "--dtype",
        choices=list(DTYPES),
        help="of what is not quantized, and of the target of --check (default: as they are)",
    )
    add("--target", help="the model the head was trained for: folder or repository id")
    add("--check", action="store_true", help="measure the head on the target (needs --target)")
    words = "draft only N tokens, the first, or those of a file of ids: cheaper drafts"
    add("--draft-vocab", metavar="N|FILE|full", help=words)
    add("--draft-vocab-text", metavar="FILE", help="the N tokens most frequent in this text")
    pair = ("HEAD", "DIR")
    add("--to-pytorch", nargs=2, metavar=pair, help="write a converted head for vLLM and SGLang")
    parts = ("LAYERS", "MODEL", "DIR")
    add(
        "--stitch", nargs=3, metavar=parts, help="write a model's checkpoint with these MTP layers"
    )
    add("--upload-repo", help="put the result on the hub under this id")
    add("--revision", help="branch, tag or commit of the source repository")
    rules = parser.add_argument_group("overrides, where a checkpoint does not say it or is wrong")
    add = rules.add_argument
    add("--aux-layers", type=layer_numbers, help="taps, as layers whose input is taken: 2,16,29")
    add("--rope-theta", type=float, help="base of the rotary embedding")
    add("--norm-before-residual", action=yes_no, help="the residual is the normed state")
    add("--norm-output", action=yes_no, help="the normed output is fed back (EAGLE-3.1)")
    add("--num-layers", type=int, help="use only the first layers of the draft")
    add("--mask-token-id", type=int, help="the token of masked slots (P-EAGLE)")
    use_plain_words(parser)
    return parser


def check_arguments(args: argparse.Namespace) -> Trim | None:
    """Return the draft vocabulary to keep, None for all of it.

    Raises ValueError, before anything is read, for values that make no sense.
    """
    if args.hf_path is None:
        raise ValueError("nothing to convert; name a checkpoint with --hf-path")
    check_ranges(args, RANGES)
    wanted = read_draft_vocab(args.draft_vocab)
    if not isinstance(wanted, int) and args.draft_vocab_text is not None:
        raise ValueError(
            "--draft-vocab-text says which tokens to keep; say how many with --draft-vocab"
        )
    return None if wanted is None else Trim.of(wanted, args.draft_vocab_text)


def run(args: argparse.Namespace) -> None:
    """Convert as the flags say."""
    if args.to_pytorch is not None:
        to_pytorch(*args.to_pytorch)
        return
    if args.stitch is not None:
        print(f"The model with these layers is in {stitch(*args.stitch)}.")
        return
    draft_vocab = check_arguments(args)
    if args.check and args.target is not None:
        prepare_device()
    options: dict[str, Any] = vars(args)
    overrides = Overrides(**{f.name: options.pop(f.name) for f in fields(Overrides)})
    options |= {"overrides": overrides, "draft_vocab": draft_vocab}
    del options["to_pytorch"], options["stitch"], options["draft_vocab_text"]
    with Bar("Converting", "tensor") as progress:
        convert(**options, progress=progress)


def main(argv: Sequence[str] | None = None) -> None:
    """Convert; exit with 2 and one sentence on errors a user can cause, 130 on Ctrl-C."""
    args = make_parser().parse_args(argv)
    run_command(lambda: run(args), interrupted="interrupted; nothing was written")


if __name__ == "__main__":
    main()
