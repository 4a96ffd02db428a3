"""The whole conversion: open, recognise, resolve, trim, read, quantize, check, save."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.folder import write_files
from mlx_eagle.drafters.kind import Tensors
from mlx_eagle.drafters.kinds import KINDS, OTHERWISE, is_converted, recognise
from mlx_eagle.drafters.quantize import Packing, Quantization, pack, shapes_of_matrices
from mlx_eagle.drafters.target_parts import TargetSizes, made_from, read_target_config
from mlx_eagle.system.atomic_folder import AlreadyThere, new_folder
from mlx_eagle.system.device import megabytes
from mlx_eagle.system.hub import locate, upload
from mlx_eagle.system.progress import Progress, silent

from .check import Report, check_head, load_model, measure_acceptance, rope_bases
from .checkpoint import (
    CONFIG_FILES,
    DraftCheckpoint,
    TargetFolder,
    open_checkpoint,
    open_target,
    read_parts,
    same_values,
)
from .dequantize import FLOATS, MLXPacked, Unpacked, unpacked
from .head_config import Resolved, resolve
from .publish import CARD, make_card, source_license, stored_as
from .published_config import NO_OVERRIDES, Overrides
from .stored import Stored
from .trim import Trim, describe, trim

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
TABLES_OF_IDS = ("d2t", "token_ordering")
TABLES = {"file": "kept", "target": "the target's", "target_rows": "rows of the target's"}
"""Origins of the embedding and the lm_head, for people."""


@dataclass(frozen=True)
class Head:
    """A drafter as it will be saved: its ``config.json``, its arrays, and doubts for the user.

    ``title`` says what it is: a family of EAGLE heads, or another kind of drafter. Most of its
    ``tensors``, which are unread, were published in the type ``dtype``; ``is_packed`` says
    whether MLX has packed matrices. ``build`` makes the ``weights`` of them.
    """

    title: str
    config: dict[str, Any]
    tensors: Tensors
    dtype: mx.Dtype
    is_packed: bool = False
    notes: tuple[str, ...] = ()
    weights: Mapping[str, mx.array] = field(default_factory=dict)


def drop_shared(head: Resolved, target: TargetFolder) -> Resolved:
    """Leave out the embedding and the lm_head if they equal the target's."""
    if head.config.hidden_size != target.hidden_size:
        return head
    tensors = dict(head.tensors)
    shared = {}
    ids = head.target_ids
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and same_values(embedding.read(), target.table("embed_tokens")):
        del tensors["embed_tokens.weight"]
        shared["embed_source"] = "target"
    output = tensors.get("lm_head.weight")
    if output is not None:
        theirs = target.table("lm_head", "embed_tokens")
        if theirs is not None and ids is not None:
            theirs = theirs[mx.array(ids)]
        if same_values(output.read(), theirs):
            del tensors["lm_head.weight"]
            shared["lm_head_source"] = "target" if ids is None else "target_rows"
    return replace(head, config=replace(head.config, **shared), tensors=tensors)


def prepare(
    kind: str,
    checkpoint: DraftCheckpoint,
    target: TargetSizes | None,
    overrides: Overrides = NO_OVERRIDES,
    draft_vocab: Trim | None = None,
) -> Head:
    """The drafter in a checkpoint of that kind, with a part of its vocabulary if one is given."""
    make = KINDS[kind].convert
    if make is None:
        return _prepare_eagle(checkpoint, target, overrides, draft_vocab)
    whole = unpacked(checkpoint.tensors, checkpoint.config)
    config, tensors = make(whole, checkpoint.config)
    config = config | {"kind": kind}
    _refuse(config, draft_vocab, overrides)
    if draft_vocab is not None:
        ids = draft_vocab.ids
        config["draft_vocab"] = draft_vocab.size if ids is None else list(ids)
    KINDS[kind].made_for(config, Path("config.json"), target)
    is_packed = any(isinstance(tensor, MLXPacked) for tensor in whole.values())
    return Head(KINDS[kind].title, config, tensors, own_dtype(whole), is_packed)


