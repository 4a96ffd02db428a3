"""Ranks: numbers of rank 0 that travel with the passes."""

import mlx.core as mx
import pytest

from mlx_eagle.system.ranks import Relay


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_numbers_ride_with_what_the_passes_exchange(monkeypatch, dtype):
    """Known two calls later, for no further exchange, and what carries them stays as it is."""
    exchange, asked = mx.distributed.all_sum, []
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x: asked.append(x.size) or exchange(x))
    relay = Relay(mx.default_stream(mx.default_device()))
    relay.rides = True
    found = []
    for number in range(4):
        found.append(relay.pass_on([number, -4, 255 + number % 2]))
        carrier = mx.random.normal((2, 1, 3)).astype(dtype)
        assert mx.array_equal(relay.ride(carrier), carrier)
    assert found == [[0, -4, 255]] * 3 + [[1, -4, 256]]
    assert asked == [3, 6, 9, 9, 9]
