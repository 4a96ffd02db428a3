"""The table of machines: which line holds for which chip, and what is timed first there."""

import mlx.core as mx
import pytest

from mlx_eagle.decoding.costs import on_line
from mlx_eagle.system import machines
from mlx_eagle.system.machines import first_look, fused_rows, machine_of, this_machine

APPLE = [  # what mx.device_info says, rows from which layers up to 2048, 4096 and wider change
    ("Apple M1", "applegpu_g13g", "M1", (14, 10, 6), 1),
    ("Apple M1 Max", "applegpu_g13s", "M1", (14, 10, 7), 1),
    ("Apple M1 Ultra", "applegpu_g13d", "M1", (32, 18, 12), 1),
    ("Apple M2 Pro", "applegpu_g14s", "M2", (14, 10, 6), 1),
    ("Apple M2 Ultra", "applegpu_g14d", "M2", (32, 18, 12), 1),
    ("Apple M3", "applegpu_g15g", "M3", (13, 15, 13), 5),
    ("Apple M3 Ultra", "applegpu_g15d", "M3", (32, 18, 12), 5),
    ("Apple M4 Max", "applegpu_g16s", "M4", (13, 15, 13), 5),
    ("Apple M5", "applegpu_g17g", "M5", (33, 25, 13), 5),
    ("Apple A18 Pro", "applegpu_g17p", "A18", (33, 25, 13), 5),
    ("Apple M6 Max", "applegpu_g18s", "M6", (33, 25, 13), 5),
    ("Apple Paravirtual device", "air64_v27", "unknown", (18, 12, 10), 1),
]


def apple(name, architecture):
    return machine_of({"device_name": name, "architecture": architecture}, "metal")


@pytest.mark.parametrize("name, architecture, generation, limits, rows", APPLE)
def test_apple_chips(name, architecture, generation, limits, rows):
    machine = apple(name, architecture)
    products = machine.products
    assert (machine.generation, products.matrix_from) == (generation, limits)
    widths = [(2048, 2048), (2048, 4096), (4096, 14336)]
    assert tuple(products.limit(*width) for width in widths) == limits
    for rows_in_pass in (1, 2, 5):
        assert products.kernel(rows_in_pass) == ("vector", -(-rows_in_pass // rows))
    assert products.kernel(limits[2]) == ("matrix", 1)
    assert products.kernel(33) == ("matrix", 2)
    assert machine.is_virtual == ("Paravirtual" in name)


@pytest.mark.parametrize(
    "architecture, seven, eight",
    [("sm_80", "vector", "matrix"), ("sm_90", "matrix", "matrix"), ("sm_120", "vector", "matrix")],
)
def test_cuda(architecture, seven, eight):
    info = {"device_name": "NVIDIA A card", "architecture": architecture}
    products = machine_of(info, "cuda").products
    assert (products.kernel(7).kernel, products.kernel(8).kernel) == (seven, eight)
    assert "MLX_CUDA_USE_CUDNN_SDPA=0" in products.advice


@pytest.mark.parametrize("info", [{}, {"architecture": "sm_75"}, {"device_name": "A new thing"}])
@pytest.mark.parametrize("backend", ["metal", "cuda", "cpu"])
def test_unknown_machines_have_a_name_and_an_advice(info, backend):
    machine = machine_of(info, backend)
    assert machine.name and machine.generation and machine.advice
    assert first_look(machine)[0] == 1 and first_look(machine)[-1] == 7


def test_this_machine_is_the_one_of_the_default_device():
    machine = this_machine()
    assert (machine.backend == "cpu") == (mx.default_device() == mx.cpu)
    assert machine.name == str(mx.device_info()["device_name"])


EVERY = [apple(name, architecture) for name, architecture, *_ in APPLE]
EVERY += [machine_of({"architecture": name}, "cuda") for name in ("sm_80", "sm_90", "sm_100")]


@pytest.mark.parametrize("machine", EVERY, ids=lambda m: f"{m.name} {m.generation}")
@pytest.mark.parametrize("num_texts", [1, 2, 3, 4, 8, 16])
def test_on_lines_between_what_is_timed_first_all_prices_lie(machine, num_texts):
    """Whatever a vector read and a matrix tile cost, nothing in between is off the line."""
    known = first_look(machine, num_texts)
    for prices in ({"vector": 1.0, "matrix": 2.75}, {"vector": 1.0, "matrix": 5.5}):
        passes = {k: machine.products.kernel(num_texts * (k + 1)) for k in machines.LENGTHS}
        price = {k: prices[p.kernel] * p.times + 0.125 * k for k, p in passes.items()}
        points = {k: price[k] for k in known}
        assert [on_line(points, k) for k in price] == pytest.approx(list(price.values()))


def test_what_is_timed_first():
    assert first_look(apple("Apple M4", "applegpu_g16g")) == (1, 4, 5, 7)
    assert first_look(apple("Apple M4", "applegpu_g16g"), 4) == (1, 2, 3, 7)
    assert first_look(apple("Apple M1 Max", "applegpu_g13s")) == (1, 5, 6, 7)
    assert first_look(apple("Apple M2 Ultra", "applegpu_g14d")) == (1, 3, 7)
    assert first_look(machine_of({}, "cpu")) == (1, 3, 7)


@pytest.mark.parametrize(
    "head_dim, heads_per_key, rows",
    [(128, 4, 8), (128, 8, 4), (128, 7, 4), (128, 16, 2), (64, 3, 8), (80, 1, 0), (192, 1, 0)],
)
def test_rows_of_fused_attention(head_dim, heads_per_key, rows):
    assert fused_rows(head_dim, heads_per_key) == rows
