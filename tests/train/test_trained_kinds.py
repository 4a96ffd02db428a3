"""Drafters of every kind: losses and gradients by hand, and runs that begin with one."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from grids import thorough
from helpers import SIZES
from mlx.utils import tree_flatten, tree_unflatten
from tolerances import tolerance
from trained_kinds import (
    BLOCKS,
    CASES,
    block_loss_by_hand,
    naive_chain_losses,
    recipe_of,
    some_batch,
)
from training import chats, weights_of, write_data, write_target

import mlx_eagle
from mlx_eagle.draft_models import known_drafter
from mlx_eagle.drafters.kinds import KINDS
from mlx_eagle.drafters.pairs import pairs_for
from mlx_eagle.system.cli_values import flag_of
from mlx_eagle.train import block, teacher, train
from mlx_eagle.train.given import open_given
from mlx_eagle.train.kinds import MADE_OF, TRAINED
from mlx_eagle.train.optimizer import TrainStep
from mlx_eagle.train.settings import TrainSettings
from mlx_eagle.train.student import fresh_block, write_fresh

BOUND = {"assistant": 5e-5}  # of all others 2e-5
MORE = {
    "mtp": ({"train_experts": True}, {"num_experts": 4}, "switch_mlp"),
    "mtp, fused": ({"train_experts": True}, {"num_experts": 4}, "switch_mlp"),
    "assistant": ({"train_embeddings": True}, {}, "embed_tokens"),
}
LOSSES = [
    ("mtp", {}, {}),
    ("assistant", {}, {}),
    ("dflash", {}, {}),
    ("dspark", {}, {"markov_kind": "rnn"}),
    ("dflash2", {}, {"top_k": 100}),  # labels among them, and others
    ("mtp", {"loss": "ce=.1,tv=.6,l1=.2"}, {}),
    ("mtp", {"loss": "ce"}, {}),
    ("assistant", {"loss": "ce"}, {}),
    ("dflash", {"position_weights": "decay"}, {}),
    ("dspark", {}, {"markov_kind": "gated", "confidence": "state"}),
    ("dspark", {"loss": "kl"}, {"confidence": "none"}),
    ("dspark", {"gamma": 2.0, "loss_divisor": "texts"}, {"reduced": 128}),
    ("dspark", {}, {"vocab_size": 262, "draft_vocab_size": 262, "lm_head_source": "file"}),
    ("dflash2", {"position_weights": "decay", "labels": "text"}, {"top_k": 3, "kernel_size": 3}),
]
QUICK = LOSSES[:6]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    made = CASES[request.param](tmp_path_factory.mktemp(request.param))
    made.kind = request.param
    return made


def learnt(recipe, batch, **options):
    """Losses and gradients of a batch, as a run has them."""
    step = TrainStep(recipe)
    return step.gradients(mx.array(batch.tokens), *recipe.teach(batch, 0))


def by_hand(case, recipe, batch):
    head = recipe.student.head
    weights = dict(tree_flatten(head.trainable_parameters()))
    settings = recipe.settings

    def total(weights):
        head.update(tree_unflatten(list(weights.items())))
        if case.kind in BLOCKS:
            found = block_loss_by_hand(case, case.kind, recipe, batch)
            return found, [found]
        loss = "mix" if "=" in settings.loss else settings.loss
        loss = settings.labels if loss == "ce" else loss
        losses = naive_chain_losses(case, head, batch, recipe.depth, loss)
        scale = settings.step_decay ** np.arange(recipe.depth)
        scale = scale / scale.sum() if case.kind == "mtp" else scale
        return sum(float(w) * x for w, x in zip(scale, losses, strict=True)), losses

    (_, losses), gradients = mx.value_and_grad(total)(weights)
    mx.eval(losses, gradients)
    head.update(tree_unflatten(list(weights.items())))
    return losses, gradients


@pytest.mark.parametrize("checkpoint", thorough([False, True], False))
@pytest.mark.parametrize("each", thorough(LOSSES, *QUICK))
def test_losses_and_gradients_are_those_by_hand(each, checkpoint, tmp_path, monkeypatch):
    kind, options, changes = each
    case = CASES[kind](tmp_path, **changes)
    case.kind = kind
    options = options | ({"anchors": 2} if kind in BLOCKS else {})
    recipe = recipe_of(case, kind, grad_checkpoint=checkpoint, **options)
    if checkpoint or kind == "dflash":  # two blocks are compared at once
        monkeypatch.setattr(block, "chunk_rows", lambda width: 2 * recipe.depth)
    batch = some_batch()
    losses, gradients = learnt(recipe, batch)
    expected, theirs = by_hand(case, recipe, batch)
    bound = max(BOUND.get(kind, 2e-5), tolerance())
    np.testing.assert_allclose(np.array(losses), np.array(mx.stack(expected)), rtol=bound)
    assert gradients.keys() == theirs.keys() and len(theirs) > 8
    largest = max(float(mx.abs(x).max()) for x in theirs.values())
    for name, gradient in theirs.items():
        assert float(mx.abs(gradient).max()) > 0, name
        np.testing.assert_allclose(
            np.array(gradients[name]), np.array(gradient), atol=bound * largest, err_msg=name
        )


def fuse_experts(folder: Path) -> None:
    """Store the experts of a published layer in two matrices, as Qwen3.5's are."""
    arrays = mx.load(str(folder / "model.safetensors"))
    start = "layers.0.mlp.experts."
    parts = {
        name: mx.stack([arrays.pop(f"{start}{i}.{name}.weight") for i in range(4)])
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    arrays[f"{start}gate_up_proj"] = mx.concatenate([parts["gate_proj"], parts["up_proj"]], -2)
    arrays[f"{start}down_proj"] = parts["down_proj"]
    mx.eval(arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)


@pytest.mark.parametrize("what", thorough(MORE, "mtp, fused", "assistant"))
def test_more_is_trained_where_it_is_asked_for(what, data, tmp_path):
    """Gradients as by hand, of experts and of the table, and all of them come out as published."""
    options, changes, part = MORE[what]
    kind = what.split(",")[0]
    case = CASES[kind](tmp_path, **changes)
    if kind != what:
        fuse_experts(case.given)
    case.kind = kind
    recipe = recipe_of(case, kind, **options)
    batch = some_batch()
    _, gradients = learnt(recipe, batch)
    _, theirs = by_hand(case, recipe, batch)
    assert gradients.keys() == theirs.keys() and any(part in name for name in theirs)
    largest = max(float(mx.abs(x).max()) for x in theirs.values())
    bound = max(BOUND.get(kind, 2e-5), tolerance()) * largest
    for name, gradient in theirs.items():
        ours = np.array(gradients[name])
        np.testing.assert_allclose(ours, np.array(gradient), atol=bound, err_msg=name)
    run = {**NOTHING, **options, "iters": 1, "learning_rate": 0.1, "init": str(case.given)}
    out = tmp_path / "out"
    train(str(case.target), str(data), str(out), **run)
    model, tokenizer = mlx_lm.load(str(case.target))
    drafter = mlx_eagle.load_drafter(out, model)
    published = open_given(str(out / "published"), str(case.target))
    again = published.load(model, None)
    given = open_given(str(case.given), str(case.target)).load(model, mx.float32)
    before = dict(tree_flatten(given.head.parameters()))
    mine = dict(tree_flatten(drafter.head.parameters()))
    for name, array in tree_flatten(again.head.parameters()):
        assert mx.allclose(array, mine[name], atol=1e-6).item(), name
        assert (name in gradients) == (not mx.array_equal(array, before[name]).item()), name
    plain = mlx_lm.generate(model, tokenizer, "say", max_tokens=8)
    assert mlx_eagle.generate(model, tokenizer, "say", max_tokens=8, draft_model=drafter) == plain


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
def test_a_drafter_learns_and_texts_stay_the_targets(case, data, tmp_path, capsys):
    how = "lora" if case.kind == "dflash" else "full"
    run = {**RUN, "test_prompts": 4, "fine_tune_type": how, "learning_rate": 5e-3}
    out = tmp_path / "out"
    report = train(str(case.target), str(data), str(out), init=str(case.given), iters=60, **run)
    said = capsys.readouterr().out
    assert "Mean acceptance length (tau) before and after" in said
    assert report.generated.lengths[-1] > report.before.lengths[-1] + 0.3
    # Teacher-forced figures are those of greedy decoding of the same texts, but that a shorter
    # draft of a block is made of fewer masks.
    bound = 0.05 if case.kind in BLOCKS else 1e-6
    assert report.evaluation.lengths == pytest.approx(report.generated.lengths, rel=bound)
    model, tokenizer = mlx_lm.load(str(case.target))
    drafter = mlx_eagle.load_drafter(out, model)
    for prompt in ("say 1", "dog"):
        plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)
        drafted = mlx_eagle.generate(model, tokenizer, prompt, max_tokens=20, draft_model=drafter)
        assert drafted == plain
    # What was published says the same when it is converted.
    published = open_given(str(out / "published"), str(case.target))
    again = published.load(model, None)
    mine = dict(tree_flatten(drafter.head.parameters()))
    for name, array in tree_flatten(again.head.parameters()):
        assert mx.allclose(array, mine[name], atol=1e-6).item(), name


