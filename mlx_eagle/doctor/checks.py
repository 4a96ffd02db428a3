"""Checks of the doctor: machine, memory, files, known pairs, and expectations for a target.

Each check yields its findings and raises nothing. ``expect`` loads no weights: the model is built
from its ``config.json``, and MLX computes no array before somebody asks for it.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, get_total_parameters

from ..decoding.pass_costs import EXPECTED, TargetWeights
from ..decoding.setup import AUTO
from ..draft_models import LOOKUP, known_pairs, split_name
from ..drafters.kinds import KINDS, kind_of, own_kind
from ..drafters.model_drafter import NOT_LOADED
from ..drafters.mtp import outline
from ..drafters.output_rows import USUAL_SHARE, WORTH_IT
from ..drafters.pairs import HEAD_SHARE, targets_within
from ..drafters.quantize import packing_words, usual_quantization
from ..drafters.target_parts import sizes_of
from ..system.atomic_folder import user_cache
from ..system.device import (
    CUDNN,
    EMULATES_BFLOAT16,
    LENGTHS,
    NO_TENSOR_CORES,
    PACKED_FLOAT32,
    Machine,
    blas_name,
    blas_note,
    load_note,
    memory,
    this_machine,
    weight_bytes,
)
from ..system.hub import INSIDE, REPO_ID, locate
from ..system.loading import check_heads, check_target, context_size, read_json, text_config
from ..target_model.attention import fused_rows
from ..target_model.cache_size import cache_bytes
from ..target_model.rollback import check_supported
from .packages import Finding, check_packages, read_sysctl

GB = 1e9
FILES = ("config.json", "*.index.json")  # of a target, all that ``expect`` needs
WIRED = "iogpu.wired_limit_mb"
TF32 = "MLX_ENABLE_TF32"
SHOWN_PAIRS = 5  # the largest that fit: the whole table is a wall of names
PIPELINE = "between its layers (--pipeline)"
WITH_TF32 = re.compile(r"M([5-9]|\d\d)")  # chips whose GPU has matrix units
ACCEPTANCES = (0.5437, 0.8105)
"""Probabilities that a draft is accepted after those before it: tau is 2 and 3 at k = 3."""
DRAFT_STEP = HEAD_SHARE - 1
"""Plain steps that the head takes for one more token: it reads this share of the weights."""


def check_machine() -> Iterator[Finding]:
    """The chip, the gain to expect from drafting on it, and other work, if it is too much."""
    machine = this_machine()
    kind = {"metal": "Metal", "cuda": "CUDA", "cpu": "on its CPU"}[machine.backend]
    known = "" if machine.generation == "unknown" else f"{machine.generation}, "
    yield Finding("machine", f"{machine.name} ({known}{kind})")
    yield Finding("drafting", machine.advice)
    if note := load_note():
        yield Finding("load", note.removeprefix("Note: "), "note")


def check_blas() -> Iterator[Finding]:
    """The library that multiplies floats on a CPU."""
    if mx.default_device() == mx.cpu:
        note = (blas_note() or "").removeprefix("Note: ")
        yield Finding("BLAS", blas_name(), "problem" if note else "ok", note)


def check_settings() -> Iterator[Finding]:
    """Settings of MLX that decide here whether drafting gains, and whether float32 is exact."""
    machine = this_machine()
    if machine.backend == "cuda" and os.environ.get(CUDNN) != "0":
        remedy = (
            f"our commands set {CUDNN}=0 by themselves; in a program of yours, set it before the "
            "first attention, or every round waits for new cuDNN plans"
        )
        yield Finding("cuDNN", f"{CUDNN} is not 0", "note", remedy)
    has_tf32 = machine.backend == "cuda" or WITH_TF32.fullmatch(machine.generation)
    if has_tf32 and os.environ.get(TF32) != "0":
        text = "float32 products of several rows keep 10 bits (TF32)"
        remedy = f"for token-identical text in float32, set {TF32}=0"
        yield Finding("float32", text, "note", remedy)


def check_memory() -> Iterator[Finding]:
    """Memory in all, and on a Mac the part that may be wired (kept in place for the GPU)."""
    machine = this_machine()
    total, usable = memory(machine)
    yield Finding("memory", f"{total / GB:.1f} GB, {usable / GB:.1f} GB for weights and caches")
    if machine.backend == "metal":
        limit = read_sysctl(WIRED)
        text = f"set to {limit} MB" if limit else f"{usable / GB:.1f} GB, macOS's own"
        yield Finding("wired limit", f"{text} (sysctl {WIRED})")


def check_cache() -> Iterator[Finding]:
    """Whether converted heads can be kept."""
    folder = user_cache()
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as err:
        text = f"{folder} cannot be written ({err.strerror or err})"
        remedy = "heads are converted again in every process: make it writable, or set HOME to a "
        yield Finding("cache", text, "problem", remedy + "folder that is")
    else:
        yield Finding("cache", f"{folder} can be written")


def check_pairs() -> Iterator[Finding]:
    """Targets of the table of pairs that fit into the memory, in 4 bits with their head."""
    machine = this_machine()
    fit, others = targets_within(memory(machine)[1])
    text = f"{len(fit)} of {len(fit) + len(others)} targets with a known head fit in 4 bits"
    if fit:
        text += f", such as {', '.join(fit[-SHOWN_PAIRS:])}; mlx_eagle.generate --list shows all"
    if machine.backend == "cpu":
        text += ". On a CPU they run and do not gain: try the demo pair"
    yield Finding("known pairs", text)


def check_all() -> list[Finding]:
    """Findings of all checks."""
    checks = (check_machine, check_packages, check_blas, check_settings, check_memory)
    return [found for check in (*checks, check_cache, check_pairs) for found in check()]


def expect(
    model: str, draft_model: str | None, context: int | None = None, num_ranks: int = 1
) -> list[Finding]:
    """Findings about a target and its draft model, named as for ``--model`` and the like.

    With ``context``, in tokens, also about the memory of such a text. On ``num_ranks`` machines
    each has a part of the target. If one of them cannot be found or built, that is a finding too;
    nothing is raised.
    """
    try:
        folder = locate(model, FILES)
        if Path(model).expanduser().is_dir():
            check_target(folder)
        config = read_json(folder / "config.json")
        built = build(config)
    except (OSError, ValueError) as err:
        return [Finding("model", " ".join(str(err).split()), "problem", "give another --model")]
    size = check_size(model, config, built)
    if num_ranks > 1:
        size = check_shard(config, built, num_ranks)
    found = [size, check_caches(built), *check_passes(built), *check_precision(config)]
    found += [*check_vocabulary(folder, built), check_head(model, draft_model, built)]
    return [*found, check_context(built, draft_model, context)] if context is not None else found


def build(config: dict[str, Any]) -> nn.Module:
    """Build the model of a ``config.json`` without its weights; ValueError if mlx-lm cannot."""
    try:
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
        text = text_config(config)
        if text.get("tie_word_embeddings", str(text.get("model_type")).startswith("gemma")):
            for module in model.modules():
                # Gemma drops it, and says that it did, only when weights are loaded.
                if module.pop("lm_head", None) is not None and "tie_word_embeddings" in vars(
                    module
                ):
                    module.tie_word_embeddings = True
        model.set_dtype(mx.bfloat16)
        if packing := config.get("quantization"):
            group_size = packing["group_size"]

            def choice(path: str, module: nn.Module) -> bool | dict[str, Any]:
                can = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
                return packing.get(path, can)  # layers with an entry of their own by it

            mode = packing.get("mode", "affine")
            nn.quantize(model, group_size, packing["bits"], mode=mode, class_predicate=choice)
    except NOT_LOADED as err:
        reason = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise ValueError(
            f"mlx-lm cannot build a model of type {config.get('model_type')} ({reason})"
        ) from err
    return model


def check_size(name: str, config: dict[str, Any], model: nn.Module) -> Finding:
    """Size of the target, and whether it fits."""
    num_parameters = get_total_parameters(model)
    num_bytes = weight_bytes(model)
    text = (
        f"{Path(name).name}, {config['model_type']}, {num_parameters / 1e9:.2f} B parameters "
        f"in {8 * num_bytes / num_parameters:.3g} bits each: {num_bytes / GB:.1f} GB"
    )
    remedy = "it does not fit into this machine's memory: take a smaller or more packed one"
    return _fitting(text, num_bytes, "", remedy)


def _fitting(text: str, num_bytes: float, end: str, remedy: str) -> Finding:
    """The size of a target in words, with the ``end`` if it fits into the memory."""
    _, usable = memory(this_machine())
    if num_bytes > usable:
        return Finding("model", f"{text}, of {usable / GB:.1f} GB", "problem", remedy)
    return Finding("model", f"{text}{end}")


def check_shard(config: dict[str, Any], model: nn.Module, num_ranks: int) -> Finding:
    """Size of the target on each of several machines, and whether mlx-lm can split it so."""
    ways = []
    with suppress(ValueError):
        check_heads(text_config(config), num_ranks)
        ways += ["within its layers"] if hasattr(model, "shard") else []
    if hasattr(vars(model).get("model") or model.get("model"), "pipeline"):
        ways.append(PIPELINE)
    share = 1 / num_ranks
    if ways == [PIPELINE]:  # of which rank 0 has the most layers
        share = -(-len(model.layers) // num_ranks) / len(model.layers)
    layers = sum(map(weight_bytes, model.layers))
    outside = weight_bytes(model) - layers
    shard = outside + share * layers
    text = (
        f"{shard / GB:.1f} GB on each of {num_ranks} machines: {(shard - outside) / GB:.1f} GB of "
        f"the layers, {outside / GB:.1f} GB of embeddings and output matrix, which are whole "
        "everywhere; a draft model is, too"
    )
    if not ways:
        remedy = "mlx-lm cannot split this target among so many: take another number, or target"
        return Finding("model", text, "problem", remedy)
    remedy = "a part does not fit into a memory like this machine's: take more machines"
    return _fitting(text, shard, f"; split {' or '.join(ways)}", remedy)


def check_context(model: nn.Module, draft_model: str | None, context: int) -> Finding:
    """Whether the target, its draft model and the caches of a text fit into the memory."""
    weights = weight_bytes(model)
    caches = cache_bytes(model, context)
    _, usable = memory(this_machine())
    draft = draft_bytes(model, draft_model, context)
    total = weights + caches + draft
    text = (
        f"{context} tokens: target {weights / GB:.1f} GB, caches {caches / GB:.1f} GB, draft "
        f"model about {draft / GB:.1f} GB, together {total / GB:.1f} of {usable / GB:.1f} GB; a "
        "long prompt needs some more while it is read"
    )
    limit = context_size(model)
    if total > usable:
        return Finding("context", text, "problem", "take a shorter text or a smaller target")
    if limit is not None and context > limit:
        return Finding("context", text, "note", f"the target was made for {limit} tokens at most")
    return Finding("context", text)


def draft_bytes(model: nn.Module, name: str | None, context: int) -> float:
    """Bytes of a draft model, by its file if there is one, and of its cache.

    A head that is not here is taken to be as large as most are in 4 bits, with one layer like
    the target's.
    """
    head = None if name is None else split_name(name)[0]
    if name == LOOKUP:
        return 0.0
    cache = cache_bytes(model, context) / len(make_prompt_cache(model))
    file = Path(str(head)).expanduser() / "model.safetensors"
    if file.is_file():
        return file.stat().st_size + cache
    return (HEAD_SHARE - 1) * weight_bytes(model) + cache


def check_caches(model: nn.Module) -> Finding:
    """Whether rejected drafts can be removed from the target's caches."""
    caches = make_prompt_cache(model)
    names = ", ".join(sorted({type(cache).__name__ for cache in caches}))
    try:
        check_supported(caches, "target")
    except ValueError as err:
        return Finding("caches", names, "problem", str(err))
    return Finding("caches", f"{names}: drafts can be taken back")