def _prepare_eagle(
    checkpoint: DraftCheckpoint,
    target: TargetSizes | None,
    overrides: Overrides,
    draft_vocab: Trim | None,
) -> Head:
    """The same for an EAGLE head: resolved, trimmed, without tables that equal the target's."""
    head = resolve(checkpoint, target, overrides)
    folder = target if isinstance(target, TargetFolder) else None
    if draft_vocab is not None:
        head = trim(head, draft_vocab, folder)
    if folder is not None:
        head = drop_shared(head, folder)
    config = Eagle3Config.from_dict(head.config.to_dict()).to_dict() | {"kind": "eagle3"}
    if head.trimmed is not None:
        config["draft_vocab_trim"] = dict(head.trimmed)
    tensors = dict(head.tensors)
    if head.target_ids is not None:
        offsets = (head.target_ids - np.arange(len(head.target_ids))).astype(np.int32)
        tensors["d2t"] = Stored("I32", offsets.shape, offsets.view(np.uint8))
    dtype = own_dtype(head.tensors)
    return Head(head.family.title, config, tensors, dtype, notes=head.notes)


def own_dtype(tensors: Tensors) -> mx.Dtype:
    """The dtype that most of a drafter is stored in, judged by its largest tensor.

    Tensors that are made of several do not count: their scales are often more precise. It is
    float16 for what is not stored as floats.
    """
    plain = (tensor for tensor in tensors.values() if not isinstance(tensor, Unpacked))
    return FLOATS.get(max(plain, key=lambda tensor: tensor.size).format, mx.float16)


def build(
    unread: Head,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    progress: Progress = silent,
) -> Head:
    """Read the tensors as weights, quantized as the config then says.

    Matrices are of the published dtype unless another is asked for. Norms and biases are not
    quantized, and keep their precision unless a dtype is asked for: in GGUF files they are
    float32, and matrices blocks of 8 bits and fewer. Matrices that MLX has packed already stay as
    they are unless other bits are asked for, since packing them again would lose more.
    """
    tensors = unread.tensors
    config = dict(unread.config)
    shapes = shapes_of_matrices(tensors, KINDS[config["kind"]].never_quantized)
    notes: list[str] = []
    kept: dict[str, Packing] = {}
    chosen: dict[str, Packing | None] = {}
    if quantization is not None:
        packed = {n: t.packing for n, t in tensors.items() if isinstance(t, MLXPacked)}
        own = {name.removesuffix(".weight"): each for name, each in packed.items() if each}
        if unread.is_packed and not own:
            raise ValueError(
                f"this is {unread.title} that is packed already, and packed anew it would lose "
                "twice: name it as it is with --draft-model, or convert with --no-quantize"
            )
        kept = {p: each for p, each in own.items() if quantization.bits in (None, each["bits"])}
        chosen = quantization.choose(shapes) | kept
        notes = quantization.notes(shapes, {p: c for p, c in chosen.items() if p not in kept})
        config["quantization"] = quantization.entry(chosen)
    weights: dict[str, mx.array] = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        progress(i, len(tensors))
        path = name.removesuffix(".weight")
        if path in kept and isinstance(tensor, MLXPacked):
            weights |= tensor.stored(name)
            continue
        array = tensor.read()
        if name in TABLES_OF_IDS:
            weights[name] = array.astype(mx.int32)
            continue
        if array.dtype not in DTYPES.values():
            raise ValueError(
                f"{name} is stored as {tensor.format} without a scale, expected floats; the "
                "checkpoint is damaged"
            )
        if dtype is not None or array.ndim > 1:
            array = array.astype(DTYPES[dtype] if dtype else unread.dtype)
        packing = chosen.get(path)
        entry = pack(name, array, packing) if packing else {name: array}
        mx.eval(entry)  # one tensor at a time, so that the sources can be let go
        weights |= entry
    progress(len(tensors), len(tensors))
    return replace(unread, config=config, weights=weights, notes=(*unread.notes, *notes))


def summary(checkpoint: DraftCheckpoint, head: Head) -> list[str]:
    """Lines for people: the drafter that was found, how it is stored, and doubts."""
    c = head.config
    lines = [f"kind        {head.title}"]
    if c["kind"] == "eagle3":
        lines = _summary_of_eagle(head.title, c)
    dtype = str(max(head.weights.values(), key=lambda array: array.size).dtype).split(".")[-1]
    num_parameters = sum(tensor.size for tensor in head.tensors.values())
    num_bytes = sum(array.nbytes for array in head.weights.values())
    return [
        *lines,
        f"parameters  {num_parameters / 1e6:.2f} M",
        f"stored as   {stored_as(c, dtype)}",
        f"size        {megabytes(checkpoint.num_bytes)} -> {megabytes(num_bytes)}",
        *(f"warning: {note}" for note in head.notes),
    ]


