"""The device: what commands set or say before they begin, and a table of the costs of passes.

The gain of drafting depends on one thing: how much more a pass of k + 1 rows over the target
costs than a pass of one row. For packed weights MLX decides by the chip and the number of rows
which kernel multiplies: a vector kernel that reads the weights once for one row or a few, or a
matrix kernel with a price of its own, the same for all rows of a tile.

Sources: ``get_qmv_batch_limit``, ``use_qmv_wide`` and ``qmv_wide`` in MLX's
``mlx/backend/metal/quantized.cpp``, checked against the code of ``libmlx.dylib`` 0.32.4 (which has
7 where the repository of August 2026 has 6); ``QuantizedMatmul::eval_gpu`` in
``mlx/backend/cuda/quantized/quantized.cpp``, and ``qmm/qmm_sm80.cu`` and ``qmm_sm90.cu`` there for
tiles.
"""

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, get_total_parameters

from .blas import openblas, slow_because

LENGTHS = range(1, 8)
EMULATES_BFLOAT16 = ("M1", "M2")  # mlx-lm 990
APPLE_NAMES = {13: "M1", 14: "M2", 15: "M3", 16: "M4", 17: "M5"}


BY_ROW = {2: 2.0}
"""c(R), what a pass over 4-bit weights takes by its rows R, in passes of one row: each as much as
the first. Between rows that are given a line; beyond them the line from one row to the last."""
BLAS_CURVE = {2: 1.10, 3: 1.16, 4: 1.15, 5: 1.32, 6: 1.48, 7: 1.37, 8: 1.18, 12: 1.60, 16: 1.56}
"""A whole pass in float32 on an EPYC with OpenBLAS 0.3.34: rows that fill a tile are cheap."""
DENSE_CURVE = {2: 1.08, 8: 1.56}  # a guess, for weights that are read once for all rows
OLD_DENSE = {2: 2.2, 16: 2.3}
"""M1 and M2, where 2 rows or more take a padded product: 2.0 to 2.9 (mlx 3967, M1 Pro; 3661)."""
HOPPER_DENSE = {2: 1.25, 4: 1.17, 8: 1.14, 16: 1.26, 32: 1.29}
"""Products of 4096 to 14336 in bfloat16, MLX 0.32.4 on an H200, 2026-11-27 (mean of two runs)."""


FOUR_BITS = "4 bits"
"""The packing of most targets; others are "2 bits" and so on, or an MLX mode such as "mxfp4"."""
FLOATS = ("mxfp4", "nvfp4", "mxfp8")  # have the wide kernel on every Apple chip
TWO_BITS = {2: 1.30, 3: 1.82, 4: 2.34, 5: 2.86, 8: 4.53}  # mlx 3852, an M4 Pro
EIGHT_BITS = 1.4 / 1.6
"""Cost of 8 bits in that of 4: of 4 rows, times faster than one by one in 4 and 8 (mlx 3764)."""
TILE_DOUBT = 0.4
"""Standard deviation of the logarithm of a matrix kernel's price that nobody has measured."""


def wide_curves(four_bits: Mapping[int, float]) -> dict[str, Mapping[int, float]]:
    """Curves by packing of a chip on which MLX's wide kernel takes ``four_bits``."""
    eight_bits = {rows: max(1.0, EIGHT_BITS * cost) for rows, cost in four_bits.items()}
    return {FOUR_BITS: four_bits, "2 bits": TWO_BITS, "8 bits": eight_bits}