def check_passes(model: nn.Module) -> Iterator[Finding]:
    """Costs of passes of 2 to 8 rows by the table of machines, and the attention they take."""
    machine = this_machine()
    weights = TargetWeights.of(model)
    if machine.products is None:
        yield Finding("passes", machine.advice)
    else:
        source = machine.products.source if weights.packing else machine.products.dense_source
        yield Finding("passes", pass_words(machine, weights, source))
        yield Finding(
            "speedup",
            f"{speedup_words(machine, weights)} with a head, for tau of 2 to 3 at k = 3: computed "
            "from the costs of passes, not measured",
        )
    if weights.experts is not None:
        yield Finding("experts", EXPECTED)
    if machine.backend == "metal":
        yield from check_attention(model)


def check_vocabulary(folder: Path, model: nn.Module) -> Iterator[Finding]:
    """A smaller vocabulary for drafts, where the first ids are the frequent ones."""
    num_tokens = sizes_of(model).vocab_size
    path = folder / "tokenizer.json"
    if num_tokens <= WORTH_IT or not path.is_file():
        return
    with suppress(ValueError):  # loading the target says what is wrong
        decoder = read_json(path).get("decoder")
        if isinstance(decoder, dict) and decoder.get("type") == "ByteLevel":
            text = (
                f"{num_tokens} tokens by byte pairs: drafters that use the target's output matrix "
                f"(MTP layers, DFlash, DSpark) read {USUAL_SHARE / num_tokens:.0%} of it with "
                f"--draft-vocab {USUAL_SHARE}; measure both"
            )
            yield Finding("vocabulary", text)


