"""Parts of a target that drafters share: of a loaded model, and tensors of its own checkpoint.

mlx-lm drops the layers that predict further tokens when it converts a model, so a target without
sends back to the one that it was made from, by its card or config. Only what holds the tensors is
read or fetched: of a repository the shards with them, or, where they are the smaller part of a
shard, their bytes.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..system.atomic_folder import locked, user_cache
from ..system.hub import REPO_ID, FileMissing, fetch, read_range, snapshot_of
from ..system.json_file import read_published, read_weight_map
from ..system.progress import Bar
from ..system.safetensors import Entry, header_length, parse_header, read_header
from ..target_model.sharding import find_stage
from ..target_model.target import Target

Linear = nn.Linear | nn.QuantizedLinear
Embedding = nn.Embedding | nn.QuantizedEmbedding


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target that a head has to know."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    name: str = "the target"

    def check_width(self, what: str, hidden_size: int) -> None:
        """Raise ValueError where ``what``, a drafter, is for targets of another hidden size."""
        if hidden_size != self.hidden_size:
            raise ValueError(
                f"the {what} was made for a target of hidden size {hidden_size}, but this "
                f"target's is {self.hidden_size}: use the one made for this model."
            )

    def check_vocabulary(self, what: str, vocab_size: int, mask_token_id: int | None) -> None:
        """Raise ValueError where ``what`` has another vocabulary, or masks with no token of it."""
        if not self.is_padded_as(vocab_size) or (mask_token_id or 0) >= self.vocab_size:
            masks = "" if mask_token_id is None else f" and masks with token {mask_token_id}"
            raise ValueError(
                f"the {what} was made for a vocabulary of {vocab_size} tokens{masks}, but the "
                f"target's has {self.vocab_size}: use the one made for this model."
            )

    def is_padded_as(self, vocab_size: int) -> bool:
        """Whether both vocabularies may be the same one, padded differently."""
        return abs(vocab_size - self.vocab_size) <= max(1024, self.vocab_size // 100)


def sizes_of(model: nn.Module) -> TargetSizes:
    """The sizes of an mlx-lm model; of a pipelined one all processes must ask at once."""
    embedding, vocab_size = find_embedding(model)
    with mx.stream(generation_stream):
        return TargetSizes(_num_columns(embedding), find_stage(model).num_layers, vocab_size)


NOT_OF_TOKENS = ("wpe", "_per_layer")  # of GPT-2's positions; for each layer of a small Gemma


def find_embedding(model: nn.Module) -> tuple[Embedding, int]:
    """The module that embeds tokens in an mlx-lm model, and its number of rows.

    It is the widest one, as wide as the residual stream: those of several tokens at once
    (LongCat's n-grams) are narrower, however many rows they have. Others say by their names that
    they are not of tokens: see ``NOT_OF_TOKENS``.
    """
    modules = model.named_modules()
    found = [m for n, m in modules if isinstance(m, Embedding) and not n.endswith(NOT_OF_TOKENS)]
    if not found:
        raise ValueError(
            "the target has no token embedding that a draft head could share: this model is "
            "not supported."
        )
    embedding = max(found, key=_num_columns)
    return embedding, embedding.weight.shape[0]


def _num_columns(module: Linear | Embedding) -> int:
    """Input width of a matrix, packed or not."""
    columns = module.weight.shape[-1]
    return columns * 32 // module.bits if "scales" in module else columns


def lm_head_of(model: nn.Module, embedding: Embedding) -> Callable[[mx.array], mx.array]:
    """The target's output projection: its own matrix, or the embedding where they are tied."""
    shape = (embedding.weight.shape[0], _num_columns(embedding))
    for name, module in model.named_modules():
        if not (isinstance(module, Linear) and name.endswith("lm_head")):
            continue
        if (module.weight.shape[0], _num_columns(module)) == shape:
            return module
    return embedding.as_linear


def rows_of_lm_head(
    model: nn.Module, embedding: Embedding, to_target: mx.array
) -> dict[str, mx.array]:
    """The rows of the target's output projection that the draft vocabulary names."""
    source = lm_head_of(model, embedding)
    module = source if isinstance(source, nn.Module) else embedding
    weight: mx.array = module.weight[to_target]
    if "scales" in module:
        scales = module["scales"][to_target]
        biases = module["biases"][to_target]
        weight = mx.dequantize(weight, scales, biases, module.group_size, module.bits)
    return {"lm_head.weight": weight}


def embedding_scale(model: nn.Module) -> float:
    """By what a model multiplies its embeddings before the first layer: Gemma by sqrt(H).

    Measured on a token; 1 where what enters the first layer is not its embedding times a number.
    """
    embedding, _ = find_embedding(model)
    token = mx.array([1])
    with mx.stream(generation_stream):
        _, entering = Target(model, (0,))(token, make_prompt_cache(model))
        assert entering is not None
        own = embedding(token).astype(mx.float32)
        seen = entering.astype(mx.float32)
        factor = float((own * seen).sum().item() / max((own * own).sum().item(), 1e-20))
        is_scaled = mx.allclose(seen, factor * own, rtol=0.02, atol=0.02 * factor).item()
    return factor if is_scaled and abs(factor - 1) > 0.01 else 1.0


def activation_dtype(embedding: Embedding) -> mx.Dtype:
    return (embedding.scales if "scales" in embedding else embedding.weight).dtype


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CARD = "README.md"
CONFIG = "config.json"
FRONT = re.compile(r"\A---\s*\n(.*?)\n---", re.DOTALL)
MLX = re.compile(r"^(?:library_name: *|- *)mlx *$", re.MULTILINE)
QUANTIZED = re.compile(r"^base_model_relation: *[\"']?quantized", re.MULTILINE)
TUNED = re.compile(r"^base_model_relation: *[\"']?(?:finetune|merge|adapter)", re.MULTILINE)
BASE_MODEL = re.compile(r"^base_model: *(?:\n *- *)?[\"']?([\w.-]+/[\w.-]+)", re.MULTILINE)
MOST_STEPS = 3  # from a model to the one that it was made from
WHOLE = 0.5  # the share of a file's bytes from which on all of it is fetched, as the hub keeps it
HEADER_BYTES = 100_000  # asked for first: most headers are shorter
PART_BYTES = 32_000_000  # asked for at once, and lost where a connection breaks

IsWanted = Callable[[str], bool]


class LayersMissing(ValueError):
    """Neither a target nor a model that it was made from holds the wanted tensors."""


def take_tensors(source: str, is_wanted: IsWanted) -> dict[str, mx.array]:
    """The tensors that are wanted.

    ``source`` is the target's folder or repository id. Where it has none, the model is looked into
    that its card or config names as its base, with a warning where that has other weights. Raises
    ValueError where no one has any.
    """
    holder, names, tuned = search(source, is_wanted)
    if tuned is not None:
        warnings.warn(
            f"the MTP layers are those of {holder}, for {tuned}, which was tuned from it, has "
            "none: fewer drafts may be accepted.",
            stacklevel=2,
        )
    return read_tensors(fetch_files(holder, names, is_wanted), is_wanted)


def holder_of(source: str, is_wanted: IsWanted) -> str | None:
    """The checkpoint that ``take_tensors`` would take from; no weights are read or fetched."""
    with suppress(LayersMissing):
        return search(source, is_wanted)[0]
    return None


def search(source: str, is_wanted: IsWanted) -> tuple[str, list[str], str | None]:
    """The model that has wanted tensors, ``source`` or one it was made from, and their files.

    The last of the three is the first model on the way whose base has other weights: a fine-tune,
    no conversion. Raises LayersMissing where the way ends without.
    """
    looked: list[str] = []
    tuned: str | None = None
    name: str | None = source
    while name is not None and name not in looked and len(looked) <= MOST_STEPS:
        looked.append(name)
        try:
            if names := find_shards(name, is_wanted):
                return name, names, tuned
            base, is_same = made_from(name)
        except ValueError as err:
            if len(looked) == 1:
                raise
            raise ValueError(f"{looked[-2]} was made from {name}, and {err}") from err
        if base is not None and not is_same:
            tuned = tuned or name
        name = base
    end = f"{looked[-1]} names no other model that it was made from"
    if name is not None and name not in looked:
        end = f"{name}, which {looked[-1]} was made from, is not looked into"
    raise LayersMissing(
        f"{' and '.join(looked)} {'holds' if len(looked) == 1 else 'hold'} no MTP layers, and "
        f"{end}: mlx-lm leaves them out where it converts a model, so give the checkpoint as "
        "published as --model, or name a folder of MTP layers or another drafter."
    )


def find_shards(source: str, is_wanted: IsWanted, revision: str | None = None) -> list[str]:
    """The names of the files of a folder or repository that hold wanted tensors."""
    folder = Path(source).expanduser()
    is_local = folder.is_dir()
    if not is_local:
        if not REPO_ID.fullmatch(source):
            raise ValueError(f"{source} does not exist, and it is not a repository id either")
        folder = fetch(source, (INDEX, CONFIG), revision)
    if (folder / INDEX).is_file():
        files = read_weight_map(folder / INDEX)
        return sorted({file for name, file in files.items() if is_wanted(name)})
    if is_local or (folder / SINGLE).is_file():
        shards = sorted(folder.glob("*.safetensors"))
        return [shard.name for shard in shards if any(map(is_wanted, read_header(shard)))]
    try:
        names = _remote_header(source, SINGLE, folder.name)[0]
    except FileMissing:
        return []  # it has none, or is another format
    return [SINGLE] if any(map(is_wanted, names)) else []


def fetch_files(
    source: str, names: list[str], is_wanted: IsWanted, revision: str | None = None
) -> list[Path]:
    """These files of a folder or repository, or the wanted part of them, fetched where need be."""
    folder = Path(source).expanduser()
    is_local = folder.is_dir()
    if not is_local:
        folder = fetch(source, (INDEX, CONFIG), revision)
    files = []
    for name in names:
        path = folder / name
        if not path.is_file():
            if is_local:
                raise ValueError(
                    f"{source} has {name} in its index, but the file is missing: fetch it again."
                )
            path = _fetch_part(source, name, folder.name, is_wanted)
        files.append(path)
    return files


def _remote_header(repo: str, name: str, commit: str) -> tuple[dict[str, Entry], int]:
    """The tensors of a file of a repository, and its size, by its first bytes.

    They are kept, so that what was fetched is found again without the hub.
    """
    where = f"{repo}/{name}"
    kept = _kept(repo, f"{commit};{name}", "header")
    if kept.is_file():
        stored = kept.read_bytes()
        size = int.from_bytes(stored[:8], "little")
        return parse_header(stored[8:], size, where), size
    start, size = read_range(repo, name, 0, HEADER_BYTES, commit)
    end = 8 + header_length(start, size, where)
    if len(start) < end:
        start += read_range(repo, name, len(start), end, commit)[0]
    found = parse_header(start[8:end], size, where)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(size.to_bytes(8, "little") + start[8:end])
    return found, size


def _kept(repo: str, about: str, suffix: str) -> Path:
    """Where what was fetched of a repository lies in our cache."""
    key = hashlib.sha256(about.encode()).hexdigest()[:12]
    return user_cache() / "layers" / f"{repo.replace('/', '--')}-{key}.{suffix}"


def _fetch_part(repo: str, name: str, commit: str, is_wanted: IsWanted) -> Path:
    """A file of a repository, or one of ours with its wanted tensors where these are the less."""
    try:
        header, size = _remote_header(repo, name, commit)
    except FileMissing as err:
        raise ValueError(
            f"{repo} has {name} in its index, but the file is missing: ask on its page, or name "
            "another drafter."
        ) from err
    wanted = {n: entry for n, entry in header.items() if is_wanted(n)}
    if sum(entry.end - entry.start for entry in wanted.values()) > WHOLE * size:
        return fetch(repo, (name,), commit) / name
    path = _kept(repo, f"{commit};{name};{sorted(wanted)}", "safetensors")
    with locked(path.parent, lambda: print(f"{repo}: another process is fetching; waiting.")):
        if not path.is_file():
            try:
                _write_part(path, wanted, lambda a, b: read_range(repo, name, a, b, commit)[0])
            except OSError as err:
                raise ValueError(
                    f"{path} cannot be written ({err.strerror}): make room or give rights, and "
                    "try again."
                ) from err
    return path


def _write_part(
    path: Path, wanted: Mapping[str, Entry], read: Callable[[int, int], bytes]
) -> None:
    """A safetensors file of these tensors of another, whose bytes ``read`` gives.

    What is there so far lies beside it, and the next call goes on from there.
    """
    ordered = sorted(wanted.items(), key=lambda item: item[1].start)
    entries = {}
    total = 0
    for name, entry in ordered:
        end = total + entry.end - entry.start
        entries[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [total, end]}
        total = end
    header = json.dumps(entries).encode()
    begun = path.with_suffix(".incomplete")
    with begun.open("ab") as file, Bar("Fetching", "B") as progress:
        if file.tell() == 0:
            file.write(len(header).to_bytes(8, "little") + header)
        done = file.tell() - 8 - len(header)
        for start, end in _pieces(entry for _, entry in ordered):
            if (left := end - start - done) > 0:
                file.write(read(end - left, end))
                file.flush()
            done = max(0, done - (end - start))
            progress(file.tell() - 8 - len(header), total)
    os.replace(begun, path)


def _pieces(entries: Iterable[Entry]) -> Iterator[tuple[int, int]]:
    """The bytes of tensors in their order, from and to, as much at once as lies side by side."""
    runs: list[list[int]] = []
    for entry in entries:
        if runs and runs[-1][1] == entry.start:
            runs[-1][1] = entry.end
        else:
            runs.append([entry.start, entry.end])
    for start, end in runs:
        for first in range(start, end, PART_BYTES):
            yield first, min(first + PART_BYTES, end)


def read_target_config(source: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a folder or repository; {} where there is none that can be read.

    It is mlx-lm that says what is wrong with a target's.
    """
    folder = Path(source).expanduser()
    folder = folder if folder.is_dir() else fetch(str(source), (CONFIG,))
    with suppress(ValueError):
        return read_published(folder / CONFIG)
    return {}


def read_tensors(files: Iterable[Path], is_wanted: IsWanted) -> dict[str, mx.array]:
    """The wanted tensors of these files; the others are not read."""
    found: dict[str, mx.array] = {}
    for file in files:
        read_header(file)  # a sentence where it is damaged
        loaded: Any = mx.load(str(file))
        found |= {name: array for name, array in loaded.items() if is_wanted(name)}
    return found


def made_from(source: str) -> tuple[str | None, bool]:
    """The model that another was made from, and whether only by converting it.

    By its card, else by its config; None where neither names one.
    """
    folder = Path(source).expanduser()
    repo, commit = snapshot_of(source)
    if not folder.is_dir():
        folder = fetch(source, (CARD, CONFIG))
    elif commit is not None:
        with suppress(ValueError):  # the card, which mlx-lm does not download
            fetch(repo, (CARD,), commit)
    text, card = (_text(folder / name) for name in (CONFIG, CARD))
    front = FRONT.match(card)
    lines = front[1] if front is not None else ""
    is_same = MLX.search(lines) or QUANTIZED.search(lines) or '"quantization' in text
    is_same = is_same and not TUNED.search(lines)
    base = BASE_MODEL.search(lines)
    named = base[1] if base is not None else read_target_config(source).get("_name_or_path")
    is_other = isinstance(named, str) and REPO_ID.fullmatch(named) and named != source
    return (named if is_other else None), bool(is_same)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
