"""Trained MTP layers in their model's checkpoint: in their places, or in a file of their own."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mtp_checkpoints
import pytest
from checkpoints import write_config
from drafter_pairs import tiny_qwen3_5
from mlx.utils import tree_flatten
from training import VOCAB, chats, write_data, write_model

import mlx_eagle
from mlx_eagle import open_drafter
from mlx_eagle.convert.__main__ import main
from mlx_eagle.drafters.target_parts import INDEX
from mlx_eagle.train import train


def as_published(folder: Path) -> Path:
    """Write a target of two shards with MTP layers in the second, beside a layer of its own."""
    model = tiny_qwen3_5(vocab_size=VOCAB)
    write_model(folder, model, dict(vars(model.args)))
    arrays = mx.load(str(folder / "model.safetensors"))
    own = mtp_checkpoints.qwen(model).arrays()
    second = {name: array for name, array in arrays.items() if ".layers.3." in name} | own
    first = {name: array for name, array in arrays.items() if name not in second}
    places = {}
    for number, part in enumerate((first, second), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        mx.save_safetensors(str(folder / name), part, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    size = sum(array.nbytes for array in (first | second).values())
    values = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(values))
    (folder / "model.safetensors").unlink()
    (folder / "more").mkdir()
    (folder / "more" / "notes.txt").write_text("kept")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A target, and layers that a training step has changed, in their published layout."""
    folder = tmp_path_factory.mktemp("stitch")
    target = as_published(folder / "target")
    data = write_data(folder / "data", train=chats(4))
    run = {"iters": 1, "batch_size": 2, "learning_rate": 0.05, "test_prompts": 0}
    train(str(target), str(data), str(folder / "out"), init="mtp", val_batches=0, **run)
    return target, folder / "out"


def weights_in(folder: Path) -> dict[str, mx.array]:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: mx.load(str(folder / name)) for name in set(places.values())}
    return {name: files[file][name] for name, file in places.items()}


def assert_drafts_as(out: Path, folder: Path) -> None:
    """What ``--draft-model mtp`` finds in the folder is the trained drafter."""
    model, tokenizer = mlx_lm.load(str(folder))
    own = open_drafter("mtp", model, tokenizer, target=folder)
    theirs = dict(tree_flatten(mlx_eagle.load_drafter(out, model).head.parameters()))
    for name, array in tree_flatten(own.head.parameters()):
        assert mx.allclose(array, theirs[name], atol=1e-6).item(), name
    plain = mlx_lm.generate(model, tokenizer, "say", max_tokens=8)
    assert mlx_eagle.generate(model, tokenizer, "say", max_tokens=8, draft_model=own) == plain


def test_layers_take_their_places(made, tmp_path):
    target, out = made
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    main(["--stitch", str(out / "published"), str(target), str(tmp_path / "new")])
    found, old = weights_in(tmp_path / "new"), weights_in(target)
    layers = mx.load(str(out / "published" / "model.safetensors"))
    assert found.keys() == old.keys() and layers.keys() < old.keys()
    for name, array in found.items():
        assert mx.array_equal(array, layers.get(name, old[name])).item(), name
    assert any(not mx.array_equal(layers[name], old[name]).item() for name in layers)
    assert all(path.read_bytes() == data for path, data in before.items())
    changed = []
    for path in before:
        there = tmp_path / "new" / path.relative_to(target)
        assert there.stat().st_size == path.stat().st_size
        changed += [] if there.samefile(path) else [path.name]
    assert sorted(changed) == ["model-00002-of-00002.safetensors", INDEX]
    assert_drafts_as(out, tmp_path / "new")


@pytest.mark.parametrize("has_index", [True, False])
def test_layers_that_a_conversion_left_out_are_added(has_index, made, tmp_path):
    _, out = made
    model = tiny_qwen3_5(vocab_size=VOCAB)
    target = write_model(tmp_path / "target", model, dict(vars(model.args)))
    index = target / INDEX
    if has_index:
        index.write_text(json.dumps(json.loads(index.read_text()) | {"kept": 1}))
    else:
        index.unlink()
    # A folder of such layers leaves the prefix out.
    bare = shutil.copytree(out / "published", tmp_path / "bare")
    arrays = mx.load(str(bare / "model.safetensors"))
    named = {name.removeprefix("mtp."): array + 0 for name, array in arrays.items()}
    mx.save_safetensors(str(bare / "model.safetensors"), named)
    main(["--stitch", str(bare), str(target), str(tmp_path / "new")])
    found = weights_in(tmp_path / "new")
    expected = {**mx.load(str(target / "model.safetensors")), **arrays}
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]).item() for name in expected)
    values = json.loads((tmp_path / "new" / INDEX).read_text())
    if has_index:
        total = sum(array.nbytes for array in expected.values())
        assert values["metadata"]["total_size"] == total and values["kept"] == 1
        assert "mtp.safetensors" not in index.read_text()
    assert_drafts_as(out, tmp_path / "new")


def test_what_does_not_fit_is_refused(made, tmp_path, capsys):
    target, out = made
    layers = out / "published"

    def refused(*words: object) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["--stitch", *map(str, words)])
        assert stop.value.code == 2
        assert not (tmp_path / "new").exists()
        return capsys.readouterr().err

    assert "is there already" in refused(layers, target, target)
    assert "is no folder of this model's MTP layers" in refused(target, target, tmp_path / "new")
    assert "is no model in safetensors that has MTP" in refused(layers, out, tmp_path / "new")
    assert "/nowhere" in refused(layers, "/nowhere", tmp_path / "new")
    other = shutil.copytree(layers, tmp_path / "other")
    arrays = mx.load(str(other / "model.safetensors"))
    arrays = {name: array.astype(mx.bfloat16) for name, array in arrays.items()}
    mx.save_safetensors(str(other / "model.safetensors"), arrays)
    said = refused(other, target, tmp_path / "new")
    assert "has F32 [" in said and "as BF16 [" in said and said.count("\n") == 1
    stray = tmp_path / "stray"
    model = tiny_qwen3_5(vocab_size=VOCAB)
    write_model(stray, model, dict(vars(model.args)))
    shutil.copy(layers / "model.safetensors", stray / "mtp.safetensors")
    assert "which model.safetensors.index.json does not name" in refused(
        layers, stray, tmp_path / "new"
    )
    write_config(stray, {"model_type": "llama"})
    assert "has MTP layers" in refused(layers, stray, tmp_path / "new")