def check_precision(config: dict[str, Any]) -> Iterator[Finding]:
    """Another type for a target whose activations have one that the GPU emulates."""
    machine = this_machine()
    text = text_config(config)
    dtype = text.get("torch_dtype") or text.get("dtype")
    if dtype == "float32" and config.get("quantization") and machine.backend == "cuda":
        yield Finding("precision", PACKED_FLOAT32, "note", NO_TENSOR_CORES)
    if dtype == "bfloat16" and machine.generation in EMULATES_BFLOAT16:
        found = f"activations in bfloat16, which an {machine.generation} emulates"
        remedy = "try --dtype float16, also for plain decoding; it rounds otherwise, so it may "
        yield Finding("precision", found, "note", f"{remedy}change the plain text, too")


def pass_words(machine: Machine, weights: TargetWeights, source: str) -> str:
    """ "k = 1 to 7 cost about 1.0, 1.2, ... plain steps a pass (measured on an M4 Pro)" """
    experts = weights.experts
    if not weights.packing and experts is None and not source:
        unknown = "the weights are not packed, which the table of machines does not cover"
        return f"{unknown}: auto measures"
    costs = ", ".join(f"{weights.pass_cost(machine, k + 1):.1f}" for k in LENGTHS)
    words = (
        f"k = {LENGTHS[0]} to {LENGTHS[-1]} cost about {costs} plain steps a pass "
        f"({source or 'a guess'})"
    )
    if experts is None:
        return words
    return (
        f"{words}; a row goes through {experts.per_row} of {experts.total} experts, 4 rows "
        f"through about {experts.touched(4):.0f}, and each reads its own"
    )


