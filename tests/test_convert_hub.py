"""The converter against a hub: a stand-in on this machine that speaks its few endpoints."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

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

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories under ``root/owner/name``; ``requests`` and ``uploads`` are what came in."""

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.requests: list[str] = []
        self.uploads: dict[str, bytes] = {}
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0]).strip("/")
        self.server.requests.append(path)
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            folder = self.server.root.joinpath(*parts[2:4])
            if folder.is_dir():
                files = [(p.name, p.stat().st_size) for p in sorted(folder.iterdir())]
                if "tree" in parts:
                    entry = {"type": "file", "oid": COMMIT}
                    self.answer_json([entry | {"path": n, "size": size} for n, size in files])
                    return
                siblings = [{"rfilename": name} for name, _ in files]
                repo = "/".join(parts[2:4])
                self.answer_json({"id": repo, "sha": COMMIT, "siblings": siblings})
                return
        elif "resolve" in parts:
            file = self.server.root.joinpath(*parts[:2], *parts[4:])
            if file.is_file():
                body = file.read_bytes()
                etag = f'"{hashlib.sha1(body).hexdigest()}"'
                self.answer(200, body, ETag=etag, X_Repo_Commit=COMMIT)
                return
        self.answer(404, b"{}", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if path == "api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.answer_json({"url": f"{self.server.address}/{repo}"})
        elif path == "api/validate-yaml":  # asked before a model card is uploaded
            self.answer_json({"errors": [], "warnings": []})
        elif "preupload" in path:
            how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = [how | {"path": file["path"]} for file in json.loads(body)["files"]]
            self.answer_json({"files": files})
        elif "commit" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.uploads[line["value"]["path"]] = content
            repo = path.split("/commit/")[0].removeprefix("api/models/")
            url = f"{self.server.address}/{repo}/commit/{COMMIT}"
            self.answer_json({"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self.answer(404)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = Hub(tmp_path / "hub")
    server.root.mkdir()
    yield server
    server.shutdown()
    server.server_close()


def run(tmp_path: Path, address: str, *args: object) -> subprocess.CompletedProcess[str]:
    """The converter in a process of its own, whose hub and cache are these."""
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": "hf_test"}
    return subprocess.run(
        [sys.executable, "-m", "mlx_eagle.convert", *map(str, args)],
        env={**os.environ, **settings, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"},
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
