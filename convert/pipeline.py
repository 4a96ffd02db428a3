"""identify -> rename -> check -> quantize -> save: the whole conversion."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.folder import bits_of
from mlx_eagle.drafters.kinds import KINDS, OTHERWISE, recognise
from mlx_eagle.drafters.target_parts import (
    TargetSizes,
    fetch_files,
    find_shards,
    made_from,
    read_target_config,
)
from mlx_eagle.system.atomic_folder import AlreadyThere, new_folder
from mlx_eagle.system.device import megabytes
from mlx_eagle.system.hub import locate, upload
from mlx_eagle.system.safetensors import save_arrays
from mlx_eagle.system.terminal import Progress, silent

from ..drafters.kind import Tensor, Tensors
from .check import Report, check_entry, check_head, check_table, load_model, rope_bases
from .check_acceptance import measure_acceptance
from .checkpoint import (
    CONFIG_FILES,
    AnyTarget,
    DraftCheckpoint,
    TargetFolder,
    open_checkpoint,
    open_target,
    read_safetensors,
    same_values,
)
from .dequantize import MLXPacked, Unpacked, unpacked
from .publish import CARD, make_card, source_license
from .published_head import NO_OVERRIDES, Overrides
from .quantize import Packing, Quantization, pack
from .resolve import Resolved, resolve
from .trim import Trim, describe, trim

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
# The dtype of a head whose weights are stored so; block formats stand for float16.
DTYPE_OF_FORMAT = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float32"}
TABLES_OF_IDS = ("d2t", "token_ordering")


@dataclass(frozen=True)
class Head:
    """A head ready to be saved: its ``config.json`` and its arrays."""

    config: dict[str, Any]
    weights: dict[str, mx.array]
    num_parameters: int
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.weights.values())


def drop_shared(head: Resolved, target: TargetFolder) -> Resolved:
    """Leave out the embedding and the lm_head where they equal the target's."""
    if head.config.hidden_size != target.hidden_size:
        return head
    config, tensors = head.config, dict(head.tensors)
    ids = head.vocabulary.target_ids
    embedding, output = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    if embedding is not None and same_values(embedding.read(), target.table("embed_tokens")):
        del tensors["embed_tokens.weight"]
        config = replace(config, embed_source="target")
    if output is not None:
        theirs = target.output_table()
        if theirs is not None and ids is not None:
            theirs = theirs[mx.array(ids)]
        if same_values(output.read(), theirs):
            del tensors["lm_head.weight"]
            source = "target" if ids is None else "target_rows"
            config = replace(config, lm_head_source=source)
    return replace(head, config=config, tensors=tensors)


def prepare(
    checkpoint: DraftCheckpoint,
    target: AnyTarget | None,
    overrides: Overrides,
    draft_vocab: int | Trim | None,
) -> Resolved:
    """The head as it will be saved, its tensors unread: resolved, trimmed, nothing twice."""
    head = resolve(checkpoint, target, overrides)
    folder = target if isinstance(target, TargetFolder) else None
    if draft_vocab is not None:
        wanted = Trim(draft_vocab) if isinstance(draft_vocab, int) else draft_vocab
        head = trim(head, wanted, checkpoint, folder)
    return head if folder is None else drop_shared(head, folder)


def own_dtype(tensors: dict[str, Tensor]) -> str:
    """The dtype most of the head is stored in, judged by its first matrix.

    Where that is quantized, by a norm, for scales are often more precise than the head.
    """
    first = tensors["layers.0.self_attn.o_proj.weight"]
    if isinstance(first, Unpacked):
        first = tensors["layers.0.post_attention_layernorm.weight"]
    return DTYPE_OF_FORMAT.get(first.format, "float16")


def build(
    resolved: Resolved,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    progress: Progress = silent,
) -> Head:
    """Read, cast and quantize the tensors.

    Norms and biases are not quantized, and keep the precision they are stored in unless a
    ``dtype`` is given: in GGUF files they are float32, and matrices blocks of 8 bits and fewer.
    """
    config = Eagle3Config.from_dict(resolved.config.to_dict()).to_dict() | {"kind": "eagle3"}
    if resolved.trimmed is not None:
        config["draft_vocab_trim"] = dict(resolved.trimmed)
    kind, tensors = DTYPES[dtype or own_dtype(resolved.tensors)], resolved.tensors
    head = _read(config, tensors, kind, dtype is not None, quantization, progress)
    if resolved.vocabulary.offsets is not None:
        head.weights["d2t"] = mx.array(resolved.vocabulary.offsets)
    return replace(head, notes=(*resolved.notes, *head.notes))


