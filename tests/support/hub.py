"""A stand-in for the hub on this machine, which speaks the few endpoints that we use."""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories under ``root/owner/name``; ``requests`` and ``uploads`` are what came in.

    What a branch or tag holds lies under ``root/owner/name@branch``.

    ``sent`` are the bytes that went out of each file. ``refusals`` are what a repository is
    answered with, a status and the hub's code for it; ``breaks_after`` how many bytes of weights
    go out before the connection does.
    """

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.requests: list[str] = []
        self.uploads: dict[str, bytes] = {}
        self.sent: Counter[str] = Counter()
        self.refusals: dict[str, tuple[int, str]] = {}
        self.breaks_after: int | None = None
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


def commit_of(branch: str) -> str:
    return COMMIT if branch == "main" else hashlib.sha1(branch.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    commit = COMMIT

    def find(self, repo: str, revision: str) -> Path | None:
        """The folder of a branch, a tag or a commit; None where there is none."""
        owner, name = repo.split("/")
        for folder in self.server.root.glob(f"{owner}/{name}*"):
            own, _, branch = folder.name.partition("@")
            self.commit = commit_of(branch or "main")
            if own == name and revision in (branch or "main", self.commit):
                return folder
        return None

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_file(self, path: str, body: bytes) -> None:
        """A file, or the range of it that is asked for, as the hub sends it."""
        etag = f'"{hashlib.sha1(body).hexdigest()}"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, more = 200, {}
        if asked is not None:
            first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            more = {"Content_Range": f"bytes {first}-{last}/{len(body)}"}
            status, body = 206, body[first : last + 1]
        limit = self.server.breaks_after
        if self.command == "HEAD" or limit is None or not path.endswith(".safetensors"):
            self.server.sent[path] += 0 if self.command == "HEAD" else len(body)
            self.answer(status, body, ETag=etag, X_Repo_Commit=self.commit, **more)
            return
        part = body[: max(limit - self.server.sent[path], 0)]
        self.server.sent[path] += len(part)
        size = str(len(body))
        more |= {"X_Repo_Commit": self.commit, "Content_Length": size}
        self.answer(status, part, ETag=etag, **more)
        self.close_connection = True

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0]).strip("/")
        self.server.requests.append(path)
        parts = path.split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo in self.server.refusals:
            status, code = self.server.refusals[repo]
            self.answer(status, b"{}", X_Error_Code=code)
            return
        if parts[:2] == ["api", "models"]:
            revision = parts[5] if parts[4:5] in (["revision"], ["tree"]) else "main"
            folder = self.find(repo, revision)
            if folder is None and self.server.root.joinpath(repo).is_dir():
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
                return
            if folder is not None:
                found = sorted(path for path in folder.rglob("*") if path.is_file())
                files = [(str(p.relative_to(folder)), p.stat().st_size) for p in found]
                if "tree" in parts:
                    entry = {"type": "file", "oid": self.commit}
                    self.answer_json([entry | {"path": n, "size": size} for n, size in files])
                    return
                siblings = [{"rfilename": name} for name, _ in files]
                self.answer_json({"id": repo, "sha": self.commit, "siblings": siblings})
                return
        elif "resolve" in parts:
            folder = self.find(repo, parts[3])
            if folder is not None and folder.joinpath(*parts[4:]).is_file():
                self.answer_file(path, folder.joinpath(*parts[4:]).read_bytes())
                return
            if self.server.root.joinpath(*parts[:2]).is_dir():
                self.answer(404, b"{}", X_Error_Code="EntryNotFound")
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


@contextmanager
def running_hub(root: Path) -> Iterator[Hub]:
    root.mkdir()
    server = Hub(root)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def hub_settings(address: str, home: Path) -> dict[str, str]:
    """The environment of a process whose hub, home and caches these are."""
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(home / "hf"), "HOME": str(home)}
    return settings | {"HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


def use_hub(patch: pytest.MonkeyPatch, address: str, home: Path) -> None:
    """Let this process know no other hub, and keep downloads and our own cache in ``home``."""
    url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hf" / "hub"))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setenv("HF_TOKEN", "hf_test")
    for module in ("draft_models", "drafters.target_parts"):
        patch.setattr(f"mlx_eagle.{module}.user_cache", lambda: home / ".cache" / "mlx-eagle")
