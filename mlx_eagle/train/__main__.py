"""The command ``mlx_eagle.train``."""

import argparse
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from mlx_lm.lora import yaml_loader

from ..system.cli_values import add_version_flag, flag_of, use_plain_words
from ..system.terminal import run_command
from .log import write_page
from .session import is_first, run
from .settings import TrainSettings


def make_parser() -> argparse.ArgumentParser:
    """One flag for each field of ``TrainSettings``; none has a default of its own."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.train", description="Train an EAGLE-3 draft head for a model of mlx-lm."
    )
    add_version_flag(parser)
    parser.add_argument("-c", "--config", help="YAML file with the same settings as the flags.")
    hints = get_type_hints(TrainSettings)
    for setting in fields(TrainSettings):
        shown, how = setting.default, dict(setting.metadata)
        text = how["help"]
        if shown is not MISSING and shown is not None and not isinstance(shown, bool | tuple):
            text = f"{text.removesuffix('.')} (default {shown})."
        options: dict[str, Any] = {"default": None, "help": text}
        kind = hints[setting.name]
        if isinstance(kind, types.UnionType):  # str | None
            kind = get_args(kind)[0]
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = how.get("type", kind)
        options |= {key: how[key] for key in ("choices", "metavar") if key in how}
        parser.add_argument(flag_of(setting.name), **options)
    use_plain_words(parser)
    return parser


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
    for setting in fields(TrainSettings):
        if setting.default is MISSING and not values.get(setting.name):
            raise ValueError(f"--{setting.name} is missing: see mlx_eagle.train --help.")
    return TrainSettings(**values)


def main(argv: Sequence[str] | None = None) -> None:
    """Train; exit with 2 and one sentence on errors a user can cause."""
    run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    report = run(settings_of(argv))
    if is_first():
        print(f"Its curves are in {write_page(report.output)}.")


if __name__ == "__main__":
    main()
