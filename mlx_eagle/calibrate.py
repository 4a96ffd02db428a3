"""What a round of each length costs here, measured on the caches of a running generation.

Once per device, target, drafter, versions and context bucket; kept in the user's cache.
"""

import json
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from mlx.utils import tree_flatten

from .accept import Match
from .cache import Window
from .decoder import Decoder, Round
from .device import device_name
from .hub import user_cache
from .pace import RoundCosts
from .sharding import is_sharded, mean_over_processes

MOST_DRAFTS = 7  # verify passes of 2 to 8 rows
PLAIN_STEPS = 8
ROUNDS = 3  # of each length, in each repeat
REPEATS = 2
SMALLEST_BUCKET = 512


def round_costs(decoder: Decoder) -> RoundCosts:
    """Costs of ``decoder``'s rounds where its text stands: as remembered, or measured now."""
    if is_sharded(decoder.target.model):
        # Measured anew: what one process remembers and another does not would part them.
        costs = measure(decoder)
        plain, *rounds = mean_over_processes([costs.plain, *costs.rounds])
        return RoundCosts(plain, tuple(rounds))
    file, key = user_cache() / "calibration.json", _key(decoder)
    known = _read(file)
    if key in known:
        return RoundCosts(known[key]["plain"], tuple(known[key]["rounds"]))
    costs = measure(decoder)
    known = _read(file) | {key: {"plain": costs.plain, "rounds": costs.rounds}}
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(known, indent=1))
    fresh.replace(file)
    return costs


def measure(decoder: Decoder, most_drafts: int = MOST_DRAFTS) -> RoundCosts:
    """Time real rounds from where the text stands, and undo them all.

    The drafter starts on caches of its own: one layer on a short text costs what it costs on
    a long one, nearly. Drafts and choices are greedy, so that no sampler of the caller runs.
    """
    trial = Decoder(
        decoder.target,
        decoder.drafter.begin(),
        decoder.cache,
        Match(),
        (),
        decoder.quantization,
        None,
        decoder.stream,
    )
    undo = Window(decoder.cache)
    sizes = range(1, most_drafts + 1)
    plain: list[float] = []
    rounds: dict[int, list[float]] = {size: [] for size in sizes}
    try:
        trial.root = decoder.root
        _finish(trial, trial.launch_first())
        for _ in range(REPEATS):
            plain += _time_plain(trial)
            for size in sizes:
                rounds[size] += _time_rounds(trial, size)
    finally:
        undo.keep(0)
    return RoundCosts(median(plain), tuple(median(rounds[size]) for size in sizes))


def _finish(trial: Decoder, done: Round) -> float:
    """Read and commit a round; the time when it was read."""
    num_kept, _ = done.read()
    now = time.perf_counter()
    trial.commit(done, num_kept + 1)
    return now


def _time_rounds(trial: Decoder, size: int) -> list[float]:
    """Seconds from read to read of rounds of ``size`` drafts, one after the other."""
    reads = [_finish(trial, trial.launch(size)) for _ in range(ROUNDS + 1)]
    return [after - before for before, after in zip(reads, reads[1:])]


def _time_plain(trial: Decoder) -> list[float]:
    """Seconds a step of pipelined plain decoding, taps included; one figure."""
    done = trial.launch(0)
    start = time.perf_counter()
    for _ in range(PLAIN_STEPS):
        trial.commit(done, 1)
        upcoming = trial.launch(0)
        done.read()
        done = upcoming
    elapsed = time.perf_counter() - start
    _finish(trial, done)
    return [elapsed / PLAIN_STEPS]


def _read(file: Path) -> dict[str, Any]:
    """What was remembered; nothing where the file is missing or damaged."""
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _key(decoder: Decoder) -> str:
    """All that a round's cost depends on."""
    length = max((getattr(c, "offset", 0) for c in decoder.cache), default=0)
    bucket = SMALLEST_BUCKET
    while bucket < length:
        bucket *= 2
    versions = [f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-eagle")]
    target = _describe(decoder.target.model)
    drafter = ", ".join(_describe(module) for module in decoder.drafter.modules())
    kind = f"{type(decoder.drafter).__name__} {drafter}"
    caches = sorted({type(c).__name__ for c in decoder.cache})
    return " | ".join([device_name(), *versions, target, kind, *caches, f"context {bucket}"])


def _describe(module: Any) -> str:
    """A model by what decides its speed: kind, layers, parameters, bytes."""
    weights = [w for _, w in tree_flatten(module.parameters())]
    num_bytes, num_parameters = sum(w.nbytes for w in weights), sum(w.size for w in weights)
    kind = type(module).__module__.rsplit(".", 1)[-1]
    return f"{kind} {len(module.layers)} layers {num_parameters} numbers {num_bytes} bytes"
