"""Type checkers on what a user writes: the README's Python, and what a response is.

mypy as strict as it gets, and pyright as it comes (basedpyright: the same, with its own Node.js).
Both find this package, ``mlx_eagle.convert`` too, where it is installed in place.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, blocks

USE = """
from typing import assert_type

import mlx_eagle
import mlx_eagle.bench
from mlx_eagle.convert import convert

model, tokenizer, drafter = mlx_eagle.load_demo()
for drafted in mlx_eagle.stream_generate(model, tokenizer, "Hi", draft_model=drafter):
    assert_type(drafted, mlx_eagle.GenerationResponse)
    assert_type(drafted.stats, mlx_eagle.Stats)
maybe: mlx_eagle.Eagle3Drafter | None = None
for either in mlx_eagle.stream_generate(model, tokenizer, "Hi", draft_model=maybe, kv_bits=8):
    assert_type(either.text, str)
for drafted in mlx_eagle.stream_generate(model, tokenizer, [1, 2], 20, drafter):
    assert_type(drafted.stats.tau, float)
assert_type(mlx_eagle.generate(model, tokenizer, "Hi", draft_model=drafter), str)
for plain in mlx_eagle.stream_generate(model, tokenizer, "Hi", max_tokens=20):
    assert_type(plain.text, str)
convert("a", "b")
"""
MISTAKES = """
import mlx_eagle
model, tokenizer, drafter = mlx_eagle.load_demo()
for plain in mlx_eagle.stream_generate(model, tokenizer, "Hi"):
    plain.stats
for drafted in mlx_eagle.stream_generate(model, tokenizer, "Hi", draft_model=drafter):
    drafted.stats.taus
mlx_eagle.generate(model, tokenizer, "Hi", draft_model=drafter, max_token=3)
"""
# mlx_lm.load is typed as what gives two things or three, which no snippet of its own passes.
LOAD_PAIR = """
from mlx.nn.layers.base import Module
from typing import Any
def load_pair(path: str) -> tuple[Module, Any]:
    raise NotImplementedError
"""
# Libraries of others that we do not speak of: what they export is not looked at, which takes time.
UNREAD = "transformers numpy huggingface_hub tokenizers safetensors jinja2 tqdm matplotlib rich"
ANYTHING = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What is checked, away from the repository: the README's snippets as one file, and ours."""
    folder = tmp_path_factory.mktemp("types")
    snippets = [text for _, text in blocks(ROOT / "README.md", "python")]
    assert snippets
    text = "\n".join(snippets).replace("mlx_lm.load(", "load_pair(")
    (folder / "readme.py").write_text(LOAD_PAIR + text)
    (folder / "use.py").write_text(USE)
    (folder / "mistakes.py").write_text(MISTAKES)
    unread = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in UNREAD.split())
    (folder / "mypy.ini").write_text(f"[mypy]\nstrict = true\n{unread}")
    for name in UNREAD.split():
        (folder / "typings" / name).mkdir(parents=True)
        (folder / "typings" / name / "__init__.pyi").write_text(ANYTHING)
    # What pyright itself makes of a loop's variable after the loop: a warning.
    pyright = {
        "include": ["*.py"],
        "stubPath": "typings",
        "typeCheckingMode": "standard",
        "reportPossiblyUnboundVariable": "warning",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(pyright))
    return folder


def check(folder: Path, *command: str) -> list[str]:
    """The errors that a checker finds, a line each."""
    # Node.js is not for an OpenBLAS in front of it.
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    line = [sys.executable, "-m", *command]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line.strip() for line in done.stdout.splitlines() if "error: " in line]


CHECKERS = {
    "mypy": ("mypy", "--cache-dir", "cache", "readme.py", "use.py", "mistakes.py"),
    "pyright": ("basedpyright", "--pythonpath", sys.executable),
}


@pytest.mark.parametrize("name", CHECKERS)
@pytest.mark.exhaustive
def test_what_a_user_writes_has_types(folder, name):
    errors = [line.replace(" - ", " ") for line in check(folder, *CHECKERS[name])]
    wrong = [line for line in errors if "mistakes.py" not in line]
    assert wrong == []
    # And it can tell: plain decoding has no stats, stats no "taus", and no option is "max_token".
    assert len(errors) == 3
    assert "stats" in errors[0] and "taus" in errors[1] and "max_token" in errors[2]
