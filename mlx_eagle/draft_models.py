"""Draft models by name: everything that ``--draft-model`` takes, and its opening.

All kinds of drafters come together here; the loop uses them by their interface.
"""

import hashlib
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decoding.setup import AUTO
from .drafters import mtp
from .drafters.base import Drafter
from .drafters.kind import Kind, LoadOptions
from .drafters.kinds import KINDS, is_converted, kind_of, load_folder, own_kind, published_kind
from .drafters.lookup import LookupDrafter
from .drafters.output_rows import DraftVocab
from .drafters.pairs import Pair, is_named_after, pairs_for
from .drafters.quantize import Quantization, bits_of
from .drafters.target_parts import MOST_STEPS, TargetSizes, made_from, sizes_of
from .system.atomic_folder import AlreadyThere, CannotWrite, discard_folder, locked, user_cache
from .system.exit_codes import USER_ERRORS
from .system.fields import suggestion
from .system.hub import locate, snapshot_of
from .system.json_file import read_published
from .system.progress import Bar
from .system.safetensors import read_header

LOOKUP = "lookup"
FILES = ("*.json", "*.safetensors", "*.bin", "*.gguf", "*.txt", "*.jinja", "*.model")


def open_drafter(
    name: str,
    model: nn.Module,
    tokenizer: TokenizerWrapper | None = None,
    *,
    quantize_bits: int | None = None,
    draft_window: int | None = None,
    draft_vocab: DraftVocab = None,
    target: str | Path | None = None,
) -> Drafter:
    """Open what ``name`` stands for, as a drafter for ``model``.

    "auto" is the best known drafter of the target that can be opened, and copies: see
    ``known_pairs``. "lookup" copies from the prompt (no weights); "mtp" takes the
    multi-token-prediction layers that the target was published with, from ``target``, its folder
    or hub repo id (by default where ``tokenizer`` is from), or from the model that this was
    converted from. Otherwise it is a folder, a GGUF file or a hub repo id: a converted head; a
    folder of MTP layers; an EAGLE checkpoint, which is converted into the cache, saying so; or an
    ordinary mlx-lm model with the target's vocabulary. With "+lookup" behind it, it copies where
    that is likely to keep more. What is opened as published is quantized while it is loaded, as
    the converter does it, beside a target that is quantized (see ``usual_quantization``);
    ``quantize_bits`` says how many bits it gets, 0 that it stays as it is. ``draft_window`` is for
    EAGLE heads: see ``load_drafter``. ``draft_vocab`` makes it draft from a part of the
    vocabulary: the first N ids, or those in a file or list, with the tokens that end a text and
    those of each prompt; None or "full": all.

    Raises ValueError, in one sentence, for what is none of these or does not fit ``model``.
    """
    _, drafter = open_beside(
        None,
        name,
        model,
        tokenizer,
        quantize_bits=quantize_bits,
        draft_window=draft_window,
        draft_vocab=draft_vocab,
        target=target,
    )
    assert drafter is not None  # there is a name
    return drafter


def open_beside(
    own: Drafter | None,
    name: str | None,
    model: nn.Module,
    tokenizer: TokenizerWrapper | None = None,
    *,
    quantize_bits: int | None = None,
    draft_window: int | None = None,
    draft_vocab: DraftVocab = None,
    target: str | Path | None = None,
    copies: bool = True,
) -> tuple[str | None, Drafter | None]:
    """Open a drafter as ``open_drafter`` does; also the name of what "auto" stands for.

    None and "auto" stand for ``own``, which came with the target, if there is one; without it
    None stands for no drafter. ``copies`` is whether "auto" alone copies.
    """
    if own is None and name is None:
        return None, None
    base, has_plus = (AUTO, False) if name is None else split_name(name)
    copies = has_plus or (copies and base == AUTO)
    if own is None and target is None and tokenizer is not None:
        target = tokenizer.name_or_path
    options = LoadOptions(
        quantize_bits,
        tokenizer=tokenizer,
        target=None if target is None else str(target),
        draft_window=draft_window,
        draft_vocab=draft_vocab,
    )
    if base != AUTO:
        drafter = _open(base, model, options)
    elif own is not None:
        drafter = options.limit(own, model)
    else:
        base, drafter = _open_known(model, options, copies)
    if copies and base != LOOKUP:
        return f"{base}+{LOOKUP}", drafter.with_copies()
    return base, drafter


