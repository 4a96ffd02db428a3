"""Train the same head with mlx_eagle and with the PyPI package ``specforge``, steps in turn.

    pip install torch "transformers>=5" && pip install --no-deps specforge==0.2.0
    python tools/compare_trainers.py [--model TARGET --data DATA] [--init HEAD] [--iters N] ...

Both begin with the same weights and get the same tokens in the same order; PyTorch computes
everything else anew: the target's features and distributions, the losses, their gradients,
clipping and AdamW. Both get our learning rate, because specforge's schedule begins its cosine a
step before its rise has ended, and then exceeds its peak. Printed are the losses, the seconds of a
step (with one thread each, without the first step), and the mean acceptance length of both heads
on held-out data. Without ``--model``, the target is a tiny random one, whose answers are learnt by
heart.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "golden"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import make_training as golden
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from specforge.optimizer import BF16Optimizer
from training import chats, write_data, write_target
from transformers import LlamaConfig

from mlx_eagle.drafters.head_weights import fuse_weights, split_weights
from mlx_eagle.train.answers import regenerate
from mlx_eagle.train.batches import BatchOrder, TokenBatch, make_batch
from mlx_eagle.train.data import read_data, read_examples
from mlx_eagle.train.evaluation import Evaluation, evaluate
from mlx_eagle.train.given import open_given
from mlx_eagle.train.kinds import TRAINED, begin, filled
from mlx_eagle.train.optimizer import BETAS, TrainStep, learning_rate
from mlx_eagle.train.settings import TrainSettings
from mlx_eagle.train.student import Student
from mlx_eagle.train.teacher import load_target

OURS = "layers.0."  # beginning of the names of a layer's tensors here
THEIRS = "midlayer."  # the same in SpecForge


@dataclass(frozen=True)
class Comparison:
    """Figures of both trainers, ours first: ``losses`` (2, steps, T) and ``seconds`` (2, steps).

    The evaluations are on held-out data: before training, and after ours and theirs.
    """

    losses: np.ndarray
    seconds: np.ndarray
    before: Evaluation
    ours: Evaluation
    theirs: Evaluation

    @property
    def speed(self) -> float:
        """Speed relative to PyTorch: the median over pairs of steps, each timed side by side."""
        ours, theirs = self.seconds[:, 1:]
        return float(np.median(theirs / ours))


def as_torch(array: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(array.astype(mx.float32)))


def without_derived(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}


class PyTorchTrainer:
    """SpecForge's model and optimizer, on transformers' llama with the target's weights."""

    def __init__(
        self, model: nn.Module, config: dict[str, Any], student: Student, settings: TrainSettings
    ):
        weights = {name: as_torch(w) for name, w in tree_flatten(model.parameters())}
        sizes = without_derived(config) | {"tie_word_embeddings": "lm_head.weight" not in weights}
        self._target = golden.LlamaForCausalLM(LlamaConfig(**sizes))
        missing = self._target.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
        own = student.head.config
        shape = {
            "hidden_size": own.hidden_size,
            "intermediate_size": own.intermediate_size,
            "num_attention_heads": own.num_heads,
            "num_key_value_heads": own.num_kv_heads,
            "head_dim": own.head_dim,
            "rms_norm_eps": own.rms_norm_eps,
            "max_position_embeddings": own.max_position_embeddings,
            "vocab_size": own.vocab_size,
            "rope_parameters": {"rope_type": "default", "rope_theta": own.rope["theta"]},
        }
        self._head = golden.LlamaForCausalLMEagle3(
            LlamaConfig(
                **shape,
                num_hidden_layers=1,
                draft_vocab_size=own.draft_vocab_size,
                pretraining_tp=1,
                pad_token_id=None,
            )
        )
        stored = split_weights(dict(tree_flatten(student.head.parameters())), own)
        named = {name.replace(OURS, THEIRS): as_torch(w) for name, w in stored.items()}
        left = self._head.load_state_dict(named, strict=False)
        assert not left.unexpected_keys
        assert set(left.missing_keys) <= {"embed_tokens.weight", "t2d", "d2t"}
        ids = torch.from_numpy(np.array(student.ids).astype(np.int64))
        self._head.t2d.fill_(False)[ids] = True
        self._head.d2t.copy_(ids - torch.arange(len(ids)))
        self._head.embed_tokens.weight.data.copy_(self._target.model.embed_tokens.weight)
        self._head.embed_tokens.weight.requires_grad_(False)
        self._taps = student.taps
        self._decay = settings.step_decay
        self._model = golden.eagle3.OnlineEagle3Model(
            self._head, settings.ttt_steps, attention_backend="sdpa"
        )
        self._optimizer = BF16Optimizer(
            self._head,
            settings.learning_rate,
            max_grad_norm=settings.max_grad_norm,
        )
        for group in self._optimizer.optimizer.param_groups:
            group["betas"] = BETAS

    def step(self, batch: TokenBatch, rate: float) -> np.ndarray:
        """Learn from a batch; return its losses (T,)."""
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = rate
        tokens = torch.from_numpy(batch.tokens.astype(np.int64))
        counts = torch.from_numpy(batch.counts)
        features, logits = golden.target_states(self._target, tokens, self._taps)
        losses = self._model(
            input_ids=golden.padding(tokens, left=False),
            attention_mask=torch.ones_like(tokens),  # padding comes last, and never counts
            target=golden.padding(logits, left=False),
            loss_mask=counts.long()[..., None],
            hidden_states=features,
        )[0]
        sum(self._decay**step * loss for step, loss in enumerate(losses)).backward()
        self._optimizer.step()
        return torch.stack(losses).detach().numpy()

    def show(self, student: Student) -> None:
        """Give the student the weights that PyTorch has learnt."""
        config = student.head.config
        weights = {
            name.replace(THEIRS, OURS): mx.array(weight.detach().numpy())
            for name, weight in self._head.named_parameters()
            if weight.requires_grad
        }
        fused = fuse_weights(weights, config.num_layers, config)
        student.head.load_weights(list(fused.items()), strict=False)


