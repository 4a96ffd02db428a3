"""A training run from its settings: makes data, head and teacher, and starts the trainer."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..convert.checkpoint import CONFIG_FILES
from ..drafters.target_parts import find_embedding
from ..system.device import weight_bytes
from ..system.hub import locate
from ..system.stop_signals import StopSignals
from .data import Examples, check_data, read_examples
from .draft_vocabulary import narrowed, resized_vocabulary, widened
from .memory import amount, fitting, memory_kept_to
from .resume import Checkpoints, locked
from .settings import CACHE_BITS, TrainSettings
from .student import Student, fresh_student, student_from
from .teacher import Teacher, cache_name, load_target
from .trainer import Trainer, TrainReport

DEFAULT_VOCABULARY = 32000  # tokens, as in published heads


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
        return _run(settings, output)


def _run(settings: TrainSettings, output: Path) -> TrainReport:
    checkpoints = Checkpoints(output, settings.keep_checkpoints)
    found = checkpoints.latest()
    _check_output(output, settings, found)
    check_data(settings.data)
    if settings.init is not None:
        locate(settings.init, CONFIG_FILES)
    of_others = mx.get_active_memory()
    mx.random.seed(settings.seed)
    model, tokenizer, config = load_target(
        settings.model, settings.adapter_path, settings.trust_remote_code, settings.dtype
    )
    _, vocab_size = find_embedding(model)
    data = settings.data
    if settings.regenerate:
        from .answers import regenerate  # here, for it is a command as well: python -m

        folder = output / "answers"
        data = str(regenerate(data, folder, model, tokenizer, settings.answers()))
    examples = read_examples(
        data, tokenizer, vocab_size, settings.max_seq_length, settings.mask_prompt
    )
    student = _make_student(settings, model, config, examples, vocab_size)
    settings, needs = fitting(settings, student, weight_bytes(model), examples)
    teacher = _make_teacher(settings, model, student, examples)
    trainer = Trainer(
        settings, student, teacher, model, tokenizer, examples, checkpoints, str(needs)
    )
    if found is not None:
        trainer.restore(found)
    trainer.describe()
    with StopSignals(once=True) as stop, memory_kept_to(needs.total, of_others):
        return trainer.run(stop)


def _check_output(output: Path, settings: TrainSettings, found: Path | None) -> None:
    """Raise ValueError if ``output`` holds what this run would spoil, or lacks what it needs."""
    if settings.resume:
        if found is None:
            raise ValueError(f"{output} holds no checkpoint to go on from: leave out --resume.")
        return
    if found is not None:
        raise ValueError(
            f"{output} holds a run up to batch {int(found.name)}: go on with --resume, or give "
            "another --output."
        )
    if any(output.glob("*.safetensors")):
        raise ValueError(f"{output} is there already: give another --output.")


def _make_student(
    settings: TrainSettings,
    model: nn.Module,
    config: dict[str, Any],
    examples: Examples,
    vocab_size: int,
) -> Student:
    """Make a fresh head, or take that of --init, with the draft vocabulary that is asked for."""
    if settings.init is None:
        size = settings.draft_vocab_size or min(DEFAULT_VOCABULARY, vocab_size)
        none = np.array([], np.int32)
        ids = resized_vocabulary(examples.train, none, size, vocab_size)
        return fresh_student(model, config, ids, settings)
    given = [settings.aux_layers, settings.intermediate_size]
    if any(value is not None for value in given) or settings.num_layers != 1:
        raise ValueError(
            "--init keeps the shape of the head it names: leave out --aux-layers, "
            "--num-layers and --intermediate-size."
        )
    student = student_from(settings.init, model, settings.model)
    ids = np.array(student.ids)
    size = settings.draft_vocab_size
    if size is None or size == len(ids):
        return student
    resize = widened if size > len(ids) else narrowed
    return resize(student, model, resized_vocabulary(examples.train, ids, size, vocab_size))


def _make_teacher(
    settings: TrainSettings, model: nn.Module, student: Student, examples: Examples
) -> Teacher:
    """Make the teacher, with its cache if one is asked for and there is room for it."""
    teacher = Teacher(model, student.taps, student.ids, needs_sums=settings.loss != "ce")
    if settings.cache_features is None:
        return teacher
    bits = settings.cache_bits
    name = cache_name(examples, model, student.taps, student.ids, settings.loss, bits)
    cache = Path(settings.cache_features).expanduser() / name
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    needed = teacher.cache_bytes(examples.train, student, bits)
    taken = f"{cache} takes up to {amount(needed)}, and {amount(free)} are free"
    if needed > free and not any(cache.iterdir()):
        way_on = "leave out --cache-features"
        if teacher.cache_bytes(examples.train, student, CACHE_BITS) <= free:
            way_on = f"give --cache-bits {CACHE_BITS}, or {way_on}"
        raise ValueError(f"{taken}: {way_on}.")
    if is_first():
        print(f"{taken}.")
    teacher.keep_in(cache, bits)
    return teacher


def is_first() -> bool:
    """Return whether this is the rank that speaks and writes."""
    return mx.distributed.init().rank() == 0
