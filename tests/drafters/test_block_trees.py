"""Trees of drafters of blocks: grown as the NumPy twin says, in one forward of the head."""

import numpy as np
import pytest
from block_twin import (
    after,
    learned_head,
    tiny_dflash,
    tiny_dflash2,
    tiny_dspark,
    twin_logits,
)
from drafter_pairs import tiny_qwen3_next
from helpers import PROMPT, plain, speculative, tiny_llama

from mlx_eagle.decoding.accept import Match
from mlx_eagle.drafters.tree import parse_tree

LLAMA = tiny_llama(num_hidden_layers=6)
DRAFTERS = {
    "dflash": tiny_dflash(LLAMA),
    "dflash2": tiny_dflash2(LLAMA),
    "dspark": tiny_dspark(LLAMA),
    "dspark, rnn": tiny_dspark(LLAMA, markov_kind="rnn"),
}


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@pytest.mark.parametrize("text", ["3/2+0+1/1+1", "2x3:7"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_children_are_the_likeliest_after_their_parents(name, text):
    shape, context = parse_tree(text), [*PROMPT, 5]
    drafter = after(DRAFTERS[name], LLAMA, context)
    draft = drafter.propose_tree(shape, Match().pick_children)
    assert drafter.num_forwards == 1
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent], token])
    for row, path in enumerate(paths):
        children = [t for t, parent in zip(tokens, parents, strict=True) if parent == row]
        if children:
            logits = twin_logits(drafter, LLAMA, context, shape.depth, path)[len(path)]
            assert children == np.argsort(-logits, kind="stable")[: len(children)].tolist()
    if text == "2x3:7":  # the best of all candidates: two, and four a level
        best = {}
        beam = [([], 0.0)]
        for _ in range(3):
            found = []
            for path, score in beam:
                logits = twin_logits(drafter, LLAMA, context, 3, path)[len(path)]
                likely = log_softmax(logits)
                found += [([*path, int(t)], score + likely[t]) for t in np.argsort(-logits)[:2]]
            best |= {tuple(path): score for path, score in found}
            beam = sorted(found, key=lambda each: -each[1])[:2]
        wanted = sorted(best, key=lambda path: -best[path])[:7]
        assert {tuple(path) for path in paths[1:]} == set(wanted)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_a_head_that_knows_the_text(kind):
    tokens, stats = speculative(LLAMA, learned_head(LLAMA, kind), PROMPT, 25, tree="2x4:8")
    assert tokens == plain(LLAMA, PROMPT, 25)
    assert stats.tau >= 4.5 and stats.num_head_forwards == stats.num_rounds


REFUSED = {
    "deeper than a block": ("dflash", "1x7:7", "7 levels, but the head drafts blocks of 6"),
    "wider than the candidates": ("dflash2", "6x1:6", "drafts only 5 different tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_trees_that_a_block_cannot_hold_are_refused(case):
    name, tree, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        speculative(LLAMA, DRAFTERS[name], PROMPT, 4, tree=tree)


def test_recurrent_targets_say_why_not():
    target = tiny_qwen3_next()
    with pytest.raises(ValueError, match="recurrent layers, whose state follows one branch"):
        speculative(target, tiny_dflash(target), PROMPT, 4, tree="2x2:4")
