"""Draft models by name: everything that ``--draft-model`` takes, and its opening.

All kinds of drafters come together here; the loop uses them by their interface.
"""

import hashlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decoding.setup import AUTO
from .drafters.base import Drafter
from .drafters.kind import Kind, LoadOptions
from .drafters.kinds import KINDS, is_converted, kind_of, load_drafter, published_kind
from .drafters.target_parts import TargetSizes, sizes_of
from .system.atomic_folder import AlreadyThere, CannotWrite, discard_folder, locked, user_cache
from .system.hub import locate
from .system.json_file import read_published
from .system.progress import Bar

LOOKUP = "lookup"
FILES = ("*.json", "*.safetensors", "*.bin", "*.gguf", "*.txt", "*.jinja", "*.model")


def open_drafter(
    name: str,
    model: nn.Module,
    tokenizer: TokenizerWrapper | None = None,
    *,
    quantize_bits: int | None = None,
    draft_window: int | None = None,
    target: str | Path | None = None,
) -> Drafter:
    """Open what ``name`` stands for, as a drafter for ``model``.

    "lookup" copies from the prompt (no weights); "mtp" takes the multi-token-prediction layers
    that the target was published with, from ``target``, its folder or hub repo id (by default
    where ``tokenizer`` is from), or from the model that this was converted from. Otherwise it is a
    folder, a GGUF file or a hub repo id: a converted head; a folder of MTP layers; an EAGLE
    checkpoint, which is converted into the cache, saying so; or an ordinary mlx-lm model with the
    target's vocabulary. With "+lookup" behind it, it copies where that is likely to keep more.
    ``draft_window`` is for EAGLE heads: see ``load_drafter``.

    Raises ValueError, in one sentence, for what is none of these or does not fit ``model``.
    """
    name, copies = split_name(name)
    if target is None and tokenizer is not None:
        target = tokenizer.name_or_path
    place = None if target is None else str(target)
    options = LoadOptions(quantize_bits, tokenizer=tokenizer, target=place)
    drafter = _open(name, model, options).with_draft_window(draft_window)
    return drafter.with_copies() if copies else drafter


def _open(name: str, model: nn.Module, options: LoadOptions) -> Drafter:
    """Open a drafter by its name without "+lookup"."""
    named = KINDS.get(name)
    if named is not None and named.by_name is not None:
        return named.by_name(model, options)
    path, kind = _find(name)
    if kind is None:
        return load_drafter(path, model, quantize_bits=options.quantize_bits)
    if kind.loads_published:
        return kind.load(path, read_published(path / "config.json"), model, options)
    return _open_checkpoint(path, name, model, options.quantize_bits)


def find_drafter(name: str | None) -> None:
    """Find and download what ``name`` stands for, so that a mistake is reported before the target
    is loaded.

    Raises ValueError, as ``open_drafter`` does.
    """
    base = AUTO if name is None else split_name(name)[0]
    if base == AUTO or (base in KINDS and KINDS[base].by_name is not None):
        return
    _find(base)


def _find(name: str) -> tuple[Path, Kind | None]:
    """The path of a drafter, downloaded if need be, and its published kind; None if converted."""
    path = locate(name, FILES)
    return path, None if is_converted(path) else KINDS[published_kind(path, name)]


def split_name(name: str) -> tuple[str, bool]:
    """Split off "+lookup", and tell whether it was there: HEAD+lookup -> (HEAD, True).

    A plus in the name of a file or folder that exists is part of that name. Raises ValueError for
    any other plus.
    """
    if "+" not in name or _exists(name):
        return name, False
    head, _, what = name.rpartition("+")
    if what != LOOKUP:
        raise ValueError(
            f"{name} does not exist, and behind a plus there may only be {LOOKUP!r}: give "
            f"HEAD+{LOOKUP}."
        )
    if head in ("", LOOKUP) or ("+" in head and not _exists(head)):
        raise ValueError(
            f"{name!r} has no draft head before the plus: give HEAD+{LOOKUP}, or {LOOKUP!r} alone."
        )
    return head, True


