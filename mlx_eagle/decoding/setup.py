"""Before anything is decoded: target, drafter and caches checked against each other."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import does_model_support_input_embeddings

from ..drafters.base import Drafter, EmbeddedDrafter, TreeDrafter
from ..drafters.tree import Tree
from ..system.machines import fused_rows
from ..target.rollback import CacheQuantization, Checkpoint, check_supported
from ..target.sharding import in_any_process, is_pipelined
from ..target.taps import Target
from ..target.tree_attention import check_trees
from .accept import Sampler
from .calibrate import TREES
from .decoder import Decoder
from .limits import AUTO
from .processors import LogitsProcessor
from .rules import make_rule


def split_cache(
    prompt_cache: list | None, model: nn.Module, max_kv_size: int | None
) -> tuple[list, list | None]:
    """The target's caches, and the drafter's where ``prompt_cache`` holds them behind those.

    Raises ValueError where there are fewer than the target has.
    """
    fresh = make_prompt_cache(model, max_kv_size)
    if prompt_cache is None:
        return fresh, None
    # Not len(model.layers): models that share keys and values have fewer caches than layers.
    num_caches = len(fresh)
    if len(prompt_cache) < num_caches:
        raise ValueError(
            f"prompt_cache holds {len(prompt_cache)} caches, but the target has {num_caches}: "
            "make it with mlx_lm's make_prompt_cache for this target."
        )
    return prompt_cache[:num_caches], prompt_cache[num_caches:] or None


def begin_drafter(draft_model: Drafter, draft_cache: list | None) -> Drafter:
    """A drafter for one request, on its part of a prompt cache.

    Raises ValueError where that is not one of this drafter's.
    """
    num_needed = len(draft_model.make_cache())
    if draft_cache is not None and len(draft_cache) != num_needed:
        raise ValueError(
            f"prompt_cache holds {len(draft_cache)} caches behind the target's, but this drafter "
            f"has {num_needed}: make it with this drafter's make_cache()."
        )
    for found, own in zip(draft_cache or (), draft_model.make_cache()):
        sizes = [getattr(cache, "max_size", None) for cache in (found, own)]
        if sizes[0] != sizes[1]:
            held, kept = ("all slots" if n is None else f"a window of {n} slots" for n in sizes)
            raise ValueError(
                f"prompt_cache holds {held} of the draft model, but this drafter keeps {kept}: "
                "give the same draft window, or a prompt_cache without the drafter's part."
            )
    drafter = draft_model.begin(draft_cache)
    check_supported(drafter.cache, "draft model")
    return drafter


def check_embeddings(
    embeddings: mx.array, prompt: mx.array, model: nn.Module, drafter: Drafter
) -> None:
    """Raise ValueError unless ``embeddings`` (n, h) can stand for ``prompt`` (n,) or (0,)."""
    if embeddings.ndim != 2 or embeddings.shape[0] == 0:
        raise ValueError(
            f"input_embeddings have shape {tuple(embeddings.shape)}: give one row per token of "
            "one prompt, (n, h)."
        )
    if prompt.size not in (0, embeddings.shape[0]):
        raise ValueError(
            f"the prompt has {prompt.size} tokens, but input_embeddings "
            f"{embeddings.shape[0]} rows: give one for each, or an empty prompt."
        )
    if not does_model_support_input_embeddings(model):
        raise ValueError("this target takes no input_embeddings: give it tokens alone.")
    if not isinstance(drafter, EmbeddedDrafter):
        raise ValueError(
            "this drafter reads tokens, and input_embeddings have none: use an EAGLE head or an "
            "MTP layer alone, or no draft model."
        )
    drafter.check_embeddings(embeddings)


def open_decoder(
    model: nn.Module,
    drafter: Drafter,
    cache: list,
    quantization: CacheQuantization,
    stream: mx.Stream | mx.ThreadLocalStream,
    *,
    sampler: Sampler | None,
    logits_processors: list[LogitsProcessor] | None,
    acceptance: str | None,
    tree: Tree | str | None = None,
) -> Decoder:
    """Target and drafter for one request, checked against each other and what is asked of them."""
    # What processes exchange must be on one stream: an earlier pass may still be under way.
    with mx.stream(stream):
        _check_target(model, drafter, cache, quantization, tree)
        target = Target(model, drafter.taps, fused_rows)
    rule, processors = make_rule(acceptance, sampler), tuple(logits_processors or ())
    return Decoder(target, drafter, cache, rule, processors, quantization, stream)


def _check_target(
    model: nn.Module,
    drafter: Drafter,
    cache: list,
    quantization: CacheQuantization,
    tree: Tree | str | None,
) -> None:
    """Raise ValueError where the target cannot do exactly what is asked of it."""
    check_supported(cache, "target")
    quantization.check(cache)
    if is_pipelined(model) and in_any_process(bool(Checkpoint(cache).recurrent)):
        raise ValueError(
            "this target is split in a pipeline and has recurrent layers, whose rows no process "
            "can run again alone: use tensor parallelism, or no draft model."
        )
    if tree is not None:
        check_tree_drafter(drafter, tree)
        check_trees(model, cache)


def check_tree_drafter(drafter: Drafter, tree: Tree | str) -> None:
    """Raise ValueError where ``drafter`` cannot draft ``tree``; "auto" stands for several."""
    if not isinstance(drafter, TreeDrafter):
        raise ValueError("this drafter proposes chains only: leave the tree out.")
    for shape in [shape.tree for shape in TREES] if tree == AUTO else [tree]:
        drafter.check_tree(shape)
