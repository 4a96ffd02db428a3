"""The table of architectures tells the truth about the installed mlx-lm.

Fewer draft lengths, scripts and tokens than the table was measured with: chains of 3, trees, the
script "every length", 18 tokens, which cross every window, batches of 3. For all of it run
``python tests/support/architectures.py``.
"""

import mlx.core as mx
import pytest
from architectures import (
    ARCHITECTURES,
    COLUMNS,
    PROMPT,
    build,
    check,
    load,
    may_part,
    model_file,
    model_files,
    recorded,
)
from grids import thorough
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.target_model.target import Target

TABLE = recorded()
# Of several kinds of caches and of what works; test_promises.py has the common ones too.
QUICK = ("baichuan_m1", "deepseek_v32", "gpt2", "llama4")


def test_every_model_file_of_mlx_lm_is_in_the_table():
    missing = sorted(set(model_files()) - {model_file(name) for name in TABLE})
    assert not missing, (
        f"mlx-lm has model files that architectures.md does not know: {', '.join(missing)}. Give "
        "them a config in tests/support/architecture_configs.py where none can be derived, then "
        "run `python tests/support/architectures.py`."
    )


def test_every_architecture_is_in_the_table():
    missing = sorted(set(ARCHITECTURES) - set(TABLE))
    assert not missing, f"run `python tests/support/architectures.py`: the table lacks {missing}"


def test_the_explicit_cases_work():
    for name in ("gemma4 (31B)", "gpt_oss (20b)"):
        assert TABLE[name] == list(COLUMNS), f"{name} must work with everything"


WORKING = [name for name, works in TABLE.items() if works]


@pytest.mark.parametrize("name", thorough(WORKING, *QUICK))
def test_what_the_table_says_works(name):
    if name not in ARCHITECTURES:
        pytest.skip(f"the installed mlx-lm has no {model_file(name)}")
    if may_part(name):
        pytest.xfail("on Metal mlx-lm computes one row of it in another way than several")
    fewer = {"ks": (3,), "scripts": ("every length",), "num_tokens": 18, "batch_sizes": (3,)}
    result = check(name, TABLE[name], **fewer)
    works = [column for column in COLUMNS if getattr(result, column)]
    assert works == TABLE[name], result.reason


TAPPED = [name for name, works in TABLE.items() if "tap" in works]


@pytest.mark.parametrize("name", thorough(TAPPED, "cohere2", "gpt_oss", "qwen3_vl"))
def test_the_logits_of_some_rows_are_those_of_all(name):
    if name not in ARCHITECTURES:
        pytest.skip(f"the installed mlx-lm has no {model_file(name)}")
    model, tokens, rows = build(name), mx.array([PROMPT, PROMPT[::-1]]), mx.array([2, 5, 9])
    target = Target(model, (0, 1))
    logits, features, _ = target.logits_at(tokens, rows)
    expected = model(tokens).reshape(-1, logits.shape[-1])[rows]
    assert mx.allclose(logits, expected, 1e-4, 1e-5)
    assert mx.array_equal(features, target.batch(tokens, None)[1])


STATES = {"ssm_update": 2, "gated_delta_update": 1, "_wkv7_step_ops": 0}
"""By function, the argument whose last axis is that of the state."""


@pytest.mark.parametrize(
    "name",
    thorough(
        [
            "bailing_moe_v3", "falcon_h1", "granitemoehybrid", "kimi_k3", "kimi_linear", "mamba2",
            "nemotron_h", "olmo_hybrid", "plamo2", "prism_hadamard_qwen35", "qwen3_5",
            "qwen3_5_moe", "qwen3_next", "rwkv7",
        ],
        "falcon_h1", "kimi_linear", "qwen3_next", "rwkv7",
    ),
)  # fmt: skip
def test_recurrent_states_are_of_a_size_that_gpu_kernels_take(name, monkeypatch):
    """mlx-lm's kernels give each of 32 threads an equal part of a state; less is left undone."""
    sizes = []

    def watched(function, index):
        def run(*args, **kwargs):
            sizes.append(args[index].shape[-1])
            return function(*args, **kwargs)

        return run

    model = build(name)
    for file in {model_file(name), "qwen3_5", "rwkv7"}:
        for update, index in STATES.items():
            if (function := getattr(load(file), update, None)) is not None:
                monkeypatch.setattr(load(file), update, watched(function, index))
    model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    assert sizes and all(size % 32 == 0 for size in sizes), sizes
