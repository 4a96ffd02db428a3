"""Sizes of caches against those that mlx-lm fills, and against what is known of real models."""

import mlx.core as mx
import pytest
import true_configs
from architectures import build, model_files
from grids import thorough
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.doctor import checks
from mlx_eagle.target_model.cache_size import cache_bytes

ALLOCATED = 256  # tokens, mlx-lm's caches grow by as many at a time
VARIED = ("llama", "deepseek_v3", "qwen3_next", "gpt_oss", "gemma3_text", "deepseek_v41")
LEFT_OUT = {
    "llama4": "a chunk of 8 tokens, which no real one has, in caches that grow by 256",
    "olmo": "mlx-lm cannot run it over several tokens",
}


@pytest.mark.parametrize(
    "name", thorough([n for n in model_files() if n not in LEFT_OUT], *VARIED)
)
def test_caches_are_as_large_as_they_become(name):
    """The last token comes alone, when a window drops what a long pass left in it."""
    model = build(name)
    caches = make_prompt_cache(model)
    tokens = mx.arange(ALLOCATED)[None] % 50
    model(tokens[:, :-1], cache=caches)
    model(tokens[:, -1:], cache=caches)
    held = tree_flatten([cache.state for cache in caches])
    filled = sum(array.nbytes for _, array in held if isinstance(array, mx.array))
    assert cache_bytes(model, ALLOCATED) == filled


# Bytes per token: layers x key heads x head dimension x 2 x 2.
PER_TOKEN = {"LLAMA_8B": 32 * 8 * 128 * 4, "VICUNA_13B": 40 * 40 * 128 * 4}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_real_models_by_hand_and_without_weights(name):
    model = checks.build(vars(true_configs)[name])
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    assert cache_bytes(model, 32768) == 32768 * PER_TOKEN[name]
    assert mx.get_peak_memory() - active < 1e6, "nothing is computed"


def test_windows_do_not_grow():
    """gpt-oss-20b: 12 of 24 layers keep 128 tokens."""
    model = checks.build(true_configs.GPT_OSS_20B)
    layer = 8 * 64 * 4
    assert cache_bytes(model, 8000) == 12 * layer * 8000 + 12 * layer * 128
    assert cache_bytes(model, 100) == 24 * layer * 100
