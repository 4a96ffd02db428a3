"""Expectation of a target and a draft model on this machine, without loading a weight.

The model is built from its ``config.json`` alone; MLX computes no array before it is asked for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, get_total_parameters

from ..commands.loading import check_target, read_json
from ..decoding.target_weights import TargetWeights
from ..draft_models import LOOKUP, split_name
from ..drafters.kinds import KINDS, kind_of
from ..drafters.model_drafter import NOT_LOADED
from ..drafters.pairs import pair_for
from ..drafters.target_parts import sizes_of
from ..system.device import weight_bytes
from ..system.hub import locate
from ..system.machines import LENGTHS, Machine, fused_rows, this_machine
from ..target.rollback import check_supported
from .checks import GB, memory
from .report_lines import Finding, Level

FILES = ("config.json", "*.index.json")


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
    found += check_passes(this_machine(), built)
    return [*found, check_head(model, draft_model, built)]


def build(config: dict[str, Any]) -> nn.Module:
    """The model of that configuration, its weights not computed; ValueError where none is."""
    try:
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
        text = config | (config.get("text_config") or {})
        if text.get("tie_word_embeddings", str(text.get("model_type")).startswith("gemma")):
            for module in model.modules():
                module.pop("lm_head", None)  # Gemma has one until its weights are loaded
        model.set_dtype(mx.bfloat16)
        pack(model, config.get("quantization"))
    except NOT_LOADED as err:
        reason = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise ValueError(
            f"mlx-lm cannot build a model of type {config.get('model_type')} ({reason})"
        ) from err
    return model


def pack(model: nn.Module, packing: dict[str, Any] | None) -> None:
    """Pack the weights as ``config.json`` says, each layer in its own way if it has one."""
    if not packing:
        return
    group_size = packing["group_size"]

    def choice(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path in packing:
            return packing[path]
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0

    mode = packing.get("mode", "affine")
    nn.quantize(model, group_size, packing["bits"], mode=mode, class_predicate=choice)


def check_size(name: str, config: dict[str, Any], model: nn.Module) -> Finding:
    """How large the target is, and whether it fits."""
    num_parameters, num_bytes = get_total_parameters(model), weight_bytes(model)
    _, usable = memory(this_machine())
    text = (
        f"{Path(name).name}, {config['model_type']}, {num_parameters / 1e9:.2f} B parameters "
        f"in {8 * num_bytes / num_parameters:.3g} bits each: {num_bytes / GB:.1f} GB"
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


def check_passes(machine: Machine, model: nn.Module) -> list[Finding]:
    """What passes of 2 to 8 rows cost by the table of machines, and which attention they take."""
    found, weights = [], TargetWeights.of(model)
    if machine.products is None:
        found.append(Finding("passes", machine.advice))
    elif not weights.is_packed and weights.experts is None:
        text = "the weights are not packed, which the table of machines does not cover"
        found.append(Finding("passes", f"{text}: auto measures"))
    else:
        found.append(Finding("passes", pass_words(machine, weights)))
    if machine.backend == "metal":
        found += [Finding("attention", attention_words(*sizes)) for sizes in head_sizes(model)]
    return found


def pass_words(machine: Machine, weights: TargetWeights) -> str:
    """ "k = 1 to 7 cost about 1.0, 1.2, ... plain steps a pass (measured on an M4 Pro)" """
    costs = [weights.pass_cost(machine, k + 1) for k in LENGTHS]
    products, experts = machine.products, weights.experts
    source = products.source if products is not None and weights.is_packed else "a guess"
    words = (
        f"k = {LENGTHS[0]} to {LENGTHS[-1]} cost about "
        f"{', '.join(f'{cost:.1f}' for cost in costs)} plain steps a pass ({source})"
    )
    if experts is None:
        return words
    return (
        f"{words}; a row goes through {experts.per_row} of {experts.total} experts, 4 rows "
        f"through about {experts.touched(4):.0f}, and each reads its own"
    )


def head_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Head dimension and query heads per key head, of Gemma 4 those of both kinds of layers."""
    for module in model.modules():
        args = getattr(module, "args", None) or getattr(module, "config", None)
        heads = getattr(args, "num_attention_heads", None)
        if not isinstance(heads, int):
            continue
        keys = getattr(args, "num_key_value_heads", None) or heads
        size = getattr(args, "head_dim", None) or args.hidden_size // heads
        found = [(size, heads // keys)]
        if wide := getattr(args, "global_head_dim", None):
            keys = getattr(args, "num_global_key_value_heads", None) or keys
            found.append((wide, heads // keys))
        return found
    return []


def attention_words(head_dim: int, heads_per_key: int) -> str:
    """Up to which draft length a pass takes the fast attention kernel."""
    rows = fused_rows(head_dim, heads_per_key)
    if rows < 2:
        return f"heads of {head_dim}: no fused kernel for passes of 2 to 8 rows"
    return f"heads of {head_dim}: fused for passes of up to {rows} rows (k up to {rows - 1})"


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
    if name in KINDS and KINDS[name].by_name is not None:
        title = KINDS[name].title
        if KINDS[name].comes_with(model_name):
            return Finding("draft model", f"{title} of the target's own")
        wrong = f"there is no {name} in the target's checkpoint, nor in what it was made from"
        return Finding("draft model", wrong, "problem", "name another drafter")
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