def _open(name: str, model: nn.Module, options: LoadOptions) -> Drafter:
    """Open a drafter by its name without "+lookup"."""
    named = KINDS.get(name)
    if named is not None and named.by_name is not None:
        opened = named.by_name(model, options)
    else:
        path, kind = _find(name)
        if kind is None:
            return load_folder(path, model, options)
        opened = _open_published(path, name, kind, model, options)
    return options.limit(opened, model)


def _open_published(
    path: Path, name: str, kind: Kind, model: nn.Module, options: LoadOptions
) -> Drafter:
    """Open a drafter in the form of its makers."""
    if kind.loads_published:
        return kind.load(path, read_published(path / "config.json"), model, options)
    if path.is_file() or any(path.glob("*.gguf")):
        from .convert.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(str(path))
        if mtp.recognise(checkpoint.tensors, checkpoint.config):
            return mtp.load_mtp(checkpoint.arrays(), model, options)
    packing = options.quantization(model)
    names = (name for shard in sorted(path.glob("*.safetensors")) for name in read_header(shard))
    if options.quantize_bits is None and any(name.endswith(".scales") for name in names):
        packing = Quantization()  # what MLX has packed stays as it is
    return _open_checkpoint(path, name, model, packing)


def _open_known(model: nn.Module, options: LoadOptions, copies: bool) -> tuple[str, Drafter]:
    """Open the first known drafter of the target that can be; else one that only copies.

    What is taken, and what cannot be, is said on standard error.
    """
    if not options.target:
        raise ValueError(
            f"{AUTO!r} needs the target's name, and its tokenizer does not say it: give its "
            "folder or repository as `target`."
        )
    unknown = f"no public head is known here for {options.target}"
    for pair in known_pairs(options.target):
        try:
            drafter = _open(pair.head, model, options)
        except USER_ERRORS as err:
            reason = " ".join(str(err).split())
            print(f"{pair.head} is passed over, for it cannot be used: {reason}", file=sys.stderr)
            unknown = f"no known drafter of {options.target} can be used"
            continue
        title = f"{KINDS[pair.kind].title} of the model's own"
        taken = title if pair.head == pair.kind else pair.head
        also = ", and copying what the text repeats" if copies else ""
        print(f"Drafting with {taken} (licence: {pair.licence}){also}.", file=sys.stderr)
        return pair.head, drafter
    print(
        f"Note: {unknown}, so drafts are copied from the text: name another with --draft-model.",
        file=sys.stderr,
    )
    return LOOKUP, LookupDrafter()


def known_pairs(target: str, num_steps: int = 0) -> Iterator[Pair]:
    """The drafters that "auto" tries for a target, a folder or hub repo id, in this order.

    Rows of the table of pairs, by the target's name, else by those of the models that it was
    converted from; layers of its own; rows whose layout nobody has seen, which are never first.
    Then those of the models that it was made from in any way, ``num_steps`` back.
    """
    rows = _rows(target)
    seen = [row for row in rows if row.is_seen]
    yield from seen
    own = None if any(row.head in KINDS for row in seen) else own_kind(target)
    if own is not None:
        yield Pair(target, own, "the target's", own, None)
    if seen or own is not None:
        yield from (row for row in rows if not row.is_seen)
    base = made_from(snapshot_of(target)[0])[0] if num_steps else None
    if base is not None:
        yield from known_pairs(base, num_steps - 1)


def known_drafter(target: str, kinds: Collection[str]) -> str:
    """The first seen drafter of these kinds for a target, or for what that was made from.

    Raises ValueError if none is known.
    """
    for pair in known_pairs(target, MOST_STEPS):
        if pair.is_seen and pair.kind in kinds:
            return pair.head
    raise ValueError(
        f"no drafter is known that could be trained for {target}, or for a model that it was made "
        "from: name one with --init, or leave it out for a fresh one."
    )