def _exists(name: str) -> bool:
    return Path(name).expanduser().exists()


def open_beside(
    own: Drafter | None,
    name: str | None,
    model: nn.Module,
    tokenizer: TokenizerWrapper | None = None,
    *,
    quantize_bits: int | None = None,
    draft_window: int | None = None,
    target: str | Path | None = None,
) -> Drafter | None:
    """Open a drafter by name; None and "auto" stand for ``own``, which came with the target.

    Everything else is as in ``open_drafter``.
    """
    base, copies = (AUTO, False) if name is None else split_name(name)
    if base == AUTO and own is not None:
        own = own.with_draft_window(draft_window)
        return own.with_copies() if copies else own
    if name is None:
        return None
    return open_drafter(
        name,
        model,
        tokenizer,
        quantize_bits=quantize_bits,
        draft_window=draft_window,
        target=target,
    )


def _open_checkpoint(path: Path, name: str, model: nn.Module, q_bits: int | None) -> Drafter:
    """A head as published: its converted form, from the cache where it is there and usable."""
    target = sizes_of(model)
    folder = cached_folder(path, q_bits, target)
    if folder.is_dir():
        try:
            return load_drafter(folder, model)
        except ValueError as err:
            print(f"{folder} is converted again, for it cannot be used: {err}", file=sys.stderr)
            discard_folder(folder)
    try:
        return load_drafter(converted(path, name, q_bits, target), model)
    except CannotWrite as err:
        print(f"warning: the converted head is not kept: {err}", file=sys.stderr)
    with TemporaryDirectory() as place:
        return load_drafter(_convert(path, name, Path(place) / "head", q_bits, target), model)


def cached_folder(path: Path, q_bits: int | None, target: TargetSizes) -> Path:
    """The folder of a checkpoint's converted form for such a target, made or not."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file())
    stamp = "".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns};" for f in files)
    key = f"{path.resolve()};{q_bits};{target};{stamp}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    packed = "mixed" if q_bits is None else f"{q_bits}bit"
    return heads_folder() / f"{path.stem}-{packed}-{digest}"


def converted(path: Path, name: str, q_bits: int | None, target: TargetSizes) -> Path:
    """The converted form of an unconverted checkpoint, made once and kept in the cache.

    Of several processes one converts, and the others wait for its folder. Raises CannotWrite
    where the cache cannot be written.
    """
    folder = cached_folder(path, q_bits, target)
    with locked(folder.parent, lambda: print(f"{name}: another process is converting; waiting.")):
        if folder.is_dir():
            return folder
        try:
            return _convert(path, name, folder, q_bits, target)
        except AlreadyThere:  # where the file system has no locks
            return folder


def _convert(path: Path, name: str, folder: Path, q_bits: int | None, target: TargetSizes) -> Path:
    from .convert import convert  # heavier than the runtime, and rarely needed

    bits = "" if q_bits is None else f" to {q_bits} bits"
    print(f"{name} is not converted yet: converting it{bits} into {folder}.")
    with Bar("Converting", "tensor") as progress:
        convert(str(path), str(folder), q_bits=q_bits, target=target, progress=progress)
    return folder


def heads_folder() -> Path:
    """The folder of heads that were converted when first used, a subfolder each."""
    return user_cache() / "heads"


def head_lines() -> list[str]:
    """Readable lines about the heads in that folder: size, target and source."""
    found = sorted(path.parent for path in heads_folder().glob("*/config.json"))
    lines = [f"  {head}  {_about(head)}" for head in found if not head.name.startswith(".")]
    return [f"Heads converted into {heads_folder()}:", *(lines or ["  none yet"])]


def _about(folder: Path) -> str:
    try:
        kind, values = kind_of(folder)
        made_for = kind.made_for(values, folder / "config.json", None)
        size = (folder / "model.safetensors").stat().st_size
    except (ValueError, OSError):
        return "damaged; it is converted again when it is used"
    source = (values.get("source") or {}).get("path", "an unknown place")
    return f"{size / 1e6:.0f} MB, {made_for}, from {source}"
