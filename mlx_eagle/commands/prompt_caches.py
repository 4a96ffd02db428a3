"""The file of ``--prompt-cache-file``, as ``mlx_lm.cache_prompt`` writes it.

mlx-lm reads any safetensors file as such a one and fails where a part is missing; here each part
is looked for before.
"""

import json
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as cache_types
from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache, make_prompt_cache
from safetensors import SafetensorError, safe_open

from ..drafters.base import Drafter

FLAG = "--prompt-cache-file"
REMEDY = "make it again with mlx_lm.cache_prompt."


def read_prompt_cache(file: str) -> tuple[list[Any], dict[str, str]]:
    """The caches in a file and what was written with them: "model", "tokenizer_config".

    Raises ValueError, naming the file, for anything that ``mlx_lm.cache_prompt`` did not write.
    """
    check_prompt_cache(file)
    try:
        return load_prompt_cache(file, return_metadata=True)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as err:
        # The parts are there: what is wrong in one of them, only its type of cache can tell.
        raise ValueError(f"{FLAG} {file} cannot be restored ({err}): {REMEDY}") from err


def check_prompt_cache(file: str) -> None:
    """Raise ValueError unless the file has the parts of a prompt cache."""
    if not Path(file).is_file():
        what = "is no file" if Path(file).exists() else "does not exist"
        raise ValueError(f"{FLAG} {file} {what}: {REMEDY}")
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError as err:
        raise ValueError(
            f"{FLAG} {file} cannot be read ({err}): it is damaged or no prompt cache; {REMEDY}"
        ) from err
    classes = [value for key, value in metadata.items() if key.startswith("1.")]
    if not classes:
        raise ValueError(f"{FLAG} {file} holds no prompt cache, but other tensors: {REMEDY}")
    unknown = [name for name in classes if not isinstance(vars(cache_types).get(name), type)]
    if unknown:
        raise ValueError(f"{FLAG} {file} holds caches of an unknown type {unknown[0]}: {REMEDY}")
    if "0.model" not in metadata:
        raise ValueError(f"{FLAG} {file} does not say which model it was made with: {REMEDY}")
    try:
        is_object = isinstance(json.loads(metadata.get("0.tokenizer_config", "{}")), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ValueError(f"{FLAG} {file} holds no tokenizer configuration: {REMEDY}")


def check_bits(cache: list[Any], kv_bits: int | None) -> None:
    """Raise ValueError where ``--kv-bits`` is not what a quantized prompt cache has."""
    first = cache[0]
    if isinstance(first, QuantizedKVCache) and kv_bits not in (None, first.bits):
        raise ValueError(
            f"--kv-bits is {kv_bits}, but the prompt cache has {first.bits} bits: leave the flag "
            "out, or give the same number."
        )


def fit_prompt_cache(
    file: str, cache: list[Any], model: nn.Module, drafter: Drafter | None
) -> list[Any]:
    """The caches for ``model`` and ``drafter``: those of the file, the drafter's fresh if missing.

    Raises ValueError where the file has caches for neither the model alone nor for both.
    """
    num_target = len(make_prompt_cache(model))
    fresh = [] if drafter is None else drafter.make_cache()
    if len(cache) == num_target:
        return cache + fresh
    if drafter is None or len(cache) != num_target + len(fresh):
        both = f", or {num_target + len(fresh)} with the draft model's" if fresh else ""
        raise ValueError(
            f"{FLAG} {file} holds {len(cache)} caches, but this model has {num_target}{both}: "
            "give a file that was made with this model."
        )
    return cache
