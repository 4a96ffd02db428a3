"""Models for the benchmark's tests to measure."""

import pytest
from helpers import byte_tokenizer, tiny_head, tiny_llama

from mlx_eagle.bench import runner


@pytest.fixture(scope="module")
def tiny():
    """Target, tokenizer, drafter, and a second model as mlx-lm's draft model."""
    model = tiny_llama(vocab_size=258)
    compared = tiny_llama(seed=3, vocab_size=258, num_hidden_layers=2)
    return runner.Models(model, byte_tokenizer(), {"tiny head": tiny_head(model)}, compared)
