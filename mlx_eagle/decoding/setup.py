"""Settings and checks of a pair before anything is decoded."""

from collections.abc import Callable
from functools import partial
from numbers import Integral, Real
from typing import Any, SupportsInt, TypeGuard

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import does_model_support_input_embeddings

from ..drafters.base import Drafter
from ..drafters.copies import Copies, Tokens
from ..drafters.seen_text import GAP
from ..drafters.tree import TREES, DraftShape, Tree, parse_tree
from ..system.device import this_machine
from ..target_model.probe import check_trees
from ..target_model.rollback import CacheQuantization, Checkpoint, check_supported
from ..target_model.sharding import in_any_process, is_pipelined, is_sharded
from ..target_model.target import Target
from .decoder import Decoder
from .processors import LogitsProcessor, LogitsProcessors
from .rules import make_rule
from .sampling import Sampler

AUTO = "auto"


def check_prompt(prompt: mx.array, can_be_empty: bool = False) -> None:
    """Raise ValueError for anything but one prompt of at least one token, unless allowed."""
    if prompt.ndim != 1:
        raise ValueError(
            f"the prompt has shape {tuple(prompt.shape)}: speculative decoding takes one prompt "
            "(n,) at a time; use mlx_eagle.batch_generate for several."
        )
    if prompt.size == 0 and not can_be_empty:
        raise ValueError("the prompt is empty: give at least one token.")


def check_num_draft_tokens(num_draft_tokens: object) -> None:
    """Raise ValueError for anything but a whole number from 0 or "auto"."""
    if num_draft_tokens == AUTO or (_is_whole(num_draft_tokens) and int(num_draft_tokens) >= 0):
        return
    raise ValueError(
        f"num_draft_tokens is {in_words(num_draft_tokens)}: give a whole number, 0 (plain "
        "decoding) or more, or 'auto'."
    )


def check_max_tokens(max_tokens: object, *, of: str = "", least: int = -1) -> None:
    """Raise ValueError for anything but a whole number above 0, or -1 if ``least`` is -1."""
    if _is_whole(max_tokens) and int(max_tokens) >= least and max_tokens != 0:
        return
    no_limit = ", or -1 for no limit" if least < 0 else ""
    raise ValueError(f"max_tokens{of} is {in_words(max_tokens)}: give 1 or more{no_limit}.")


def read_tree(tree: object) -> Tree | str | None:
    """A tree, "auto" or None unchanged; for a text, its tree: see ``parse_tree``.

    Raises ValueError for anything else.
    """
    if isinstance(tree, str) and tree != AUTO:
        return parse_tree(tree)
    if tree is None or tree == AUTO or isinstance(tree, Tree):
        return tree
    raise ValueError(
        f"tree is {in_words(tree)}: give WIDTHxDEPTH:NODES, for example '4x5:16', or 'auto'."
    )


def in_words(value: object) -> str:
    """Describe a value for a message, with its type if the type is wrong."""
    if value is None:
        return "None (nothing)"
    if isinstance(value, bool):
        return f"{value} (yes or no, not a number)"
    if isinstance(value, str):
        return f"{value!r} (text)"
    if isinstance(value, Integral):
        return str(value)
    if isinstance(value, Real):
        return f"{value} (not a whole number)" if value % 1 else f"{value} (a decimal number)"
    return f"a {type(value).__name__}"


