"""Fixtures of many files: checkpoints, where they are converted to, what is remembered."""

import gc
import os
from pathlib import Path

from mlx_eagle import load_fast_blas

load_fast_blas()  # before anything imports MLX
gc.disable()  # until all is imported and collected, of which nothing is garbage: a quarter of that

# ruff: noqa: E402
import helpers
import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors

from mlx_eagle.decoding import round_costs
from mlx_eagle.system.device import this_machine
from mlx_eagle.target_model.per_model import PerModel

NEEDS_GPU = "needs a GPU"


def pytest_configure(config: pytest.Config) -> None:
    """Keep each of several test processes, and what it starts, on one core, as a batch job.

    MLX hands every operation from one thread to another. Where each of two processes may run on
    both cores that takes half as long again as on a core of their own; and a thread that is woken
    there does not take the core from the one that has more to hand over, which takes a third less.
    """
    resize(config.getoption("--target-sizes"))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def resize(sizes: str) -> None:
    """Give the tiny targets other sizes: "head_dim=128,num_key_value_heads=1"."""
    for name, size in (pair.split("=") for pair in sizes.split(",") if pair):
        if name not in helpers.SIZES:
            raise pytest.UsageError(f"--target-sizes: no {name}, only {', '.join(helpers.SIZES)}")
        helpers.SIZES[name] = int(size)
    helpers.VOCAB = helpers.SIZES["vocab_size"]


def pytest_collection_finish() -> None:
    """Look for garbage from here on, and among what tests make alone."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What only a GPU shows is left out on a CPU, with its reason."""
    for mark in item.iter_markers("on_gpu"):
        backend, reason = mark.args
        if this_machine().backend != backend:
            pytest.skip(f"{NEEDS_GPU} ({backend}): {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out and why, a line each: nothing is skipped silently."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    reasons = [found[2].removeprefix("Skipped: ") for found in skipped if isinstance(found, tuple)]
    for reason in sorted(set(reasons)):
        terminalreporter.write_line(f"{reasons.count(reason)} x {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-browser", action="store_true", help="leave out what needs a Chromium on PATH"
    )
    parser.addoption(
        "--target-sizes", default="", help="of tiny targets: head_dim=128,num_key_value_heads=1"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of the browser out where that was said; otherwise they fail without one."""
    if config.getoption("--without-browser"):
        left_out = [item for item in items if item.get_closest_marker("browser")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny EAGLE-3 head as the original files have it."""
    return write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that does not exist, in a parent that does not exist."""
    return tmp_path / "results" / "head"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounds cost is learned by every test anew."""
    monkeypatch.setattr(round_costs, "_known", PerModel())
