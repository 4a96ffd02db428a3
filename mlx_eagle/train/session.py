"""A training run from its settings: makes data, head and teacher, and starts the trainer."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..convert.checkpoint import CONFIG_FILES
from ..drafters.kinds import KINDS
from ..drafters.target_parts import find_embedding
from ..system.device import weight_bytes
from ..system.hub import locate
from ..system.ranks import is_first
from ..system.stop_signals import StopSignals
from .data import read_data, read_examples
from .given import AUTO, Given, known_drafter, open_given
from .kinds import TRAINED, begin, check_kind, check_mask, filled, needs_for, title_of, trained_as
from .memory import fitting, memory_kept_to
from .resume import Checkpoints, locked
from .settings import TrainSettings
from .teacher import load_target
from .trainer import Trainer, TrainReport


def train(model: str, data: str, output: str, **options: Any) -> TrainReport:
    """Train a draft head for ``model`` on ``data`` into the folder ``output``.

    ``model`` and ``data`` are what ``mlx_lm.lora`` takes; ``options`` are the other fields of
    ``TrainSettings``. Ctrl-C ends the run after the current batch and saves it; ``resume``
    continues it. Raises ValueError, one sentence, for data, heads and settings that cannot be
    trained on or with, and if the loss is no longer a number.
    """
    return run(TrainSettings(model=model, data=data, output=output, **options))


def run(settings: TrainSettings) -> TrainReport:
    """Train as ``train`` does, with all settings in one object."""
    output = Path(settings.output).expanduser()
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is there already: give another --output.")
    with locked(output) if is_first() else nullcontext():
        return _run(settings, Checkpoints(output, settings.keep_checkpoints))


def _run(settings: TrainSettings, checkpoints: Checkpoints) -> TrainReport:
    found = checkpoints.to_begin_with(settings.resume)
    data = read_data(settings.data)
    if settings.init is not None and settings.init not in (AUTO, *KINDS):
        locate(settings.init, CONFIG_FILES)
    of_others = mx.get_active_memory()
    mx.random.seed(settings.seed)
    model, tokenizer, config = load_target(
        settings.model, settings.adapter_path, settings.trust_remote_code, settings.dtype
    )
    _, vocab_size = find_embedding(model)
    settings, given = _begin_with(settings)
    check_mask(settings, given, tokenizer, vocab_size)
    if settings.regenerate:
        from .answers import regenerate  # here, for it is a command as well: python -m

        to = checkpoints.output / "answers"
        data = read_data(str(regenerate(settings.data, to, model, tokenizer, settings.answers())))
    examples = read_examples(
        data, tokenizer, vocab_size, settings.max_seq_length, settings.mask_prompt
    )
    student, make_recipe = begin(settings, given, model, config, tokenizer, examples)
    settings, needs = fitting(
        settings, student, weight_bytes(model), examples, needs_for(settings, student)
    )
    trainer = Trainer(settings, make_recipe(settings), model, tokenizer, examples, checkpoints)
    if found is not None:
        trainer.restore(found)
    if is_first():
        trainer.describe(str(needs))
    with StopSignals(once=True) as stop, memory_kept_to(needs.total, of_others):
        return trainer.run(stop)


def _begin_with(settings: TrainSettings) -> tuple[TrainSettings, Given | None]:
    """Find what --init names, and give the settings the defaults of its kind."""
    name = settings.init
    if name is None:
        kind = settings.kind or "eagle3"
        check_kind(kind, None)
        return filled(settings, kind), None
    if name == AUTO:
        name = known_drafter(settings.model, TRAINED)
        if is_first():
            print(f"Beginning with {name}, the drafter that is known for {settings.model}.")
    given = open_given(name, settings.model)
    kind = trained_as(given, settings.kind)
    check_kind(kind, name)
    if settings.kind not in (None, kind):
        raise ValueError(
            f"--kind is {settings.kind}, and {name} is {title_of(kind)}: leave out one of --kind "
            "and --init."
        )
    return filled(replace(settings, init=name), kind), given
