"""The table of machines: which line holds for which chip, and what is timed first there."""

import mlx.core as mx
import pytest
from metal_rules import MATRIX_FROM

from mlx_eagle.system.device import (
    machine_of,
    on_curve,
    product_cost,
    this_machine,
    tile_doubt,
)
from mlx_eagle.target_model.attention import fused_rows

APPLE = [  # what mx.device_info says
    ("Apple M1", "applegpu_g13g", "M1"),
    ("Apple M1 Max", "applegpu_g13s", "M1"),
    ("Apple M1 Ultra", "applegpu_g13d", "M1"),
    ("Apple M2 Pro", "applegpu_g14s", "M2"),
    ("Apple M2 Ultra", "applegpu_g14d", "M2"),
    ("Apple M3", "applegpu_g15g", "M3"),
    ("Apple M3 Ultra", "applegpu_g15d", "M3"),
    ("Apple M4 Max", "applegpu_g16s", "M4"),
    ("Apple M5", "applegpu_g17g", "M5"),
    ("Apple A18 Pro", "applegpu_g17p", "A18"),
    ("Apple M6 Max", "applegpu_g18s", "M6"),
    ("Apple Paravirtual device", "air64_v27", "unknown"),
]


def apple(name, architecture):
    return machine_of({"device_name": name, "architecture": architecture}, "metal")


@pytest.mark.parametrize("name, architecture, generation", APPLE)
def test_apple_chips(name, architecture, generation):
    machine = apple(name, architecture)
    products = machine.products
    limit = MATRIX_FROM[architecture[-4:]][-1]
    assert (machine.generation, products.matrix_from) == (generation, limit)
    assert [products.num_tiles(rows) for rows in (limit - 1, limit, 33)] == [0, 1, 2]
    assert ("virtual Mac" in machine.advice) == ("Paravirtual" in name)


@pytest.mark.parametrize(
    "architecture, seven, eight",
    [("sm_80", "vector", "matrix"), ("sm_90", "matrix", "matrix"), ("sm_120", "vector", "matrix")],
)
def test_cuda(architecture, seven, eight):
    info = {"device_name": "NVIDIA A card", "architecture": architecture}
    products = machine_of(info, "cuda").products
    found = ["matrix" if products.num_tiles(rows) else "vector" for rows in (7, 8)]
    assert found == [seven, eight]
    assert "MLX_CUDA_USE_CUDNN_SDPA=0" in products.advice


CURVES = {  # as others have published them, by rows; ml-explore/mlx 3852, 3839, 3863, 3791
    ("Apple M4 Pro", "applegpu_g16s"): [
        {2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84},
        {2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69},
    ],
    ("Apple M3 Max", "applegpu_g15s"): [
        {2: 1.00, 4: 1.28, 6: 2.04, 8: 2.50, 9: 3.14} | dict.fromkeys(range(10, 33), 3.94)
    ],
    ("Apple M5 Max", "applegpu_g17s"): [{3: 1.12, 5: 1.42, 8: 2.2}],
    # Whole rounds, drafts included (mlxcel 1217), of which c(4) was 1.4.
    ("Apple M3 Ultra", "applegpu_g15d"): [{k: 0.83 + 0.17 * k - 0.11 for k in range(2, 9)}],
}  # fmt: skip


@pytest.mark.parametrize("name, architecture", CURVES)
def test_prices_are_the_published_ones(name, architecture):
    machine = apple(name, architecture)
    for curve in CURVES[name, architecture]:
        for rows, cost in curve.items():
            assert product_cost(machine, rows, "4 bits") == pytest.approx(cost, abs=0.09)
    assert product_cost(machine, 1, "4 bits") == 1.0


def test_other_packings_have_other_prices():
    """ml-explore/mlx 3852 and 3764; the wide kernel of floats is on every chip."""
    m4 = apple("Apple M4 Pro", "applegpu_g16s")
    found = [product_cost(m4, rows, "2 bits") for rows in (2, 3, 4, 5, 8)]
    assert found == [1.30, 1.82, 2.34, 2.86, 4.53]
    alone = 1.4 * product_cost(m4, 4, "4 bits")  # four rows one by one
    assert alone / product_cost(m4, 4, "8 bits") == pytest.approx(1.6)
    assert product_cost(m4, 4, "6 bits") == product_cost(m4, 4, "4 bits")
    m1 = apple("Apple M1 Pro", "applegpu_g13s")
    for mode in ("mxfp4", "nvfp4", "mxfp8"):
        assert product_cost(m1, 4, mode) == 2.35 < product_cost(m1, 4, "4 bits")


@pytest.mark.parametrize("architecture", ["applegpu_g13g", "applegpu_g14d"])
def test_weights_in_16_bits_are_dear_on_old_chips_however_few_the_rows(architecture):
    """2.0 to 2.9 from 2 to 8 rows on an M1 Pro: ml-explore/mlx 3967 and 3661."""
    machine = apple("", architecture)
    costs = [product_cost(machine, rows, None) for rows in range(2, 17)]
    assert 2.0 < min(costs) <= max(costs) < 2.4
    assert "slower than plain 4 bits" in machine.advice


