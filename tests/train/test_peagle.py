"""P-EAGLE heads: the loss by hand, what is dropped, and whole runs, fresh and adapted."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from golden import frozen
from grids import thorough
from helpers import SIZES, tiny_llama
from mlx.utils import tree_flatten, tree_unflatten
from tolerances import tolerance
from training import VOCAB, chats, weights_of, write_data, write_model, write_target

import mlx_eagle
from mlx_eagle.convert import convert
from mlx_eagle.drafters.eagle3 import ParallelDrafter
from mlx_eagle.target_model.target import Target
from mlx_eagle.train import chunks, train
from mlx_eagle.train.batches import TokenBatch
from mlx_eagle.train.data import Example, Examples
from mlx_eagle.train.kinds import filled
from mlx_eagle.train.optimizer import TrainStep
from mlx_eagle.train.peagle import PEagleRecipe, kept_slots, make_student
from mlx_eagle.train.settings import TrainSettings

TEXTS = ((26, 5), (14, 3), (5, 0))  # tokens of each text, and of its prompt
DEPTHS = 5
KEPT = {1: [4, 6, 7, 11, 15], 2: [4, 7, 11, 15], 3: [7, 11, 15], 4: [15]}  # slots by depth


def batch_of(seed: int = 0) -> TokenBatch:
    dice = np.random.default_rng(seed)
    tokens = np.full((len(TEXTS), 26), 7, np.int32)
    counts = np.zeros(tokens.shape, bool)
    for row, (length, num_prompt) in enumerate(TEXTS):
        tokens[row, :length] = dice.integers(8, VOCAB, length)
        counts[row, max(0, num_prompt - 1) : length - 1] = True
    counts[0, 9] = False  # as between two answers
    return TokenBatch(tokens, counts, (0, 1, 2))


def kept_of(batch: TokenBatch) -> list[list[np.ndarray]]:
    """The slots of ``KEPT`` whose last element counts, and those before it."""
    return [
        [
            np.array([a for a in KEPT[depth] if counts[a + 1 : a + 1 + depth].all()], np.int32)
            for depth in range(1, DEPTHS)
        ]
        for counts in np.pad(batch.counts, [(0, 0), (0, DEPTHS)])
    ]


def normed(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def turned(x: mx.array, positions: mx.array, theta: float) -> mx.array:
    """RoPE on (N, H, D): the first half of the channels with the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-mx.arange(half) / half)
    cos, sin = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
    left, right = x[..., :half], x[..., half:]
    return mx.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def naive_sums(
    weights, c, taps, text, said, counted, kept, ids, loss
) -> tuple[list[mx.array], int]:
    """Sums of losses by depth, and the number of elements, with one mask over all elements."""
    elements = [(a, 0) for a in range(len(text) - 1)]
    elements += [(a, d) for d, own in enumerate(kept, start=1) for a in own.tolist()]
    table = weights["embed_tokens.weight"]
    tokens = [text[a + 1] if d == 0 else c.mask_token_id for a, d in elements]
    e = mx.stack([table[token] for token in tokens])
    f = mx.stack([taps[a] if d == 0 else weights["mask_hidden"] for a, d in elements])
    states = f @ weights["fc.weight"].T
    positions = mx.array([a + d for a, d in elements])
    for i in range(c.num_layers):
        layer = {k.removeprefix(f"layers.{i}."): w for k, w in weights.items()}
        window = None if i in c.full_attention_layers else c.sliding_window
        seen = [
            [
                (b == a and s <= d)
                or (s == 0 and b < a and (window is None or a + d - b < window))
                for b, s in elements
            ]
            for a, d in elements
        ]
        x = normed(states, layer["hidden_norm.weight"], c.rms_norm_eps)
        if i == 0:
            own = normed(e, layer["input_layernorm.weight"], c.rms_norm_eps)
            x = mx.concatenate([own, x], axis=-1)
        qkv = (x @ layer["self_attn.qkv_proj.weight"].T).reshape(len(elements), -1, c.head_dim)
        q = turned(qkv[:, : c.num_heads], positions, c.rope["theta"])
        k, v = (
            mx.repeat(part, c.num_heads // c.num_kv_heads, axis=1)
            for part in mx.split(qkv[:, c.num_heads :], 2, axis=1)
        )
        k = turned(k, positions, c.rope["theta"])
        scores = mx.einsum("nhd,mhd->hnm", q, k) / c.head_dim**0.5
        scores = mx.where(mx.array(seen), scores, -mx.inf)
        out = mx.einsum("hnm,mhd->nhd", mx.softmax(scores, axis=-1), v)
        states = states + out.reshape(len(elements), -1) @ layer["self_attn.o_proj.weight"].T
        x = normed(states, layer["post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = mx.split(x @ layer["mlp.gate_up_proj.weight"].T, 2, axis=-1)
        states = states + (gate * mx.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    states = normed(states, weights["norm.weight"], c.rms_norm_eps)
    logits = states @ weights["lm_head.weight"].T
    sums = [mx.array(0.0) for _ in range(len(kept) + 1)]
    num = 0
    for row, (a, d) in enumerate(elements):
        own = said[a + d + 1]  # after token a + d + 1
        if counted[a + d] and mx.argmax(own).item() in ids:
            p = mx.softmax(own[mx.array(ids)])
            log_q = logits[row] - mx.logsumexp(logits[row])
            divergence = (p * (mx.log(p) - log_q)).sum()
            rejected = 1 - mx.minimum(p, mx.exp(log_q)).sum()
            sums[d] = sums[d] + (divergence if loss == "kl" else 0.5 * divergence + rejected)
            num += 1
    return sums, num


def recipe_of(model, **options) -> PEagleRecipe:
    examples = Examples([Example(tuple(range(8, 200)), 4)], [], [])
    settings = TrainSettings(
        model="", data="", output="", kind="peagle", depths=DEPTHS, draft_vocab_size=190,
        aux_layers=(0, 1, 2), mask_token_id=5, **options,
    )  # fmt: skip
    settings = filled(settings, "peagle")
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"intermediate_size": 96, "rms_norm_eps": 1e-5}
    mx.random.seed(3)
    student = make_student(settings, None, model, config, examples)
    return PEagleRecipe(settings, student, model, None)


@pytest.mark.parametrize("checkpoint", thorough([False, True], True))
@pytest.mark.parametrize("how", thorough([(None, "kl=.5,tv=1"), (3, "kl")], (3, "kl")))
def test_losses_and_gradients_are_those_by_hand(how, checkpoint, monkeypatch):
    window, loss = how
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)  # four rows at a time
    monkeypatch.setattr(chunks, "ROWS_ALIKE", 4)
    model = tiny_llama(vocab_size=VOCAB)
    recipe = recipe_of(model, num_layers=2, grad_checkpoint=checkpoint, loss=loss)
    head = recipe.student.head
    ids = recipe.student.ids.tolist()
    head.layers[1].window = window
    c = head.config
    object.__setattr__(c, "sliding_window", window)
    object.__setattr__(c, "full_attention_layers", (0,))
    batch = batch_of()
    kept = kept_of(batch)
    step = TrainStep(recipe)
    found = step.gradients(mx.array(batch.tokens), *recipe.targets_of(batch, kept))

    def total(weights):
        sums, num = [], 0
        for row, (length, _) in enumerate(TEXTS):
            text = batch.tokens[row, :length].tolist()
            said, taps, _ = Target(model, recipe.student.taps).logits_at(
                mx.array([text]), mx.arange(length)
            )
            given = (weights, c, taps[0], text, said, batch.counts[row], kept[row], ids, loss)
            own, count = naive_sums(*given)
            sums.append(mx.stack(own))
            num += count
        losses = mx.stack(sums).sum(axis=0) / num
        return losses.sum(), losses

    weights = dict(tree_flatten(head.parameters()))
    (_, losses), gradients = mx.value_and_grad(total)(weights)
    mx.eval(losses, gradients)
    head.update(tree_unflatten(list(weights.items())))
    bound = max(2e-5, tolerance())
    np.testing.assert_allclose(np.array(found[0]), np.array(losses), rtol=bound)
    assert found[1].keys() == gradients.keys() >= {"mask_hidden", "embed_tokens.weight"}
    largest = max(float(mx.abs(x).max()) for x in gradients.values())
    for name, gradient in gradients.items():
        assert float(mx.abs(gradient).max()) > 0, name
        np.testing.assert_allclose(
            np.array(found[1][name]), np.array(gradient), atol=bound * largest, err_msg=name
        )


def test_what_is_kept_is_behind_what_was_kept_before():
    """As many at each depth as in P-EAGLE's trainers, by seed, epoch and number alone."""
    counts = np.zeros((2, 70), bool)
    counts[0, 3:64] = True
    counts[1, :30] = True
    counts[1, 12] = False
    batch = TokenBatch(np.zeros(counts.shape, np.int32), counts, (4, 9))
    settings = TrainSettings(model="", data="", output="", depths=8)
    found = kept_slots(batch, settings, 1)
    for own, counted in zip(found, counts, strict=True):
        num = int(counted.sum())
        before = np.arange(70)
        for depth, slots in enumerate(own, start=1):
            assert set(slots) <= set(before) and counted[slots + depth].all()
            pool = [a for a in before if a + depth < 70 and counted[a + depth]]
            most = int((num - depth) * max(0.7**depth, 0.2))
            assert len(slots) == min(most, len(pool))
            before = slots
    alone = TokenBatch(batch.tokens[1:], counts[1:], (9,))
    again = kept_slots(alone, settings, 1)[0]
    assert all(map(np.array_equal, again, found[1]))
    other = kept_slots(alone, settings, 2)[0]
    assert not all(map(np.array_equal, again, other))


RUN = {"batch_size": 4, "steps_per_eval": 1000, "test_prompts": 0, "val_batches": 0}
FRESH = {"kind": "peagle", "mask_token_id": 7, "depths": 4, "draft_vocab_size": 128}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("peagle") / "target", num_hidden_layers=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rows = chats(8)
    return write_data(tmp_path_factory.mktemp("data"), train=rows, valid=rows[:4])


def assert_drafts(target: Path, folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(target))
    drafter = mlx_eagle.load_drafter(folder, model)
    assert isinstance(drafter, ParallelDrafter)
    for prompt in ("say 1", "dog"):
        plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=16)
        options = {"max_tokens": 16, "num_draft_tokens": 4, "draft_model": drafter}
        assert mlx_eagle.generate(model, tokenizer, prompt, **options) == plain


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"draft_vocab_size": VOCAB}])
def test_a_fresh_head_is_published_as_speculators_do(options, target, data, tmp_path):
    out = tmp_path / "out"
    train(str(target), str(data), str(out), iters=2, **{**RUN, **FRESH, **options})
    assert_drafts(target, out)
    convert(str(out / "published"), str(tmp_path / "again"), quantize=False)
    ours, theirs = (json.loads((x / "config.json").read_text()) for x in (out, tmp_path / "again"))
    other = {"family", "source", "training", "aux_ids_source", "kind", "model_type"}
    ours["rope"]["dims"] = ours["head_dim"]  # which None means
    for key in ours.keys() - other:
        assert ours[key] == theirs[key], (key, ours[key], theirs[key])
    before, after = weights_of(out), weights_of(tmp_path / "again")
    assert before.keys() == after.keys() and "mask_hidden" in before
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A target, and a frozen head of speculators' made to fit it: more tokens, in bfloat16."""
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": VOCAB}
    model = tiny_llama(**sizes)
    model.model.norm.weight = 6 * model.model.norm.weight
    write_model(folder / "target", model, {"model_type": "llama", **SIZES, **sizes})
    golden = frozen.FOLDER / "peagle-llama"
    arrays = mx.load(str(golden / "model.safetensors"))
    rows = mx.random.normal((VOCAB, 32), key=mx.random.key(2)).astype(mx.bfloat16)
    arrays["embed_tokens.weight"] = rows
    arrays["t2d"] = mx.pad(arrays["t2d"], [(0, VOCAB - 128)])
    config = json.loads((golden / "config.json").read_text())
    config["transformer_layer_config"]["vocab_size"] = VOCAB
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (folder / "given").mkdir()
    mx.save_safetensors(str(folder / "given" / "model.safetensors"), arrays)
    (folder / "given" / "config.json").write_text(json.dumps(config))
    return folder / "target", folder / "given"


