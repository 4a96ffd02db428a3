"""The script for five minutes on a GPU: shares of time, the wide target, and a run on a CPU."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import tiny_llama
from mlx.utils import tree_flatten

from mlx_eagle.bench import __main__ as bench
from mlx_eagle.bench.report_file import read_report

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_session.py"


@pytest.fixture(scope="module")
def session() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_session", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_session"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_wide_target_computes_the_same(session, is_packed):
    model = tiny_llama(intermediate_size=128)
    wide = tiny_llama(intermediate_size=512)
    if is_packed:
        for each in (model, wide):
            nn.quantize(each, group_size=32, bits=4)
    weights = session.widened(dict(tree_flatten(model.parameters())), 128, 512)
    wide.load_weights(list(weights.items()))
    tokens = mx.array([[1, 2, 3, 4]])
    assert mx.allclose(model(tokens), wide(tokens), atol=1e-5)
    sizes = [each.layers[0].mlp.down_proj.weight.nbytes for each in (wide, model)]
    assert sizes[0] == 4 * sizes[1]


@pytest.mark.parametrize("has_exact", [False, True])
def test_all_ends_within_five_minutes_however_long_steps_take(session, tmp_path, has_exact):
    """Steps that would take for ever are ended when their share, and what was saved, is over."""
    steps = session.all_steps(tmp_path / "models", tmp_path, is_smoke=False, has_exact=has_exact)
    assert ("exact" in [step.name for step in steps]) == has_exact
    assert sum(step.seconds for step in steps) <= 300
    for wants in (1e9, 1.0):
        now = [50.0]

        def call(command, log, seconds, wants=wants, now=now):
            now[0] += min(seconds, wants)
            return session.TIME_IS_UP if wants > seconds else 0

        found = session.run_all(steps, tmp_path, call, lambda now=now: now[0])
        assert now[0] - 50.0 <= 300 and all(outcome.code is not None for outcome in found)
        assert json.loads((tmp_path / "session.json").read_text())[0]["name"] == "targets"


@pytest.mark.parametrize(
    "takes, given, codes",
    [
        ((2.0, 18.0, 7.0, 0.0), [10.0, 18.0, 10.0, 13.0], [0, 0, 0, 0]),
        ((2.0, 26.0, 1.0), [10.0, 18.0, 12.0], [0, 0, None, 0]),  # slow to be ended
    ],
)
def test_saved_time_goes_to_the_next_and_lost_time_is_not_made_up(
    session, tmp_path, takes, given, codes
):
    now = [0.0]
    left = []
    seconds_of = iter(takes)

    def call(command, log, seconds):
        left.append(seconds)
        now[0] += next(seconds_of)
        return 0

    steps = [session.Step(name, ["x"], 10.0) for name in "abcd"]
    found = session.run_all(steps, tmp_path, call, lambda: now[0])
    assert left == given and [outcome.code for outcome in found] == codes


def test_a_command_is_ended_and_its_words_are_kept(session, tmp_path):
    log = tmp_path / "x.log"
    code = "import time; print('begun', flush=True); time.sleep(60)"
    assert session.call([sys.executable, "-c", code], log, 2.0) == session.TIME_IS_UP
    assert log.read_text() == "begun\n"
    assert session.call([sys.executable, "-c", "raise SystemExit(3)"], log, 9.0) == 3


def test_every_command_is_one_that_exists(session, tmp_path):
    for is_smoke in (False, True):
        for step in session.all_steps(tmp_path, tmp_path, is_smoke, has_exact=False):
            if "mlx_eagle.bench" in step.command:
                args = bench.build_parser().parse_args(step.command[3:])
                assert bench.read_settings(args).repeats == 1


@pytest.mark.exhaustive
@pytest.mark.timeout(700)
def test_a_run_on_a_cpu(session, tmp_path):
    """The targets and one benchmark: the others have only other flags."""
    session.main(["--out", str(tmp_path), "--smoke", "--only", "targets,sampling"])
    found = json.loads((tmp_path / "session.json").read_text())
    logs = "".join(path.read_text()[-500:] for path in tmp_path.glob("*.log"))
    assert [outcome["code"] for outcome in found] == [0, 0], logs
    runs = read_report(tmp_path / "sampling-measured.json")["runs"]
    assert [run["drafts"] for run in runs] == ["k=3", "auto"]
    assert all(run["identical"] == run["texts"] == 1 for run in runs)
