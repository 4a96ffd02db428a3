"""The recipe: what SpecForge computes, and what decoding does."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from golden import frozen
from heads import NUM_SLOTS, VARIANTS, Runner, random_head
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tolerances import tolerance

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.head_weights import fuse_weights, split_weights
from mlx_eagle.drafters.target_parts import find_embedding
from mlx_eagle.train.examples import TokenBatch
from mlx_eagle.train.losses import LossSettings, first_slot, is_compiled, unroll
from mlx_eagle.train.optimizer import TrainStep, learning_rate
from mlx_eagle.train.student import Student
from mlx_eagle.train.teacher import Teacher

NUM_STEPS = 5
TOLERANCE = tolerance()
TAPS = (1, 2, 4)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
}
LOSSES = {
    "ce": LossSettings(NUM_STEPS),
    "lk-alpha": LossSettings(NUM_STEPS, kind="lk-alpha"),
    "lk-lambda": LossSettings(NUM_STEPS, kind="lk-lambda", kl_scale=0.7, kl_decay=2.0),
    "fc-norm": LossSettings(NUM_STEPS),
}


def read(path: Path) -> dict[str, mx.array]:
    """A safetensors file; floats in float32."""
    arrays = mx.load(str(path))
    return {k: v.astype(mx.float32) if v.dtype == mx.bfloat16 else v for k, v in arrays.items()}


class Golden:
    """A frozen batch: target, head and what SpecForge computed."""

    def __init__(self, name: str):
        folder = frozen.FOLDER / f"training-{name}"
        args = llama.ModelArgs(
            model_type="llama",
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=False,
            **SIZES,
        )
        self.model = llama.Model(args)
        self.model.load_weights(list(read(folder / "target.safetensors").items()))
        tensors = read(folder / "head.safetensors")
        offsets = tensors.pop("d2t").astype(mx.int32)
        config = Eagle3Config(
            target_hidden_size=32,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            draft_vocab_size=40,
            aux_boundary_ids=TAPS,
            pre_fc_norm="per_feature" if name == "fc-norm" else "none",
            **SIZES,
        )
        head = Eagle3Head(config)
        weights = {
            key.replace("midlayer.", "layers.0."): value
            for key, value in tensors.items()
            if key not in ("t2d", "embed_tokens.weight")
        }
        head.load_weights(list(fuse_weights(weights, 1).items()))
        ids = offsets + mx.arange(40, dtype=mx.int32)
        embedding = find_embedding(self.model)[0]
        self.student = Student(head, embedding, TAPS, ids, mx.float32)
        expected = mx.load(str(folder / "training.safetensors"))
        self.losses = np.array(expected["losses"])
        self.features = np.array(expected["features"])
        self.gradients = {
            key.removeprefix("gradient.").replace("midlayer.", "layers.0."): np.array(value)
            for key, value in expected.items()
            if key.startswith("gradient.")
        }
        tokens, counts = np.array(expected["tokens"]), np.array(expected["counts"])
        size, length = tokens.shape
        self.batch = TokenBatch(tokens.astype(np.int32), counts, length, size, tuple(range(size)))

    def rows(self, *numbers: int, padding: int = 0) -> TokenBatch:
        """Some of the batch's texts, as one of several ranks has them; more padding."""
        whole, chosen = self.batch, list(numbers)
        tokens = np.pad(whole.tokens[chosen], [(0, 0), (0, padding)])
        counts = np.pad(whole.counts[chosen], [(0, 0), (0, padding)])
        return TokenBatch(tokens, counts, whole.longest, whole.size, numbers)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_losses_and_gradients_are_specforges(name, checkpoint):
    golden = Golden(name)
    settings = LossSettings(**{**vars(LOSSES[name]), "checkpoint": checkpoint})
    teacher = Teacher(golden.model, TAPS, golden.student.ids)
    features, targets = teacher.teach(golden.batch, NUM_STEPS)
    # Padding is cut off: it is zeros here and whatever the target makes of it there.
    for ours, theirs, counts in zip(features, golden.features, golden.batch.counts, strict=True):
        used = counts.nonzero()[0].max() + 2
        assert frozen.relative(np.array(ours[:used]), theirs[:used]) < TOLERANCE
    step = TrainStep(golden.student, settings, max_grad_norm=0.5)
    losses, gradients = step.gradients(mx.array(golden.batch.tokens), features, targets)
    assert frozen.relative(np.array(losses), golden.losses) < 10 * TOLERANCE
    found = split_weights(dict(tree_flatten(gradients)), golden.student.head.config)
    assert found.keys() == golden.gradients.keys()
    for key, wanted in golden.gradients.items():
        assert np.abs(wanted).max() > 0
        assert frozen.relative(np.array(found[key]), wanted) < 10 * TOLERANCE, key


