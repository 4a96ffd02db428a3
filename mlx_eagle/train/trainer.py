"""Training run: from settings over batch after batch to a finished head."""

import math
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..convert.checkpoint import open_target
from ..convert.publish import training_card
from ..drafters.folder import write_files
from ..drafters.target_parts import find_embedding
from ..system.device import weight_bytes
from ..system.ranks import is_first
from ..system.safetensors import save_arrays
from ..system.stop_signals import StopSignals
from .answers import regenerate
from .batches import BatchOrder, make_batch
from .data import Examples, read_data, read_examples
from .draft_vocabulary import coverage
from .evaluation import Evaluation, Generated, evaluate, generate_held_out
from .kinds import TRAINED, begin, begin_with, with_mask
from .log import TrainingLog, check_services
from .memory import LEAST, fitting, memory_kept_to
from .optimizer import TrainStep, learning_rate
from .recipe import Recipe
from .resume import Checkpoints, kept_from_others, load_checkpoint
from .settings import TrainSettings
from .teacher import Teacher, load_target

FACTS = {"iteration": int, "trained_tokens": int, "settings": dict, "data": str}
"""Facts in a checkpoint besides its arrays, by their types."""


@dataclass
class TrainReport:
    """Outcome of a run.

    ``evaluation`` is the last one, None if no sequences were held out; ``losses`` are those of
    the last batch, by step; ``generated`` is the finished head's acceptance when decoding, None
    if nothing was generated, and ``before`` that of the drafter which the run began with.
    """

    output: Path
    iteration: int = 0
    trained_tokens: int = 0
    is_finished: bool = False
    evaluation: Evaluation | None = None
    losses: tuple[float, ...] = ()
    generated: Generated | None = None
    before: Generated | None = None


