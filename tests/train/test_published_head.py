"""EAGLE-3 heads as they are published: fresh ones as speculators do, given ones as they came."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from golden import frozen
from training import chats, weights_of, write_data, write_target

from mlx_eagle.convert import convert
from mlx_eagle.train import train

RUN = {"batch_size": 2, "ttt_steps": 2, "learning_rate": 0.1, "test_prompts": 0}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("published") / "target", num_hidden_layers=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), train=chats(4), valid=chats(2, first=4))


@pytest.fixture(scope="module")
def fresh(target, data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("fresh") / "out"
    train(str(target), str(data), str(out), iters=1, draft_vocab_size=64, **RUN)
    return out


def test_a_fresh_head_is_published_as_speculators_do(fresh, tmp_path):
    """Names and types are those of a head that speculators saved, and it converts to the same."""
    golden = frozen.FOLDER / "speculators-default"
    theirs = mx.load(str(golden / "model.safetensors"))
    ours = mx.load(str(fresh / "published" / "model.safetensors"))
    assert ours.keys() == theirs.keys() - {"embed_tokens.weight"}  # the target's own
    for name in ("d2t", "t2d"):
        assert ours[name].dtype == theirs[name].dtype
    config, saved = (
        json.loads((x / "config.json").read_text()) for x in (fresh / "published", golden)
    )
    assert config.keys() <= saved.keys()
    assert config["speculators_config"].keys() == saved["speculators_config"].keys()
    convert(str(fresh / "published"), str(tmp_path / "again"), quantize=False)
    before, after = weights_of(fresh), weights_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    here, again = (
        json.loads((x / "config.json").read_text()) for x in (fresh, tmp_path / "again")
    )
    about = {"family", "source", "training", "aux_ids_source", "kind", "speculative_tokens_hint"}
    here["rope"]["dims"] = here["head_dim"]  # which None means
    here["aux_boundary_ids"] = [2, 4, 5]  # so does None, for eight layers
    assert {k: here[k] for k in here.keys() - about} == {k: again[k] for k in here.keys() - about}


@pytest.fixture(params=["speculators", "specforge"])
def given(request, fresh, tmp_path) -> Path:
    """A published head in one of two layouts."""
    if request.param == "speculators":
        return fresh / "published"
    arrays = mx.load(str(fresh / "published" / "model.safetensors"))
    config = json.loads((fresh / "published" / "config.json").read_text())
    layer = config["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
    }
    folder = tmp_path / "given"
    folder.mkdir()
    named = {name.replace("layers.0.", "midlayer."): x for name, x in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named)
    (folder / "config.json").write_text(json.dumps(layer))
    return folder


def test_a_given_head_comes_out_as_it_came(given, target, data, tmp_path):
    own = mx.load(str(given / "model.safetensors"))
    for iters in (0, 1):
        out = tmp_path / str(iters)
        train(str(target), str(data), str(out), iters=iters, init=str(given), **RUN)
        found = mx.load(str(out / "published" / "model.safetensors"))
        assert found.keys() == own.keys()
        assert all(found[name].dtype == own[name].dtype for name in own)
        same = {name for name in own if mx.array_equal(found[name], own[name]).item()}
        assert same == ({"d2t", "t2d"} if iters else set(own))
        config = (out / "published" / "config.json").read_text()
        assert json.loads(config) == json.loads((given / "config.json").read_text())
