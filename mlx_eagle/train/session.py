"""A training run from its settings: data, head and teacher are made, and the trainer started."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.target_parts import find_embedding
from ..system.command import StopSignals
from .checkpoints import Checkpoints, locked
from .evaluate import Tester, choose_prompts
from .examples import Examples, read_examples
from .settings import TrainSettings
from .student import (
    Shape,
    Student,
    choose_vocabulary,
    coverage,
    fresh_student,
    narrowed,
    resized_vocabulary,
    student_from,
    widened,
)
from .teacher import Teacher, cache_bytes, cache_name, load_target
from .trainer import Trainer, TrainReport

DEFAULT_VOCABULARY = 32000


def train(model: str, data: str, output: str, **options: Any) -> TrainReport:
    """Train a draft head for ``model`` on ``data`` into the folder ``output``.

    ``model`` and ``data`` are what ``mlx_lm.lora`` takes; ``options`` are the other fields of
    ``TrainSettings``. Ctrl-C ends the run behind the batch it is at and saves it; ``resume``
    goes on. Raises ValueError, one sentence, for what cannot be trained on or with, and where
    the loss is no longer a number.
    """
    return run(TrainSettings(model=model, data=data, output=output, **options))


def run(settings: TrainSettings) -> TrainReport:
    """The same with all that is set in one place."""
    output = Path(settings.output).expanduser()
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is there already: give another --output.")
    with locked(output) if is_first() else nullcontext():
        return _run(settings, output)


def _run(settings: TrainSettings, output: Path) -> TrainReport:
    checkpoints = Checkpoints(output, settings.keep_checkpoints)
    found = checkpoints.latest()
    _check_output(output, settings, found)
    mx.random.seed(settings.seed)
    model, tokenizer, config = load_target(
        settings.model, settings.adapter_path, settings.trust_remote_code
    )
    vocab_size = find_embedding(model)[1]
    data = settings.data
    if settings.regenerate:
        from .answers import regenerate  # here, for it is a command as well: python -m

        folder = output / "answers"
        data = str(regenerate(data, folder, model, tokenizer, settings.answers()))
    examples = read_examples(
        data, tokenizer, vocab_size, settings.max_seq_length, settings.mask_prompt
    )
    student, covered = _make_student(settings, model, config, examples, vocab_size)
    teacher = _make_teacher(settings, model, student, examples)
    tester = Tester(
        model,
        tokenizer,
        choose_prompts(examples.valid, settings.test_prompts),
        settings.test_tokens,
        settings.ttt_steps,
    )
    trainer = Trainer(settings, student, teacher, examples, checkpoints, covered, tester)
    if found is not None:
        trainer.restore(found)
    trainer.describe()
    with StopSignals(once=True) as stop:
        return trainer.run(stop)


def _check_output(output: Path, settings: TrainSettings, found: Path | None) -> None:
    """Raise ValueError where ``output`` holds something that this run would spoil or lacks."""
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
) -> tuple[Student, float]:
    """The head to train, and the share of the answers that its vocabulary covers."""
    if settings.init is not None:
        given = [settings.aux_layers, settings.intermediate_size]
        if any(value is not None for value in given) or settings.num_layers != 1:
            raise ValueError(
                "--init keeps the shape of the head it names: leave out --aux-layers, "
                "--num-layers and --intermediate-size."
            )
        student = student_from(settings.init, model, settings.model)
        ids, wanted = np.array(student.ids), settings.draft_vocab_size
        if wanted is not None and wanted != len(ids):
            resize = widened if wanted > len(ids) else narrowed
            ids = resized_vocabulary(examples.train, ids, wanted, vocab_size)
            student = resize(student, model, ids)
        return student, coverage(examples.train, ids)
    wanted = settings.draft_vocab_size or min(DEFAULT_VOCABULARY, vocab_size)
    vocabulary = choose_vocabulary(examples.train, wanted, vocab_size)
    shape = Shape(
        settings.num_layers,
        wanted,
        tuple(settings.aux_layers) if settings.aux_layers else None,
        settings.intermediate_size,
    )
    student = fresh_student(model, config, vocabulary, shape, settings.max_seq_length)
    return student, vocabulary.coverage


def _make_teacher(
    settings: TrainSettings, model: nn.Module, student: Student, examples: Examples
) -> Teacher:
    """The teacher, with its cache where one is asked for and there is room for it."""
    cache = None
    if settings.cache_features is not None:
        config = student.head.config
        width = config.num_aux * config.target_hidden_size
        needed = cache_bytes(examples.train, width, len(student.ids), student.dtype.size)
        name = cache_name(examples, model, student.taps, student.ids, settings.loss)
        cache = Path(settings.cache_features).expanduser() / name
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if is_first():
            print(
                f"The cache in {cache} takes up to {needed / 1e9:.1f} GB; {free / 1e9:.1f} are "
                "free."
            )
        if needed > free and not any(cache.iterdir()):
            raise ValueError(
                f"{cache} needs up to {needed / 1e9:.1f} GB, but {free / 1e9:.1f} are free: "
                "leave out --cache-features."
            )
    return Teacher(model, student.taps, student.ids, cache, needs_sums=settings.loss != "ce")


def is_first() -> bool:
    """Whether this is the rank that speaks and writes."""
    return mx.distributed.init().rank() == 0