def _summary_of_eagle(title: str, c: Mapping[str, Any]) -> list[str]:
    ids = c["aux_boundary_ids"]
    if not c["uses_aux"]:
        taps = "the target's final state, after its norm"
    elif ids is None:
        taps = "2, N/2 and N-3 of the target's N layers (default)"
    else:
        depth = ", to be settled by the target's depth" if c["aux_nested_ids"] else ""
        taps = f"{', '.join(map(str, ids))} ({c['aux_ids_source']}{depth})"
    if c["pre_fc_norm"] == "per_feature" and c["norm_output"]:
        title += ", EAGLE-3.1"
    if c["mask_token_id"] is not None:
        title += ", P-EAGLE"
    trimmed = f", {describe(c['draft_vocab_trim'])}" if "draft_vocab_trim" in c else ""
    return [
        f"family      {title}",
        f"layers      {c['num_layers']}",
        f"taps        {taps}",
        f"rope        {c['rope']['type']}, base {c['rope']['theta']:g}",
        f"vocabulary  {c['draft_vocab_size']} of {c['vocab_size']}{trimmed}",
        f"embedding   {TABLES[c['embed_source']]}",
        f"lm_head     {TABLES[c['lm_head_source']]}",
    ]


def _destination(mlx_path: str, dtype: str | None) -> Path:
    """The folder to write; ValueError if it cannot be made, or for an unknown dtype."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype}; choose one of {', '.join(DTYPES)}")
    path = Path(mlx_path).expanduser()
    if path.exists():
        raise AlreadyThere(f"{mlx_path} is there already; remove it or choose another --mlx-path")
    if path.is_symlink():
        raise ValueError(
            f"--mlx-path {path} is a link to {path.readlink()}, which does not exist: remove the "
            "link, or name another folder."
        )
    return path


def _refuse(config: Mapping[str, Any], draft_vocab: Trim | None, overrides: Overrides) -> None:
    """Raise ValueError for options that a drafter which is no EAGLE head does not take."""
    title = KINDS[config["kind"]].title
    options = {"--draft-vocab-text": None if draft_vocab is None else draft_vocab.text}
    options |= {f"--{name.replace('_', '-')}": value for name, value in vars(overrides).items()}
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]} is for EAGLE heads, and this is {title}: leave it out")
    if draft_vocab is None:
        return
    if "vocab_size" not in config:
        raise ValueError(
            f"--draft-vocab is for drafters that score a vocabulary, and this is {title}: leave "
            "it out"
        )
    most = max(draft_vocab.ids or (draft_vocab.size - 1,))
    if most >= config["vocab_size"]:
        raise ValueError(
            f"--draft-vocab reaches token {most}, and the drafter's target has "
            f"{config['vocab_size']}; give less"
        )
    if config.get("num_centroids"):
        raise ValueError(
            "--draft-vocab makes an assistant no cheaper that scores clusters of its vocabulary; "
            "leave it out"
        )


def measure(
    head: Head,
    unread: Head,
    whole: Head | None,
    checkpoint: DraftCheckpoint,
    target: TargetFolder,
    dtype: str | None,
) -> Report:
    """Measure a drafter on its target, under every reading of it.

    An EAGLE head is measured quantized and not, and with its ``whole`` draft vocabulary if a part
    is kept.
    """
    loaded = load_model(target.name, dtype)
    if head.config["kind"] != "eagle3":
        kind = KINDS[head.config["kind"]]
        return measure_acceptance(kind, head.config, head.weights, *loaded)
    dense = head
    variants = {}
    if "quantization" in head.config:
        dense = build(unread, dtype)
        variants["quantized"] = head.config, head.weights
    if whole is not None:
        full = build(whole, dtype)
        variants["full"] = full.config, full.weights
    bases = rope_bases(checkpoint.config) | rope_bases(target.config)
    return check_head(dense.config, dense.weights, *loaded, variants=variants, bases=bases)


def save(head: Head, folder: Path, target: TargetFolder | None = None) -> None:
    """Write ``config.json``, ``model.safetensors`` and the target's tokenizer there."""
    write_files(folder, head.config, head.weights)
    if target is not None and not target.copy_tokenizer(folder):
        print(f"warning: {target.name} has no tokenizer files to copy")


