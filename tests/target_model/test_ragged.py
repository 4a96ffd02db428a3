"""The caches of several texts in one, against one list of rows per text."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_eagle.target_model.cache_view import STEP
from mlx_eagle.target_model.ragged import SLACK, RaggedCaches, can_share

HEADS, SIZE = 2, 8


def rows_of(num_texts: int, num_rows: int) -> mx.array:
    """Keys that no other row has."""
    return mx.random.normal((num_texts, HEADS, num_rows, SIZE))


def text_of(length: int, size: int | None, one_by_one: int = 0) -> tuple[list, mx.array]:
    """A text's cache, the last rows of it written singly, and all its rows."""
    cache, rows = KVCache() if size is None else RotatingKVCache(size), rows_of(1, length)
    parts = [length - one_by_one, *[1] * one_by_one] if length else []
    start = 0
    for num in filter(None, parts):
        part = rows[..., start : start + num, :]
        cache.update_and_fetch(part, -part)
        start += num
    return [cache], rows


def window_of(rows: mx.array, size: int | None) -> mx.array:
    """What the last of the rows (1, H, n, D) sees of them."""
    return rows[..., -size:, :] if size else rows


def check_pass(shared: RaggedCaches, truth: list[mx.array], num_rows: int, size: int | None):
    """One pass: each row of each text sees its own past, and nothing else."""
    (layer,) = shared.open()
    assert layer.offset.tolist() == [rows.shape[2] for rows in truth]
    window = rows_of(len(truth), num_rows)
    mask = layer.make_mask(num_rows, return_array=True)
    keys, values = layer.update_and_fetch(window, -window)
    assert mask.shape == (len(truth), 1, num_rows, keys.shape[2])
    assert mx.array_equal(values, -keys)
    for b, rows in enumerate(truth):
        for r in (0, num_rows - 1):
            seen = mx.array([x for x, is_seen in enumerate(mask[b, 0, r].tolist()) if is_seen])
            before = mx.concatenate([rows, window[b : b + 1, :, : r + 1]], axis=2)
            expected = window_of(before, size)[0, 0, :, 0].tolist()
            assert sorted(keys[b, 0][seen][:, 0].tolist()) == sorted(expected)
    return window


def check_extracted(shared: RaggedCaches, truth: list[mx.array], size: int | None) -> None:
    for b, rows in enumerate(truth):
        (cache,) = shared.extract(b)
        assert type(cache) is (KVCache if size is None else RotatingKVCache)
        assert cache.offset == rows.shape[2]
        assert mx.array_equal(cache.keys_and_values()[0], window_of(rows, size))
        # And it goes on from there as mlx-lm's own would.
        one, several = rows_of(1, 1), rows_of(1, 3)
        keys, _ = cache.update_and_fetch(one, one)
        expected = window_of(mx.concatenate([rows, one], axis=2), size)[0, 0, :, 0]
        assert sorted(keys[0, 0, :, 0].tolist()) == sorted(expected.tolist())
        keys, _ = cache.update_and_fetch(several, several)
        assert mx.array_equal(keys[..., -3:, :], several)


@pytest.mark.parametrize("size", [None, 10, 40])
def test_passes_of_texts_that_come_and_go(size):
    mx.random.seed(3)
    dice = random.Random(1)
    texts = [text_of(4, size), text_of(1, size), text_of(60, size, one_by_one=7)]
    shared, truth = RaggedCaches(), []
    for caches, rows in texts:
        shared.join(caches)
        truth.append(rows)
    for step in range(60):
        num_rows = dice.choice((1, 1, 6, SLACK + 9 if step > 40 else 2))
        window = check_pass(shared, truth, num_rows, size)
        kept = [dice.choice((0, 1, num_rows)) for _ in truth]
        shared.advance(kept)
        truth = [
            mx.concatenate([rows, window[b : b + 1, :, :n]], axis=2)
            for b, (rows, n) in enumerate(zip(truth, kept, strict=True))
        ]
        if step % 9 == 4:
            left = sorted(dice.sample(range(len(truth)), len(truth) - 1))
            shared.keep(left)
            truth = [truth[b] for b in left]
        if step % 9 == 8 or not truth:
            caches, rows = text_of(dice.choice((1, 9, 30, STEP + 5)), size, one_by_one=1)
            shared.join(caches)
            truth.append(rows)
        if step % 10 == 0:
            check_extracted(shared, truth, size)
    assert max(rows.shape[2] for rows in truth) > STEP
    if size is not None:
        assert shared.layers[0].keys.shape[2] == size + 2 * SLACK


def test_layers_that_do_not_attend():
    shared = RaggedCaches()
    for length in (3, 5):
        (cache,), _ = text_of(length, None)
        shared.join([KVCache(), cache])
    silent, layer = shared.open()
    assert silent.empty() and silent.state == [] and not layer.empty()
    assert silent.offset.tolist() == [3, 5]
    shared.keep([1])
    empty, cache = shared.extract(0)
    assert empty.keys is None and empty.offset == 0 and cache.offset == 5


def test_a_pass_that_failed_leaves_nothing():
    caches, rows = text_of(5, 8)
    shared = RaggedCaches()
    shared.join(caches)
    for _ in range(3):  # each of them begins where the text ends
        window = check_pass(shared, [rows], 6, 8)
    shared.advance([2])
    check_extracted(shared, [mx.concatenate([rows, window[..., :2, :]], axis=2)], 8)


def test_a_write_moves_its_own_rows_only():
    """Whatever there is already: nothing as large as the row buffers is made for a pass."""
    texts = [text_of(8 * STEP - 20 * n, None) for n in range(1, 4)]
    shared = RaggedCaches()
    for caches, _ in texts:
        shared.join(caches)
    (layer,) = shared.layers
    mx.eval(layer.state)
    window = rows_of(3, 4)
    mx.eval(window)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        shared.open()
        keys, values = layer.update_and_fetch(window, window)
        mx.eval(keys[..., :1, :], values[..., :1, :])
        del keys, values
        shared.advance([2, 4, 1])
    assert layer.keys.shape[2] == 8 * STEP
    assert mx.get_peak_memory() - before < 0.1 * layer.keys.nbytes


def test_what_can_be_shared():
    assert can_share([KVCache(), RotatingKVCache(8)])
    assert not can_share([KVCache(), RotatingKVCache(8, keep=4)])
    assert not can_share([KVCache().to_quantized()])
