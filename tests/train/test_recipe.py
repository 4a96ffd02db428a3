"""Recipe: losses and gradients are SpecForge's, and steps are those of decoding."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from golden import frozen
from grids import thorough
from heads import NUM_SLOTS, VARIANTS, Runner, random_head
from mlx.optimizers import AdamW, Muon
from mlx_lm.models import llama
from tolerances import tolerance

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.head_weights import fuse_weights, split_weights
from mlx_eagle.drafters.target_parts import find_embedding
from mlx_eagle.target_model.target import Target
from mlx_eagle.train import chunks
from mlx_eagle.train.batches import TokenBatch
from mlx_eagle.train.data import Examples
from mlx_eagle.train.eagle3 import Eagle3Recipe
from mlx_eagle.train.kinds import filled
from mlx_eagle.train.optimizer import BETAS, TrainStep, learning_rate
from mlx_eagle.train.settings import TrainSettings
from mlx_eagle.train.student import Student
from mlx_eagle.train.teacher import Teacher
from mlx_eagle.train.unroll import unroll

NUM_STEPS = 5
TOLERANCE = tolerance()
TAPS = (1, 2, 4)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
}
LOSSES: dict[str, dict] = {
    "ce": {},
    "lk-alpha": {"loss": "lk-alpha"},
    "lk-lambda": {"loss": "lk-lambda", "kl_scale": 0.7, "kl_decay": 2.0},
    "fc-norm": {},
}


def read(path: Path) -> dict[str, mx.array]:
    """Read a safetensors file, with bfloat16 as float32."""
    arrays = mx.load(str(path))
    return {k: v.astype(mx.float32) if v.dtype == mx.bfloat16 else v for k, v in arrays.items()}


class Golden:
    """A frozen batch with its target, its head, and SpecForge's losses and gradients."""

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
        tokens = np.array(expected["tokens"])
        counts = np.array(expected["counts"])
        self.batch = TokenBatch(tokens.astype(np.int32), counts, tuple(range(len(tokens))))

    def recipe(self, num_steps: int = NUM_STEPS, **options) -> Eagle3Recipe:
        settings = TrainSettings("", "", "", ttt_steps=num_steps, **options)
        return Eagle3Recipe(filled(settings, "eagle3"), self.student, self.model, None)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_losses_and_gradients_are_specforges(name, checkpoint):
    golden = Golden(name)
    recipe = golden.recipe(grad_checkpoint=checkpoint, **LOSSES[name])
    features, targets = recipe.teach(golden.batch, 0)
    # Padding is left out: here it is zeros, there it is the target's features of padding.
    taps = features[..., : golden.features.shape[-1]]
    for ours, theirs, counts in zip(taps, golden.features, golden.batch.counts, strict=True):
        used = counts.nonzero()[0].max() + 2
        assert frozen.relative(np.array(ours[:used]), theirs[:used]) < TOLERANCE
    step = TrainStep(recipe)
    found_losses, gradients = step.gradients(mx.array(golden.batch.tokens), features, targets)
    assert frozen.relative(np.array(found_losses), golden.losses) < 10 * TOLERANCE
    found = split_weights(gradients, golden.student.head.config)
    assert found.keys() == golden.gradients.keys()
    for key, wanted in golden.gradients.items():
        assert np.abs(wanted).max() > 0
        assert frozen.relative(np.array(found[key]), wanted) < 10 * TOLERANCE, key


def test_muon_learns_the_matrices_between_states():
    """As mlx's own two optimizers do with the same gradients, one for each part of the head."""
    how = {"max_grad_norm": 1e9, "weight_decay": 0.1, "optimizer": "muon"}
    recipe = Golden("ce").recipe(**how)
    step = TrainStep(recipe)
    weights = dict(step.weights)
    matrices = {name for name, weight in weights.items() if weight.ndim == 2} - {"lm_head.weight"}
    assert "fc.weight" in matrices and "lm_head.weight" in weights
    theirs = {True: Muon(0.0, weight_decay=0.1), False: AdamW(0.0, list(BETAS), weight_decay=0.1)}
    theirs[False].bias_correction = True
    wanted = dict(weights)
    for number in range(3):
        mx.random.seed(number)
        gradients = {name: mx.random.normal(weight.shape) for name, weight in weights.items()}
        for is_muon, own in theirs.items():
            own.learning_rate = 0.01
            names = [name for name in weights if (name in matrices) == is_muon]
            parts = ({name: x[name] for name in names} for x in (gradients, wanted))
            wanted |= own.apply_gradients(*parts)
        step._learn(gradients, 0.01, 1)
    for name, weight in step.weights.items():
        assert frozen.relative(np.array(weight), np.array(wanted[name])) < 1e-5, name
        assert len(step.moments[name]) == (1 if name in matrices else 2)
    again = TrainStep(recipe)
    again.load(step.state)
    assert again.state.keys() == step.state.keys()


