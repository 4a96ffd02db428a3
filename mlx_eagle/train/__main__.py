"""The command ``mlx_eagle.train``."""

import argparse
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from mlx_lm.lora import yaml_loader

from ..system.cli_values import add_version_flag, layer_numbers, use_plain_words
from ..system.device import DTYPES
from ..system.terminal import run_command
from .log import write_page
from .session import is_first, run
from .settings import LOSSES, TrainSettings, parse_temperatures

REQUIRED = ("model", "data", "output")
HELP = {
    "model": "Folder or hub repo of the target.",
    "data": "Folder with train.jsonl (and valid.jsonl), or a hub data set, as mlx_lm.lora takes.",
    "output": "Folder for the head, its checkpoints, training.csv and a page of its curves.",
    "init": "Begin with this head, in any form that mlx_eagle.convert reads, or converted.",
    "adapter_path": "Adapters of the target, as mlx_lm.lora writes them.",
    "trust_remote_code": "Let the target bring code of its own.",
    "dtype": "Floats of the target, and what the head computes in (default: as stored; on a CPU "
    "float32, with packed weights unpacked, where the memory is enough).",
    "mask_prompt": "Learn from answers only (the default).",
    "iters": "Batches to train for.",
    "batch_size": "Sequences per batch, of all machines together.",
    "learning_rate": "Peak of the learning rate.",
    "warmup": "Share of all steps in which the learning rate rises.",
    "weight_decay": "Weight decay of AdamW.",
    "max_grad_norm": "Gradients are clipped to this norm.",
    "max_seq_length": "Longer sequences are cut.",
    "grad_checkpoint": "Compute activations again rather than keep them: less memory, more time "
    "(default: where the memory asks for it).",
    "grad_accumulation_steps": "Batches per step of the optimizer.",
    "ttt_steps": "Steps of the training-time test: how many drafts in a row are trained.",
    "step_decay": "Step j of the training-time test weighs this to the power of j.",
    "loss": "ce: soft cross-entropy; lk-alpha, lk-lambda: acceptance losses.",
    "kl_scale": "lk-lambda: share of cross-entropy where nothing is accepted.",
    "kl_decay": "lk-lambda: how fast that share falls with acceptance.",
    "num_layers": "Layers of a fresh head.",
    "draft_vocab_size": "Tokens that a fresh head can draft (default: 32000, or all), or that the "
    "head of --init can when more are added or the rarest left out.",
    "aux_layers": "Layers of the target whose input a fresh head takes: 2,16,29.",
    "intermediate_size": "Width of a fresh head's MLP (default: the target's).",
    "steps_per_report": "Batches between two lines about the loss.",
    "steps_per_eval": "Batches between two evaluations on held-out data.",
    "save_every": "Batches between two checkpoints.",
    "val_batches": "Batches to evaluate on; -1 is all that is held out.",
    "test_prompts": "Held-out prompts that the finished head drafts for; 0 is none.",
    "test_tokens": "Tokens of each such answer, which is given once for each draft length.",
    "keep_checkpoints": "Checkpoints to keep.",
    "seed": "Seed of the fresh head and of the order of the data.",
    "cache_features": "Keep what the target says of each sequence here, for more epochs.",
    "cache_bits": "Bits of a number of --cache-features: 8 is half its size (default: as it is).",
    "resume": "Go on from the last checkpoint in --output.",
    "regenerate": "Learn from the target's own answers to the data's prompts, made first.",
    "answer_temps": "Temperatures of these answers (default 0,0.6,1).",
    "answer_tokens": "Most tokens of such an answer.",
    "answer_rows": "Answers that are decoded at once.",
    "quantize": "Quantize the finished head.",
    "q_bits": "Bits of a weight (default: 4; fusion and output matrix 6).",
    "q_group_size": "Weights that share a scale.",
}

CHOICES = {"loss": LOSSES, "dtype": DTYPES}


def make_parser() -> argparse.ArgumentParser:
    """One flag for each field of ``TrainSettings``; none has a default of its own."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.train", description="Train an EAGLE-3 draft head for a model of mlx-lm."
    )
    add_version_flag(parser)
    parser.add_argument("-c", "--config", help="YAML file with the same settings as the flags.")
    hints = get_type_hints(TrainSettings)
    for setting in fields(TrainSettings):
        kind = _plain(hints[setting.name])
        shown = setting.default
        text = HELP[setting.name]
        if shown is not MISSING and shown is not None and not isinstance(shown, bool | tuple):
            text = f"{text.removesuffix('.')} (default {shown})."
        options: dict[str, Any] = {"default": None, "help": text}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif setting.name == "aux_layers":
            options |= {"type": layer_numbers, "metavar": "LAYERS"}
        elif setting.name == "answer_temps":
            options |= {"type": parse_temperatures, "metavar": "T,T"}
        else:
            options["type"] = kind
        if setting.name in CHOICES:
            options["choices"] = CHOICES[setting.name]
        parser.add_argument("--" + setting.name.replace("_", "-"), **options)
    use_plain_words(parser)
    return parser


def _plain(hint: Any) -> Any:
    """str | None -> str."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint


def read_config(path: str) -> dict[str, Any]:
    """The settings in a YAML file; ValueError where it is none, or names what is no setting."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), yaml_loader)
    except yaml.YAMLError as err:
        raise ValueError(f"{path} is not YAML ({err}).") from err
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings: give lines such as `iters: 1000`.")
    known = {setting.name for setting in fields(TrainSettings)}
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    for key in values:
        if key not in known:
            raise ValueError(
                f"{path} sets {key}, which is no setting: see mlx_eagle.train --help."
            )
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}


def settings_of(argv: Sequence[str] | None) -> TrainSettings:
    """Flags, then the file that ``-c`` names, then defaults."""
    args = vars(make_parser().parse_args(argv))
    config = args.pop("config")
    values = read_config(config) if config else {}
    values |= {key: value for key, value in args.items() if value is not None}
    for name in REQUIRED:
        if not values.get(name):
            raise ValueError(f"--{name} is missing: see mlx_eagle.train --help.")
    return TrainSettings(**values)


def main(argv: Sequence[str] | None = None) -> None:
    """Train; exit with 2 and one sentence on errors a user can cause."""
    run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    report = run(settings_of(argv))
    if not is_first():
        return
    print(f"Its curves are in {write_page(report.output)}.")


if __name__ == "__main__":
    main()