def expected_speedup(machine: Machine, weights: TargetWeights) -> tuple[float, float]:
    """The lowest and the highest speedup for tau of 2 to 3, each with the best k of ``LENGTHS``.

    It is tau / (c(k + 1) + k d), without the host's part of a round; where that is below 1,
    ``auto`` turns drafting off, and it is 1.
    """
    costs = {k: weights.pass_cost(machine, k + 1) + k * DRAFT_STEP for k in LENGTHS}
    low, high = (
        max(1.0, *(sum(acceptance**i for i in range(k + 1)) / costs[k] for k in costs))
        for acceptance in ACCEPTANCES
    )
    return low, high


def speedup_words(machine: Machine, weights: TargetWeights) -> str:
    """ "1.4 to 1.9x"; "1.0x" where no draft pays."""
    low, high = (f"{speedup:.1f}" for speedup in expected_speedup(machine, weights))
    return f"{low}x" if low == high else f"{low} to {high}x"


def check_attention(model: nn.Module) -> Iterator[Finding]:
    """The longest draft whose pass takes the fast attention kernel, for each size of heads."""
    for module in model.modules():
        args = getattr(module, "args", None) or getattr(module, "config", None)
        heads = getattr(args, "num_attention_heads", None)
        if isinstance(heads, int):
            break
    else:
        return
    keys = getattr(args, "num_key_value_heads", None) or heads
    sizes = {getattr(args, "head_dim", None) or args.hidden_size // heads: keys}
    if wide := getattr(args, "global_head_dim", None):  # Gemma 4's
        sizes[wide] = getattr(args, "num_global_key_value_heads", None) or keys
    for size, num in sizes.items():
        rows = fused_rows(size, heads // num)
        text = f"fused for passes of up to {rows} rows (k up to {rows - 1})"
        text = text if rows > 1 else "no fused kernel for passes of 2 to 8 rows"
        yield Finding("attention", f"heads of {size}: {text}")


def check_head(model_name: str, name: str | None, model: nn.Module) -> Finding:
    """The draft model, and whether it belongs to the target."""
    try:
        head, copies = (None, False) if name is None else split_name(name)
        if head in (None, AUTO):
            found = _known_head(model_name, head, model)
        else:
            found = _named_head(model_name, head, model)
    except (OSError, ValueError) as err:
        return Finding("draft model", str(err), "problem", "name another drafter")
    return replace(found, text=f"{found.text}; copies from the text as well") if copies else found


def _named_head(model_name: str, name: str, model: nn.Module) -> Finding:
    """A draft model by its name; ValueError where it cannot be used."""
    if name == LOOKUP:
        return Finding("draft model", "lookup, which copies from the prompt and has no weights")
    if name in KINDS and KINDS[name].by_name is not None:
        if own_kind(model_name) == name:
            return _own_layers(name, model)
        raise ValueError(
            f"there is no {name} in the target's checkpoint, nor in what it was made from"
        )
    path = Path(name).expanduser()
    if not path.exists():
        if not (REPO_ID.fullmatch(name) or INSIDE.fullmatch(name)):
            raise ValueError(f"{name} does not exist, and it is not a repository id either")
        text = f"{name} is not on this machine, so it was not looked at"
        return Finding("draft model", text, "note", "it is looked for on the hub when loaded")
    kind, config = kind_of(path)
    kind.made_for(config, path / "config.json", sizes_of(model))
    num_bytes = (path / "model.safetensors").stat().st_size
    text = f"{path.name}, {kind.title} of {num_bytes / 1e6:.0f} MB, fits the target"
    return Finding("draft model", text)


def _own_layers(kind: str, model: nn.Module) -> Finding:
    """The target's own layers: their size, and what they are quantized to while loading."""
    text = f"{KINDS[kind].title} of the target's own"
    head = outline(model, None)
    quantization = usual_quantization(model, this_machine())
    if not head.layers or quantization is None:
        return Finding("draft model", f"{text}, which stays as it is")
    packed = outline(model, quantization)
    sizes = " in place of ".join(f"{weight_bytes(m) / 1e6:.0f} MB" for m in (packed, head))
    text = f"{text}, {packing_words([packed])} while it is loaded: {sizes}"
    return Finding("draft model", text)


def _known_head(model_name: str, name: str | None, model: nn.Module) -> Finding:
    """The draft model that "auto", or no name, stands for."""
    pair = next(known_pairs(model_name), None)
    if pair is None:
        copies = ", so --draft-model auto copies from the text" if name else ""
        remedy = "Name one with --draft-model, or train one: mlx_eagle.train"
        return Finding("draft model", f"no public head is known{copies}", "note", remedy)
    if pair.head == pair.kind:
        return _own_layers(pair.kind, model)
    usual = usual_quantization(model, this_machine())
    done = "" if usual is None else f", and quantizes to {usual.words}"
    known = f"{pair.kind}, {pair.size}, licence: {pair.licence}"
    return Finding("draft model", f"{pair.head} ({known}) is what --draft-model auto takes{done}")
