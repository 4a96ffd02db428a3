"""Train heads of blocks on three texts by heart, for the tests of each kind in tests/drafters.

The classes are mlx-vlm's. They are trained on blocks that start anywhere in the greedy texts of a
tiny target, until every draft is right. ``learned-KIND/`` holds config and weights as published,
the weights in float16. Run ``pip install --no-deps mlx-vlm==0.7.10`` first.

    PYTHONPATH=tests/support:. python tools/golden/learn_blocks.py [KIND ...]
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from block_twin import LEARNED, PROMPTS, features_of
from helpers import plain, tiny_llama
from make_blocks import CLASSES as FROZEN
from make_blocks import FOLDER, DFlash2DraftModel, DSparkDraftModel, greedy, published
from mlx_vlm.speculative.drafters.muse_glimmer_assistant.config import MuseGlimmerAssistantConfig
from mlx_vlm.speculative.drafters.muse_glimmer_assistant.dflash import (
    MuseGlimmerAssistantDraftModel,
)

LENGTH = 26  # tokens of a text
STEPS = 1500  # of training, at most
BATCH = 6  # blocks
CLASSES = FROZEN | {
    "liquid": FROZEN["dspark"],
    "muse": (MuseGlimmerAssistantDraftModel, MuseGlimmerAssistantConfig),
}


def rows_of(model: Any, states: mx.array, bare: mx.array, before: mx.array) -> mx.array:
    """Return the rows (k, V) that a block's tokens are chosen from, each after the one before."""
    if isinstance(model, DSparkDraftModel):
        return mx.vmap(model.markov_head.apply_step_logits)(bare, before)
    if isinstance(model, DFlash2DraftModel):  # for all tokens; candidates have no gradients
        own = model.candidate_selector
        seen = own.predecessor_codebook(before) * own.hidden_projection(states)
        return bare + seen @ own.successor_codebook.weight.T
    return bare


def block_of(model: Any, seen: mx.array, text: mx.array, start: int, size: int) -> tuple:
    """Compute a block: rows to choose from, rows before any correction, and the true tokens."""
    model._fused_context_kv_weight = None  # else that of the step before
    is_first = hasattr(model, "markov_head")  # whether the first slot drafts
    masks = mx.full((size - is_first,), model.config.mask_token_id, mx.int32)
    block = mx.concatenate([text[start : start + 1].astype(mx.int32), masks])[None]
    states = model._hidden(block, seen[None, :start], model.make_cache())[0, 1 - is_first :]
    bare = model._logits(states)
    rows = rows_of(model, states, bare, text[start : start + size])
    return rows, bare, text[start + 1 : start + 1 + size]


def is_right(model: Any, seen: mx.array, text: mx.array, start: int, size: int) -> bool:
    """Return whether the model's own greedy draft is the text."""
    model._fused_context_kv_weight = None
    anchor = int(text[start].item())
    rows = seen[None, :start]
    drafted = model.draft_block(anchor, rows, model.make_cache(), size + 1, greedy)[0]
    return bool((drafted == text[start + 1 : start + 1 + size]).all().item())


def make(kind: str, target: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Make a fresh head and its config."""
    make_model, make_config = CLASSES[kind]
    config = json.loads(json.dumps(LEARNED[kind]))  # mlx-vlm takes some keys out
    model = make_model(make_config.from_dict(json.loads(json.dumps(config))))
    model.embed_tokens = target.model.embed_tokens
    model.lm_head = model.embed_tokens.as_linear  # the target's are one table
    return model, config


def save(kind: str, model: Any, config: dict[str, Any]) -> None:
    """Write the head without the target's parts."""
    model.embed_tokens = None
    model.lm_head = None
    folder = FOLDER / f"learned-{kind}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    stored = {n: a.astype(mx.float16) for n, a in published(model).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), stored)


def learn(kind: str) -> None:
    """Train a head of this kind, and write it."""
    mx.random.seed(3)
    target = tiny_llama(num_hidden_layers=6)
    model, config = make(kind, target)
    longest = config["block_size"] - (not hasattr(model, "markov_head"))
    prompts = [prompt + plain(target, prompt, LENGTH + longest + 1) for prompt in PROMPTS]
    seen = [mx.array(features_of(target, (1, 6), text).astype(np.float32)) for text in prompts]
    texts = [mx.array(text) for text in prompts]
    starts = [(i, len(PROMPTS[i]) + n) for i in range(len(PROMPTS)) for n in range(LENGTH)]
    dice = np.random.default_rng(0)

    def loss(model: Any, some: list[tuple[int, int, int]]) -> mx.array:
        lost = mx.array(0.0)
        for i, start, size in some:
            rows, bare, wanted = block_of(model, seen[i], texts[i], start, size)
            # Candidates are the best rows before the correction.
            lost += nn.losses.cross_entropy(rows, wanted).mean() / BATCH
            lost += 0.3 * nn.losses.cross_entropy(bare, wanted).mean() / BATCH
        return lost

    model.embed_tokens.freeze()
    step: Callable[..., Any] = nn.value_and_grad(model, loss)
    optimizer = optim.Adam(optim.cosine_decay(3e-3, STEPS))
    for i in range(STEPS):
        chosen = dice.choice(len(starts), BATCH, replace=False)
        # A shorter draft is a smaller block, in which each slot sees less.
        sizes = [longest if n % 2 else int(dice.integers(1, longest)) for n in range(BATCH)]
        value, grads = step(model, [(*starts[n], s) for n, s in zip(chosen, sizes, strict=True)])
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        if i % 100 == 99:
            asked = [(j, start, size) for j, start in starts for size in (2, longest)]
            right = [is_right(model, seen[j], texts[j], *block) for j, *block in asked]
            print(kind, i + 1, value.item(), sum(right) / len(right), flush=True)
            if all(right) and value.item() < 0.03:
                break
    save(kind, model, config)


if __name__ == "__main__":
    for name in sys.argv[1:] or CLASSES:
        learn(name)
