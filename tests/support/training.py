"""Helpers of the tests of training: a tiny target with its tokenizer, and data, in folders."""

import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from helpers import SIZES, byte_tokenizer, tiny_llama
from mlx_lm.utils import save_model

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<reply>{{ m['content'] }}<end>"
    "{% else %}<user>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)
VOCAB = 258  # of the byte tokenizer
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "old",
    "owls",
    "look",
    "on",
]


def write_target(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny llama as mlx-lm loads it, with large logits, and a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_llama(seed, vocab_size=VOCAB, **changes)
    model.model.norm.weight = 6 * model.model.norm.weight
    save_model(folder, model)
    config = {"model_type": "llama", **SIZES, "vocab_size": VOCAB, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer()._tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def write_data(folder: Path, **rows: Sequence[dict]) -> Path:
    """Write a data folder: ``train=[...]``, ``valid=[...]``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in rows.items():
        lines = [json.dumps(row) + "\n" for row in values]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def chats(num: int, length: int = 6, first: int = 0) -> list[dict]:
    """Make conversations of one question each, all different."""
    rows = []
    for i in range(first, first + num):
        words = [WORDS[(i * 5 + j * (1 + i % 4)) % len(WORDS)] for j in range(length)]
        messages = [
            {"role": "user", "content": f"say {i}"},
            {"role": "assistant", "content": " ".join(words)},
        ]
        rows.append({"messages": messages})
    return rows


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """Read the weights of a finished head."""
    return {k: np.array(v) for k, v in mx.load(str(folder / "model.safetensors")).items()}


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``num_bytes``: writing fails as on a full disk."""
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))


def write_model(folder: Path, model: Any, config: dict[str, Any]) -> Path:
    """Write a target of any architecture, with the tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer()._tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