def _is_whole(value: object) -> TypeGuard[SupportsInt]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def split_cache(
    prompt_cache: list[Any] | None, model: nn.Module, max_kv_size: int | None
) -> tuple[list[Any], list[Any] | None]:
    """The target's caches, and the drafter's if ``prompt_cache`` has them after those.

    Raises ValueError if there are fewer than the target needs.
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


def begin_drafter(draft_model: Drafter, draft_cache: list[Any] | None) -> Drafter:
    """A drafter for one request, with its part of a prompt cache.

    Raises ValueError if these caches do not belong to this drafter.
    """
    num_needed = len(draft_model.make_cache())
    if draft_cache is not None and len(draft_cache) != num_needed:
        raise ValueError(
            f"prompt_cache holds {len(draft_cache)} caches behind the target's, but this drafter "
            f"has {num_needed}: make it with this drafter's make_cache()."
        )
    for found, own in zip(draft_cache or (), draft_model.make_cache(), strict=False):
        sizes = [getattr(cache, "max_size", None) for cache in (found, own)]
        if sizes[0] != sizes[1]:
            found, kept = ("all slots" if n is None else f"a window of {n} slots" for n in sizes)
            raise ValueError(
                f"prompt_cache holds {found} of the draft model, but this drafter keeps {kept}: "
                "give the same draft window, or a prompt_cache without the drafter's part."
            )
    drafter = draft_model.begin(draft_cache)
    check_supported(drafter.cache, "draft model")
    return drafter


def begin_copies(
    draft_model: Drafter,
    caches: list[Any],
    prompt: mx.array,
    known_tokens: Tokens | None,
    is_embedded: bool = False,
) -> Copies | None:
    """Copies for a request, if its drafter copies.

    ``caches`` are the target's; ``known_tokens`` those that they hold, by default those remembered
    of them. From a prompt that ``is_embedded``, and across it, nothing is copied. Raises
    ValueError where ``known_tokens`` are no tokens.
    """
    if known_tokens is not None:
        known_tokens = read_tokens(known_tokens)
    source = draft_model.copies
    if source is None:
        return None
    known = source.remembered(caches) if known_tokens is None else known_tokens
    return source.begin(known, [GAP] if is_embedded else np.array(prompt))


def read_tokens(tokens: Tokens) -> np.ndarray:
    """Token ids (n,) int32 from a list or an array; ValueError for anything else."""
    try:
        read = np.array(tokens)
    except ValueError:
        read = np.array(None)
    if read.size == 0 and read.ndim == 1:
        return read.astype(np.int32)
    if read.ndim != 1 or read.dtype.kind not in "iu":
        raise ValueError(
            f"known_tokens are {in_words(tokens)}: give the token ids (n,) that prompt_cache "
            "holds, as a list or an array, or leave them out."
        )
    return read.astype(np.int32)


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
    drafter.check_embeddings(embeddings)


def open_decoder(
    model: nn.Module,
    drafter: Drafter,
    cache: list[Any],
    quantization: CacheQuantization,
    stream: mx.Stream | mx.ThreadLocalStream,
    *,
    sampler: Sampler | None,
    logits_processors: list[LogitsProcessor] | None,
    acceptance: str | None,
    tree: Tree | str | None = None,
    copies: Copies | None = None,
    exact: bool = False,
) -> Decoder:
    """Target and drafter for one request, checked against each other and what is asked of them.

    ``copies`` are what the request may copy from its text and others. ``exact``: rows of a pass
    are computed one by one, and a tie of rounded log-probabilities is broken as in mlx-lm.
    """
    # What processes exchange must be on one stream: an earlier pass may still be under way.
    with mx.stream(stream):
        _check_target(model, drafter, cache, quantization, tree)
        target = Target(model, drafter.taps)
    if exact and sampler is None:
        sampler = partial(mx.argmax, axis=-1)
    rule = make_rule(acceptance, sampler)
    processors = LogitsProcessors(logits_processors or ())
    return Decoder(target, drafter, cache, rule, processors, quantization, stream, copies, exact)


def _check_target(
    model: nn.Module,
    drafter: Drafter,
    cache: list[Any],
    quantization: CacheQuantization,
    tree: Tree | str | None,
) -> None:
    """Raise ValueError if the target cannot do exactly what the options need."""
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


def drawable_trees(decoder: Decoder) -> tuple[DraftShape, ...]:
    """The ``TREES`` that the drafter can draft; () if the target's caches cannot verify any."""
    if not decoder.drafter.supports_trees or decoder.quantization.bits is not None:
        return ()
    if is_sharded(decoder.target.model) and not verifies_trees(decoder):  # all ranks at once
        return ()
    drafter = decoder.drafter
    return tuple(shape for shape in TREES if _passes(check_tree_drafter, drafter, shape.tree))


def verifies_trees(decoder: Decoder) -> bool:
    """Whether the target can verify trees exactly; probed once for each model."""
    with mx.stream(decoder.stream):
        return _passes(check_trees, decoder.target.model, decoder.cache)


def _passes(check: Callable[..., None], *args: Any) -> bool:
    """Whether a check passes without ValueError."""
    try:
        check(*args)
    except ValueError:
        return False
    return True


def check_tree_drafter(drafter: Drafter, tree: Tree | str | None) -> None:
    """Raise ValueError if ``drafter`` cannot draft ``tree``; for "auto", any of ``TREES``."""
    if isinstance(tree, str):
        trees = [shape.tree for shape in TREES]
        if any(_passes(drafter.check_tree, shape) for shape in trees):
            return
        tree = trees[0]
    if tree is not None:
        drafter.check_tree(tree)


def kernel_options(decoder: Decoder) -> list[str]:
    """Names of the ``KernelOptions`` that apply here; known after the first pass."""
    if this_machine().backend == "cpu":  # its kernels are alike either way
        return []
    if is_sharded(decoder.target.model):  # ranks by different kernels might draft other tokens
        return []
    found = {
        "splits_attention": decoder.target.attention.matters,
        "forces_fused": decoder.target.attention.falls_off,
        "uses_overlay": decoder.drafter.supports_overlay,
    }
    return [name for name, is_possible in found.items() if is_possible]