@dataclass(frozen=True)
class Products:
    """Products with packed weights on one kind of chip: their kernels, and what follows.

    ``matrix_from`` are the rows from which on a product is the matrix kernel's, in layers of more
    than 4096 inputs or outputs; in smaller ones no fewer. ``curves`` are c(R) by packing, that of
    4 bits for what has none, up to the matrix kernel's first rows, and ``source`` says who
    measured it; ``dense`` and ``dense_source`` are those of weights that are not packed.
    ``tile_doubt`` is as in ``TILE_DOUBT``, 0 where the matrix kernel was measured.
    """

    matrix_from: int
    rows_per_tile: int
    advice: str
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=lambda: {FOUR_BITS: BY_ROW})
    source: str = "by MLX's sources"
    dense: Mapping[int, float] = field(default_factory=lambda: DENSE_CURVE)
    dense_source: str = ""  # a guess
    tile_doubt: float = TILE_DOUBT

    def num_tiles(self, num_rows: int) -> int:
        """Tiles of a pass in the matrix kernel; 0 where the vector kernel has it."""
        return -(-num_rows // self.rows_per_tile) if num_rows >= self.matrix_from else 0


NO_STEP = "each row of a pass costs a little more than the one before"
ROW_BY_ROW = (
    "4-bit weights are read once for every row, so chains of an EAGLE head seldom pay: measure; "
    "decode 4 bits plainly or with lookup, and try --dtype float16 for activations, which rounds "
    "plain text otherwise too. Targets in 16 bits gain most with k = 7 and trees, and by others' "
    "figures stay slower than plain 4 bits"
)
M5 = Products(  # or newer
    13, 32,
    f"{NO_STEP}: expect k = 2 to 4; from 13 rows on the matrix units multiply, so trees of 12 to "
    "31 nodes cost alike",
    wide_curves({3: 1.12, 5: 1.42, 8: 2.2}), "measured on an M5 Max, a 70B: ml-explore/mlx 3791",
)  # fmt: skip
M4 = Products(
    13, 32,
    f"{NO_STEP}: expect k = 2; from 13 rows on a pass costs what 32 rows cost, which trees seldom "
    "earn",
    # Means of products of 5120 to 17408 (2 to 5 and 8 rows) and 4096 to 24576 (2 to 4, 6, 8).
    wide_curves({2: 1.01, 3: 1.18, 4: 1.45, 5: 1.75, 6: 2.07, 8: 2.77}),
    "measured on an M4 Pro: ml-explore/mlx 3852 and 3839",
)  # fmt: skip
M3 = replace(  # many products at once; those of 3553, on the same chip, waited .18 ms each
    M4, advice=f"{NO_STEP}: expect k = 2 to 3; from 10 rows on a pass costs what 32 rows cost",
    curves=wide_curves({2: 1.0, 4: 1.28, 6: 2.04, 8: 2.5, 9: 3.14, 10: 3.94, 32: 3.94}),
    source="measured on an M3 Max: ml-explore/mlx 3863", tile_doubt=0.0,
)  # fmt: skip
NEW_ULTRA = replace(  # M3 or newer
    M4, matrix_from=12, advice=f"{NO_STEP}: expect 1.6 to 1.9x, with k = 3",
    # Whole rounds of K rows took .83 + .170 K; with .11 less for the draft, c(4) is 1.4. One
    # product in a chain (ml-explore/mlx 4265) took 4 rows at the price of one.
    curves=wide_curves({2: 1.06, 4: 1.4, 8: 2.08}),
    source="by whole rounds on an M3 Ultra: mlxcel 1217",
)  # fmt: skip
M1 = Products(  # and M2
    6, 32,
    f"{ROW_BY_ROW}. Expect auto to turn drafting off in 4 bits; from 6 rows on a pass costs 5 to "
    "6 plain steps, whatever it holds up to 32 rows",
    {FOUR_BITS: BY_ROW} | {mode: {4: 2.35} for mode in FLOATS},  # read in MLX's sources
    dense=OLD_DENSE, dense_source="measured on an M1 Pro: ml-explore/mlx 3967",
)  # fmt: skip
M1_MAX = replace(  # and M1 Pro
    M1, matrix_from=7,
    advice=M1.advice.replace("6 rows on a pass costs 5 to 6", "7 rows on a pass costs 6 to 7"),
)  # fmt: skip
OLD_ULTRA = replace(  # M1 or M2
    M1, matrix_from=12,
    advice=f"{ROW_BY_ROW}. Expect auto to turn drafting off in 4 bits",
)  # fmt: skip
OLDER = replace(OLD_ULTRA, matrix_from=10)  # than M1, or virtual
CUDA = Products(
    8, 16,
    "up to 7 rows the vector kernel multiplies row by row, from 8 on tensor cores do: measure k "
    "= 7 and trees as well. cuDNN's attention has to stay off (MLX_CUDA_USE_CUDNN_SDPA=0)",
    # MLX changes kernels at 8 rows whatever they take; what a tile takes there is a guess.
    {FOUR_BITS: {7: 7.0, 8: 2.0, 16: 2.0}},
)  # fmt: skip
HOPPER = replace(
    CUDA, matrix_from=2, curves={FOUR_BITS: {2: 1.2}}, source="a guess",
    dense=HOPPER_DENSE, dense_source="measured on an H200",
    tile_doubt=0.0,  # no draft has another kernel to be compared with
    advice="from 2 rows on tensor cores multiply, and up to 16 rows cost alike: long drafts and "
    "trees pay. cuDNN's attention has to stay off (MLX_CUDA_USE_CUDNN_SDPA=0)",
)  # fmt: skip

APPLE = (
    # first and last generation of the GPU's architecture, its size ("" is any), what holds
    (15, 99, "d", NEW_ULTRA),
    (17, 99, "", M5),
    (16, 16, "", M4),
    (15, 15, "", M3),
    (13, 14, "d", OLD_ULTRA),
    (13, 13, "s", M1_MAX),
    (13, 14, "", M1),
    (0, 12, "", OLDER),
)
"""The first line that fits counts. Sizes: g base, s Pro and Max, d Ultra, p phone."""

CPU_ADVICE = (
    "MLX's CPU build multiplies packed weights row by row, so only dense float32 targets can "
    "gain, and on Linux only with OpenBLAS: expect k = 1 to 3"
)


@dataclass(frozen=True)
class Machine:
    """A machine to compute on. ``backend``: "metal", "cuda" or "cpu".

    ``products`` is None where the table does not know what several rows cost.
    """

    name: str
    backend: str
    generation: str
    products: Products | None = None

    @property
    def prefers_floats(self) -> bool:
        """Whether MLX multiplies packed weights more slowly here than the same in floats."""
        return self.backend == "cpu"

    @property
    def advice(self) -> str:
        """The expected gain of drafting here, in one sentence without its full stop."""
        if "Paravirtual" in self.name:
            return "this is a virtual Mac: times measured here say nothing about a real one"
        if self.products is not None:
            return self.products.advice
        return CPU_ADVICE if self.backend == "cpu" else "nothing is known here: auto measures"


def this_machine() -> Machine:
    """The machine of MLX's default device, by what ``mx.device_info`` says of it."""
    device = mx.default_device()
    backend = "cpu"
    if device.type == mx.gpu:
        backend = "metal" if mx.metal.is_available() else "cuda"
    return machine_of(mx.device_info(device), backend)


def machine_of(info: Mapping[str, Any], backend: str) -> Machine:
    """The machine that an answer of ``mx.device_info`` describes.

    {"device_name": "Apple M4 Pro", "architecture": "applegpu_g16s"}, "metal" -> M4;
    {"device_name": "Apple Paravirtual device", "architecture": "air64_v27"} -> no generation
    """
    architecture = str(info.get("architecture", ""))
    name = str(info.get("device_name") or architecture or "unknown")
    generation = architecture or "unknown"
    products = None
    if backend == "metal":
        generation, products = _apple(name, architecture)
    elif backend == "cuda":
        major = re.fullmatch(r"sm_(\d+)\d", architecture)
        if major is not None and int(major[1]) >= 8:
            products = HOPPER if major[1] == "9" else CUDA
    return Machine(name, backend, generation, products)


def _apple(name: str, architecture: str) -> tuple[str, Products | None]:
    """The generation of a chip, and the costs of products on it."""
    # The two digits before the last letter, read as MLX reads them; what is no digit is 0:
    # "applegpu_g16s" -> 16; "air64_v27" -> 2
    digits = architecture[-3:-1] if len(architecture) >= 3 else ""
    tens, ones = (int(d) if d in "0123456789" else 0 for d in digits.rjust(2, "0"))
    number = 10 * tens + ones
    size = architecture[-1:]
    found = re.search(r"\bApple ([MA]\d+)", name)
    generation = found[1] if found else APPLE_NAMES.get(number, "unknown")
    for first, last, wanted, products in APPLE:
        if architecture and first <= number <= last and wanted in ("", size):
            return generation, products
    return generation, None


def product_cost(machine: Machine, num_rows: int, packing: str | None) -> float:
    """Time of products of ``num_rows`` rows, in products of one row, if the table knows.

    ``packing`` is as in ``FOUR_BITS``; None of weights that are not packed.
    """
    products = machine.products
    if packing is None:
        dense = DENSE_CURVE if products is None else products.dense
        return on_curve(BLAS_CURVE if machine.backend == "cpu" else dense, num_rows)
    if products is None:
        return on_curve(BY_ROW, num_rows)
    curve = products.curves.get(packing, products.curves[FOUR_BITS])
    if num_tiles := products.num_tiles(num_rows):
        return on_curve(curve, products.matrix_from) * num_tiles  # no dearer than the vector's
    return on_curve(curve, num_rows)


def tile_doubt(machine: Machine, num_rows: int, packing: str | None) -> float:
    """Doubt in ``product_cost`` that times of the vector kernel leave: see ``TILE_DOUBT``."""
    products = machine.products
    if products is None or packing is None or not products.num_tiles(num_rows):
        return 0.0
    return products.tile_doubt


def on_curve(curve: Mapping[int, float], num_rows: int) -> float:
    """The value of a curve at ``num_rows``, interpolated as ``BY_ROW`` says."""
    points = {1: 1.0, **curve}
    last = max(points)
    if num_rows > last:
        return 1 + (points[last] - 1) * (num_rows - 1) / (last - 1)
    low = max(at for at in points if at <= num_rows)
    high = min(at for at in points if at >= num_rows)
    share = (num_rows - low) / (high - low) if high > low else 0.0
    return points[low] + share * (points[high] - points[low])


CUDNN = "MLX_CUDA_USE_CUDNN_SDPA"
CUDNN_OFF = (
    f"Note: {CUDNN}=0 is set for this command: cuDNN's attention would make a new plan, about 20 "
    "ms, at every length of the text, so in every round."
)


def blas_name() -> str:
    """The library behind products of floats on a CPU."""
    if sys.platform == "darwin":
        return "Accelerate"
    found = openblas()
    if found is None:
        return "reference BLAS"
    found.openblas_get_config.restype = ctypes.c_char_p
    config = re.search(r"OpenBLAS (\d+\.\d+\.\d+)", found.openblas_get_config().decode())
    version = f" {config[1]}" if config else ""
    return f"OpenBLAS{version} with {found.openblas_get_num_threads()} threads"


def blas_note() -> str | None:
    """One line if this build cannot gain from drafting, with the remedy; None where it can.

    A reference BLAS is only the CPU build's for Linux.
    """
    on_cpu = mx.default_device() == mx.cpu
    if sys.platform != "linux" or not on_cpu or openblas() is not None:
        return None
    return (
        "Note: drafting cannot be faster here, because MLX's CPU build for Linux comes with a "
        "reference BLAS, with which k + 1 rows take k + 1 times as long as one: "
        f"{slow_because()}."
    )


def load_note(load: float | None = None) -> str:
    """One sentence if processes wait for this machine's cores; "" if they do not.

    ``load`` is the mean number of running processes in the last minute, by default that of now.
    """
    load = os.getloadavg()[0] if load is None else load
    cores = os.cpu_count() or 1
    if load <= cores:
        return ""
    return (
        f"Note: the load of this machine is {load:.1f} on {cores} cores, so other work slows down "
        "what is timed here: run it again when the machine is quiet."
    )


WIDTH = "MLX_BFS_MAX_WIDTH"
"""Arrays that may wait, in MLX's order of a graph, before it goes depth first: 20 by default."""

BREADTH_FIRST = "1000"  # more than wait in a pass of 16 rows, which need about 100


def prepare_device(is_exact: bool = False) -> None:
    """Set up the device for drafting; commands call this before MLX computes anything.

    On CUDA the environment is changed, unless the user has set cuDNN there. Standard error says
    what was changed, or that drafting cannot gain here. ``is_exact``: rows of a pass are plain
    steps, which MLX is to compute side by side, so that each weight matrix is read once for all.
    """
    if note := blas_note():
        print(note, file=sys.stderr)
    if is_exact:
        os.environ.setdefault(WIDTH, BREADTH_FIRST)
    if this_machine().backend == "cuda" and CUDNN not in os.environ:
        os.environ[CUDNN] = "0"
        print(CUDNN_OFF, file=sys.stderr)


DTYPES = ("float32", "float16", "bfloat16")
SHARE_OF_RAM = 0.75  # for weights and caches, where the system gives no limit
FLOAT32 = (
    "Note: on a CPU {whose} weights are loaded as float32, {after} in place of {before}, as MLX "
    "is many times slower there with others."
)
TARGET = "the target's"
CHOICE = (
    " --dtype float32 leaves packed weights packed, --dtype float16 and bfloat16 take half "
    "precision."
)
TOO_LARGE = (
    "Note: MLX is many times slower on a CPU with weights that are not float32, but as float32 "
    "{whose} would take {after} of {total}: they stay as they are, {before}."
)

PACKED_FLOAT32 = "packed weights with activations in float32"
NO_TENSOR_CORES = (
    "on CUDA such products use no tensor cores, so a pass of several rows costs far more: take "
    "--dtype bfloat16 or float16 where speed counts"
)


def set_precision(model: nn.Module, dtype: str | None = None, whose: str = TARGET) -> nn.Module:
    """Set the type of a loaded model's floats to ``dtype``; packed weights stay packed.

    By default everything stays as it is stored. But on a CPU it is unpacked and made float32, if
    the memory is enough; a line on standard error says what that takes.
    """
    if dtype is None and mx.default_device() == mx.gpu:
        return model
    if dtype is None:
        before = weight_bytes(model)
        after = 4 * get_total_parameters(model)
        total = ram()
        sizes = {"before": before, "after": after, "total": total}
        size = {name: megabytes(value, digits=0) for name, value in sizes.items()}
        if after > before and after > SHARE_OF_RAM * total:
            print(TOO_LARGE.format(whose=whose, **size), file=sys.stderr)
            return model
        if after > before:
            choice = CHOICE if whose == TARGET else ""
            print(FLOAT32.format(whose=whose, **size) + choice, file=sys.stderr)
        # Before the cast: a packed weight is what its scales say in their own type.
        model = dequantize_model(model)
    is_packed = any("scales" in module for module in model.modules())
    if dtype == "float32" and is_packed and this_machine().backend == "cuda":
        print(f"Note: {PACKED_FLOAT32}: {NO_TENSOR_CORES}.", file=sys.stderr)
    model.set_dtype(getattr(mx, dtype or "float32"))
    mx.eval(model.parameters())  # another thread could not compute them
    return model


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters as they are stored (packed where quantized)."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def num_parameters(module: nn.Module) -> int:
    """The number of its parameters, packed ones unpacked; also those beside its layers."""
    layers = tree_flatten(module.leaf_modules(), is_leaf=lambda part: isinstance(part, nn.Module))
    inside = tuple(f"{path}." for path, _ in layers)
    every = tree_flatten(module.parameters())
    beside = sum(array.size for path, array in every if not path.startswith(inside))
    return int(get_total_parameters(module)) + beside


def ram() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory(machine: Machine) -> tuple[float, float]:
    """Bytes of memory, and of those that this process may have for weights and caches."""
    info = mx.device_info()
    if machine.backend == "metal":
        return float(info["memory_size"]), float(info["max_recommended_working_set_size"])
    if machine.backend == "cuda":
        free = float(info["free_memory"]) + mx.get_active_memory() + mx.get_cache_memory()
        return float(info["total_memory"]), free
    total = float(ram())
    return total, SHARE_OF_RAM * total


def megabytes(size: float, digits: int = 1) -> str:
    """1.5e9 bytes -> "1500.0 MB" """
    return f"{size / 1e6:.{digits}f} MB"
