"""MTP layers that know one text by heart, for tests/drafters/test_mtp_families.py.

As ``make_mtp.py``, with mlx-vlm, whose layer is trained on the greedy text of a tiny target, over
chains of three drafts as they are drafted: true slots up to the root, then the layer's own states.
The tensors are kept in float16 under the names of the makers' files.

    PYTHONPATH=tests/support:. python tools/golden/learn_mtp.py
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from helpers import PROMPT, plain
from make_mtp import GOLDEN, make_qwen
from mlx.utils import tree_flatten
from mtp_checkpoints import FAMILIES

NAME, NUM_TOKENS, DEPTH, STEPS = "qwen3.5", 48, 3, 60


def main() -> None:
    part = FAMILIES[NAME]()
    model = make_qwen(NAME)
    text = PROMPT + plain(part.target, PROMPT, NUM_TOKENS)
    table, output = (mx.array(each) for each in part.tables())
    states = mx.array(part.states(text))[:-1]
    embeddings = table[mx.array(text[1:])]
    starts = mx.arange(len(PROMPT), len(text) - DEPTH)  # roots: slots before them are true
    places = mx.arange(states.shape[0])[None]

    def loss(_: nn.Module) -> mx.array:
        inner = mx.broadcast_to(states, (starts.size, *states.shape))
        rows, lost = mx.arange(starts.size), 0.0
        for depth in range(DEPTH):
            at = starts - 1 + depth
            both = mx.broadcast_to(embeddings, inner.shape), inner
            out = model._forward_hidden(*both, None, places)[rows, at]
            follows = mx.array(text)[starts + 1 + depth]
            lost = lost + nn.losses.cross_entropy(out @ output.T, follows).mean()
            chosen = (places[0] == (at + 1)[:, None])[..., None]
            inner = mx.where(chosen, out[:, None], inner)
        return lost / DEPTH

    step, optimizer = nn.value_and_grad(model, loss), optim.Adam(2e-3)
    for i in range(STEPS):
        value, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if i % 10 == 0:
            print(i, value.item(), flush=True)
    weights: Any = tree_flatten(model.parameters())
    stored = {f"mtp.{n}": (w - 1 if w.ndim == 1 else w).astype(mx.float16) for n, w in weights}
    mx.save_safetensors(str(GOLDEN.with_name("mtp-by-heart.safetensors")), stored)


if __name__ == "__main__":
    main()
