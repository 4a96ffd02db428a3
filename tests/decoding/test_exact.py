"""With ``exact`` every row of a verify pass has the logits of plain decoding, bit for bit.

The rows of all passes of a text, those of rejected drafts included, are compared with those of
mlx-lm's model, which is given the same tokens one by one, each on a copy of its own caches.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from architectures import ARCHITECTURES, PROMPT, build, model_file, recorded
from grids import thorough
from helpers import SCRIPTS, VOCAB, ScriptedDrafter, byte_tokenizer, tiny_head, tiny_llama
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tree_drafters import ScriptedTreeDrafter

import mlx_eagle
from mlx_eagle.decoding.decoder import Decoder
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.round_costs import costs_of
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.tree import PLAIN, DraftShape, TreeShape

TABLE = recorded()
CHAINS = [name for name, works in TABLE.items() if "chain" in works]
# Experts and windows, a latent cache, recurrent states, and a cache that is cut in front.
QUICK = ("gpt_oss", "deepseek_v3", "qwen3_next", "llama4")
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
GROUP = 32  # weights that share a scale, of which the tiny models' sizes are multiples
NUM_TOKENS = 7  # with the prompt more than the windows hold
SHAPES: dict[str, tuple[type[ScriptedDrafter], dict[str, Any]]] = {
    "chain": (ScriptedDrafter, {"num_draft_tokens": 3}),
    "tree": (ScriptedTreeDrafter, {"tree": TreeShape.parse("2x2:4")}),
}


def forms(name: str) -> Iterator[tuple[str, nn.Module]]:
    """One model in all types, as it was built, and with 4-bit weights where some can be packed."""
    model = build(name)
    for what in ("dense", "4 bits"):
        if what == "4 bits":
            nn.quantize(model, GROUP, 4, class_predicate=can_be_packed)
            if not any(hasattr(module, "bits") for module in model.modules()):
                return
        for dtype in DTYPES:
            model.set_dtype(dtype)
            mx.eval(model.parameters())
            yield f"{what}, {dtype}", model


def can_be_packed(path: str, module: nn.Module) -> bool:
    """Not so afm7's own layers, whose method lacks an argument that MLX gives it."""
    pack = getattr(module, "to_quantized", None)
    return (
        pack is not None
        and "mode" in signature(pack).parameters
        and not (module.weight.shape[-1] % GROUP)
    )


@dataclass
class Plain:
    """mlx-lm's own decoding: the text, and the caches before each of its tokens is run."""

    model: nn.Module
    text: list[int]
    caches: list[list]

    @classmethod
    def of(cls, model: nn.Module) -> "Plain | None":
        """None where the device has no kernel: a CPU has one for experts in float32 or packed."""
        steps = generate_step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS + 4)
        try:
            text = [token for token, _ in steps]
        except RuntimeError as error:
            assert str(error).endswith("only supports float32."), error
            return None
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([PROMPT[:-1]]), cache=cache))
        plain = cls(model, text, [cache])
        for token in [PROMPT[-1], *text]:
            plain.caches.append(plain.step(token, plain.caches[-1])[1])
        mx.eval([c.state for cache in plain.caches for c in cache if not c.empty()])
        return plain

    def step(self, token: int, cache: list) -> tuple[mx.array, list]:
        """Logits (V,) after one more token, and the caches then; the others stay as they were."""
        cache = deepcopy(cache)
        logits = self.model(mx.array([[token]]), cache=cache)[0, -1]
        return logits, cache

    def rows(self, position: int, tokens: list[int], parents: list[int]) -> mx.array:
        """Logits (R, V) of a pass, whose row 0 is the last of ``position`` emitted tokens."""
        made = [self.step(([PROMPT[-1], *self.text])[position], self.caches[position])]
        for token, parent in zip(tokens, parents, strict=True):
            made.append(self.step(token, made[parent][1]))
        return mx.stack([logits for logits, _ in made])


def different_rows(plain: Plain, shape: str, monkeypatch, **options: Any) -> list[tuple[int, int]]:
    """(pass, row) of the rows whose logits are not plain decoding's; ``options`` of the loop."""
    passes = []
    accept = Decoder._accept

    def noted(decoder, choice, draft, tree_mask, logits):
        passes.append((decoder.num_emitted, draft, logits))
        return accept(decoder, choice, draft, tree_mask, logits)

    monkeypatch.setattr(Decoder, "_accept", noted)
    kind, drafts = SHAPES[shape]
    drafter = kind(PROMPT + plain.text, SCRIPTS["every length"], VOCAB)
    drafter.may_part = True  # without ``exact``
    options = {**drafts, "max_tokens": NUM_TOKENS, **options}
    steps = speculative_generate_step(mx.array(PROMPT), plain.model, drafter, **options)
    text = [token for token, _, _ in steps]
    found = []
    for i, (position, draft, logits) in enumerate(passes):
        parents = range(len(draft)) if draft.parents is None else draft.parents.tolist()
        if text[:position] != plain.text[:position]:
            found.append((i, -1))
            break
        expected = plain.rows(position, draft.tokens.tolist(), list(parents))
        is_same = ((expected == logits) | mx.isnan(expected) & mx.isnan(logits)).all(axis=-1)
        found += [(i, row) for row, same in enumerate(is_same.tolist()) if not same]
    assert len(passes) >= 4
    return found