def in_small_chunks(monkeypatch) -> None:
    """Let attention and losses take four rows at a time."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "ROWS_ALIKE", 4)


@pytest.mark.parametrize("name", thorough(LOSSES, "lk-lambda"))
@pytest.mark.parametrize(
    "how", thorough(["in chunks", "checkpointed", "both", "kept in a file"], "both")
)
def test_with_less_memory_losses_and_gradients_are_the_same(name, how, tmp_path, monkeypatch):
    golden = Golden(name)
    recipe = golden.recipe(**LOSSES[name])
    step = TrainStep(recipe)
    tokens = mx.array(golden.batch.tokens)
    expected = step.gradients(tokens, *recipe.teach(golden.batch, 0))
    recipe = golden.recipe(grad_checkpoint=how in ("checkpointed", "both"), **LOSSES[name])
    if how in ("in chunks", "both"):
        in_small_chunks(monkeypatch)
    if how == "kept in a file":
        recipe.teacher.keep_in(str(tmp_path), Examples((), (), ()))
        recipe.teach(golden.batch, 0)
        assert len(list(tmp_path.rglob("*.safetensors"))) == len(golden.batch.numbers)
    found = TrainStep(recipe).gradients(tokens, *recipe.teach(golden.batch, 0))
    assert frozen.relative(np.array(found[0]), np.array(expected[0])) < 1e-5
    for key, wanted in expected[1].items():
        assert frozen.relative(np.array(found[1][key]), np.array(wanted)) < 1e-5, key


def test_eight_bits_are_nearly_the_same_and_a_third_of_the_size(tmp_path):
    golden = Golden("ce")
    made = []
    for bits in (None, 8):
        teacher = Teacher(golden.model, TAPS)
        teacher.keep_in(str(tmp_path / str(bits)), Examples((), (), ()), bits)
        teacher.read(golden.batch)
        made.append(teacher.read(golden.batch))
    sizes = []
    for bits in ("None", "8"):
        files = (tmp_path / bits).rglob("*.safetensors")
        sizes.append(sum(x.nbytes for file in files for x in mx.load(str(file)).values()))
    assert sizes[1] < 0.4 * sizes[0]
    assert 0 < frozen.relative(np.array(made[1]), np.array(made[0])) < 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "gemma4_text", "cohere2", "gpt2", "llama4_text"]
)
def test_logits_are_made_again_of_what_the_teacher_tells(name):
    """By a product, a scale and a cap, or else from the logits themselves."""
    model = build(name)
    ids = mx.array([3, 5, 8, 40])
    tokens = np.array([[4, 2, 9, 1, 7]])
    teacher = Teacher(model, (0, 1), ids)
    assert teacher.has_states == (name not in ("gpt2", "llama4_text"))
    features = teacher.features(tokens)
    final = teacher.final(features, mx.array([1, 3, 4]))
    wanted = np.array(model(mx.array(tokens))[0, [1, 3, 4]])
    assert frozen.relative(np.array(teacher.whole(final)), wanted) < 1e-5
    assert frozen.relative(np.array(teacher.output(final)), wanted[:, np.array(ids)]) < 1e-5
    taps = Target(model, (0, 1)).logits_at(mx.array(tokens), mx.array([0]))[1]
    assert mx.allclose(features[..., : -teacher.width], taps, atol=1e-5)


def test_some_choices_of_the_golden_target_cannot_be_drafted():
    golden = Golden("ce")
    _, targets = golden.recipe().teach(golden.batch, 0)
    assert 3 < targets.weights.sum().item() < golden.batch.counts.sum() - 3


@pytest.mark.parametrize("name", ["ce", "lk-alpha"])
def test_parts_of_a_batch_average_to_the_whole(name):
    golden = Golden(name)
    recipe = golden.recipe(**LOSSES[name])
    step = TrainStep(recipe)
    whole = golden.batch
    cut = (slice(i, i + 1) for i in range(3))
    parts = [TokenBatch(whole.tokens[own], whole.counts[own], (own.start,)) for own in cut]
    taught = [recipe.teach(part, 0) for part in parts]
    counts = sum(targets.counts for _, targets in taught) / 3
    total = None
    for part, (features, targets) in zip(parts, taught, strict=True):
        targets = targets._replace(counts=counts)
        _, gradients = step.gradients(mx.array(part.tokens), features, targets)
        total = gradients if total is None else {k: total[k] + v for k, v in gradients.items()}
    mean = {k: v / 3 for k, v in total.items()}
    found = split_weights(mean, golden.student.head.config)
    for key, wanted in golden.gradients.items():
        assert frozen.relative(np.array(found[key]), wanted) < 10 * TOLERANCE, key


@pytest.mark.parametrize("checkpoint", thorough([False, True], True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_j_is_the_jth_chained_draft(variant, checkpoint, monkeypatch):
    if checkpoint:
        in_small_chunks(monkeypatch)
    example = random_head(variant)
    runner = Runner(example)
    embeddings = runner.embed[mx.array(example.tokens)][None]
    features = mx.array(example.features)[None]
    steps = list(unroll(runner.head, embeddings, features, NUM_STEPS, checkpoint))
    for slot in (0, 2, NUM_SLOTS - NUM_STEPS - 1):
        decoding = Runner(example)
        states = decoding.extend(example.tokens[1 : slot + 2], example.features[: slot + 1])[-1:]
        for step in range(NUM_STEPS):
            if step:
                states = decoding.step([example.tokens[slot + 1 + step]], states)
            wanted = decoding.logits(states)[0]
            found = runner.logits(steps[step][0, slot : slot + 1])[0]
            assert frozen.relative(found, wanted) < TOLERANCE


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0) and 0 < rates[99] < 0.01
    assert rates[10:] == sorted(rates[10:], reverse=True)
