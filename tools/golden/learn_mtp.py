"""Train MTP layers on one text by heart, for tests/drafters/test_mtp_families.py.

The layer is mlx-vlm's, as in ``make_mtp.py``. It is trained on the greedy text of a tiny target,
on chains of three drafts as in decoding: true slots up to the root, then the layer's own states.
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

NAME = "qwen3.5"
NUM_TOKENS = 48  # of the text
DEPTH = 3  # drafts in a chain
STEPS = 60  # of training


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
        rows = mx.arange(starts.size)
        lost = 0.0
        for depth in range(DEPTH):
            at = starts - 1 + depth
            both = mx.broadcast_to(embeddings, inner.shape), inner
            out = model._forward_hidden(*both, None, places)[rows, at]
            follows = mx.array(text)[starts + 1 + depth]
            lost = lost + nn.losses.cross_entropy(out @ output.T, follows).mean()
            chosen = (places[0] == (at + 1)[:, None])[..., None]
            inner = mx.where(chosen, out[:, None], inner)
        return lost / DEPTH

    step = nn.value_and_grad(model, loss)
    optimizer = optim.Adam(2e-3)
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