def build_kind(
    name: str,
    checkpoint: DraftCheckpoint,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    progress: Progress = silent,
) -> Head:
    """The same of a kind whose row in the table of kinds says what a checkpoint becomes."""
    make = KINDS[name].convert
    assert make is not None
    whole = unpacked(checkpoint.tensors, checkpoint.config)
    config, tensors = make(whole, checkpoint.config)
    is_packed = any(isinstance(tensor, MLXPacked) for tensor in whole.values())
    if is_packed and quantization and not _kept_packings(tensors, Quantization()):
        raise ValueError(
            f"this is {KINDS[name].title} that is packed already, and packed anew it would lose "
            "twice: name it as it is with --draft-model, or convert with --no-quantize"
        )
    largest = max(tensors.values(), key=lambda tensor: tensor.size)
    kind = DTYPES[dtype or DTYPE_OF_FORMAT.get(largest.format, "float16")]
    config = config | {"kind": name}
    return _read(config, tensors, kind, dtype is not None, quantization, progress)


def _read(
    config: dict[str, Any],
    tensors: Tensors,
    dtype: mx.Dtype,
    casts_all: bool,
    quantization: Quantization | None,
    progress: Progress,
) -> Head:
    """Tensors as arrays: matrices of that ``dtype``, quantized as the config then says."""
    weights: dict[str, mx.array] = {}
    notes: list[str] = []
    shapes = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in tensors.items()
        if len(tensor.shape) in (2, 3) and name.endswith(".weight")
        if not name.endswith(KINDS[config["kind"]].never_quantized)
    }
    chosen, kept = {}, {}
    if quantization is not None:
        kept = _kept_packings(tensors, quantization)
        chosen = quantization.choose(shapes) | kept
    for i, (name, tensor) in enumerate(tensors.items()):
        progress(i, len(tensors))
        packing = chosen.get(name.removesuffix(".weight"))
        if isinstance(tensor, MLXPacked) and packing and packing == tensor.packing:
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
        if casts_all or array.ndim > 1:
            array = array.astype(dtype)
        entry = pack(name, array, packing) if packing else {name: array}
        mx.eval(entry)  # one tensor at a time, so that the sources can be let go
        weights |= entry
    progress(len(tensors), len(tensors))
    if quantization is not None:
        notes += quantization.notes(shapes, {p: c for p, c in chosen.items() if p not in kept})
        config["quantization"] = quantization.entry(chosen)
    num_parameters = sum(tensor.size for tensor in tensors.values())
    return Head(config, weights, num_parameters, tuple(notes))


def _kept_packings(tensors: Tensors, quantization: Quantization) -> dict[str, Packing]:
    """How matrices are packed that MLX has packed already: packed anew they would lose twice."""
    found = {}
    for name, tensor in tensors.items():
        is_packed = isinstance(tensor, MLXPacked) and quantization.bits in (None, tensor.bits)
        if is_packed and (packing := tensor.packing) is not None:
            found[name.removesuffix(".weight")] = packing
    return found


