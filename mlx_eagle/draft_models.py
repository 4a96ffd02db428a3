"""What ``--draft-model`` may name, and how each kind is opened.

The one place that knows every drafter; the loop knows none of them.
"""

import hashlib
import json
from pathlib import Path

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from safetensors import SafetensorError, safe_open

from .drafters.base import Drafter
from .drafters.load import load_drafter
from .drafters.lookup import LookupDrafter
from .drafters.model_drafter import load_model_drafter
from .system.hub import locate, user_cache
from .system.progress import Bar

LOOKUP = "lookup"
FILES = ("*.json", "*.safetensors", "*.bin", "*.gguf", "*.txt", "*.jinja", "*.model")
# Names that only draft heads have: a fusion matrix, a second norm, a draft vocabulary.
HEAD_TENSORS = ("fc.weight", "hidden_norm.weight", "d2t", "mask_hidden", "eh_proj.weight")


def open_drafter(
    name: str,
    model: nn.Module,
    tokenizer: TokenizerWrapper | None = None,
    *,
    quantize_bits: int | None = None,
) -> Drafter:
    """Open what ``name`` stands for, as a drafter for ``model``.

    "lookup" copies from the prompt (no weights). Otherwise it is a folder, a GGUF file or a
    hub repo id: a converted head; an unconverted EAGLE checkpoint, which is converted into the
    cache, saying so; or an ordinary mlx-lm model with the target's vocabulary.

    Raises ValueError, in one sentence, for what is none of these or does not fit ``model``.
    """
    if name == LOOKUP:
        return LookupDrafter()
    path = locate(name, FILES)
    if _is_converted(path):
        return load_drafter(path, model, quantize_bits=quantize_bits)
    if _is_checkpoint(path):
        return load_drafter(converted(path, name, quantize_bits), model)
    if quantize_bits is not None:
        raise ValueError(
            f"{name} is an ordinary model, which is not quantized while loading: make a "
            "quantized copy with mlx_lm.convert."
        )
    return load_model_drafter(path, model, tokenizer)


def converted(path: Path, name: str, q_bits: int | None = None) -> Path:
    """The converted form of an unconverted checkpoint, made once and kept in the cache."""
    from .convert import convert  # heavier than the runtime, and rarely needed

    bits = q_bits or 4
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file())
    stamp = "".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns};" for f in files)
    digest = hashlib.sha256(f"{path.resolve()};{bits};{stamp}".encode()).hexdigest()[:12]
    folder = heads_folder() / f"{path.stem}-{bits}bit-{digest}"
    if not folder.is_dir():
        print(f"{name} is not converted yet: converting it to {bits} bits into {folder}.")
        with Bar("Converting", "tensor") as progress:
            convert(str(path), str(folder), q_bits=bits, progress=progress)
    return folder


def heads_folder() -> Path:
    """Where heads lie that were converted on the way, a folder each."""
    return user_cache() / "heads"


def head_lines() -> list[str]:
    """The heads in that folder for people, a line each: size, target and source."""
    lines = []
    for path in sorted(heads_folder().glob("*/config.json")):
        config, weights = json.loads(path.read_text()), path.parent / "model.safetensors"
        lines.append(
            f"  {path.parent}  {weights.stat().st_size / 1e6:.0f} MB, for targets of hidden size "
            f"{config['target_hidden_size']} with {config['vocab_size']} tokens, from "
            f"{config['source']['path']}"
        )
    return [f"Heads converted into {heads_folder()}:", *(lines or ["  none yet"])]


def _is_converted(path: Path) -> bool:
    config = path / "config.json"
    if not config.is_file():
        return False
    try:
        return json.loads(config.read_text()).get("model_type") == "eagle3"
    except ValueError as err:
        raise ValueError(f"{config} is not JSON ({err}).") from err


def _is_checkpoint(path: Path) -> bool:
    """Whether it holds a draft head as published, of a family we know or not."""
    if path.is_file() or not (path / "config.json").is_file():
        return True  # a GGUF, or nothing mlx-lm could load: the converter says what it is
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        return True
    for shard in shards:
        try:
            with safe_open(shard, framework="numpy") as file:
                if any(key.endswith(HEAD_TENSORS) for key in file.keys()):
                    return True
        except SafetensorError as err:
            raise ValueError(
                f"{shard} cannot be read ({err}): it is damaged or cut short, fetch it again."
            ) from err
    return False
