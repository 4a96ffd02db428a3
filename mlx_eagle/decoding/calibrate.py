"""What a round of each length costs here, measured on the caches of a running generation.

Once per device, target, drafter, versions and context bucket; kept in the user's cache. What
rounds of a batch cost is measured by ``batch_costs.py`` and remembered here.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafters.base import Draft, Drafter, Pick
from ..drafters.tree import TreeShape
from ..system.device import device_name
from ..system.hub import user_cache
from ..system.progress import Progress, silent
from ..target.rollback import Checkpoint
from ..target.sharding import in_any_process, is_sharded, mean_over_processes
from .accept import Match
from .controller import DraftShape, RoundCosts, on_line
from .decoder import Decoder, Round

CHAINS = tuple(DraftShape(size) for size in range(1, 8))  # verify passes of 2 to 8 rows
FIRST_LOOK = (DraftShape(1), DraftShape(3), DraftShape(7))  # are timed first, in each repeat
TREES = tuple(
    DraftShape(tree.depth, tree)
    for tree in map(TreeShape.parse, ("2x2:4", "3x3:8", "4x4:16", "6x5:32", "10x6:59"))
)
PLAIN_STEPS = 6
ROUNDS = 3  # of each length, in each repeat
REPEATS = 6  # so that a length meets more than one moment: other work comes and goes
TIME_LIMIT = 30.0  # seconds; whatever they take, the first look is finished
SMALLEST_BUCKET = 512


def round_costs(
    decoder: Decoder, with_trees: bool = False, progress: Progress = silent
) -> RoundCosts:
    """Costs of ``decoder``'s rounds where its text stands: as remembered, or measured now."""
    shapes = CHAINS + TREES if with_trees else CHAINS
    model, what = decoder.target.model, "chains and trees" if with_trees else "chains"
    key = make_key(model, decoder.drafter, decoder.cache, 0, what)
    return remembered_or(model, key, shapes, lambda: measure(decoder, shapes, progress))


def remembered_or(
    model: nn.Module, key: str, shapes: Sequence[DraftShape], measure_now: Callable[[], RoundCosts]
) -> RoundCosts:
    """What is remembered of ``plans`` under ``key``; else what is measured now, for next time."""
    if is_sharded(model):
        # Measured anew: what one process remembers and another does not would part them.
        costs = measure_now()
        plain, *rounds = mean_over_processes([costs.plain, *costs.rounds.values()])
        return RoundCosts(plain, dict(zip(costs.rounds, rounds)))
    file = user_cache() / "calibration.json"
    known = _read(file).get(key, {})
    if known.get("rounds", {}).keys() == {str(shape) for shape in shapes}:
        return RoundCosts(known["plain"], {shape: known["rounds"][str(shape)] for shape in shapes})
    costs = measure_now()
    rounds = {str(shape): seconds for shape, seconds in costs.rounds.items()}
    known = _read(file) | {key: {"plain": costs.plain, "rounds": rounds}}
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(known, indent=1))
    fresh.replace(file)
    return costs


def measure(
    decoder: Decoder, shapes: Sequence[DraftShape] = CHAINS, progress: Progress = silent
) -> RoundCosts:
    """Time real rounds from where the text stands, and undo them all.

    The drafter starts on caches of its own: one layer on a short text costs what it costs on
    a long one, nearly. Drafts and choices are greedy, so that no sampler of the caller runs.
    Nothing is begun after ``TIME_LIMIT`` but the first look; a length that was not timed then
    is taken to lie between its neighbours. The ``shortest`` of all times counts.
    ``progress`` is called between rounds of one length and those of the next, never within.
    """
    trial = on_trial(decoder)
    undo = Checkpoint(decoder.cache)
    late = _late_after(TIME_LIMIT, decoder.target.model)
    plain: list[float] = []
    rounds: dict[DraftShape, list[float]] = {shape: [] for shape in shapes}
    later = [shape for shape in shapes if shape.tree is None and shape not in FIRST_LOOK]
    first = [None, *(shape for shape in shapes if shape not in later)]
    groups = [*first, *later] * REPEATS
    try:
        _finish(trial, trial.launch_first())
        for i, shape in enumerate(groups):
            progress(i, len(groups))
            if shape is None:
                plain += _time_plain(trial)
            else:
                rounds[shape] += _time_rounds(trial, shape)
            if i + 1 >= len(first) and late():
                break
        progress(len(groups), len(groups))
    finally:
        undo.rollback(0)
    return shortest(plain, rounds)