@pytest.mark.parametrize("checkpoint", [False, True])
def test_chains_that_nothing_counts_of_are_not_computed(checkpoint):
    """A step's loss is that of a longer test, where fewer slots before answers are left out."""
    golden = Golden("ce")
    features, targets = Teacher(golden.model, TAPS, golden.student.ids).teach(golden.batch, 2)
    length = golden.batch.tokens.shape[1]
    if not is_compiled():
        assert first_slot(targets, length, 2) > first_slot(targets, length, NUM_STEPS)
    step = TrainStep(golden.student, LossSettings(2, checkpoint=checkpoint), max_grad_norm=0.5)
    losses, _ = step.gradients(mx.array(golden.batch.tokens), features, targets)
    assert frozen.relative(np.array(losses), golden.losses[:2]) < 10 * TOLERANCE


def test_some_choices_of_the_golden_target_cannot_be_drafted():
    golden = Golden("ce")
    _, targets = Teacher(golden.model, TAPS, golden.student.ids).teach(golden.batch, NUM_STEPS)
    assert 3 < targets.weights.sum().item() < golden.batch.counts.sum() - 3


@pytest.mark.parametrize("name", ["ce", "lk-alpha"])
def test_parts_of_a_batch_average_to_the_whole(name):
    golden = Golden(name)
    teacher = Teacher(golden.model, TAPS, golden.student.ids)
    step = TrainStep(golden.student, LOSSES[name], max_grad_norm=0.5)
    parts = [golden.rows(0), golden.rows(1, padding=3), golden.rows(2, padding=47)]
    taught = [teacher.teach(part, NUM_STEPS, num_ranks=3) for part in parts]
    counts = sum(targets.counts for _, targets in taught) / 3
    total = None
    for part, (features, targets) in zip(parts, taught, strict=True):
        targets = type(targets)(*targets.arrays()[:-1], counts)
        _, gradients = step.gradients(mx.array(part.tokens), features, targets)
        flat = dict(tree_flatten(gradients))
        total = flat if total is None else {k: total[k] + v for k, v in flat.items()}
    mean = {k: v / 3 for k, v in total.items()}
    found = split_weights(mean, golden.student.head.config)
    for key, wanted in golden.gradients.items():
        assert frozen.relative(np.array(found[key]), wanted) < 10 * TOLERANCE, key


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_j_is_the_jth_chained_draft(variant, checkpoint):
    example = random_head(variant)
    runner = Runner(example)
    embeddings = runner.embed[mx.array(example.tokens)][None]
    features = mx.array(example.features)[None]
    first = 0 if checkpoint else 2
    steps = list(unroll(runner.head, embeddings, features, NUM_STEPS, checkpoint, first))
    for slot in (first, first + 2, NUM_SLOTS - NUM_STEPS - 1):
        decoding = Runner(example)
        states = decoding.extend(example.tokens[1 : slot + 2], example.features[: slot + 1])[-1:]
        for step in range(NUM_STEPS):
            if step:
                states = decoding.step([example.tokens[slot + 1 + step]], states)
            wanted = decoding.logits(states)[0]
            found = runner.logits(steps[step][0, slot - first : slot - first + 1])[0]
            assert frozen.relative(found, wanted) < TOLERANCE


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0) and 0 < rates[99] < 0.01
    assert rates[10:] == sorted(rates[10:], reverse=True)
