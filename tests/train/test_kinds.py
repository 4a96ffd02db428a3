"""Drafters of every kind: losses and gradients by hand, and runs that begin with one."""

from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from grids import thorough
from tolerances import tolerance
from trained_kinds import CASES, naive_chain_losses, recipe_of, some_batch
from training import chats, weights_of, write_data

import mlx_eagle
from mlx_eagle.drafters.kinds import KINDS
from mlx_eagle.train import train
from mlx_eagle.train.optimizer import TrainStep

BOUNDS = {"mtp": 2e-5, "assistant": 5e-5}
LOSSES = [
    ("mtp", {}, "kl"),
    ("mtp", {"loss": "ce"}, "text"),
    ("assistant", {}, "kl"),
    ("assistant", {"loss": "ce"}, "argmax"),
]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    made = CASES[request.param](tmp_path_factory.mktemp(request.param))
    made.kind = request.param
    return made


def learnt(recipe, batch, **options):
    """Losses and gradients of a batch, as a run has them."""
    step = TrainStep(recipe.student, recipe.settings.losses(), 0.5, 0.0, recipe)
    return step.gradients(mx.array(batch.tokens), *recipe.teach(batch, 0))


def by_hand(case, recipe, batch, loss):
    head = recipe.student.head
    weights = dict(tree_flatten(head.trainable_parameters()))

    def total(weights):
        head.update(tree_unflatten(list(weights.items())))
        losses = naive_chain_losses(case, head, batch, recipe.depth, loss)
        scale = recipe.settings.step_decay ** np.arange(recipe.depth)
        scale = scale / scale.sum() if case.kind == "mtp" else scale
        return sum(float(w) * x for w, x in zip(scale, losses, strict=True)), losses

    (_, losses), gradients = mx.value_and_grad(total)(weights)
    mx.eval(losses, gradients)
    head.update(tree_unflatten(list(weights.items())))
    return losses, gradients


@pytest.mark.parametrize("checkpoint", thorough([False, True], False))
@pytest.mark.parametrize("each", thorough(LOSSES, *LOSSES[::2]))
def test_losses_and_gradients_are_those_by_hand(each, checkpoint, tmp_path):
    kind, options, loss = each
    case = CASES[kind](tmp_path)
    case.kind = kind
    recipe = recipe_of(case, kind, grad_checkpoint=checkpoint, **options)
    batch = some_batch()
    losses, gradients = learnt(recipe, batch)
    expected, theirs = by_hand(case, recipe, batch, loss)
    bound = max(BOUNDS[kind], tolerance())
    np.testing.assert_allclose(np.array(losses), np.array(mx.stack(expected)), rtol=bound)
    assert gradients.keys() == theirs.keys() and len(theirs) > 8
    largest = max(float(mx.abs(x).max()) for x in theirs.values())
    for name, gradient in theirs.items():
        assert float(mx.abs(gradient).max()) > 0, name
        np.testing.assert_allclose(
            np.array(gradients[name]), np.array(gradient), atol=bound * largest, err_msg=name
        )


RUN = {
    "batch_size": 4,
    "test_prompts": 2,
    "test_tokens": 16,
    "regenerate": True,
    "answer_temps": (0.0,),
    "answer_tokens": 16,
    "steps_per_eval": 1000,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rows = chats(8)
    return write_data(tmp_path_factory.mktemp("data"), train=rows, valid=rows[:4])


def same_arrays(left: Path, right: Path) -> set[str]:
    """Names of the tensors that differ between two files."""
    ours = mx.load(str(left / "model.safetensors"))
    theirs = mx.load(str(right / "model.safetensors"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and ours[name].shape == theirs[name].shape
    return {name for name in ours if not mx.array_equal(ours[name], theirs[name]).item()}


def test_no_steps_change_nothing(case, data, tmp_path):
    train(
        str(case.target), str(data), str(tmp_path / "out"), init=str(case.given), iters=0,
        **{**RUN, "test_prompts": 0, "regenerate": False, "val_batches": 0},
    )  # fmt: skip
    assert same_arrays(tmp_path / "out" / "published", case.given) == set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["full", "lora"])
def test_stopped_and_gone_on_with_is_the_same(case, data, tmp_path, how):
    run = {**RUN, "save_every": 2, "init": str(case.given), "fine_tune_type": how}
    run |= {"test_prompts": 0, "learning_rate": 1e-3, "regenerate": False, "val_batches": 0}
    train(str(case.target), str(data), str(tmp_path / "whole"), iters=4, **run)
    half = tmp_path / "half"
    train(str(case.target), str(data), str(half), iters=4, **run)
    for path in sorted((half / "checkpoints").iterdir())[1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    for file in half.glob("*.safetensors"):
        file.unlink()
    train(str(case.target), str(data), str(half), iters=4, resume=True, **run)
    resumed = weights_of(half)
    for name, array in weights_of(tmp_path / "whole").items():
        assert np.array_equal(array, resumed[name]), name
    changed = same_arrays(tmp_path / "whole" / "published", case.given)
    assert changed and not any("embed_tokens" in name for name in changed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["full", "lora"])
def test_a_drafter_learns_and_texts_stay_the_targets(case, data, tmp_path, how, capsys):
    run = {**RUN, "test_prompts": 4, "fine_tune_type": how, "learning_rate": 5e-3}
    out = tmp_path / "out"
    report = train(
        str(case.target), str(data), str(out), init=str(case.given), iters=60, **run
    )
    said = capsys.readouterr().out
    assert "Mean acceptance length (tau) before and after" in said
    assert report.generated.lengths[-1] > report.before.lengths[-1] + 0.3
    # Teacher-forced figures are those of greedy decoding of the same texts.
    model, tokenizer = mlx_lm.load(str(case.target))
    drafter = mlx_eagle.load_drafter(out, model)
    for prompt in ("say 1", "dog"):
        plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)
        drafted = mlx_eagle.generate(model, tokenizer, prompt, max_tokens=20, draft_model=drafter)
        assert drafted == plain
    # What was published says the same when it is converted.
    again = mlx_eagle.open_drafter(str(out / "published"), model, tokenizer)
    mine = dict(tree_flatten(drafter.head.parameters()))
    for name, array in tree_flatten(again.head.parameters()):
        assert mx.allclose(array, mine[name], atol=1e-6).item(), name


def test_kinds_that_are_trained_have_a_title():
    from mlx_eagle.train.kinds import TRAINED

    assert set(TRAINED) <= set(KINDS)
