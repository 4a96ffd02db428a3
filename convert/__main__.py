"""The command line of the converter: ``mlx_eagle.convert``."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from mlx_eagle.system.progress import Bar
from mlx_eagle.system.version import add_version_flag

from .pipeline import DTYPES, convert
from .pytorch import to_pytorch
from .resolve import Overrides
from .trim import Trim


def layer_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.convert", description="Convert an EAGLE draft head to MLX."
    )
    add_version_flag(parser)
    yes_no = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--hf-path", "--model", help="folder, GGUF file or hub repository id")
    add("--mlx-path", default="mlx_model", help="folder to write; it must not exist yet")
    add("-q", "--quantize", action=yes_no, default=True, help="quantize (the default)")
    add("--q-bits", type=int, default=4, help="bits a weight (default 4)")
    add("--q-group-size", type=int, default=64, help="weights a scale (default 64)")
    add("--dtype", choices=list(DTYPES), help="of what is not quantized (default: as it is)")
    add("--target", help="the model the head was trained for: folder or repository id")
    add("--check", action="store_true", help="measure the head on the target (needs --target)")
    add("--draft-vocab", type=int, metavar="N", help="keep only N draft tokens: a cheaper draft")
    add("--draft-vocab-text", metavar="FILE", help="the N tokens most frequent in this text")
    add("--to-pytorch", nargs=2, metavar=("HEAD", "DIR"), help="write a converted head back in the "
        "layout that vLLM and SGLang read")
    add("--upload-repo", help="put the result on the hub under this id")
    add("--revision", help="branch, tag or commit of the source repository")
    rules = parser.add_argument_group("overrides, where a checkpoint does not say it or is wrong")
    add = rules.add_argument
    add("--aux-layers", type=layer_numbers, help="taps, as layers whose input is taken: 2,16,29")
    add("--aux-offset", type=int, help="add this to the taps that the config names")
    add("--rope-theta", type=float, help="base of the rotary embedding")
    add("--norm-before-residual", action=yes_no, help="the residual is the normed state")
    add("--norm-output", action=yes_no, help="the normed output is fed back (EAGLE-3.1)")
    add("--num-layers", type=int, help="use only the first layers of the draft")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Convert; exit with 2 and one sentence on errors a user can cause, 130 on Ctrl-C."""
    args = vars(make_parser().parse_args(argv))
    overrides = Overrides(**{f.name: args.pop(f.name) for f in fields(Overrides)})
    size, text = args.pop("draft_vocab"), args.pop("draft_vocab_text")
    back = args.pop("to_pytorch")
    try:
        if back is not None:
            to_pytorch(*back)
            return
        if args["hf_path"] is None:
            raise ValueError("nothing to convert; name a checkpoint with --hf-path")
        if size is None and text is not None:
            raise ValueError(
                "--draft-vocab-text says which tokens to keep; say how many with --draft-vocab"
            )
        wanted = None if size is None else Trim(size, text)
        with Bar("Converting", "tensor") as progress:
            convert(**args, overrides=overrides, draft_vocab=wanted, progress=progress)
    except (ValueError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
