"""The converter against a hub: a stand-in on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    as_midlayer,
    eagle3_tensors,
    write_bin,
    write_config,
    write_gguf,
    write_safetensors,
    write_target,
)
from hub import Hub, hub_settings, running_hub, use_hub

from mlx_eagle.convert.__main__ import main
from mlx_eagle.system.hub import refuse_eagle_4


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def run(tmp_path, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the converter with the hub at an address: (exit code, out, err)."""

    def command(address: str, *args: object) -> tuple[int, str, str]:
        code = 0
        with pytest.MonkeyPatch.context() as patch:
            use_hub(patch, address, tmp_path)
            try:
                main([*map(str, args)])
            except SystemExit as stop:
                code = stop.code
        return code, *capsys.readouterr()

    return command


@pytest.mark.exhaustive
def test_download(hub, tmp_path):
    """Safetensors are chosen, and the .bin beside them is not; the environment names the hub."""
    folder = write_safetensors(hub.root / "some" / "head", CONFIG, as_midlayer(eagle3_tensors()))
    write_bin(folder / "pytorch_model.bin", {})
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "mlx_eagle.convert", "--hf-path", "some/head", "--mlx-path", out],
        env={**os.environ, **hub_settings(hub.address, tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["source"]["path"] == "some/head"
    assert any("model.safetensors" in path for path in hub.requests)
    assert not any("pytorch_model.bin" in path for path in hub.requests)


def test_a_folder_of_a_repository(run, hub, tmp_path):
    """Two variants of one head lie in folders of their own; only the one is downloaded."""
    for name in ("full", "compressed"):
        folder = hub.root / "some" / "head" / name
        write_safetensors(folder, CONFIG, as_midlayer(eagle3_tensors()))
    out = tmp_path / "out"
    code, _, err = run(hub.address, "--hf-path", "some/head/compressed", "--mlx-path", out)
    assert code == 0, err
    fetched = [path for path in hub.requests if "model.safetensors" in path]
    assert fetched and all("compressed/" in path for path in fetched)
    code, _, err = run(hub.address, "--hf-path", "some/head/none", "--mlx-path", tmp_path / "x")
    assert code == 2 and "some/head has no folder none" in err


def test_nothing_of_eagle_4_is_asked_for(run, hub, tmp_path):
    write_safetensors(hub.root / "some" / "EAGLE4-8B", CONFIG, as_midlayer(eagle3_tensors()))
    args = "--hf-path", "some/EAGLE4-8B", "--mlx-path", tmp_path / "out"
    code, _, err = run(hub.address, *args)
    assert code == 2 and "forbids competing use" in err
    assert not hub.requests


@pytest.mark.parametrize(
    "name, is_one",
    [
        ("owner/Qwen3-8B-EAGLE-4", True),
        ("owner/eagle4-llama", True),
        ("owner/llama-eagle_4.1", True),
        ("owner/EAGLE3-4bit", False),
        ("owner/eagle-4bit", False),
        ("owner/EAGLE-4B", False),
        ("owner/eagle3-4k", False),
        ("owner/eagle-4096", False),
    ],
)
def test_which_names_say_eagle_4(name, is_one):
    with pytest.raises(ValueError, match="EAGLE-4") if is_one else nullcontext():
        refuse_eagle_4(name, name)


@pytest.mark.exhaustive
def test_download_of_a_bin(run, hub, tmp_path):
    folder = hub.root / "some" / "head"
    write_config(folder, CONFIG)
    write_bin(folder / "pytorch_model.bin", as_midlayer(eagle3_tensors()))
    out = tmp_path / "out"
    code, _, err = run(hub.address, "--hf-path", "some/head", "--mlx-path", out)
    assert code == 0, err
    # A second time from the cache alone.
    again = tmp_path / "again"
    hub.shutdown()
    hub.server_close()
    code, _, err = run(hub.address, "--hf-path", "some/head", "--mlx-path", again)
    assert code == 0, err
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_a_gguf_file_of_a_repository(run, hub, tmp_path):
    folder = hub.root / "some" / "ggufs"
    folder.mkdir(parents=True)
    for kind in ("F16", "Q8_0"):
        write_gguf(folder / f"head-{kind}.gguf", eagle3_tensors(), CONFIG, kind)
    out = tmp_path / "out"
    source = "some/ggufs/head-Q8_0.gguf"
    code, _, err = run(hub.address, "--hf-path", source, "--mlx-path", out)
    assert code == 0, err
    assert not any("F16" in path for path in hub.requests)
    code, _, err = run(hub.address, "--hf-path", "some/ggufs", "--mlx-path", tmp_path / "b")
    assert code == 2 and "owner/name/file.gguf" in err


def test_unknown_repository_and_unreachable_hub(run, hub, tmp_path):
    out = tmp_path / "out"
    args = ("--hf-path", "no/such", "--mlx-path", out)
    for address, words in ((hub.address, "nor a repository"), ("http://127.0.0.1:9", "reached")):
        code, _, err = run(address, *args)
        assert code == 2 and not out.exists()
        assert err.startswith("error: ") and err.count("\n") == 1
        assert words in err


def test_upload(run, hub, tmp_path):
    source = write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors())
    out = tmp_path / "out"
    args = ("--hf-path", source, "--mlx-path", out, "--upload-repo", "me/converted")
    code, _, err = run(hub.address, *args)
    assert code == 0, err
    assert hub.uploads["config.json"] == (out / "config.json").read_bytes()
    assert hub.uploads["README.md"] == (out / "README.md").read_bytes()
    assert hub.uploads["model.safetensors"] == (out / "model.safetensors").read_bytes()


def test_failing_upload_keeps_the_folder(run, tmp_path):
    source = write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors())
    out = tmp_path / "out"
    args = ("--hf-path", source, "--mlx-path", out, "--upload-repo", "me/converted")
    code, _, err = run("http://127.0.0.1:9", *args)
    assert code == 2 and "could not be uploaded" in err
    assert err.count("\n") == 1 and (out / "model.safetensors").exists()


def test_of_a_target_only_the_tables_are_fetched(run, hub, tmp_path):
    table = np.random.default_rng(5).standard_normal((128, 64), np.float32)
    body = {f"model.layers.{i}.weight": np.ones((512, 256), np.float32) for i in range(2)}
    write_target(hub.root / "some" / "target", {"model.embed_tokens.weight": table} | body)
    tensors = eagle3_tensors() | {"embed_tokens.weight": table}
    source = write_safetensors(tmp_path / "source", CONFIG, tensors)
    args = ("--hf-path", source, "--mlx-path", tmp_path / "out", "--target", "some/target")
    code, out, err = run(hub.address, *args)
    assert code == 0, err
    assert "embedding   the target's" in out
    sent = sum(n for path, n in hub.sent.items() if path.endswith(".safetensors"))
    assert table.nbytes < sent < table.nbytes + 150_000
