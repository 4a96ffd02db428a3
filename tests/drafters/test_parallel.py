"""P-EAGLE: a draft of one head forward, as speculators computes it and as a naive twin does."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from golden import frozen
from golden.frozen import Frozen, relative
from heads import TOLERANCE, Runner

from mlx_eagle.drafters.parallel import ParallelDrafter

NAMES = [name for name in frozen.CHANGES if name.startswith("peagle")]


def drafter_of(golden: Frozen) -> ParallelDrafter:
    runner = Runner(golden)
    to_target = mx.array(golden.d2t) + mx.arange(len(golden.d2t))
    return ParallelDrafter(runner.head, lambda tokens: runner.embed[tokens], (2, 6, 9), to_target)


class Seen:
    """A greedy pick that remembers the logits it chose from."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def __call__(self, logits: mx.array, to_target: mx.array | None) -> mx.array:
        self.rows.append(np.array(logits[0]))
        return mx.argmax(logits, axis=-1)


def absorb(drafter: ParallelDrafter, golden: Frozen, start: int, end: int, extra: int) -> None:
    """Slots start .. end - 1 as a round does: with rows after them that do not count."""
    rows = slice(start, end + extra)
    drafter.extend(
        mx.array(golden.tokens[rows]), mx.array(golden.features[rows]), mx.array(end - start - 1)
    )


def cut(drafter: ParallelDrafter, end: int) -> None:
    """As the loop does once it knows how many rows count."""
    for cache in drafter.cache[:-1]:
        cache.trim(cache.offset - end)


@pytest.mark.parametrize("name", NAMES)
def test_every_draft_equals_speculators(name):
    golden = frozen.load(name)
    depths, num_slots, _ = golden.logits.shape
    drafter = drafter_of(golden)
    for end in range(1, num_slots + 1):
        size = min(depths, num_slots + 1 - end)
        wanted = golden.logits[:size, end - 1]
        alone = drafter.begin()
        alone.extend(mx.array(golden.tokens[:end]), mx.array(golden.features[:end]))
        together = drafter.begin()
        absorb(together, golden, 0, end, extra=2)
        cut(together, end)
        grown = drafter.begin()
        grown._size = 1
        absorb(grown, golden, 0, end, extra=1)
        cut(grown, end)
        for begun, num_forwards in ((alone, 2), (together, 1), (grown, 2)):
            seen = Seen()
            draft = begun.propose(size, seen)
            assert relative(np.stack(seen.rows), wanted) < TOLERANCE
            ids = wanted.argmax(axis=-1)
            assert draft.tokens.tolist() == (golden.d2t[ids] + ids).tolist()
            assert begun.num_forwards == num_forwards - (size == 1 and num_forwards == 2)
            assert begun.cache[0].offset == end


@pytest.mark.parametrize("name", NAMES)
def test_rounds_equal_speculators(name):
    """Round after round on one cache, keeping one to three pairs."""
    golden = frozen.load(name)
    depths, num_slots, _ = golden.logits.shape
    drafter, start = drafter_of(golden).begin(), 0
    for kept in (2, 1, 3, 1, 1):
        end = start + kept
        absorb(drafter, golden, start, end, extra=2)
        size = min(depths, num_slots + 1 - end)
        cut(drafter, end)
        seen = Seen()
        drafter.propose(size, seen)
        assert relative(np.stack(seen.rows), golden.logits[:size, end - 1]) < TOLERANCE
        start = end
    assert drafter.num_forwards == 5


@pytest.mark.parametrize(
    "change", [{"mask_token_id": 5}, {"norm_before_residual": True}, frozen.rope(5e5)]
)
def test_a_wrong_setting_shows(change):
    golden = frozen.load("peagle-llama")
    wrong = drafter_of(replace(golden, config=replace(golden.config, **change)))
    wrong.extend(mx.array(golden.tokens[:5]), mx.array(golden.features[:5]))
    seen = Seen()
    wrong.propose(4, seen)
    assert relative(np.stack(seen.rows), golden.logits[:4, 4]) > 100 * TOLERANCE