def _rows(target: str) -> list[Pair]:
    """The rows of a target, or of what its card says that it was converted from."""
    target_name = snapshot_of(target)[0]
    for _ in range(MOST_STEPS + 1):
        if rows := pairs_for(target_name):
            return rows
        try:
            base, is_same = made_from(target_name)
        except USER_ERRORS:  # opening the target says why
            break
        if base is None or not is_same or not is_named_after(target_name, base):
            break
        target_name = base
    return []


def find_drafter(name: str | None, target: str | None = None) -> None:
    """Find and download what ``name`` stands for, so that a mistake is reported before the target
    is loaded.

    Raises ValueError, as ``open_drafter`` does, but not for "auto": what it cannot use is passed
    over when it is opened.
    """
    if name is None:
        return
    base = split_name(name)[0]
    if base != AUTO:
        _find_named(base)
        return
    for pair in () if target is None else known_pairs(target):
        with suppress(*USER_ERRORS):
            _find_named(pair.head)
            return


def _find_named(name: str) -> None:
    if name not in KINDS or KINDS[name].by_name is None:
        _find(name)


def _find(name: str) -> tuple[Path, Kind | None]:
    """The path of a drafter, downloaded if need be, and its published kind; None if converted."""
    words = [AUTO, *(word for word, kind in KINDS.items() if kind.by_name is not None)]
    near = suggestion(name, words)
    if near and "/" not in name and not _exists(name):
        raise ValueError(f"there is no draft model {name!r}{near}")
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


def _open_checkpoint(
    path: Path, name: str, model: nn.Module, packing: Quantization | None
) -> Drafter:
    """A head as published: its converted form, from the cache where it is there and usable."""
    target = sizes_of(model)
    load = partial(load_folder, model=model, options=LoadOptions())
    folder = cached_folder(path, packing, target)
    if folder.is_dir():
        try:
            return load(folder)
        except ValueError as err:
            print(f"{folder} is converted again, for it cannot be used: {err}", file=sys.stderr)
            discard_folder(folder)
    try:
        return load(converted(path, name, packing, target))
    except CannotWrite as err:
        print(f"warning: the converted head is not kept: {err}", file=sys.stderr)
    with TemporaryDirectory() as folder:
        return load(_convert(path, name, Path(folder) / "head", packing, target))


def cached_folder(path: Path, packing: Quantization | None, target: TargetSizes) -> Path:
    """The folder of a checkpoint's converted form for such a target, made or not."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file())
    stamp = "".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns};" for f in files)
    key = f"{path.resolve()};{packing};{target};{stamp}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return heads_folder() / f"{path.stem}-{_short(packing)}-{digest}"


def _short(packing: Quantization | None) -> str:
    """A quantization as part of a name: "dense", "mixed" or "8bit"."""
    if packing is None:
        return "dense"
    return "mixed" if packing.bits is None else f"{packing.bits}bit"


def converted(path: Path, name: str, packing: Quantization | None, target: TargetSizes) -> Path:
    """The converted form of an unconverted checkpoint, made once and kept in the cache.

    Of several processes one converts, and the others wait for its folder. Raises CannotWrite
    where the cache cannot be written.
    """
    folder = cached_folder(path, packing, target)
    with locked(folder.parent, lambda: print(f"{name}: another process is converting; waiting.")):
        if folder.is_dir():
            return folder
        try:
            return _convert(path, name, folder, packing, target)
        except AlreadyThere:  # where the file system has no locks
            return folder


def _convert(
    path: Path, name: str, folder: Path, packing: Quantization | None, target: TargetSizes
) -> Path:
    from .convert import convert  # heavier than the runtime, and rarely needed

    print(f"{name} is not converted yet: converting it ({_short(packing)}) into {folder}.")
    is_packed = packing is not None
    bits = None if packing is None else packing.bits
    with Bar("Converting", "tensor") as progress:
        convert(str(path), str(folder), is_packed, q_bits=bits, target=target, progress=progress)
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
    packing = values.get("quantization")
    packed = f"quantized to {bits_of(packing)}" if packing else "not quantized"
    return f"{size / 1e6:.0f} MB, {packed}, {made_for}, from {source}"