@pytest.mark.parametrize("has_all_rows", thorough([False, True], False))
def test_no_steps_change_nothing_and_one_step_all_but_maps(has_all_rows, pair, data, tmp_path):
    """Also where the output matrix has a row for each token of the target."""
    target, given = pair
    own = mx.load(str(given / "model.safetensors"))
    drafted = np.flatnonzero(np.array(own["t2d"]))
    if has_all_rows:
        given = shutil.copytree(given, tmp_path / "given")
        rows = mx.random.normal((VOCAB, 32)).astype(mx.bfloat16)
        rows[mx.array(drafted)] = own["lm_head.weight"]
        own["lm_head.weight"] = rows
        mx.save_safetensors(str(given / "model.safetensors"), own)
        own = mx.load(str(given / "model.safetensors"))
    for iters in (0, 1):
        out = tmp_path / str(iters)
        run = {**RUN, "learning_rate": 0.1, "depths": 3, "init": str(given)}
        train(str(target), str(data), str(out), iters=iters, **run)
        found = mx.load(str(out / "published" / "model.safetensors"))
        assert found.keys() == own.keys()
        assert all(found[name].dtype == own[name].dtype for name in own)
        same = {name for name in own if mx.array_equal(found[name], own[name]).item()}
        assert same == ({"d2t", "t2d"} if iters else set(own))
        if has_all_rows and iters:
            rows = [np.array(x["lm_head.weight"].astype(mx.float32)) for x in (own, found)]
            assert set(np.flatnonzero((rows[0] != rows[1]).any(axis=1))) == set(drafted)
        config = (out / "published" / "config.json").read_text()
        assert json.loads(config) == json.loads((given / "config.json").read_text())
        assert_drafts(target, out)


