"""With ``exact`` every row of a verify pass has the logits of plain decoding, bit for bit.

The rows of all passes of a text, those of rejected drafts included, are compared with those of
mlx-lm's model, which is given the same tokens one by one, each on a copy of its own caches.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import ARCHITECTURES, PROMPT, build, model_file, recorded
from grids import thorough
from helpers import SCRIPTS, VOCAB, ScriptedDrafter
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tree_drafters import ScriptedTreeDrafter

from mlx_eagle.decoding.decoder import Decoder
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.drafters.tree import TreeShape

TABLE = recorded()
CHAINS = [name for name, works in TABLE.items() if "chain" in works]
# Experts and windows, a latent cache, recurrent states, and a cache that is cut in front.
QUICK = ("gpt_oss", "deepseek_v3", "qwen3_next", "llama4")
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
GROUP = 32  # weights that share a scale, of which the tiny models' sizes are multiples
NUM_TOKENS = 10  # with the prompt more than the windows hold
SHAPES: dict[str, tuple[type[ScriptedDrafter], dict[str, Any]]] = {
    "chain": (ScriptedDrafter, {"num_draft_tokens": 3}),
    "tree": (ScriptedTreeDrafter, {"tree": TreeShape.parse("2x3:6")}),
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
    weight = getattr(module, "weight", None)
    return hasattr(module, "to_quantized") and weight is not None and weight.shape[-1] % GROUP == 0


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
    assert len(passes) > 4
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
