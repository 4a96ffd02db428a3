"""Losses of drafters of blocks by plain loops, a block and a row at a time.

Written from the papers and trainers (DFlash, speculators' DFlash2, DeepSpec's DSpark). Nothing is
shared with the product but its configs and the names of its weights.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

DECAYS = ((8, 4.0), (10, 5.0), (16, 7.0))


def rms(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x / mx.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def turned(x: mx.array, position: int, theta: float) -> mx.array:
    half = x.shape[-1] // 2
    angles = mx.array([position * theta ** (-i / half) for i in range(half)])
    first, second = x[..., :half], x[..., half:]
    cos, sin = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class NaiveBlocks:
    """The head's weights by name, and what it makes of a text."""

    def __init__(self, head: Any, output: Callable[[mx.array], mx.array]):
        self.c = head.config
        self.w = dict(tree_flatten(head.parameters()))
        own = self.w.get("lm_head.weight")
        self.output = output if own is None else lambda x: x @ own.T

    def normed(self, x: mx.array, name: str) -> mx.array:
        return rms(x, self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def states(self, features: mx.array, x: mx.array) -> mx.array:
        """States (S, h) of the block's rows x (S, h) behind features (P, F)."""
        context = self.normed(features @ self.w["fc.weight"].T, "hidden_norm")
        for i in range(self.c.num_layers):
            name = f"layers.{i}."

            def attend(u: mx.array, i: int = i) -> mx.array:
                return self.attention(i, u, context)

            def mlp(u: mx.array, name: str = name) -> mx.array:
                parts = (self.w[f"{name}mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
                gate, up, down = parts
                opened = u @ gate.T
                return (opened * mx.sigmoid(opened) * (u @ up.T)) @ down.T

            u = self.normed(x, f"{name}input_layernorm")
            x = x + self.around(f"{name}attention_conv", u, attend)
            u = self.normed(x, f"{name}post_attention_layernorm")
            x = x + self.around(f"{name}mlp_conv", u, mlp)
        return self.normed(x, "norm")

    def around(self, name: str, u: mx.array, inner: Callable[[mx.array], mx.array]) -> mx.array:
        """The sublayer, between two convolutions where the layer has them."""
        if f"{name}.base_kernel" not in self.w:
            return inner(u)
        return self.convolved(name, 1, inner(self.convolved(name, 0, u, u)), u)

    def convolved(self, name: str, which: int, rows: mx.array, fed: mx.array) -> mx.array:
        c = self.c
        groups = mx.array([channel // c.group_size for channel in range(c.hidden_size)])
        out = []
        for p in range(len(rows)):
            own = self.w[f"{name}.kernel_projection.weight"] @ fed[p]
            own = own.reshape(2, c.kernel_size, -1)[which]
            total = mx.zeros((c.hidden_size,))
            for back in range(min(c.kernel_size, p + 1)):
                kernel = self.w[f"{name}.base_kernel"][which, back] + own[back][groups]
                total = total + kernel * rows[p - back]
            out.append(total)
        return mx.stack(out)

    def attention(self, i: int, x: mx.array, context: mx.array) -> mx.array:
        c = self.c
        name = f"layers.{i}.self_attn."

        def heads(rows: mx.array, part: str, number: int) -> mx.array:
            found = rows @ self.w[f"{name}{part}_proj.weight"].T
            return found.reshape(len(rows), number, c.head_dim)

        def placed(rows: mx.array, part: str, start: int) -> list[mx.array]:
            rows = self.normed(rows, f"{name}{part}_norm")
            return [turned(row, start + n, c.rope_theta) for n, row in enumerate(rows)]

        anchor = len(context)
        queries = placed(heads(x, "q", c.num_heads), "q", anchor)
        keys = placed(heads(context, "k", c.num_kv_heads), "k", 0)
        keys += placed(heads(x, "k", c.num_kv_heads), "k", anchor)
        values = [*heads(context, "v", c.num_kv_heads), *heads(x, "v", c.num_kv_heads)]
        group = mx.arange(c.num_heads) // (c.num_heads // c.num_kv_heads)
        out = []
        for r, query in enumerate(queries):
            seen = [k for k in range(len(keys)) if self.sees(i, anchor + r, k, anchor)]
            own_keys = mx.stack([keys[k] for k in seen])[:, group]
            scores = (own_keys * query).sum(axis=-1) * c.head_dim**-0.5
            shares = mx.softmax(scores, axis=0)[..., None]
            out.append((shares * mx.stack([values[k] for k in seen])[:, group]).sum(axis=0))
        return mx.stack(out).reshape(len(x), -1) @ self.w[f"{name}o_proj.weight"].T

    def sees(self, layer: int, query: int, key: int, anchor: int) -> bool:
        c = self.c
        if layer in c.causal_layers and key > query:
            return False
        window = c.windows[layer] if c.windows else 0
        if not window or (c.window_from == "anchor" and key >= anchor):
            return True
        return key >= (anchor - window if c.window_from == "anchor" else query - window + 1)

    def markov(self, states: mx.array, before: list[int]) -> list[mx.array]:
        """What the Markov head adds to the logits of each slot."""
        w = self.w
        carried = mx.zeros((self.c.markov_rank,))
        added = []
        for h, token in zip(states, before, strict=True):
            own = w["markov_head.markov_w1.weight"][token]
            if self.c.markov_kind == "gated":
                gate = w["markov_head.gate_proj.weight"] @ mx.concatenate([h, own])
                own = mx.sigmoid(gate + w["markov_head.gate_proj.bias"]) * own
            if self.c.markov_kind == "rnn":
                joint = w["markov_head.joint_proj.weight"] @ mx.concatenate([carried, own, h])
                g, new, out = mx.split(joint + w["markov_head.joint_proj.bias"], 3)
                carried = mx.sigmoid(g) * carried + (1 - mx.sigmoid(g)) * mx.tanh(new)
                own = mx.tanh(out)
            added.append(w["markov_head.markov_w2.weight"] @ own)
        return added

    def chosen(self, logits: mx.array, state: mx.array, before: int, label: int) -> mx.array:
        """Cross-entropy of the label among the best ``top_k`` tokens, which it is one of."""
        name = "candidate_selector."
        best = np.argsort(-np.array(logits), kind="stable")[: self.c.top_k].tolist()
        if label not in best:
            best[-1] = label
        left = self.w[f"{name}predecessor_codebook"][before]
        left = left * (self.w[f"{name}hidden_projection.weight"] @ state)
        right = self.w[f"{name}successor_codebook"]
        rows = mx.array(best)
        scores = logits[rows] + (left * right[rows]).sum(axis=-1)
        return mx.logsumexp(scores) - scores[best.index(label)]

    def estimate(self, state: mx.array, before: int) -> mx.array | None:
        if self.c.confidence == "none":
            return None
        rows = [state]
        if self.c.confidence == "markov":
            rows.append(self.w["markov_head.markov_w1.weight"][before])
        weight = self.w["confidence_head.proj.weight"][0]
        u = (mx.concatenate(rows) * weight).sum() + self.w["confidence_head.proj.bias"][0]
        return mx.sigmoid(u)


def position_weights(settings: Any, block: int, entropies: list[float]) -> list[float]:
    if settings.position_weights == "decay":
        gamma = settings.gamma or next(g for most, g in DECAYS if block <= most)
        return [float(np.exp(-k / gamma)) for k in range(len(entropies))]
    reached = np.cumprod([0.5 * np.exp(-x) + 0.5 for x in entropies])
    return [float(reached[k:].sum()) for k in range(len(entropies))]


def naive_block_loss(
    kind: str,
    head: Any,
    settings: Any,
    texts: list[tuple[list[int], int, list[int]]],
    target: tuple[Callable, Callable, Callable, Callable],
    ids: list[int],
) -> mx.array:
    """The loss of texts, each given as (tokens, tokens of its prompt, anchors).

    ``target``: its embedding, its features (n, F) and final states (n, h) of a text, its output.
    ``ids`` are the tokens that can be drafted.
    """
    embed, features_of, states_of, output = target
    net = NaiveBlocks(head, output)
    c = head.config
    sums, total, num, num_texts = [], 0.0, 0, len(texts)
    for text, num_prompt, anchors in texts:
        features = mx.stop_gradient(features_of(text))
        said = mx.stop_gradient(output(states_of(text)))[:, mx.array(ids)]
        for a in anchors:
            block = [text[a], *[c.mask_token_id] * (c.block_size - 1)]
            states = net.states(features[:a], embed(mx.array(block)))[c.first_slot :]
            before = text[a : a + len(states)]
            rows = []
            added = net.markov(states[: len(before)], before) if kind == "dspark" else None
            for k, token in enumerate(before):
                place = a + 1 + k
                if place >= len(text) or place < max(num_prompt, 1):
                    break
                label = mx.argmax(said[place - 1]).item()
                if settings.labels == "text":
                    if text[place] not in ids:
                        break
                    label = ids.index(text[place])
                z = net.output(states[k])
                z = (z if added is None else z + added[k])[: len(ids)]
                log_q = z - mx.logsumexp(z)
                p = mx.softmax(said[place - 1])
                loss = -log_q[label]
                seconds = 0.0
                if kind == "dflash2":
                    seconds = net.chosen(z, states[k], token, label)
                if kind == "dspark":
                    kept = mx.minimum(p, mx.exp(log_q)).sum()
                    loss = 0.1 * loss + 0.9 * 2 * (1 - kept)
                    if settings.loss == "kl":
                        loss = (p * (mx.log(p) - log_q)).sum()
                    sure = net.estimate(states[k], token)
                    if sure is not None:
                        is_kept = kept.item()
                        seconds = -is_kept * mx.log(sure) - (1 - is_kept) * mx.log(1 - sure)
                rows.append((loss, mx.array(seconds)))
            for which, losses in enumerate(zip(*rows, strict=True)):
                values = [loss.item() for loss in losses]
                weights = position_weights(settings, c.block_size, values)
                sums += [weight * loss for weight, loss in zip(weights, losses, strict=True)]
                total += 0 if which else sum(weights)
            num += len(rows)
    divisor = {"weights": total, "rows": num, "texts": num_texts}[settings.loss_divisor]
    return mx.stack(sums).sum() / divisor