def test_stopped_and_gone_on_with_is_the_same(target, data, tmp_path):
    run = {**RUN, **FRESH, "save_every": 2, "learning_rate": 1e-3}
    train(str(target), str(data), str(tmp_path / "whole"), iters=4, **run)
    train(str(target), str(data), str(tmp_path / "half"), iters=2, **run)
    # The rate depends on all batches, so the first ones are taken from the whole run.
    checkpoints = [tmp_path / name / "checkpoints" / "0000002" for name in ("whole", "half")]
    for file in checkpoints[0].iterdir():
        (checkpoints[1] / file.name).write_bytes(file.read_bytes())
    train(str(target), str(data), str(tmp_path / "half"), iters=4, resume=True, **run)
    resumed = weights_of(tmp_path / "half")
    for name, array in weights_of(tmp_path / "whole").items():
        assert np.array_equal(array, resumed[name]), name


@pytest.mark.exhaustive
def test_heads_learn_and_texts_stay_the_targets(target, data, tmp_path):
    """A fresh one, and one made of a head that drafts step by step."""
    run = {
        **{**RUN, "test_prompts": 4, "test_tokens": 16, "val_batches": 25},
        **{"regenerate": True, "answer_temps": (0.0,), "answer_tokens": 16},
        **{"iters": 60, "learning_rate": 5e-3, "draft_vocab_size": 128},
    }
    train(str(target), str(data), str(tmp_path / "steps"), ttt_steps=3, **{**run, "iters": 20})
    parallel = {**run, **FRESH}
    for name, init in (("fresh", None), ("made", str(tmp_path / "steps"))):
        report = train(str(target), str(data), str(tmp_path / name), init=init, **parallel)
        assert report.generated.lengths[-1] > 2
        # Teacher-forced figures are those of greedy decoding of the same texts.
        assert report.evaluation.lengths == pytest.approx(report.generated.lengths)
        assert_drafts(target, tmp_path / name)


REFUSED = {
    "another": ({"kind": "eagle3"}, "--kind is eagle3, and .* is a P-EAGLE head: leave out"),
    "mask": ({"mask_token_id": 5}, "--init keeps that of the one it names"),
    "lora": ({"fine_tune_type": "lora"}, "--fine-tune-type is not for a P-EAGLE head"),
    "steps": ({"ttt_steps": 3}, "--ttt-steps is not for a P-EAGLE head"),
    "loss": ({"loss": "ce=.1,kl=1"}, "a P-EAGLE head is trained with one of kl, tv, l1"),
    "no mask": ({"init": None, "kind": "peagle"}, "every row of the embedding is a token"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_trained_costs_one_sentence(what, pair, data, tmp_path):
    options, sentence = REFUSED[what]
    run = {"init": str(pair[1]), "iters": 1, "batch_size": 2, **options}
    with pytest.raises(ValueError, match=sentence):
        train(str(pair[0]), str(data), str(tmp_path / "out"), **run)
    assert not (tmp_path / "out").exists()
