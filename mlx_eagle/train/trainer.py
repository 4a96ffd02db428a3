"""A training run: from data and a target to a head that can be used, stopped and gone on with.

Knows the order of things; what each of them is stands in the modules beside it.
"""

import math
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..convert.quantize import Quantization
from ..convert.target import open_target
from ..drafters.load import find_embedding
from .checkpoints import Checkpoints, load_checkpoint
from .evaluate import Evaluation, Evaluator
from .examples import BatchOrder, Examples, make_batch, read_examples
from .log import TrainingLog, make_card
from .optimizer import TrainStep, learning_rate
from .regenerate import regenerate
from .settings import TrainSettings
from .student import Shape, Student, fresh_student, head_files, student_from, write_head
from .target_model import load_target
from .teacher import Teacher, cache_bytes
from .vocabulary import choose_vocabulary, coverage

DEFAULT_VOCABULARY = 32000


@dataclass(frozen=True)
class TrainReport:
    """What came of a run. ``evaluation`` is the last one, None without held-out sequences."""

    output: Path
    iteration: int
    is_finished: bool
    evaluation: Evaluation | None
    losses: tuple[float, ...] = ()


@dataclass
class Stop:
    """Whether somebody asked the run to stop."""

    is_asked: bool = False


@dataclass
class _Sums:
    """Since the last report."""

    losses: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0


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
        folder = output / "answers"
        data = str(regenerate(data, folder, model, tokenizer, settings.answers()))
    examples = read_examples(
        data, tokenizer, vocab_size, settings.max_seq_length, settings.mask_prompt
    )
    student, covered = _make_student(settings, model, config, examples, vocab_size)
    teacher = _make_teacher(settings, model, student, examples)
    trainer = Trainer(settings, student, teacher, examples, checkpoints, covered)
    output.mkdir(parents=True, exist_ok=True)
    if found is not None:
        trainer.restore(found)
    trainer.describe()
    with stopping() as stop:
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
    if output.exists() and (not output.is_dir() or any(output.glob("*.safetensors"))):
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
        given = [settings.draft_vocab_size, settings.aux_layers, settings.intermediate_size]
        if any(value is not None for value in given) or settings.num_layers != 1:
            raise ValueError(
                "--init keeps the shape and the vocabulary of the head it names: leave out "
                "--draft-vocab-size, --aux-layers, --num-layers and --intermediate-size."
            )
        student = student_from(settings.init, model, settings.model)
        return student, coverage(examples.train, np.array(student.ids))
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
        # Of these sequences as this target and this vocabulary have it.
        parts = (examples.fingerprint(), *student.taps, len(student.ids), settings.loss == "ce")
        name = "-".join(map(str, parts))
        cache = Path(settings.cache_features).expanduser() / name
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if _is_first():
            print(f"The cache in {cache} takes up to {needed / 1e9:.1f} GB; {free / 1e9:.1f} are free.")
        if needed > free and not any(cache.iterdir()):
            raise ValueError(
                f"{cache} needs up to {needed / 1e9:.1f} GB, but {free / 1e9:.1f} are free: "
                "leave out --cache-features."
            )
    return Teacher(model, student.taps, student.ids, cache, needs_sums=settings.loss != "ce")


def _is_first() -> bool:
    return mx.distributed.init().rank() == 0