def _late_after(limit: float, model: nn.Module) -> Callable[[], bool]:
    """Whether ``limit`` seconds have gone by, for all processes of a model at once."""
    start = time.perf_counter()

    def late() -> bool:
        is_late = time.perf_counter() - start > limit
        return in_any_process(is_late) if is_sharded(model) else is_late

    return late


def shortest(plain: Sequence[float], rounds: Mapping[DraftShape, Sequence[float]]) -> RoundCosts:
    """The shortest times: whatever else the machine does can only add to them.

    A chain that was not timed lies between those that were.
    """
    known = {shape.size: min(s) for shape, s in rounds.items() if s and shape.tree is None}
    return RoundCosts(
        min(plain),
        {shape: min(s) if s else on_line(known, shape.size) for shape, s in rounds.items()},
    )


def on_trial(decoder: Decoder) -> Decoder:
    """A decoder on the same target's caches, with a drafter that starts afresh; greedy."""
    drafter = _AlwaysDrafts(decoder.drafter.begin())
    quantization, stream = decoder.quantization, decoder.stream
    trial = Decoder(decoder.target, drafter, decoder.cache, Match(), (), quantization, stream)
    trial.root = decoder.root
    return trial


class _AlwaysDrafts:
    """A drafter that proposes something even where its own has nothing to say."""

    def __init__(self, drafter: Drafter):
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, size: int, pick: Pick) -> Draft:
        draft = self._drafter.propose(size, pick)
        return draft if len(draft) == size else Draft(mx.zeros((size,), mx.int32))


def _finish(trial: Decoder, done: Round) -> float:
    """Read and commit a round; the time when it was read."""
    num_kept, _ = done.read()
    now = time.perf_counter()
    trial.commit(done, num_kept + 1)
    return now


def _time_rounds(trial: Decoder, shape: DraftShape) -> list[float]:
    """Seconds from read to read of such rounds, one after the other."""
    reads = [_finish(trial, trial.launch(shape)) for _ in range(ROUNDS + 1)]
    return [after - before for before, after in zip(reads, reads[1:])]


def _time_plain(trial: Decoder) -> list[float]:
    """Seconds from read to read of pipelined plain steps, taps included."""
    done, reads = trial.launch(DraftShape(0)), []
    for _ in range(PLAIN_STEPS + 1):
        trial.commit(done, 1)
        upcoming = trial.launch(DraftShape(0))
        done.read()
        reads.append(time.perf_counter())
        done = upcoming
    _finish(trial, done)
    return [after - before for before, after in zip(reads, reads[1:])]


def _read(file: Path) -> dict[str, Any]:
    """What was remembered; nothing where the file is missing or damaged."""
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def make_key(model: nn.Module, drafter: Drafter, cache: list, num_ahead: int, what: str) -> str:
    """All that the cost of a round depends on, ``num_ahead`` tokens after what is in ``cache``."""
    length = num_ahead + max((getattr(c, "offset", 0) for c in cache), default=0)
    bucket = SMALLEST_BUCKET
    while bucket < length:
        bucket *= 2
    versions = [f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-eagle")]
    modules = ", ".join(_describe(module) for module in drafter.modules())
    kind = f"{type(drafter).__name__} {modules}"
    caches = sorted({type(c).__name__ for c in cache})
    where = [device_name(), *versions, _describe(model), kind, *caches, f"context {bucket}"]
    return " | ".join([*where, what])


def _describe(module: Any) -> str:
    """A model by what decides its speed: kind, layers, parameters, bytes."""
    weights = [w for _, w in tree_flatten(module.parameters())]
    num_bytes, num_parameters = sum(w.nbytes for w in weights), sum(w.size for w in weights)
    kind = type(module).__module__.rsplit(".", 1)[-1]
    return f"{kind} {len(module.layers)} layers {num_parameters} numbers {num_bytes} bytes"
