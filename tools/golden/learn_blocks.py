"""Heads of blocks that know three texts by heart, for the tests in tests/drafters of each kind.

The classes are our own, which other tests compare with NumPy's and other libraries': what counts
here is that drafts are kept. A head is trained on blocks that start anywhere in the greedy texts
of a tiny target, until it drafts all of them, and kept in float16.

    PYTHONPATH=tests/support:. python tools/golden/learn_blocks.py
"""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from block_twin import LEARNED, PROMPTS, features_of, rows_of, tiny_block
from helpers import plain, tiny_llama
from mlx.utils import tree_flatten

GOLDEN = Path(__file__).parents[2] / "tests" / "support" / "golden"
LENGTH, STEPS, BATCH = 26, 1500, 6


def learn(kind: str, settings: dict[str, Any]) -> None:
    model = tiny_llama()
    drafter = tiny_block(model, kind, **settings)
    head, c = drafter.head, drafter.head.config
    texts = [prompt + plain(model, prompt, LENGTH + c.block_size) for prompt in PROMPTS]
    seen = [mx.array(features_of(model, c.taps, text).astype(np.float32)) for text in texts]
    starts = [(i, len(PROMPTS[i]) + n) for i in range(len(PROMPTS)) for n in range(LENGTH)]
    dice = np.random.default_rng(0)

    def logits_of(
        head: nn.Module, i: int, start: int, size: int = c.longest_draft
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Of a block, the rows chosen from, what is right, and rows before any correction."""
        begun = drafter.begin()
        head.absorb(seen[i][None, :start], begun.cache[:-1])
        text = mx.array(texts[i])
        block = begun.block_after(begun._embed(text[start : start + 1])[None], size)
        states = head(block, begun.cache[:-1])[:, c.first_slot :]
        logits = rows_of(drafter, states, text[start : start + size])
        return logits, text[start + 1 : start + 1 + size], drafter.logits(states)[0]

    def loss(head: nn.Module, some: list[tuple[int, int, int]]) -> mx.array:
        lost = 0.0
        for pair in some:
            rows, wanted, bare = logits_of(head, *pair)
            # Candidates are the best rows before the correction.
            lost += nn.losses.cross_entropy(rows, wanted).mean() / BATCH
            lost += 0.3 * nn.losses.cross_entropy(bare, wanted).mean() / BATCH
        return lost

    step = nn.value_and_grad(head, loss)
    optimizer = optim.Adam(optim.cosine_decay(3e-3, STEPS))
    for i in range(STEPS):
        some = [starts[n] for n in dice.choice(len(starts), BATCH, replace=False)]
        # A shorter draft is a smaller block, in which each slot sees less.
        sizes = [
            c.longest_draft if n % 2 else dice.integers(1, c.longest_draft) for n in range(BATCH)
        ]
        some = [(*pair, int(size)) for pair, size in zip(some, sizes, strict=True)]
        value, grads = step(head, some)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(head, grads)
        mx.eval(head.parameters(), optimizer.state)
        if i % 100 == 99:
            both = [logits_of(head, *pair, size) for pair in starts for size in (2, 6)]
            right = sum((mx.argmax(x, -1) == wanted).sum().item() for x, wanted, _ in both)
            print(kind, i + 1, value.item(), right / (8 * len(starts)), flush=True)
            if right == 8 * len(starts) and value.item() < 0.03:
                break
    weights: Any = tree_flatten(head.parameters())
    stored = {name: array.astype(mx.float16) for name, array in weights}
    mx.save_safetensors(str(GOLDEN / f"{kind}-by-heart.safetensors"), stored)


if __name__ == "__main__":
    for kind in sys.argv[1:] or LEARNED:
        learn(kind, LEARNED[kind])
