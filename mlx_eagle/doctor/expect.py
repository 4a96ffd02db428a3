"""Expectation of a target and a draft model on this machine, without loading a weight.

The model is built from its ``config.json`` alone; MLX computes no array before it is asked for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from ..commands.loading import check_target, read_json
from ..draft_models import LOOKUP, split_name
from ..drafters.kinds import kind_of
from ..drafters.model_drafter import NOT_LOADED
from ..drafters.pairs import pair_for
from ..drafters.target_parts import sizes_of
from ..system.hub import locate
from ..system.machines import LENGTHS, Machine, Pass, Products, fused_rows, this_machine
from ..target.rollback import check_supported
from .checks import GB, memory
from .report_lines import Finding, Level

FILES = ("config.json", "*.index.json")
DENSE_BITS = 16.0


def expect(model: str, draft_model: str | None) -> list[Finding]:
    """The findings about a target and its draft model, both as ``--model`` and the like take them.

    What cannot be found or built is a problem among them; nothing is raised.
    """
    try:
        folder = locate(model, FILES)
        if Path(model).expanduser().is_dir():
            check_target(folder)
        config = read_json(folder / "config.json")
        built = build(config)
    except (OSError, ValueError) as err:
        return [Finding("model", " ".join(str(err).split()), "problem", "give another --model")]
    found = [check_size(model, config, built), check_caches(built)]
    found += check_passes(this_machine(), config, built)
    return [*found, check_head(model, draft_model, built)]


def build(config: dict[str, Any]) -> nn.Module:
    """The model of that configuration, its weights not computed; ValueError where none is."""
    try:
        model_class, args_class = _get_classes(config)
        return model_class(args_class.from_dict(config))
    except NOT_LOADED as err:
        reason = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise ValueError(
            f"mlx-lm cannot build a model of type {config.get('model_type')} ({reason})"
        ) from err


def bits_per_weight(config: dict[str, Any]) -> float:
    """As stored: packed weights and what each group adds to them, else 16.

    A group has a scale and a bias of 16 bits, or in the floating-point modes a scale of 8.
    """
    found = config.get("quantization")
    if not isinstance(found, dict) or not isinstance(found.get("bits"), int):
        return DENSE_BITS
    extra = 32 if found.get("mode", "affine") == "affine" else 8
    return float(found["bits"]) + extra / float(found.get("group_size") or 64)


def check_size(name: str, config: dict[str, Any], model: nn.Module) -> Finding:
    """How large the target is, and whether it fits."""
    weights: Any = tree_flatten(model.parameters())
    num_parameters = sum(array.size for _, array in weights)
    bits = bits_per_weight(config)
    num_bytes, (_, usable) = num_parameters * bits / 8, memory(this_machine())
    text = (
        f"{Path(name).name}, {config['model_type']}, {num_parameters / 1e9:.2f} B parameters "
        f"in {bits:.3g} bits each: {num_bytes / GB:.1f} GB"
    )
    if num_bytes > usable:
        remedy = "it does not fit into this machine's memory: take a smaller or more packed one"
        return Finding("model", f"{text}, of {usable / GB:.1f} GB", "problem", remedy)
    return Finding("model", text)


def check_caches(model: nn.Module) -> Finding:
    """Whether rounds can be undone on the target's caches."""
    caches = make_prompt_cache(model)
    names = ", ".join(sorted({type(cache).__name__ for cache in caches}))
    try:
        check_supported(caches, "target")
    except ValueError as err:
        return Finding("caches", names, "problem", str(err))
    return Finding("caches", f"{names}: drafts can be taken back")


def check_passes(machine: Machine, config: dict[str, Any], model: nn.Module) -> list[Finding]:
    """What passes of 2 to 8 rows cost by the table of machines, and which attention they take."""
    found = []
    if machine.products is None:
        found.append(Finding("passes", machine.advice))
    elif "quantization" not in config:
        text = "the weights are not packed, which the table of machines does not cover"
        found.append(Finding("passes", f"{text}: auto measures"))
    else:
        inputs, outputs = widest(model)
        found.append(Finding("passes", pass_words(machine.products, inputs, outputs)))
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if machine.backend == "metal" and isinstance(heads, int):
        group = heads // keys if isinstance(keys, int) and keys else 1
        head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
        found.append(Finding("attention", attention_words(fused_rows(head_dim, group), head_dim)))
    return found


def widest(model: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of the size of layer that holds the most weights."""
    sizes: dict[tuple[int, int], int] = {}
    for _, module in model.named_modules():
        if isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            sizes[inputs, outputs] = sizes.get((inputs, outputs), 0) + module.weight.size
    return max(sizes, key=lambda size: sizes[size], default=(0, 0))


def pass_words(products: Products, inputs: int, outputs: int) -> str:
    """Runs of draft lengths whose passes cost alike: "k 1 to 4: 1 read of the weights; ..." """
    runs: list[tuple[Pass, list[int]]] = []
    for k in LENGTHS:
        kind = products.kernel(k + 1, inputs, outputs)
        if runs and runs[-1][0] == kind:
            runs[-1][1].append(k)
        else:
            runs.append((kind, [k]))
    words = []
    for kind, lengths in runs:
        span = f"k {lengths[0]}" + (f" to {lengths[-1]}" if len(lengths) > 1 else "")
        once = f"{kind.times} reads" if kind.times > 1 else "1 read"
        price = f"{once} of the weights" if kind.kernel == "vector" else "the matrix kernel"
        words.append(f"{span}: {price}")
    return f"in its largest layers ({inputs} to {outputs}), {'; '.join(words)}"


def attention_words(rows: int, head_dim: int) -> str:
    """Up to which draft length a pass takes the fast attention kernel."""
    if rows < 2:
        return f"no fused kernel for passes of 2 to 8 rows at head dimension {head_dim}"
    return f"fused for passes of up to {rows} rows (k up to {rows - 1})"


def check_head(model_name: str, name: str | None, model: nn.Module) -> Finding:
    """What the draft model is, and whether it belongs to the target."""
    try:
        head, copies = (None, False) if name is None else split_name(name)
    except ValueError as err:
        return Finding("draft model", str(err), "problem", "see the sentence before")
    found = _check_head(model_name, head, model)
    return replace(found, text=f"{found.text}; copies from the text as well") if copies else found


def _check_head(model_name: str, name: str | None, model: nn.Module) -> Finding:
    if name == LOOKUP:
        return Finding("draft model", "lookup, which copies from the prompt and has no weights")
    if name in (None, "auto"):
        try:
            pair = pair_for(model_name)
        except ValueError as err:
            remedy = f"{err} Or train one: mlx_eagle.train"
            level: Level = "problem" if name else "note"
            return Finding("draft model", "no public head is known", level, remedy)
        return Finding("draft model", f"{pair.head} is what --draft-model auto takes")
    path = Path(str(name)).expanduser()
    if not path.exists():
        return Finding("draft model", f"{name} is not on this machine, so it was not looked at")
    try:
        kind, config = kind_of(path)
        kind.made_for(config, path / "config.json", sizes_of(model))
        num_bytes = (path / "model.safetensors").stat().st_size
    except (OSError, ValueError) as err:
        return Finding("draft model", f"{path.name}: {err}", "problem", "see the sentence before")
    return Finding("draft model", f"{path.name}, {num_bytes / 1e6:.0f} MB, fits the target")
