"""The converter against a hub: a stand-in on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from checkpoints import (
    CONFIG,
    as_midlayer,
    eagle3_tensors,
    write_bin,
    write_config,
    write_gguf,
    write_safetensors,
)
from hub import Hub, hub_settings, running_hub

from mlx_eagle.system.hub import refuse_eagle_4


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub(tmp_path / "hub") as server:
        yield server


def run(tmp_path: Path, address: str, *args: object) -> subprocess.CompletedProcess[str]:
    """The converter in a process of its own, whose hub and cache are these."""
    return subprocess.run(
        [sys.executable, "-m", "mlx_eagle.convert", *map(str, args)],
        env={**os.environ, **hub_settings(address, tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_download(hub, tmp_path):
    """Safetensors are chosen, and the .bin beside them is not downloaded."""
    folder = write_safetensors(hub.root / "some" / "head", CONFIG, as_midlayer(eagle3_tensors()))
    write_bin(folder / "pytorch_model.bin", {})
    out = tmp_path / "out"
    done = run(tmp_path, hub.address, "--hf-path", "some/head", "--mlx-path", out)
    assert done.returncode == 0, done.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["source"]["path"] == "some/head"
    assert any("model.safetensors" in path for path in hub.requests)
    assert not any("pytorch_model.bin" in path for path in hub.requests)


def test_a_folder_of_a_repository(hub, tmp_path):
    """Two variants of one head lie in folders of their own; only the one is downloaded."""
    for name in ("full", "compressed"):
        folder = hub.root / "some" / "head" / name
        write_safetensors(folder, CONFIG, as_midlayer(eagle3_tensors()))
    out = tmp_path / "out"
    done = run(tmp_path, hub.address, "--hf-path", "some/head/compressed", "--mlx-path", out)
    assert done.returncode == 0, done.stderr
    fetched = [path for path in hub.requests if "model.safetensors" in path]
    assert fetched and all("compressed/" in path for path in fetched)
    done = run(tmp_path, hub.address, "--hf-path", "some/head/none", "--mlx-path", tmp_path / "x")
    assert done.returncode == 2 and "some/head has no folder none" in done.stderr


def test_nothing_of_eagle_4_is_asked_for(hub, tmp_path):
    write_safetensors(hub.root / "some" / "EAGLE4-8B", CONFIG, as_midlayer(eagle3_tensors()))
    args = "--hf-path", "some/EAGLE4-8B", "--mlx-path", tmp_path / "out"
    done = run(tmp_path, hub.address, *args)
    assert done.returncode == 2 and "forbids competing use" in done.stderr
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
def test_download_of_a_bin(hub, tmp_path):
    folder = hub.root / "some" / "head"
    write_config(folder, CONFIG)
    write_bin(folder / "pytorch_model.bin", as_midlayer(eagle3_tensors()))
    out = tmp_path / "out"
    done = run(tmp_path, hub.address, "--hf-path", "some/head", "--mlx-path", out)
    assert done.returncode == 0, done.stderr
    # A second time from the cache alone.
    again = tmp_path / "again"
    hub.shutdown()
    hub.server_close()
    done = run(tmp_path, hub.address, "--hf-path", "some/head", "--mlx-path", again)
    assert done.returncode == 0, done.stderr
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_a_gguf_file_of_a_repository(hub, tmp_path):
    folder = hub.root / "some" / "ggufs"
    folder.mkdir(parents=True)
    for kind in ("F16", "Q8_0"):
        write_gguf(folder / f"head-{kind}.gguf", eagle3_tensors(), CONFIG, kind)
    out = tmp_path / "out"
    source = "some/ggufs/head-Q8_0.gguf"
    done = run(tmp_path, hub.address, "--hf-path", source, "--mlx-path", out)
    assert done.returncode == 0, done.stderr
    assert not any("F16" in path for path in hub.requests)
    done = run(tmp_path, hub.address, "--hf-path", "some/ggufs", "--mlx-path", tmp_path / "b")
    assert done.returncode == 2 and "owner/name/file.gguf" in done.stderr


def test_unknown_repository_and_unreachable_hub(hub, tmp_path):
    out = tmp_path / "out"
    args = ("--hf-path", "no/such", "--mlx-path", out)
    for address, words in ((hub.address, "nor a repository"), ("http://127.0.0.1:9", "reached")):
        done = run(tmp_path, address, *args)
        assert done.returncode == 2 and not out.exists()
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert words in done.stderr


def test_upload(hub, tmp_path):
    source = write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors())
    out = tmp_path / "out"
    args = ("--hf-path", source, "--mlx-path", out, "--upload-repo", "me/converted")
    done = run(tmp_path, hub.address, *args)
    assert done.returncode == 0, done.stderr
    assert hub.uploads["config.json"] == (out / "config.json").read_bytes()
    assert hub.uploads["README.md"] == (out / "README.md").read_bytes()
    assert hub.uploads["model.safetensors"] == (out / "model.safetensors").read_bytes()


def test_failing_upload_keeps_the_folder(tmp_path):
    source = write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors())
    out = tmp_path / "out"
    args = ("--hf-path", source, "--mlx-path", out, "--upload-repo", "me/converted")
    done = run(tmp_path, "http://127.0.0.1:9", *args)
    assert done.returncode == 2 and "could not be uploaded" in done.stderr
    assert done.stderr.count("\n") == 1 and (out / "model.safetensors").exists()
