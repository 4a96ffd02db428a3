"""The table of machines: which line holds for which chip, and what is timed first there."""

import mlx.core as mx
import pytest

from mlx_eagle.system.machines import fused_rows, machine_of, pass_cost, this_machine

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


def test_this_machine_is_the_one_of_the_default_device():
    machine = this_machine()
    assert (machine.backend == "cpu") == (mx.default_device() == mx.cpu)
    assert machine.name == str(mx.device_info()["device_name"])


@pytest.mark.parametrize("kind", ["packed", "experts", "dense"])
def test_what_passes_cost_before_any_was_timed(kind):
    """In passes of one row; measured figures stand where they were measured."""
    for name, architecture, *_ in APPLE:
        machine = apple(name, architecture)
        assert pass_cost(machine, 1, kind) == 1.0
        costs = [pass_cost(machine, rows, kind) for rows in range(1, 41)]
        assert min(costs) == 1.0 and max(costs) <= 40
    pro, ultra = apple("Apple M4 Pro", "applegpu_g16s"), apple("Apple M3 Ultra", "applegpu_g15d")
    if kind == "packed":
        assert pass_cost(pro, 3, kind) == 1.18 and pass_cost(pro, 7, kind) == pytest.approx(2.42)
        assert pass_cost(ultra, 4, kind) == 1.0
        assert pass_cost(pro, 13, kind) == pass_cost(pro, 32, kind) < pass_cost(pro, 33, kind)
        assert pass_cost(apple("Apple M1", "applegpu_g13g"), 4, kind) == 4.0
    if kind == "dense":  # rows that fill a tile are cheap
        cpu = machine_of({}, "cpu")
        assert pass_cost(cpu, 8, kind) < pass_cost(cpu, 5, kind) < pass_cost(cpu, 6, kind)


@pytest.mark.parametrize(
    "head_dim, heads_per_key, rows",
    [(128, 4, 8), (128, 8, 4), (128, 7, 4), (128, 16, 2), (64, 3, 8), (80, 1, 0), (192, 1, 0)],
)
def test_rows_of_fused_attention(head_dim, heads_per_key, rows):
    assert fused_rows(head_dim, heads_per_key) == rows