REFUSED = {
    "fresh": ({"kind": "mtp"}, "no fresh MTP layer is trained"),
    "another kind": ({"kind": "dflash", "init": "mtp"}, "--kind is dflash, and .* an MTP layer"),
    "not trained": ({"kind": "medusa"}, "--kind is medusa, and only eagle3, .* are trained"),
    "weights": ({"init": "dspark", "position_weights": "dpace"}, "dpace, which goes by cross-en"),
    "steps": ({"init": "dflash2", "ttt_steps": 3}, "--ttt-steps is not for a DFlash2 head"),
    "reduced": ({"init": "dflash2", "draft_vocab_size": 64}, "--draft-vocab-size is not for a DF"),
    "entropy": (
        {"init": "dspark", "loss": "lk-alpha"},
        "--loss is lk-alpha, and a DSpark head is",
    ),
    "float16": ({"init": "dflash2", "dtype": "float16"}, "give --dtype bfloat16 or float32"),
    "anchors": ({"init": "mtp", "anchors": 4}, "--anchors is not for an MTP layer"),
    "vocabulary": ({"init": "mtp", "draft_vocab_size": 64}, "--draft-vocab-size is not for"),
    "loss": ({"init": "mtp", "loss": "lk-alpha"}, "--loss is lk-alpha, and an MTP layer is"),
    "mix": ({"init": "mtp", "loss": "ce=.5,lk=1"}, "--loss is ce=.5,lk=1: give one of"),
    "twice": ({"init": "mtp", "loss": "ce=.1,ce=.2"}, "--loss is ce=.1,ce=.2: give one of"),
    "no decay": ({"init": "dflash", "gamma": 4.0}, "--gamma is about --position-weights decay"),
    "no lora": ({"init": "mtp", "lora_rank": 4}, "--lora-rank is about --fine-tune-type lora"),
    "no scale": ({"init": "mtp", "lora_scale": 0.0}, "--lora-scale is 0.0: give more than 0"),
    "no steps": ({"init": "mtp", "ttt_steps": 0}, "--ttt-steps is 0: give 1 or more"),
    "evaluated": ({"init": "mtp", "val_batches": -2}, "--val-batches is -2: give -1 or more"),
    "share": ({"init": "mtp", "loss": "ce=-1"}, "--loss is ce=-1: give one of"),
    "mix of blocks": ({"init": "dflash", "loss": "ce=.1,tv=.9"}, "a DFlash head is trained with"),
    "lora": ({"fine_tune_type": "lora"}, "--fine-tune-type is not for an EAGLE head"),
    "another target": ({"init": "assistant"}, "reads keys and values that only Gemma 4 has"),
    "experts": ({"init": "mtp", "train_experts": True}, "the experts of .* are none"),
    "table": ({"init": "mtp", "train_embeddings": True}, "--train-embeddings is not for an MTP"),
    "matrices": (
        {"init": "mtp", "train_experts": True, "fine_tune_type": "lora"},
        "--train-experts trains whole matrices",
    ),
    "bits": ({"init": "mtp", "quantize": True, "q_bits": 7}, "cannot quantize to 7 bits"),
    "block": ({"init": "dflash", "block_size": 4}, "--block-size is of fresh drafters"),
    "no words": (
        {"init": "dflash", "max_seq_length": 8},
        "no sequence with 2 tokens of an",
    ),
    "unknown": ({"init": "auto"}, "no drafter is known that could be trained for"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    return {kind: make(folder / kind) for kind, make in CASES.items()}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_trained_costs_one_sentence(what, refused, data, tmp_path):
    options, sentence = REFUSED[what]
    kind = options.get("init", "mtp")
    target = refused[kind if kind in BLOCKS else "mtp"].target
    init = refused[kind].given if kind in refused and "init" in options else options.get("init")
    run = {**options, "init": None if init is None else str(init), "iters": 1, "batch_size": 2}
    with pytest.raises(ValueError, match=sentence) as found:
        train(str(target), str(data), str(tmp_path / "out"), **run)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()


NOTHING = {**RUN, "iters": 0, "test_prompts": 0, "regenerate": False, "val_batches": 0}


def test_the_targets_own_layers(refused, data, tmp_path):
    """``--init mtp`` are the layers in the target's own checkpoint, and nothing else of it."""
    target = shutil.copytree(refused["mtp"].target, tmp_path / "target")
    (target / "model.safetensors.index.json").unlink()  # which does not name the layers
    own = mx.load(str(refused["mtp"].given / "model.safetensors"))
    own = {f"mtp.{name}": array.astype(mx.bfloat16) for name, array in own.items()}
    mx.save_safetensors(str(target / "mtp.safetensors"), own)
    train(str(target), str(data), str(tmp_path / "out"), init="mtp", **NOTHING)
    found = mx.load(str(tmp_path / "out" / "published" / "model.safetensors"))
    assert found.keys() == own.keys()
    for name, array in own.items():
        assert found[name].dtype == mx.bfloat16 and mx.array_equal(found[name], array), name


def test_mtp_layers_need_the_states_of_their_target(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "scale_and_cap", lambda *args: None)
    case = CASES["mtp"](tmp_path)
    with pytest.raises(ValueError, match="more than a product"):
        recipe_of(case, "mtp")


@pytest.mark.parametrize("kind", CASES)
def test_the_result_can_be_quantized_and_adapted_again(kind, refused, data, tmp_path):
    given = refused[kind]
    run = {**NOTHING, "quantize": True, "q_bits": 4, "q_group_size": 32}
    train(str(given.target), str(data), str(tmp_path / "small"), init=str(given.given), **run)
    model, tokenizer = mlx_lm.load(str(given.target))
    drafter = mlx_eagle.load_drafter(tmp_path / "small", model)
    plain = mlx_lm.generate(model, tokenizer, "say", max_tokens=8)
    assert mlx_eagle.generate(model, tokenizer, "say", max_tokens=8, draft_model=drafter) == plain
    again = {**NOTHING, "iters": 1, "init": str(tmp_path / "small"), "fine_tune_type": "lora"}
    train(str(given.target), str(data), str(tmp_path / "again"), **again)
    drafter = mlx_eagle.load_drafter(tmp_path / "again", model)
    assert mlx_eagle.generate(model, tokenizer, "say", max_tokens=8, draft_model=drafter) == plain
    assert not (tmp_path / "again" / "published").exists()  # it came converted
    adapters = mx.load(str(tmp_path / "again" / "adapters.safetensors"))
    assert adapters and all(name.endswith(("lora_a", "lora_b")) for name in adapters)


def test_auto_finds_what_is_known_of_the_base_of_a_fine_tune(tmp_path):
    target = tmp_path / "my-fine-tune"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 36}')
    (target / "README.md").write_text("---\nbase_model: Qwen/Qwen3-8B\n---\n")
    known = {pair.head: pair.kind for pair in pairs_for("Qwen/Qwen3-8B")}
    assert known[known_drafter(str(target), TRAINED)] in TRAINED
    only = {"dflash": TRAINED["dflash"]}
    assert known[known_drafter(str(target), only)] == "dflash"


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_fresh_head_of_blocks_learns(kind, refused, data, tmp_path):
    """It keeps the sizes of its target, and comes out as it would be published."""
    run = {**RUN, "iters": 1, "test_prompts": 0, "regenerate": False, "val_batches": 0}
    out = tmp_path / "out"
    options = {"kind": kind, "block_size": 4, "mask_token_id": 3, "num_layers": 2}
    train(str(refused[kind].target), str(data), str(out), **options, **run)
    model, tokenizer = mlx_lm.load(str(refused[kind].target))
    drafter = mlx_eagle.load_drafter(out, model)
    plain = mlx_lm.generate(model, tokenizer, "say", max_tokens=8)
    assert mlx_eagle.generate(model, tokenizer, "say", max_tokens=8, draft_model=drafter) == plain
    assert drafter.longest_draft == (4 if kind == "dspark" else 3)
    config = json.loads((out / "published" / "config.json").read_text())
    assert config.get("dflash_config", config)["mask_token_id"] == 3 and config["block_size"] == 4
    again = open_given(str(out / "published"), str(refused[kind].target))
    assert again.kind == kind
    if kind == "dflash2":  # nothing is mixed before it learns
        new = tmp_path / "new"
        head = fresh_block(TrainSettings("", "", "", **options), model, SIZES)
        write_fresh(new, kind, head, seed=0)
        convolution = mx.load(str(new / "model.safetensors"))
        kernel = convolution["layers.1.mlp_conv.base_kernel"]
        assert kernel.shape == (2, 2, 64) and kernel[:, 0].min() == 1 and kernel[:, 1].max() == 0
        assert not convolution["layers.1.mlp_conv.kernel_projection.weight"].any()


def test_kinds_that_are_trained_are_kinds():
    assert {MADE_OF.get(name, name) for name in TRAINED} <= set(KINDS)
    assert set(CASES) | {"eagle3", "peagle"} == set(TRAINED)  # each is tested


def test_the_table_of_the_page_is_made_of_the_kinds():
    """A row for each setting that has a default by kind, a column for each kind."""
    page = (Path(__file__).parents[2] / "docs" / "pages" / "training.md").read_text()
    rows = [
        line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `--")
    ]
    shown = {row[0].strip("`"): row[1:] for row in rows if len(row) == 1 + len(TRAINED)}
    names = dict.fromkeys(name for row in TRAINED.values() for name in row.defaults)
    for name in names:
        expected = [str(row.defaults.get(name, "-")) for row in TRAINED.values()]
        assert shown[flag_of(name)] == expected, name


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
def test_no_token_for_masks_is_told_before_answers_are_made(kind, data, tmp_path):
    target = write_target(tmp_path / "target")
    tokens = len(mlx_lm.load(str(target))[1].get_vocab())
    run = {**RUN, "iters": 1, "kind": kind, "mask_token_id": 10 * tokens}
    with pytest.raises(ValueError, match=r"masked slots need one .* --mask-token-id"):
        train(str(target), str(data), str(tmp_path / "out"), **run)
    assert not (tmp_path / "out" / "answers").exists()