@pytest.mark.parametrize("name", thorough(CHAINS, *QUICK))
def test_every_row_is_a_plain_step(name, monkeypatch):
    if name not in ARCHITECTURES:
        pytest.skip(f"the installed mlx-lm has no {model_file(name)}")
    for form, model in forms(name):
        plain = Plain.of(model)
        if plain is None:
            continue
        for shape in SHAPES if "tree" in TABLE[name] else ["chain"]:
            different = different_rows(plain, shape, monkeypatch, exact=True)
            assert different == [], f"{form}, {shape}"


def test_the_default_rounds_otherwise(monkeypatch):
    assert different_rows(Plain.of(build("qwen3")), "chain", monkeypatch)


SAMPLED = {
    "coupled": ({"sampler": Sampling(temp=0.8, seed=3)}),
    "match": ({"sampler": Sampling(temp=0.8, seed=3), "acceptance": "match"}),
    "any sampler": ({"sampler": lambda logprobs: mx.argsort(-logprobs, axis=-1)[..., 1]}),
    "greedy": {},
}


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("tree", [None, "2x3:6"])
def test_sampled_texts_are_mlx_lms_in_half_precision(rule, tree):
    """Across 256 tokens, where caches grow, with the log-probabilities of every token."""
    model = tiny_llama()
    model.set_dtype(mx.bfloat16)
    prompt = mx.array((PROMPT * 40)[:250])
    options = SAMPLED[rule]
    sampler = options.get("sampler")
    if isinstance(sampler, Sampling):
        sampler = sampler.begin()
    plain = list(generate_step(prompt, model, max_tokens=16, sampler=sampler))
    drafted = list(
        speculative_generate_step(
            prompt, model, tiny_head(model), max_tokens=16, tree=tree, exact=True, **options
        )
    )
    assert [token for token, _, _ in drafted] == [token for token, _ in plain]
    for (_, expected), (_, logprobs, _) in zip(plain, drafted, strict=True):
        assert mx.array_equal(logprobs, expected)


def test_prompts_of_a_batch_get_the_texts_of_each():
    model = tiny_llama()
    model.set_dtype(mx.bfloat16)
    prompts = [PROMPT, PROMPT[::-1], [9, 4, 31]]
    expected = [[t for t, _ in generate_step(mx.array(p), model, max_tokens=12)] for p in prompts]
    for size in (0, 3, "auto"):
        response = mlx_eagle.batch_generate(
            model, byte_tokenizer(), prompts, max_tokens=12, draft_model=tiny_head(model),
            num_draft_tokens=size, return_token_ids=True, exact=True,
        )  # fmt: skip
        assert response.token_ids == expected


def test_rows_have_the_price_of_plain_steps():
    model = tiny_llama()
    head = tiny_head(model)
    shapes = [DraftShape(3), DraftShape(7), DraftShape(3, TreeShape.parse("2x3:6"))]
    known = costs_of(model, head, "greedy", is_exact=True)
    assert known is not costs_of(model, head, "greedy")
    estimates = known.estimates(shapes, 1)
    for shape in shapes:
        assert estimates[shape].seconds >= shape.num_rows * estimates[PLAIN].seconds


@pytest.mark.parametrize("given, is_exact", [({}, True), ({"exact": False}, False)])
def test_installed_it_is_the_default_of_every_call(given, is_exact, monkeypatch):
    model = tiny_llama()
    found = []
    launch = Decoder.launch

    def noted(decoder, *args, **kwargs):
        found.append(decoder.is_exact)
        return launch(decoder, *args, **kwargs)

    monkeypatch.setattr(Decoder, "launch", noted)
    with mlx_eagle.installed(exact=True):
        options = {"draft_model": tiny_head(model), "max_tokens": 3, **given}
        mlx_lm.generate(model, byte_tokenizer(), PROMPT, **options)
    assert set(found) == {is_exact}
    assert not mlx_eagle.install().exact
    mlx_eagle.uninstall()


ALIVE = """
import sys

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.system.device import prepare_device
from mlx_eagle.target_model.row_by_row import checkpoint_of_rows, run_rows

prepare_device(is_exact=sys.argv[1] == "exact")
size = 128
sizes = {"hidden_size": size, "intermediate_size": size, "vocab_size": size}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
others = {"num_hidden_layers": 12, "rms_norm_eps": 1e-5, "model_type": "llama"}
model = llama.Model(llama.ModelArgs(**sizes, **heads, **others))
mx.eval(model.parameters())
cache = make_prompt_cache(model)
mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
made = model.parameters()
model.update(tree_map(lambda weight: weight * 1.0, made))  # computed when the pass needs it
run = lambda token: (model(token[None], cache=cache)[0], None)
logits, _ = run_rows(run, mx.array([3] * 8), None, checkpoint_of_rows(cache, False))
model.update(made)  # now only the graph holds the others
before = mx.get_active_memory()
mx.reset_peak_memory()
mx.eval(logits)
print((mx.get_peak_memory() - before) / (4 * size * size))
"""


@pytest.mark.exhaustive
def test_the_rows_use_each_matrix_one_behind_the_other(tmp_path):
    """Weights that are made in the pass, and freed behind their last row: how many are at once.

    Of 86 matrices most wait for the last rows where MLX goes on with the first one.
    """
    alive = {}
    for how in ("exact", "as it is"):
        environment = {k: v for k, v in os.environ.items() if k != "MLX_BFS_MAX_WIDTH"}
        command = [sys.executable, "-c", ALIVE, how]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        alive[how] = float(done.stdout)
    assert alive["exact"] < 40 and alive["as it is"] > 80, alive