def test_matrix_kernels_that_nobody_measured_are_in_doubt():
    nvidia = machine_of({"architecture": "sm_89"}, "cuda")
    assert [product_cost(nvidia, rows, "4 bits") for rows in (2, 4, 7)] == [2, 4, 7]
    assert {product_cost(nvidia, rows, "4 bits") for rows in (8, 16)} == {2.0}
    assert tile_doubt(nvidia, 7, "4 bits") == tile_doubt(nvidia, 8, None) == 0
    assert tile_doubt(nvidia, 8, "4 bits") > 0 == tile_doubt(machine_of({}, "cuda"), 8, "4 bits")
    assert tile_doubt(apple("", "applegpu_g16s"), 13, "4 bits") > 0
    assert tile_doubt(apple("", "applegpu_g15s"), 13, "4 bits") == 0, "measured"


H200 = {  # milliseconds of a product of 4096 to 14336 in bfloat16 by rows, in two runs
    1: (0.0374, 0.0390), 2: (0.0476, 0.0484), 4: (0.0411, 0.0480), 8: (0.0404, 0.0470),
    16: (0.0474, 0.0487), 32: (0.0488, 0.0495),
}  # fmt: skip


@pytest.mark.parametrize("run", [0, 1])
def test_dense_products_cost_what_an_h200_took(run):
    machine = machine_of({"device_name": "NVIDIA H200", "architecture": "sm_90"}, "cuda")
    for rows, times in H200.items():
        wanted = times[run] / H200[1][run]
        assert product_cost(machine, rows, None) == pytest.approx(wanted, abs=0.09)
    assert product_cost(machine_of({}, "metal"), 2, None) == 1.08


def test_what_to_expect_of_chips():
    assert "expect k = 2;" in apple("Apple M4 Pro", "applegpu_g16s").advice
    assert "expect k = 2;" in apple("Apple M4", "applegpu_g16g").advice
    assert "expect 1.6 to 1.9x, with k = 3" in apple("Apple M3 Ultra", "applegpu_g15d").advice
    for name, architecture, rows, least in (
        ("Apple M1 Max", "applegpu_g13s", 7, 6),
        ("Apple M2 Pro", "applegpu_g14s", 6, 5),
    ):
        machine = apple(name, architecture)
        assert f"from {rows} rows on a pass costs {least} to {rows} plain" in machine.advice
        assert least <= product_cost(machine, rows, "4 bits") <= rows
    advice = apple("Apple M1 Ultra", "applegpu_g13d").advice
    assert "lookup" in advice and "--dtype float16" in advice and "checkpoint" not in advice


def test_beyond_the_vector_kernels_rows_cost_by_tiles():
    machine = apple("Apple M4", "applegpu_g16g")
    last = product_cost(machine, 12, "4 bits")
    tile = product_cost(machine, 13, "4 bits")
    assert last < tile == product_cost(machine, 32, "4 bits")
    assert product_cost(machine, 33, "4 bits") == pytest.approx(2 * tile)
    unknown = machine_of({}, "metal")
    assert [product_cost(unknown, rows, "4 bits") for rows in (1, 2, 7)] == [1.0, 2.0, 7.0]
    assert [on_curve({2: 1.5, 4: 2.5}, rows) for rows in (1, 2, 3, 4, 7)] == [1, 1.5, 2, 2.5, 4]


@pytest.mark.parametrize("info", [{}, {"architecture": "sm_75"}, {"device_name": "A new thing"}])
@pytest.mark.parametrize("backend", ["metal", "cuda", "cpu"])
def test_unknown_machines_have_a_name_and_an_advice(info, backend):
    machine = machine_of(info, backend)
    assert machine.name and machine.generation and machine.advice


def test_this_machine_is_the_one_of_the_default_device():
    machine = this_machine()
    assert (machine.backend == "cpu") == (mx.default_device() == mx.cpu)
    assert machine.name == str(mx.device_info()["device_name"])


@pytest.mark.parametrize("packing", [None, "2 bits", "4 bits", "8 bits", "mxfp4"])
def test_what_passes_cost_before_any_was_timed(packing):
    for name, architecture, *_ in APPLE:
        costs = [product_cost(apple(name, architecture), rows, packing) for rows in range(1, 41)]
        assert min(costs) == costs[0] == 1.0 and max(costs) <= 40
    cpu = machine_of({}, "cpu")  # where rows that fill a tile are cheap
    assert product_cost(cpu, 8, None) < product_cost(cpu, 5, None) < product_cost(cpu, 6, None)


@pytest.mark.parametrize(
    "head_dim, heads_per_key, rows",
    [
        (128, 4, 8),
        (128, 8, 4),
        (128, 7, 4),
        (128, 16, 2),
        (64, 3, 8),
        (80, 1, 0),
        (192, 1, 0),
        (512, 8, 1),
        (512, 4, 0),
    ],
)
def test_rows_of_fused_attention(head_dim, heads_per_key, rows):
    assert fused_rows(head_dim, heads_per_key) == rows