def compare(settings: TrainSettings, report=lambda line: None) -> Comparison:
    """Train in both ways with these settings; ``report`` is called with a line for each step."""
    settings = filled(settings, "eagle3")
    torch.set_num_threads(1)
    mx.random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    model, tokenizer, config = load_target(settings.model)
    rows = read_data(settings.data)
    if settings.regenerate:
        answers = Path(settings.output) / "answers"
        rows = regenerate(rows, answers, model, tokenizer, settings)
    examples = read_examples(rows, tokenizer, config["vocab_size"], settings.max_seq_length)
    given = None if settings.init is None else open_given(settings.init, settings.model)
    student, given = begin(settings, given, model, config, examples)
    recipe = TRAINED[settings.kind].recipe(settings, student, model, given)

    def evaluation() -> Evaluation:
        return evaluate(recipe, examples.valid, settings.batch_size)

    before = evaluation()
    other = PyTorchTrainer(model, config, student, settings)
    step = TrainStep(recipe)
    order = BatchOrder([len(x.tokens) for x in examples.train], settings.batch_size, settings.seed)
    losses = []
    seconds = []
    for number in range(settings.iters):
        batch = make_batch(examples.train, order.batch(number))
        begun = time.perf_counter()
        features, targets = recipe.teach(batch, 0)
        rate = learning_rate(number, settings.iters, settings.learning_rate, settings.warmup)
        ours = np.array(step(mx.array(batch.tokens), features, targets, rate, 1)[0])
        between = time.perf_counter()
        theirs = other.step(batch, rate)
        losses.append((ours, theirs))
        seconds.append((between - begun, time.perf_counter() - between))
        report(
            f"{number + 1}: loss {ours.sum():.5f}, {theirs.sum():.5f}; "
            f"seconds {seconds[-1][0]:.2f}, {seconds[-1][1]:.2f}"
        )
    after = evaluation()
    other.show(student)
    return Comparison(
        np.moveaxis(np.array(losses), 1, 0), np.array(seconds).T, before, after, evaluation()
    )


def tiny_settings(folder: Path, **changes: Any) -> TrainSettings:
    """Settings to learn a tiny target's greedy answers by heart, which says nothing in general."""
    target = write_target(folder / "target")
    rows = chats(4)
    data = write_data(folder / "data", train=rows, valid=rows)
    options = {
        "iters": 60,
        "batch_size": 4,
        "learning_rate": 6e-3,
        "warmup": 0.1,
        "ttt_steps": 4,
        "draft_vocab_size": 200,
        "regenerate": True,
        "answer_temps": (0.0,),
        "answer_tokens": 32,
    }
    return TrainSettings(str(target), str(data), str(folder / "out"), **options | changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "data", "init"):
        parser.add_argument(f"--{name}")
    for name, default in (("iters", 60), ("batch-size", 4), ("ttt-steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--max-seq-length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    args = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        model = args.pop("model")
        data = args.pop("data")
        if model is None:
            settings = tiny_settings(Path(folder), **args)
        else:
            settings = TrainSettings(model, data, folder, warmup=0.1, **args)
        found = compare(settings, lambda line: print(line, flush=True))
    ours, theirs = found.losses.sum(axis=-1)
    print(f"losses differ by at most {np.abs(ours / theirs - 1).max():.1e} of themselves")
    print(f"mlx_eagle is {found.speed:.2f} times as fast, by the median of pairs of steps")
    for name in ("before", "ours", "theirs"):
        evaluation = getattr(found, name)
        lengths = " ".join(f"{length:.4f}" for length in evaluation.lengths)
        print(f"{name}: mean acceptance length {lengths} on {evaluation.num_sequences} texts")


if __name__ == "__main__":
    main()
