"""The table of architectures tells the truth about the installed mlx-lm.

Fewer draft lengths, scripts and tokens than the table was measured with: chains of 3, trees, the
script "every length", 18 tokens, which cross every window. For all of it run
``python tests/support/architectures.py``.
"""

import pytest
from architectures import ARCHITECTURES, COLUMNS, check, model_file, model_files, recorded
from grids import thorough

TABLE = recorded()
# One for each combination of caches and of what works; test_matrix.py has the common ones too.
QUICK = (
    "baichuan_m1", "bailing_moe_v3", "cohere2", "deepseek_v32", "gear", "gemma3n",
    "gemma4 (26B-A4B)",
    "gpt2", "iquestloopcoder", "jamba", "kimi_linear", "llama4", "longcat_flash",
    "longcat_flash_ngram", "mamba", "minicpm3", "muse_spark", "phi3small", "plamo3", "qwen3_vl",
    "recurrent_gemma",
)  # fmt: skip


def test_every_model_file_of_mlx_lm_is_in_the_table():
    missing = sorted(set(model_files()) - {model_file(name) for name in TABLE})
    assert not missing, (
        f"mlx-lm has model files that ARCHITECTURES.md does not know: {', '.join(missing)}. Give "
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
    result = check(name, TABLE[name], ks=(3,), scripts=("every length",), num_tokens=18)
    works = [column for column in COLUMNS if getattr(result, column)]
    assert works == TABLE[name], result.reason
