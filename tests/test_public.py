"""The functions that users call in Python: defaults, names of options, what a drafter says."""

import inspect
from typing import get_type_hints

import pytest
from helpers import byte_tokenizer, tiny_head, tiny_llama
from mlx.utils import tree_flatten

import mlx_eagle
from mlx_eagle.batch import generate as batches
from mlx_eagle.batch.requests import FOR_ONE_PROMPT, BatchOptions, Options
from mlx_eagle.decoding import generate_step
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.generate import GenerateOptions

MODEL = tiny_llama()
DRAFTER = tiny_head(MODEL)
TOKENIZER = byte_tokenizer()
DOORS = {
    "generate": lambda **given: mlx_eagle.generate(MODEL, TOKENIZER, [1, 2], **given),
    "stream_generate": lambda **given: list(
        mlx_eagle.stream_generate(MODEL, TOKENIZER, [1, 2], **given)
    ),
    "batch_generate": lambda **given: mlx_eagle.batch_generate(MODEL, TOKENIZER, [[1]], **given),
}
SEEN_IN = {"batch_generate": (batches, "shared_controller", 3)}


@pytest.mark.parametrize("door", DOORS)
def test_auto_is_the_default(monkeypatch, door):
    """As of the commands; mlx-lm's own function of ours keeps mlx-lm's number."""
    module, name, place = SEEN_IN.get(door, (generate_step, "make_controller", 1))
    make, seen = getattr(module, name), []

    def spy(*args, **options):
        seen.append(args[place])
        return make(*args, **options)

    monkeypatch.setattr(module, name, spy)
    DOORS[door](draft_model=DRAFTER, max_tokens=4)
    DOORS[door](draft_model=DRAFTER, max_tokens=4, num_draft_tokens=2)
    assert seen == ["auto", 2]
    own = inspect.signature(mlx_eagle.speculative_generate_step).parameters
    assert own["num_draft_tokens"].default == 3


@pytest.mark.parametrize("door", DOORS)
def test_a_name_that_does_not_exist(door):
    """Of the function that was called, with what was probably meant."""
    with pytest.raises(TypeError) as found:
        DOORS[door](draft_model=DRAFTER, max_token=3)
    assert str(found.value) == (
        f"{door}() got an unexpected keyword argument 'max_token': did you mean max_tokens?"
    )
    with pytest.raises(TypeError, match=r"argument 'xyz'$"):
        DOORS[door](draft_model=DRAFTER, xyz=3)


def test_options_have_the_types_of_what_takes_them():
    step = inspect.signature(mlx_eagle.speculative_generate_step)
    hints = get_type_hints(mlx_eagle.speculative_generate_step)
    given = {"prompt", "model", "stop_tokens"}  # by ``stream_generate``
    typed = get_type_hints(GenerateOptions)
    assert typed.keys() == step.parameters.keys() - given
    shared = typed.keys() - {"draft_model"}
    assert {name: typed[name] for name in shared} == {name: hints[name] for name in shared}
    fields = get_type_hints(Options)
    named = inspect.signature(mlx_eagle.batch_generate).parameters
    typed = get_type_hints(BatchOptions)
    assert typed.keys() == fields.keys() - named.keys()
    assert not typed.keys() & {*FOR_ONE_PROMPT}
    typed.pop("stream"), fields.pop("stream")  # of a batch it may be None, as in mlx-lm
    assert all(fields[name] == kind for name, kind in typed.items())


def test_a_drafter_says_what_it_is():
    size = sum(array.nbytes for _, array in tree_flatten(DRAFTER.head.parameters())) / 1e6
    taps = ", ".join(map(str, DRAFTER.taps))
    assert repr(DRAFTER) == repr(DRAFTER.begin()) == f"Eagle3Drafter({size:.1f} MB, taps=({taps}))"
    assert repr(DRAFTER.with_copies()).endswith(f"taps=({taps}), copies)")
    assert repr(LookupDrafter()) == "LookupDrafter(no weights, copies)"