def save(head: Head, folder: Path, target: TargetFolder | None = None) -> None:
    """Write ``config.json``, ``model.safetensors`` and the target's tokenizer there."""
    save_arrays(folder / "model.safetensors", head.weights)
    text = json.dumps(head.config, indent=4, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    if target is not None and not target.copy_tokenizer(folder):
        print(f"warning: {target.name} has no tokenizer files to copy")


def summary(checkpoint: DraftCheckpoint, resolved: Resolved, head: Head) -> str:
    """What was found and what became of it, for people."""
    c = head.config
    ids, source = c["aux_boundary_ids"], c["aux_ids_source"]
    if not c["uses_aux"]:
        taps = "the target's final state, after its norm"
    elif ids is None:
        taps = "2, N/2 and N-3 of the target's N layers (default)"
    else:
        depth = ", to be settled by the target's depth" if c["aux_nested_ids"] else ""
        taps = f"{', '.join(map(str, ids))} ({source}{depth})"
    kinds = [", EAGLE-3.1"] if c["pre_fc_norm"] == "per_feature" and c["norm_output"] else []
    kinds += [", P-EAGLE"] if c["mask_token_id"] is not None else []
    if quantization := c.get("quantization"):
        stored = f"{bits_of(quantization)}, groups of {quantization['group_size']}"
    else:
        stored = str(head.weights["layers.0.self_attn.o_proj.weight"].dtype).split(".")[-1]
    trimmed = f", {describe(c['draft_vocab_trim'])}" if "draft_vocab_trim" in c else ""
    kept = {"file": "kept", "target": "the target's", "target_rows": "rows of the target's"}
    lines = [
        f"family      {resolved.family.title}{''.join(kinds)}",
        f"layers      {c['num_layers']}",
        f"taps        {taps}",
        f"rope        {c['rope']['type']}, base {c['rope']['theta']:g}",
        f"vocabulary  {c['draft_vocab_size']} of {c['vocab_size']}{trimmed}",
        f"embedding   {kept[c['embed_source']]}",
        f"lm_head     {kept[c['lm_head_source']]}",
        *size_lines(checkpoint, head, stored),
    ]
    return "\n".join(lines)


def size_lines(checkpoint: DraftCheckpoint, head: Head, stored: str = "") -> list[str]:
    """The last lines of what is said of a head: how large it is, then doubts."""
    return [
        f"parameters  {head.num_parameters / 1e6:.2f} M",
        *([f"stored as   {stored}"] if stored else []),
        f"size        {megabytes(checkpoint.num_bytes)} -> {megabytes(head.num_bytes)}",
        *(f"warning: {note}" for note in head.notes),
    ]


def run_check(
    checkpoint: DraftCheckpoint,
    resolved: Resolved,
    head: Head,
    target: TargetFolder,
    dtype: str | None,
) -> Report:
    """Measure the head on its target, quantized and not (see ``check_head``)."""
    dense, packed = head, None
    if "quantization" in head.config:
        dense, packed = build(resolved, dtype), (head.config, head.weights)
    bases = rope_bases(checkpoint.config) | rope_bases(target.config)
    model, tokenizer = load_model(target.name, dtype)
    return check_head(dense.config, dense.weights, model, tokenizer, quantized=packed, bases=bases)


def write(
    head: Head,
    destination: Path,
    checkpoint: DraftCheckpoint,
    title: str,
    target: str | None,
    upload_as: tuple[str, str | None] | None,
    model: TargetFolder | None,
) -> None:
    """Write the folder of a head, and with it the card of one that is to be uploaded.

    ``upload_as`` is the repository that it is put into, and the revision that its source is of.
    """
    with new_folder(destination) as folder:
        save(head, folder, model)
        if upload_as is not None:
            repo, revision = upload_as
            license = source_license(checkpoint.source, checkpoint.config, revision)
            card = make_card(head.config, repo, checkpoint.source, target, title, license)
            (folder / CARD).write_text(card, encoding="utf-8")


def _destination(mlx_path: str, dtype: str | None) -> Path:
    """Where a folder of that name will lie; ValueError where something does, or for no dtype."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype}; choose one of {', '.join(DTYPES)}")
    path = Path(mlx_path).expanduser()
    if path.exists():
        raise AlreadyThere(f"{mlx_path} is there already; remove it or choose another --mlx-path")
    return path


def source_entry(checkpoint: DraftCheckpoint) -> dict[str, Any]:
    """Where a head is from, for its config: of a local folder only the name."""
    path = Path(checkpoint.source)
    return {
        "path": path.name if path.exists() else checkpoint.source,
        "files": checkpoint.sha256(),
    }


def _refuse(kind: str, draft_vocab: object, overrides: Overrides) -> None:
    """Raise ValueError for options that only EAGLE heads have."""
    options = {"--draft-vocab": draft_vocab}
    options |= {f"--{name.replace('_', '-')}": value for name, value in vars(overrides).items()}
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"{given[0]} is for EAGLE heads, and this is {KINDS[kind].title}: leave it out"
        )


def _check_kind(
    kind: str, head: Head, target: str | TargetSizes | None, check: bool, dtype: str | None
) -> list[str]:
    """Hold a drafter of another kind than EAGLE heads against its target; what to say of it."""
    if isinstance(target, str):
        model = open_target(target)
        target = TargetSizes(model.hidden_size, model.num_layers, model.vocab_size, model.name)
    KINDS[kind].made_for(head.config, Path("config.json"), target)
    if not check or target is None:
        return []
    loaded = load_model(target.name, dtype)
    found = measure_acceptance(KINDS[kind], head.config, head.weights, *loaded)
    head.config["check"] = found.entry()
    return [found.table()]


def _open(source: str, revision: str | None, target: str | None) -> tuple[str, DraftCheckpoint]:
    """The kind of a checkpoint, and that, of a target with such parts only these.

    Raises ValueError for a kind that is known and not read.
    """
    folder = locate(source, CONFIG_FILES, revision)
    parts = _parts_in(folder)
    for name, is_part in parts.items():
        names = find_shards(source, is_part, revision)
        if not names:
            continue
        files = fetch_files(source, names, is_part, revision)
        tensors = {n: t for file in files for n, t in read_safetensors(file).items() if is_part(n)}
        config = read_target_config(folder)
        return name, DraftCheckpoint(source, config, tensors, tuple(files))
    checkpoint = open_checkpoint(source, revision)
    kind = recognise(checkpoint.tensors, checkpoint.config, source, target)
    if kind == OTHERWISE and parts:
        base, _ = made_from(source)
        way_out = f"convert {base}, which it was made from" if base else "convert its original"
        raise ValueError(f"{source} is a model without MTP layers: {way_out}")
    return kind, checkpoint


def _parts_in(folder: Path) -> dict[str, Callable[[str], bool]]:
    """The kinds that may have tensors among a model's, by its config, and which those are."""
    config = read_target_config(folder) if folder.is_dir() else {}
    found = {name: kind.parts_of(config) for name, kind in KINDS.items()}
    return {name: is_part for name, is_part in found.items() if is_part is not None}


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

    ``hf_path`` is a folder, a GGUF file or a hub repository id; ``target`` likewise, the
    model the head was trained for: with it the taps are checked, its tokenizer is copied
    and tables that equal its own are left out. Of a model at hand its ``TargetSizes`` settle
    the taps. ``dtype`` is one of float16, bfloat16, float32 (default: the checkpoint's). Without
    ``q_bits`` they are mixed, see ``Quantization``. Parameters are named as in ``mlx_lm.convert``.
    ``check`` runs the target and writes how well the head agrees into the config.
    ``draft_vocab`` keeps that many draft tokens; a ``Trim`` says which. ``progress`` is given
    the number of tensors done and of all.

    Returns the config that was written. Raises ValueError, one sentence, for a checkpoint
    that is damaged, refused or contradicts itself, and leaves nothing behind.
    """
    destination = _destination(mlx_path, dtype)
    sizes = target if isinstance(target, TargetSizes) else None
    target = None if sizes is not None else target
    if check and target is None:
        raise ValueError("--check compares the head with its target; name it with --target")
    quantization = Quantization(q_bits, q_group_size) if quantize else None
    upload_as = (upload_repo, revision) if upload_repo else None
    kind, checkpoint = _open(str(hf_path), revision, target)
    if KINDS[kind].convert is not None:
        _refuse(kind, draft_vocab, overrides)
        model, title = None, KINDS[kind].title
        head = build_kind(kind, checkpoint, dtype, quantization, progress)
        said = [f"kind        {title}", *size_lines(checkpoint, head)]
        said += _check_kind(kind, head, target or sizes, check, dtype)
    else:
        model = open_target(str(target)) if target is not None else None
        resolved = prepare(checkpoint, model or sizes, overrides, draft_vocab)
        title = resolved.family.title
        head = build(resolved, dtype, quantization, progress)
        said = [summary(checkpoint, resolved, head)]
        if check:
            report = run_check(checkpoint, resolved, head, model, dtype)
            head.config["check"] = check_entry(report)
            said.append(check_table(report))
    head.config["source"] = source_entry(checkpoint)
    write(head, destination, checkpoint, title, target, upload_as, model)
    print("\n".join(said))
    if upload_as is not None:
        print(f"uploaded to {upload(destination, upload_as[0])}")
    return head.config