@dataclass
class Trainer:
    """State of a run, and the loop."""

    recipe: Recipe
    tokenizer: TokenizerWrapper
    examples: Examples
    checkpoints: Checkpoints

    def __post_init__(self) -> None:
        settings = self.recipe.settings
        self.settings = settings
        world = mx.distributed.init()
        self._ranks = (world.rank(), world.size())
        if settings.batch_size % world.size():
            raise ValueError(
                f"--batch-size is {settings.batch_size}, which {world.size()} ranks cannot share "
                "evenly: give a multiple."
            )
        lengths = [len(example.tokens) for example in self.examples.train]
        self._order = BatchOrder(lengths, settings.batch_size, settings.seed)
        self._step = TrainStep(self.recipe)
        self._covered = coverage(self.examples.train, self.recipe.student.ids)
        self.report = TrainReport(self.checkpoints.output)

    def describe(self, needs: str) -> None:
        """Print what is trained on what; ``needs`` is a sentence about the memory."""
        student = self.recipe.student
        examples = self.examples
        num_tokens = sum(len(example.tokens) for example in examples.train)
        print(
            f"Training a head of {student.num_parameters / 1e6:.2f} M parameters on "
            f"{len(examples.train)} sequences of {num_tokens} tokens; "
            f"{len(examples.valid)} are held out. It can draft {len(student.ids)} tokens, "
            f"{self._covered:.2%} of what the answers use."
        )
        if at := self.report.iteration:
            needs = f"Going on behind batch {at}.\n{needs}"
        print(*examples.notes, needs, sep="\n", flush=True)

    def restore(self, path: Path) -> None:
        """Resume from the checkpoint in that folder; ValueError if it belongs to another run."""
        state, facts = load_checkpoint(path, self._step.state, FACTS)
        self.settings.check_same(facts["settings"])
        if facts["data"] != self.examples.fingerprint():
            raise ValueError(
                f"{self.settings.data} is not the data of the run in {self.settings.output}: "
                "give the same, or begin a new run with --init."
            )
        self._step.load(state)
        self.report.iteration = facts["iteration"]
        self.report.trained_tokens = facts["trained_tokens"]

    def run(self, stop: StopSignals) -> TrainReport:
        """Train to the end, or until ``stop`` asks to end.

        Raises ValueError if the loss is no longer a number, or the disk is full.
        """
        num_columns = max(self.recipe.depth, len(self.recipe.weights))  # losses and depths
        report = self.report
        log = TrainingLog(report.output, num_columns, self.settings, report.iteration)
        with closing(log):
            self._train(stop, log)
        report.is_finished = report.iteration >= self.settings.iters
        if report.is_finished:
            if is_first():
                self._finish(stop, log)
            log.say(f"The head is in {report.output}: use it with --draft-model.")
        return report

    def _train(self, stop: StopSignals, log: TrainingLog) -> None:
        settings = self.settings
        if self.report.iteration == 0:
            self._evaluate(log)
        while self.report.iteration < settings.iters:
            self._learn(log)
            done = self.report.iteration
            is_last = done == settings.iters
            if done % settings.steps_per_eval == 0 or is_last:
                self._evaluate(log)
            # Gradients that wait for others are not saved, so only whole steps are.
            is_whole = done % settings.grad_accumulation_steps == 0
            # All ranks stop after the same batch, whichever of them was asked to.
            is_asked = self._mean(mx.array(float(stop.is_asked))).item() > 0 and is_whole
            is_due = done % settings.save_every < settings.grad_accumulation_steps and is_whole
            if is_asked or is_last or is_due:
                self._save(log)
            if is_asked and not is_last:
                log.say(
                    f"Stopped behind batch {done}, which is saved: the same command with "
                    "--resume goes on."
                )
                break

    def _mean(self, array: mx.array) -> mx.array:
        """Average an array over all ranks."""
        return mx.distributed.all_sum(array, stream=mx.cpu) / self._ranks[1]

    def _learn(self, log: TrainingLog) -> None:
        settings = self.settings
        begun = time.perf_counter()
        number = self.report.iteration
        parts = settings.grad_accumulation_steps
        numbers = self._order.batch(number)
        batch = make_batch(self.examples.train, numbers, *self._ranks)
        epoch = number // self._order.num_batches
        features, targets = self.recipe.teach(batch, epoch)
        targets = targets._replace(counts=self._mean(targets.counts))
        of_all = (number // parts, max(1, settings.iters // parts))
        rate = learning_rate(*of_all, settings.learning_rate, settings.warmup)
        now = rate if (number + 1) % parts == 0 else None
        found, norm = self._step(mx.array(batch.tokens), features, targets, now, parts)
        losses = np.array(self._mean(found))
        self.report.iteration = number + 1
        self._check(losses, norm)
        num_tokens = sum(len(self.examples.train[i].tokens) for i in numbers)
        self.report.trained_tokens += num_tokens
        self.report.losses = tuple(losses.tolist())
        figures = {"learning_rate": rate, "grad_norm": norm.item()}
        figures["trained_tokens"] = self.report.trained_tokens
        log.learnt(number + 1, losses, num_tokens, time.perf_counter() - begun, **figures)

    def _check(self, losses: np.ndarray, norm: mx.array) -> None:
        """Raise ValueError if the last batch has spoilt the weights."""
        if math.isfinite(losses.sum()) and math.isfinite(norm.item()):
            return
        good = self.checkpoints.latest()
        way_on = "start again with a smaller --learning-rate"
        if good is not None:
            way_on = f"the last good checkpoint is {good}; {way_on}, or from there with --init"
        raise ValueError(
            f"the loss is not a number any more at batch {self.report.iteration}: {way_on}."
        )

    def _evaluate(self, log: TrainingLog) -> None:
        settings = self.settings
        texts = self.examples.valid
        if settings.val_batches >= 0:
            texts = texts[: settings.val_batches * settings.batch_size]
        # All ranks have the same weights and texts: one of them evaluates, and the others wait.
        if texts and is_first():
            self.report.evaluation = evaluate(self.recipe, texts, settings.batch_size)
            log.evaluation(self.report.iteration, self.report.evaluation)

    def _save(self, log: TrainingLog) -> None:
        if not is_first():
            return
        config, weights = self.recipe.files(self._notes())
        # Nothing random is left to keep: the order of the data follows from the seed.
        facts = {
            "trained_tokens": self.report.trained_tokens,
            "settings": asdict(self.settings),
            "data": self.examples.fingerprint(),
        }
        files = {"config": config, "weights": weights}
        self.checkpoints.save(self.report.iteration, self._step.state, facts, files)
        log.say(f"Iter {self.report.iteration}: Saved a checkpoint.")

    def _notes(self) -> dict[str, Any]:
        """Return what the head's ``config.json`` says about its training."""
        settings = self.settings
        report = asdict(self.report)
        names = ("kind", "batch_size", "ttt_steps", "loss", "learning_rate")
        facts = {name: getattr(settings, name) for name in names} | {
            "target": _shown(settings.model),
            "init": None if settings.init is None else _shown(settings.init),
            "num_sequences": len(self.examples.train),
            "iterations": self.report.iteration,
            "trained_tokens": self.report.trained_tokens,
            "draft_vocab_size": len(self.recipe.student.ids),
            "coverage": self._covered,
            "evaluation": report["evaluation"],
            "generated": report["generated"],
            "generated_before": report["before"],
        }
        return {"source": {"path": "mlx_eagle.train", "files": {}}, "training": facts}

    def _finish(self, stop: StopSignals, log: TrainingLog) -> None:
        """Write the head with its target's tokenizer, let it decode, and write its card."""
        settings = self.settings
        recipe = self.recipe
        config, weights = recipe.files(self._notes(), is_final=True)
        output = self.report.output
        open_target(settings.model).copy_tokenizer(output)
        write_files(output, config, weights)
        if settings.fine_tune_type == "lora":
            save_arrays(output / "adapters.safetensors", self._step.weights)
        if published := recipe.published():
            there = output / "published"
            there.mkdir(exist_ok=True)
            write_files(there, *published, layout="pt")
            log.say(f"As it is published, it is in {there}.")
        how = (recipe, self.tokenizer, self.examples.valid, stop)
        self.report.generated = generate_held_out(output, *how)
        if self.report.generated is not None:
            if recipe.given is not None:
                self.report.before = generate_held_out(recipe.given.folder, *how)
            log.generated(self.report.generated, self.report.before)
            write_files(output, config | self._notes())
        card = training_card(output.name, self._notes()["training"])
        (output / "README.md").write_text(card, encoding="utf-8")


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
    with kept_from_others(output) if is_first() else nullcontext():
        return _run(settings, Checkpoints(output, settings.keep_checkpoints))


def _run(settings: TrainSettings, checkpoints: Checkpoints) -> TrainReport:
    if is_first():
        check_services(settings.report_to)
    found = checkpoints.to_begin_with(settings.resume)
    data = read_data(settings.data)
    settings, given = begin_with(settings)
    of_others = mx.get_active_memory()
    mx.random.seed(settings.seed)
    model, tokenizer, config = load_target(
        settings.model, settings.adapter_path, settings.trust_remote_code, settings.dtype
    )
    _, vocab_size = find_embedding(model)
    settings = with_mask(settings, given, tokenizer, vocab_size)
    if settings.regenerate:
        data = regenerate(data, checkpoints.output / "answers", model, tokenizer, settings)
    examples = read_examples(
        data, tokenizer, vocab_size, settings.max_seq_length, settings.mask_prompt
    )
    student, given = begin(settings, given, model, config, examples)
    row = TRAINED[settings.kind]
    estimate = partial(row.needs, told=Teacher(model, ()).width)
    settings, needs = fitting(settings, student, weight_bytes(model), examples, estimate)
    recipe = row.recipe(settings, student, model, given)
    if settings.cache_features is not None:
        recipe.teacher.keep_in(settings.cache_features, examples, settings.cache_bits)
    trainer = Trainer(recipe, tokenizer, examples, checkpoints)
    if found is not None:
        trainer.restore(found)
    if is_first():
        trainer.describe(str(needs))
    stop = StopSignals(once=True)
    with stop, memory_kept_to(max(needs.total, LEAST), of_others), checkpoints.explaining():
        return trainer.run(stop)


def _shown(name: str) -> str:
    """Shorten a folder to its last part: a head that is passed on should not name the rest."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name
