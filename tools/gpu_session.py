"""Five minutes on a GPU: speed, batches, sampling and the self-test, each with its share of time.

    python tools/gpu_session.py --out gpu-session
    python tools/gpu_session.py --out smoke --smoke

The target is the demo target with MLPs of 65536 units in place of 1536, zeros behind the new ones:
it writes what it always writes, and has the weight of a model of 3.4 billion parameters. There is
one in bfloat16 and one in 4 bits. A step that takes longer than its share is ended, and what it
left is kept; time that a step does not need goes to the next. ``session.json`` says what became of
each. With ``--smoke`` all is tiny, to try the script on a CPU.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

import mlx_eagle
from mlx_eagle.bench.flags import build_parser
from mlx_eagle.demo.pair import demo_target_path

HEAD = Path(mlx_eagle.__file__).parent / "demo" / "head"
UNITS = 65536  # of the wide MLPs
SMOKE_UNITS = 3072
PRECISIONS = ("bfloat16", "4bit")
LEAST = 5.0  # seconds: a step that has fewer is not begun
SMOKE_SECONDS = 300.0  # of each step, on a busy CPU
TIME_IS_UP = 124  # as the command ``timeout`` has it


@dataclass(frozen=True)
class Step:
    """A command, and its share of the time in seconds."""

    name: str
    command: list[str]
    seconds: float


@dataclass
class Outcome:
    """The end of a step: its exit code (None if it was not begun), and its seconds."""

    name: str
    command: list[str]
    code: int | None
    seconds: float


# --- the wide target ---------------------------------------------------------------------------


def widened(weights: Mapping[str, mx.array], before: int, units: int) -> dict[str, mx.array]:
    """Weights with ``units`` units in each MLP in place of ``before``; the new ones are zeros.

    Packed weights are widened as they are: groups whose scales and biases are 0 hold zeros.
    """
    found = {}
    for name, array in weights.items():
        axis = 1 if ".down_proj." in name else 0 if ".mlp." in name else None
        if axis is not None:
            size = array.shape[axis]
            more = size * units // before - size
            array = mx.pad(array, [(0, more), (0, 0)] if axis == 0 else [(0, 0), (0, more)])
        found[name] = array
    return found


def make_target(source: Path, folder: Path, precision: str, units: int) -> None:
    """Write the demo target with wide MLPs, packed as it is or dense in bfloat16."""
    folder.mkdir(parents=True)
    model, _ = mlx_lm.load(str(source), lazy=True)
    config = json.loads((source / "config.json").read_text())
    if precision == "bfloat16":
        model = dequantize_model(model)
        del config["quantization"]
    model.set_dtype(mx.bfloat16)
    weights = dict(tree_flatten(model.parameters()))
    wide = widened(weights, config["intermediate_size"], units)
    mx.save_safetensors(str(folder / "model.safetensors"), wide, metadata={"format": "mlx"})
    config["intermediate_size"] = units
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(config))


# --- the steps ---------------------------------------------------------------------------


def all_steps(models: Path, out: Path, is_smoke: bool, has_exact: bool) -> list[Step]:
    """Steps in their order: the most wanted come first."""

    def bench(name: str, precision: str, seconds: float, flags: str) -> Step:
        command = [sys.executable, "-m", "mlx_eagle.bench", "--model", str(models / precision)]
        command += ["--draft-model", str(HEAD), "--order", "weave", "--repeats", "1"]
        command += ["--out", str(out / name), "--report", str(out / f"{name}-measured.json")]
        small = ["--limit", "1", "--max-tokens", "6"] if is_smoke else []
        return Step(name, [*command, *flags.split(), *small], seconds)

    make = [sys.executable, __file__, "--make", str(models), "--out", str(out)]
    make += ["--smoke"] if is_smoke else []
    doctor = [sys.executable, "-m", "mlx_eagle.doctor", "--self-test"]
    doctor += ["--out", str(out / "self-test.md")]
    shapes = "--num-draft-tokens 3,5,7,auto --tree 3x3:7 --prompts gsm8k,mt_bench --limit 2"
    shapes += " --max-tokens 96"
    batch = "--batch 1" if is_smoke else "--batch 2,4,8"
    few = "--prompts gsm8k --limit 2 --max-tokens 64"
    steps = [
        Step("targets", make, 25.0),
        bench("bfloat16", "bfloat16", 65.0, shapes),
        bench("4bit", "4bit", 65.0, shapes),
        bench("batches", "4bit", 35.0, f"{batch} --prompts gsm8k --limit 8 --max-tokens 48"),
        bench("sampling", "4bit", 30.0, f"{few} --temp 1 --num-draft-tokens 3,auto"),
        Step("self-test", doctor, 45.0),
    ]
    if has_exact:
        steps.insert(-1, bench("exact", "bfloat16", 25.0, f"{few} --exact"))
    if is_smoke:
        return [replace(step, seconds=SMOKE_SECONDS) for step in steps]
    return steps


def call(command: Sequence[str], log: Path, seconds: float) -> int:
    """Run a command, its words in ``log``; its exit code, or ``TIME_IS_UP``."""
    with log.open("w") as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=seconds)
        except subprocess.TimeoutExpired:
            return TIME_IS_UP
    return done.returncode


def run_all(
    steps: Sequence[Step],
    out: Path,
    call: Callable[[Sequence[str], Path, float], int] = call,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the steps, each until the shares of all steps so far are over."""
    start = clock()
    until = 0.0
    found: list[Outcome] = []
    for step in steps:
        until += step.seconds
        begun = clock()
        left = until - (begun - start)
        code = call(step.command, out / f"{step.name}.log", left) if left >= LEAST else None
        found.append(Outcome(step.name, step.command, code, round(clock() - begun, 1)))
        document = [asdict(outcome) for outcome in found]
        (out / "session.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{step.name}: {verdict(code)} ({found[-1].seconds:.0f} s)", flush=True)
    return found


def verdict(code: int | None) -> str:
    words: dict[Any, str] = {None: "not begun", 0: "done", TIME_IS_UP: "its time was up"}
    return words.get(code, f"failed with code {code}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    words = "Where all files go (%(default)s)."
    parser.add_argument("--out", default="gpu-session", metavar="DIR", help=words)
    parser.add_argument("--smoke", action="store_true", help="Try the script itself, on a CPU.")
    parser.add_argument("--only", metavar="STEP,...", help="Leave all other steps out.")
    parser.add_argument("--make", metavar="DIR", help="Only write the targets, into this folder.")
    args = parser.parse_args(argv)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.make is not None:
        for precision in PRECISIONS:
            units = SMOKE_UNITS if args.smoke else UNITS
            make_target(demo_target_path(), Path(args.make) / precision, precision, units)
        return
    has_exact = "--exact" in build_parser().format_help()
    with tempfile.TemporaryDirectory(prefix="wide-") as models:
        steps = all_steps(Path(models), out, args.smoke, has_exact)
        only = {step.name for step in steps} if args.only is None else set(args.only.split(","))
        found = run_all([step for step in steps if step.name in only], out)
    if any(outcome.code not in (None, 0, TIME_IS_UP) for outcome in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