def open_published(
    source: str, revision: str | None, target: str | None
) -> tuple[str, DraftCheckpoint]:
    """The kind of a checkpoint, and the checkpoint; of a whole model only a drafter's tensors.

    Raises ValueError for a kind that is known and not read.
    """
    folder = locate(source, CONFIG_FILES, revision)
    if is_converted(folder):
        raise ValueError(f"{source} is an already converted drafter: use the folder as it is")
    config = read_target_config(folder) if folder.is_dir() else {}
    parts = {n: is_part for n, kind in KINDS.items() if (is_part := kind.parts_of(config))}
    for name, is_part in parts.items():
        tensors, files = read_parts(source, is_part, revision)
        if tensors:
            return name, DraftCheckpoint(source, config, tensors, tuple(files))
    checkpoint = open_checkpoint(source, revision)
    kind = recognise(checkpoint.tensors, checkpoint.config, source, target)
    if kind == OTHERWISE and parts:
        base, _ = made_from(source)
        way_out = f"convert {base}, which it was made from" if base else "convert its original"
        raise ValueError(f"{source} is a model without MTP layers: {way_out}")
    if kind == "mtp" and checkpoint.files[0].suffix == ".gguf":
        if target is None:
            raise ValueError(
                f"{source} says not all of what its MTP layers are built of: name the model that "
                "they are for with --target"
            )
        checkpoint = replace(checkpoint, config=read_target_config(target))
    return kind, checkpoint


def convert(
    hf_path: str,
    mlx_path: str = "mlx_model",
    quantize: bool = True,
    q_group_size: int = 64,
    q_bits: int | None = None,
    dtype: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    target: str | TargetSizes | None = None,
    overrides: Overrides = NO_OVERRIDES,
    check: bool = False,
    draft_vocab: int | Trim | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Convert a published drafter to a folder that ``load_drafter`` reads.

    Parameters are named as in ``mlx_lm.convert``. ``hf_path`` is a folder, a GGUF file or a hub
    repository id, and so is ``target``, the model the head was trained for: with it the taps are
    checked, its tokenizer is copied, and tables that equal its own are left out. The
    ``TargetSizes`` of a loaded model only settle the taps. ``dtype`` is float16, bfloat16 or
    float32 (default: the checkpoint's). Without ``q_bits`` they are mixed (see ``Quantization``).
    ``check`` runs the target and writes into the config how well the head agrees with it.
    ``draft_vocab`` is the number of draft tokens to keep, or a ``Trim`` that says which.
    ``progress`` is given the number of tensors done and of all.

    Returns the config that was written. Raises ValueError, one sentence, for a checkpoint
    that is damaged, refused or contradicts itself, and leaves nothing behind.
    """
    destination = _destination(mlx_path, dtype)
    name = None if isinstance(target, TargetSizes) else target
    if check and name is None:
        raise ValueError("--check compares the head with its target; name it with --target")
    quantization = Quantization(q_bits, q_group_size) if quantize else None
    kind, checkpoint = open_published(str(hf_path), revision, name)
    model = target if name is None else open_target(str(name))
    if isinstance(draft_vocab, int):
        draft_vocab = Trim(draft_vocab)
    unread = prepare(kind, checkpoint, model, overrides, draft_vocab)
    head = build(unread, dtype, quantization, progress)
    lines = summary(checkpoint, head)
    if check and isinstance(model, TargetFolder):
        whole = None if draft_vocab is None else prepare(kind, checkpoint, model, overrides)
        report = measure(head, unread, whole, checkpoint, model, dtype)
        head.config["check"] = report.entry()
        lines.append(report.table())
    head.config["source"] = checkpoint.provenance()
    with new_folder(destination) as folder:
        save(head, folder, model if isinstance(model, TargetFolder) else None)
        if upload_repo:
            license = source_license(checkpoint.source, checkpoint.config, revision)
            names = upload_repo, checkpoint.source, name, head.title
            card = make_card(head.config, *names, license, lines[-1] if check else None)
            (folder / CARD).write_text(card, encoding="utf-8")
    print("\n".join(lines))
    if upload_repo:
        print(f"uploaded to {upload(destination, upload_repo)}")
    return head.config
