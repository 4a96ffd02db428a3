"""Command ``mlx_eagle.train``."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml
from mlx_lm.lora import yaml_loader

from ..system.cli_values import add_flags, add_version_flag, use_plain_words
from ..system.exit_codes import run_command
from .settings import TrainSettings
from .trainer import run


def make_parser() -> argparse.ArgumentParser:
    """Make one flag for each field of ``TrainSettings``; none has a default of its own."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.train", description="Train a drafter for a model of mlx-lm, or adapt one."
    )
    add_version_flag(parser)
    parser.add_argument("-c", "--config", help="YAML file with the same settings as the flags.")
    add_flags(parser, TrainSettings)
    use_plain_words(parser)
    return parser


def read_config(path: str) -> dict[str, Any]:
    """Read the settings in a YAML file; ValueError if it is none, or names an unknown setting."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), yaml_loader)
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is no text"
        raise ValueError(
            f"--config {path} cannot be read ({reason}): give a YAML file with settings."
        ) from err
    except yaml.YAMLError as err:
        raise ValueError(f"{path} is not YAML ({err}).") from err
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings: give lines such as `iters: 1000`.")
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    lora = values.pop("lora_parameters", None) or {}  # as mlx_lm.lora has them
    if not isinstance(lora, dict):
        raise ValueError(f"{path} sets lora_parameters to {lora!r}: give rank and scale.")
    values |= {f"lora_{key}": v for key, v in lora.items() if v or key in ("rank", "scale")}
    for key in values.keys() - {each.name for each in fields(TrainSettings)}:
        raise ValueError(f"{path} sets {key}, which is no setting: see mlx_eagle.train --help.")
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}


def settings_of(argv: Sequence[str] | None) -> TrainSettings:
    """Return the settings: flags come first, then the file that ``-c`` names, then defaults."""
    args = vars(make_parser().parse_args(argv))
    config = args.pop("config")
    values = read_config(config) if config else {}
    values |= {key: value for key, value in args.items() if value is not None}
    for setting in fields(TrainSettings):
        if setting.default is MISSING and not values.get(setting.name):
            raise ValueError(f"--{setting.name} is missing: see mlx_eagle.train --help.")
    return TrainSettings(**values)


def main(argv: Sequence[str] | None = None) -> None:
    """Train; exit with 2 and one sentence on errors a user can cause."""
    run_command(lambda: run(settings_of(argv)))


if __name__ == "__main__":
    main()
