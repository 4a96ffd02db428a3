"""Run mlx-lm's own tests with our loop installed; by hand, beside ``make test``.

    pip download --no-deps --no-binary mlx-lm mlx-lm==0.32.2 && tar xzf mlx_lm-0.32.2.tar.gz
    python tools/mlx_lm_suite.py mlx_lm-0.32.2/tests

A tiny random model with a tokenizer of bytes stands in for the models that the tests fetch. There
are three runs: mlx-lm as it is, installed, and installed with our loop for every draft model. All
tests must pass, except one that says at which tokens mlx-lm's rounds begin: ours begin later,
because the first token ends prefill. Needs ``requests``, as mlx-lm's tests do.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import mlx_lm.utils
import pytest
from helpers import byte_tokenizer, randomize
from mlx_lm.models import qwen2
from mlx_lm.utils import save_model

import mlx_eagle
from mlx_eagle.drafters.model_drafter import ModelDrafter

FILES = ("generate", "server", "prompt_cache", "sample_utils", "chat")
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
NEED_MORE = {
    "test_stream_generate_input_embeddings": "asks the real model for a word",
    "test_stream_generate_input_embeddings_prefill": "asks the real model for a word",
    "test_handle_models": "lists what the hub's cache holds",
}
WHERE_ROUNDS_BEGIN = "test_stream_generate_speculative"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Results:
    """A pytest plugin that keeps outcomes, and leaves out tests that need the hub."""

    def __init__(self):
        self.outcomes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items) -> None:
        items[:] = [item for item in items if item.name not in NEED_MORE]

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.split("::", 1)[-1]] = report.outcome


def make_stand_in(folder: Path) -> None:
    """Write the tiny model and its tokenizer."""
    # Weights small enough for the tolerances of mlx-lm's tests of batches and quantized caches.
    model = randomize(qwen2.Model(qwen2.ModelArgs.from_dict(CONFIG)), seed=0, scale=0.12)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def run(tests: Path, options: list[str]) -> dict[str, str]:
    """Run the tests; return the outcome of each by its name."""
    results = Results()
    files = [str(tests / f"test_{name}.py") for name in FILES]
    pytest.main(["-q", "-p", "no:cacheprovider", *options, *files], plugins=[results])
    return results.outcomes


def with_our_loop(tests: Path, options: list[str]) -> dict[str, str]:
    """Run the tests with our loop, and a drafter of ours in place of every draft model."""
    module = importlib.import_module("mlx_lm.generate")
    with mlx_eagle.installed() as installation:
        module.speculative_generate_step = lambda prompt, model, draft_model, *rest, **options: (
            installation(prompt, model, ModelDrafter(draft_model), *rest, **options)
        )
        outcomes = run(tests, options)
        module.speculative_generate_step = installation
    assert installation.stats is not None, "no test speculated"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Run mlx-lm's tests with our loop installed.")
    parser.add_argument("tests", type=Path, help="the tests folder of mlx-lm's sources")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        make_stand_in(Path(folder))
        mlx_lm.utils.snapshot_download = lambda *_, **__: folder
        plain = run(args.tests, options)
        with mlx_eagle.installed():
            installed = run(args.tests, options)
        ours = with_our_loop(args.tests, options)
    for name, outcomes in (("plain", plain), ("installed", installed), ("our loop", ours)):
        failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
        print(f"{name}: {dict(Counter(outcomes.values()))}", *failed, sep="\n  ")
    for test, reason in NEED_MORE.items():
        print(f"left out: {test}, which {reason}")
    missed = {test for test in plain if plain[test] != ours[test]}
    expected = all(test.endswith(WHERE_ROUNDS_BEGIN) for test in missed)
    sys.exit(set(plain.values()) != {"passed"} or installed != plain or not expected)


if __name__ == "__main__":
    main()
