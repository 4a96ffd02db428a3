"""Training loop: batch after batch, from the first to a head that can be used."""

import math
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..convert.checkpoint import open_target
from ..convert.quantize import Quantization
from ..system.terminal import StopSignals
from .checkpoints import Checkpoints, load_checkpoint
from .evaluate import Evaluation, Evaluator, Generated, Tester
from .examples import BatchOrder, Examples, make_batch
from .log import TrainingLog, duration, make_card
from .optimizer import TrainStep, learning_rate
from .settings import TrainSettings
from .student import Student, head_files, write_head
from .teacher import Teacher

FACTS = {"iteration": int, "trained_tokens": int, "settings": dict, "data": str}
"""What a checkpoint says besides its arrays."""
FIRST = 4  # batches until the run says how long it will take


@dataclass(frozen=True)
class TrainReport:
    """What came of a run. ``evaluation`` is the last one, None without held-out sequences;
    ``generated`` what the finished head accepted, None where nothing was generated."""

    output: Path
    iteration: int
    is_finished: bool
    evaluation: Evaluation | None
    losses: tuple[float, ...] = ()
    generated: Generated | None = None


@dataclass
class _Sums:
    """Since the last report."""

    losses: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0


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
        tester: Tester,
    ):
        self._settings = settings
        self._student = student
        self._teacher = teacher
        self._examples = examples
        self._checkpoints = checkpoints
        self._covered = covered
        self._tester = tester
        self._generated: Generated | None = None
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
        self._pace: list[tuple[int, float]] = []  # tokens and seconds of each batch of this run
        self._evaluation: Evaluation | None = None
        self._evaluator = self._make_evaluator()

    def _make_evaluator(self) -> Evaluator | None:
        texts = self._examples.valid
        if self._settings.val_batches >= 0:
            texts = texts[: self._settings.val_batches * self._settings.batch_size]
        if not texts:
            return None
        return Evaluator(self._teacher, texts, self._settings.batch_size, self._settings.ttt_steps)

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
        state, facts = load_checkpoint(path, self._state(), FACTS)
        self._settings.check_same(facts["settings"])
        if facts["data"] != self._examples.fingerprint():
            raise ValueError(
                f"{self._settings.data} is not the data of the run in {self._settings.output}: "
                "give the same, or begin a new run with --init."
            )
        self._step.load(state["weights"], state["moments"])
        self._iteration, self._trained_tokens = facts["iteration"], facts["trained_tokens"]

    def run(self, stop: StopSignals) -> TrainReport:
        """Train up to the end, or until somebody asks to stop.

        Raises ValueError where the loss is no longer a number, or the disk is full.
        """
        with self._checkpoints.explaining(self._output):
            with closing(self._open_log()) as log:
                losses = self._train(stop, log)
            if self._iteration < self._settings.iters:
                return self._report(losses, is_finished=False)
            if self._world.rank() == 0:
                self._finish(stop, log)
        log.say(f"The head is in {self._output}: use it with --draft-model.")
        return self._report(losses, is_finished=True)

    def _open_log(self) -> TrainingLog:
        return TrainingLog(
            self._output,
            self._settings.ttt_steps,
            self._settings.iters,
            self._iteration,
            quiet=self._world.rank() > 0,
        )

    def _train(self, stop: StopSignals, log: TrainingLog) -> list[float]:
        """Batch after batch; the losses of the last one."""
        settings, sums = self._settings, _Sums()
        losses: list[float] = []
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
            if (
                is_asked
                or done == settings.iters
                or (done % settings.save_every < settings.grad_accumulation_steps and is_whole)
            ):
                self._save(log)
            if is_asked and done < settings.iters:
                log.say(
                    f"Stopped behind batch {done}, which is saved: the same command with "
                    "--resume goes on."
                )
                break
        return losses

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
        features, targets = self._teacher.teach(
            batch, settings.ttt_steps, num_ranks=self._world.size()
        )
        if self._world.size() > 1:
            counts = mx.distributed.all_sum(targets.counts, stream=mx.cpu) / self._world.size()
            targets = replace(targets, counts=counts)
        is_update = (number + 1) % parts == 0
        rate = learning_rate(
            number // parts,
            max(1, settings.iters // parts),
            settings.learning_rate,
            settings.warmup,
        )
        found, norm = self._step(
            mx.array(batch.tokens), features, targets, rate if is_update else None, parts
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
        self._pace.append((num_tokens, time.perf_counter() - begun))
        log.advance(self._pace[-1][0] / self._pace[-1][1])
        if len(self._pace) == FIRST:
            log.say(f"{self._speed():.0f} tokens per second: {duration(self._left())} left.")
        if self._iteration % settings.steps_per_report == 0 or self._iteration == settings.iters:
            mean = np.mean(sums.losses, axis=0).tolist()
            speed = sums.num_tokens / sums.seconds
            total, left = self._trained_tokens, self._left()
            log.training(self._iteration, mean, rate, norm.item(), speed, total, left)
            sums.losses, sums.num_tokens, sums.seconds = [], 0, 0.0
        return np.array(found).tolist()

    def _speed(self) -> float:
        """Tokens per second of this run so far, without its first batch, which compiles."""
        done = self._pace[1:] or self._pace
        return sum(num for num, _ in done) / sum(seconds for _, seconds in done)

    def _left(self) -> float:
        """Seconds that the batches to come will take, without evaluations."""
        mean = self._examples.num_tokens / len(self._examples.train) * self._settings.batch_size
        return (self._settings.iters - self._iteration) * mean / self._speed()

    def _check(self, losses: mx.array, norm: mx.array) -> None:
        """Raise ValueError where the last batch spoilt the weights."""
        if math.isfinite(losses.sum().item()) and math.isfinite(norm.item()):
            return
        good = self._checkpoints.latest()
        way_on = "start again with a smaller --learning-rate"
        if good is not None:
            way_on = f"the last good checkpoint is {good}; {way_on}, or from there with --init"
        raise ValueError(
            f"the loss is not a number any more at batch {self._iteration}: {way_on}."
        )

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
            self._state(),
            {
                "trained_tokens": self._trained_tokens,
                "settings": self._settings.to_dict(),
                "data": self._examples.fingerprint(),
            },
            {"config": config, "weights": weights},
        )
        log.say(f"Iter {self._iteration}: Saved a checkpoint.")

    def _state(self) -> dict[str, Any]:
        return {"weights": self._step.weights, "moments": self._step.moments}

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
            "generated": None if self._generated is None else asdict(self._generated),
        }
        return {"source": {"path": "mlx_eagle.train", "files": {}}, "training": facts}

    def _finish(self, stop: StopSignals, log: TrainingLog) -> None:
        """Write the head itself, with its target's tokenizer, and then what it is worth."""
        settings = self._settings
        quantization = None
        if settings.quantize:
            quantization = Quantization(settings.q_bits, settings.q_group_size)
        dtype = self._student.dtype
        config, weights = head_files(self._student, self._notes(), dtype, quantization)
        open_target(settings.model).copy_tokenizer(self._output)
        write_head(self._output, config, weights)
        self._generated = self._tester(self._output, stop)
        if self._generated is not None:
            log.generated(self._generated)
            write_head(self._output, config | self._notes())
        card = make_card(self._output.name, self._notes()["training"])
        (self._output / "README.md").write_text(card, encoding="utf-8")

    def _report(self, losses: list[float], is_finished: bool) -> TrainReport:
        return TrainReport(
            self._output,
            self._iteration,
            is_finished,
            self._evaluation,
            tuple(losses),
            self._generated,
        )


def _shown(name: str) -> str:
    """A folder by its last part: heads are made to be handed on."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name