@contextmanager
def stopping() -> Iterator[Stop]:
    """Within, the first Ctrl-C or SIGTERM only asks to stop; the second is as ever."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.is_asked = True
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in numbers:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Trainer:
    """The state of a run and what is done with it, batch after batch."""

    def __init__(
        self,
        settings: TrainSettings,
        student: Student,
        teacher: Teacher,
        examples: Examples,
        checkpoints: Checkpoints,
        covered: float,
    ):
        self._settings = settings
        self._student = student
        self._teacher = teacher
        self._examples = examples
        self._checkpoints = checkpoints
        self._covered = covered
        self._world = mx.distributed.init()
        if settings.batch_size % self._world.size():
            raise ValueError(
                f"--batch-size is {settings.batch_size}, which {self._world.size()} ranks cannot "
                "share evenly: give a multiple."
            )
        lengths = [len(example.tokens) for example in examples.train]
        self._order = BatchOrder(lengths, settings.batch_size, settings.seed)
        self._losses = settings.losses()
        self._step = TrainStep(
            student, self._losses, settings.max_grad_norm, settings.weight_decay
        )
        self._output = Path(settings.output).expanduser()
        self._iteration = 0
        self._trained_tokens = 0
        self._evaluation: Evaluation | None = None
        self._evaluator = self._make_evaluator()

    def _make_evaluator(self) -> Evaluator | None:
        texts = self._examples.valid
        if self._settings.val_batches >= 0:
            texts = texts[: self._settings.val_batches * self._settings.batch_size]
        if not texts:
            return None
        return Evaluator(
            self._teacher, texts, self._settings.batch_size, self._settings.ttt_steps
        )

    def describe(self) -> None:
        """Say what is trained on what."""
        if self._world.rank():
            return
        num = len(self._examples.train)
        print(
            f"Training a head of {self._student.num_parameters / 1e6:.2f} M parameters on {num} "
            f"sequences of {self._examples.num_tokens} tokens; {len(self._examples.valid)} are "
            f"held out. It can draft {len(self._student.ids)} tokens, {self._covered:.2%} of what "
            "the answers use."
        )
        for note in self._examples.notes:
            print(note)
        if self._iteration:
            print(f"Going on behind batch {self._iteration}.", flush=True)

    def restore(self, path: Path) -> None:
        """Go on from the checkpoint in that folder; ValueError where it is of another run."""
        state, facts = load_checkpoint(path)
        self._settings.check_same(facts["settings"])
        if facts["data"] != self._examples.fingerprint():
            raise ValueError(
                f"{self._settings.data} is not the data of the run in {self._settings.output}: "
                "give the same, or begin a new run with --init."
            )
        self._step.load(state["weights"], state["moments"])
        self._iteration, self._trained_tokens = facts["iteration"], facts["trained_tokens"]

    def run(self, stop: Stop) -> TrainReport:
        """Train up to the end, or until somebody asks to stop."""
        settings, sums = self._settings, _Sums()
        log = TrainingLog(
            self._output,
            settings.ttt_steps,
            settings.iters,
            self._iteration,
            quiet=self._world.rank() > 0,
        )
        losses: list[float] = []
        try:
            if self._iteration == 0:
                self._evaluate(log)
            while self._iteration < settings.iters:
                losses = self._learn(log, sums)
                done = self._iteration
                if done % settings.steps_per_eval == 0 or done == settings.iters:
                    self._evaluate(log)
                # Gradients that wait for others are not saved: only behind a whole step.
                is_whole = done % settings.grad_accumulation_steps == 0
                is_asked = self._agree(stop.is_asked) and is_whole
                if is_asked or done == settings.iters or (
                    done % settings.save_every < settings.grad_accumulation_steps and is_whole
                ):
                    self._save(log)
                if is_asked and done < settings.iters:
                    log.say(
                        f"Stopped behind batch {done}, which is saved: the same command with "
                        "--resume goes on."
                    )
                    return self._report(losses, is_finished=False)
        finally:
            log.close()
        if self._world.rank() == 0:
            self._finish()
        log.say(f"The head is in {self._output}: use it with --draft-model.")
        return self._report(losses, is_finished=True)

    def _agree(self, is_asked: bool) -> bool:
        """Whether any rank was asked to stop; all stop behind the same batch."""
        if self._world.size() == 1:
            return is_asked
        return mx.distributed.all_sum(mx.array(int(is_asked)), stream=mx.cpu).item() > 0

    def _learn(self, log: TrainingLog, sums: _Sums) -> list[float]:
        """Learn from the next batch; its losses per step."""
        settings, begun = self._settings, time.perf_counter()
        number, parts = self._iteration, settings.grad_accumulation_steps
        numbers = self._order.batch(number)
        batch = make_batch(self._examples.train, numbers, self._world.rank(), self._world.size())
        features, teaching = self._teacher.teach(
            batch, settings.ttt_steps, num_ranks=self._world.size()
        )
        if self._world.size() > 1:
            counts = mx.distributed.all_sum(teaching.counts, stream=mx.cpu) / self._world.size()
            teaching = replace(teaching, counts=counts)
        is_update = (number + 1) % parts == 0
        rate = learning_rate(
            number // parts,
            max(1, settings.iters // parts),
            settings.learning_rate,
            settings.warmup,
        )
        found, norm = self._step(
            mx.array(batch.tokens), features, teaching, rate if is_update else None, parts
        )
        if self._world.size() > 1:
            found = mx.distributed.all_sum(found, stream=mx.cpu) / self._world.size()
        self._iteration = number + 1
        self._check(found, norm)
        num_tokens = sum(len(self._examples.train[i].tokens) for i in numbers)
        self._trained_tokens += num_tokens
        sums.losses.append(np.array(found))
        sums.num_tokens += num_tokens
        sums.seconds += time.perf_counter() - begun
        log.advance(num_tokens / (time.perf_counter() - begun))
        if self._iteration % settings.steps_per_report == 0 or self._iteration == settings.iters:
            mean = np.mean(sums.losses, axis=0).tolist()
            speed = sums.num_tokens / sums.seconds
            log.training(
                self._iteration, mean, rate, norm.item(), speed, self._trained_tokens
            )
            sums.losses, sums.num_tokens, sums.seconds = [], 0, 0.0
        return np.array(found).tolist()

    def _check(self, losses: mx.array, norm: mx.array) -> None:
        """Raise ValueError where the last batch spoilt the weights."""
        if math.isfinite(losses.sum().item()) and math.isfinite(norm.item()):
            return
        good = self._checkpoints.latest()
        way_on = "start again with a smaller --learning-rate"
        if good is not None:
            way_on = f"the last good checkpoint is {good}; {way_on}, or from there with --init"
        raise ValueError(f"the loss is not a number any more at batch {self._iteration}: {way_on}.")

    def _evaluate(self, log: TrainingLog) -> None:
        if self._evaluator is None:
            return
        # Every rank has the same weights and texts: one is enough, and all of them wait for it.
        if self._world.rank() == 0:
            student = self._student
            self._evaluation = self._evaluator(student.head, student.embed, student.ids)
            log.evaluation(self._iteration, self._evaluation)

    def _save(self, log: TrainingLog) -> None:
        if self._world.rank():
            return
        config, weights = head_files(self._student, self._notes())
        self._checkpoints.save(
            self._iteration,
            # Nothing is drawn at random but the order of the data, which the seed and the number
            # of the batch settle.
            {"weights": self._step.weights, "moments": self._step.moments},
            {
                "trained_tokens": self._trained_tokens,
                "settings": self._settings.to_dict(),
                "data": self._examples.fingerprint(),
            },
            {"config": config, "weights": weights},
        )
        log.say(f"Iter {self._iteration}: Saved a checkpoint.")

    def _notes(self) -> dict[str, Any]:
        """What the head's ``config.json`` says of how it was trained."""
        settings = self._settings
        facts = {
            "target": _shown(settings.model),
            "init": None if settings.init is None else _shown(settings.init),
            "num_sequences": len(self._examples.train),
            "iterations": self._iteration,
            "batch_size": settings.batch_size,
            "trained_tokens": self._trained_tokens,
            "draft_vocab_size": len(self._student.ids),
            "coverage": self._covered,
            "ttt_steps": settings.ttt_steps,
            "loss": settings.loss,
            "learning_rate": settings.learning_rate,
            "evaluation": None if self._evaluation is None else asdict(self._evaluation),
        }
        return {"source": {"path": "mlx_eagle.train", "files": {}}, "training": facts}

    def _finish(self) -> None:
        """Write the head itself, with its target's tokenizer and its card."""
        settings = self._settings
        quantization = None
        if settings.quantize:
            quantization = Quantization(settings.q_bits, settings.q_group_size)
        notes = self._notes()
        config, weights = head_files(self._student, notes, self._student.dtype, quantization)
        open_target(settings.model).copy_tokenizer(self._output)
        card = make_card(self._output.name, notes["training"])
        (self._output / "README.md").write_text(card, encoding="utf-8")
        write_head(self._output, config, weights)

    def _report(self, losses: list[float], is_finished: bool) -> TrainReport:
        return TrainReport(
            self._output, self._iteration, is_finished, self._evaluation, tuple(losses)
        )


def _shown(name: str) -> str:
    """A folder by its last part: heads are made to be handed on."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name
