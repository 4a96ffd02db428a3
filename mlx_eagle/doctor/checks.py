"""Checks of the doctor: the machine, what is installed, memory, files, known pairs.

Each check returns its findings and raises nothing.
"""

import os
import re
import tempfile
from collections.abc import Callable

import mlx.core as mx

from ..drafters.pairs import targets_within
from ..system.atomic_folder import user_cache
from ..system.device import CUDNN, SHARE_OF_RAM, blas_name, blas_note, ram
from ..system.machines import Machine, this_machine
from .packages import check_packages, read_sysctl
from .report_lines import Finding

GB = 1e9
WIRED = "iogpu.wired_limit_mb"
TF32 = "MLX_ENABLE_TF32"
FIRST_WITH_TF32 = 5  # M5, whose GPU has matrix units


def check_machine() -> list[Finding]:
    """The chip, and what drafting can be expected to gain on it."""
    machine = this_machine()
    kind = {"metal": "Metal", "cuda": "CUDA", "cpu": "on its CPU"}[machine.backend]
    known = "" if machine.generation == "unknown" else f"{machine.generation}, "
    found = [Finding("machine", f"{machine.name} ({known}{kind})")]
    found.append(Finding("drafting", machine.advice))
    return found


def check_blas() -> list[Finding]:
    """On a CPU: which library multiplies floats."""
    if mx.default_device() == mx.gpu:
        return []
    note = blas_note()
    if note is None:
        return [Finding("BLAS", blas_name())]
    return [Finding("BLAS", blas_name(), "problem", note.removeprefix("Note: "))]


def check_settings() -> list[Finding]:
    """MLX's own settings that decide here whether drafting gains, and whether float32 is exact."""
    machine, found = this_machine(), []
    if machine.backend == "cuda" and os.environ.get(CUDNN) != "0":
        remedy = (
            f"our commands set {CUDNN}=0 by themselves; in a program of yours, set it before the "
            "first attention, or every round waits for new cuDNN plans"
        )
        found.append(Finding("cuDNN", f"{CUDNN} is not 0", "note", remedy))
    if has_tf32(machine) and os.environ.get(TF32) != "0":
        text = "float32 products of several rows keep 10 bits (TF32)"
        remedy = f"for token-identical text in float32, set {TF32}=0"
        found.append(Finding("float32", text, "note", remedy))
    return found


def has_tf32(machine: Machine) -> bool:
    """Whether MLX multiplies float32 in TF32 there, unless it is told not to."""
    generation = re.fullmatch(r"M(\d+)", machine.generation)
    is_m5 = generation is not None and int(generation[1]) >= FIRST_WITH_TF32
    return machine.backend == "cuda" or (machine.backend == "metal" and is_m5)


def memory(machine: Machine) -> tuple[float, float]:
    """Bytes of memory, and of those that weights and caches may take."""
    info = mx.device_info()
    if machine.backend == "metal":
        return float(info["memory_size"]), float(info["max_recommended_working_set_size"])
    if machine.backend == "cuda":
        return float(info["total_memory"]), float(info["free_memory"])
    total = float(ram())
    return total, SHARE_OF_RAM * total


def check_memory() -> list[Finding]:
    """How much there is, and on a Mac how much of it may be wired (kept in place for the GPU)."""
    machine = this_machine()
    total, usable = memory(machine)
    text = f"{total / GB:.1f} GB, {usable / GB:.1f} GB for weights and caches"
    found = [Finding("memory", text)]
    if machine.backend == "metal":
        limit = read_sysctl(WIRED)
        text = f"set to {limit} MB" if limit else f"{usable / GB:.1f} GB, macOS's own"
        found.append(Finding("wired limit", f"{text} (sysctl {WIRED})"))
    return found


def check_cache() -> list[Finding]:
    """Whether converted heads can be kept."""
    folder = user_cache()
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as err:
        text = f"{folder} cannot be written ({err.strerror or err})"
        remedy = (
            "heads are converted again in every process: make it writable, or set HOME to a "
            "folder that is"
        )
        return [Finding("cache", text, "problem", remedy)]
    return [Finding("cache", f"{folder} can be written")]


def check_pairs() -> list[Finding]:
    """Which targets of the table of pairs fit into the memory, in 4 bits with their head."""
    machine = this_machine()
    fit, others = targets_within(memory(machine)[1])
    text = f"{len(fit)} of {len(fit) + len(others)} targets with a known head fit in 4 bits"
    text += f": {', '.join(fit)}" if fit else ""
    if machine.backend == "cpu":
        text += ". On a CPU they run and do not gain: try the demo pair"
    return [Finding("known pairs", text)]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_machine,
    check_packages,
    check_blas,
    check_settings,
    check_memory,
    check_cache,
    check_pairs,
)


def check_all() -> list[Finding]:
    """The findings of all checks."""
    return [finding for check in CHECKS for finding in check()]
