"""What rounds of each draft shape cost here, measured on the caches of a running generation.

Once per device, target, drafter, versions and context bucket; ``remembered.py`` keeps it. What
rounds of a batch cost is measured by ``batch/costs.py`` and kept in the same file.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafters.base import Draft, Drafter, Pick
from ..drafters.tree import TreeShape
from ..system.device import device_name
from ..system.hub import user_cache
from ..system.machines import first_look, this_machine
from ..system.progress import Progress, silent
from ..target.rollback import Checkpoint
from ..target.sharding import is_sharded, mean_over_processes
from .accept import Match
from .costs import DraftShape, RoundCosts, Ways
from .decoder import Decoder
from .generation import Generation
from .limits import Limits
from .live_costs import LiveCosts
from .remembered import open_cost_file
from .timing import Amount, RoundFailed, late_after, time_in_turn, time_rounds

CHAINS = tuple(DraftShape(size) for size in range(1, 8))  # verify passes of 2 to 8 rows
TREES = tuple(
    DraftShape(tree.depth, tree)
    # With the root they fill what a GPU does at once: passes of 5, 8, 12, 32 and 64 rows.
    for tree in map(TreeShape.parse, ("2x2:4", "3x3:7", "3x4:11", "6x5:31", "10x6:63"))
)
# Repeats, so that every length is timed at several moments: other work comes and goes.
AMOUNT = Amount(plain_steps=6, rounds=3, repeats=6)
TIME_LIMIT = 30.0  # seconds; whatever they take, the first look is finished
SMALLEST_BUCKET = 512
WAY_REPEATS = 2  # of each of two ways, in turn
WAY_GAIN = 0.98  # of the time of the ordinary way, at most, for another to be taken
# How many times what is remembered is worth: from this process, or from one before it.
OF_TODAY, OF_OLD = 2.0, 0.5


def round_costs(
    decoder: Decoder, with_trees: bool = False, progress: Progress = silent
) -> LiveCosts:
    """Costs of ``decoder``'s rounds where its sequence stands: as remembered, or measured now.

    They are then corrected by the rounds themselves, but where a model is shared by processes,
    which must all decide alike. From now on ``decoder`` computes its rounds in the ways that these
    are the costs of.
    """
    shapes = CHAINS + TREES if with_trees else CHAINS
    model, key = decoder.target.model, _key(decoder, with_trees)
    costs = remembered_or(model, key, shapes, lambda: measure(decoder, shapes, progress))
    decoder.use(costs.ways)
    if is_sharded(model):
        return LiveCosts(costs)
    file = open_cost_file(user_cache() / "calibration.json")

    def keep(learned: RoundCosts) -> None:
        """For texts that begin where this one has ended."""
        file.put(_key(decoder, with_trees), learned)

    return LiveCosts(costs, trust_in(model, key), keep)


def trust_in(model: nn.Module, key: str) -> float:
    """How many times what is remembered under ``key`` is worth: see ``LiveCosts``.

    Infinite where a model is shared by processes.
    """
    if is_sharded(model):
        return math.inf
    file = open_cost_file(user_cache() / "calibration.json")
    return OF_TODAY if file.is_recent(key) else OF_OLD


def _key(decoder: Decoder, with_trees: bool) -> str:
    what = "chains and trees" if with_trees else "chains"
    return make_key(decoder.target.model, decoder.drafter, decoder.cache, 0, what)


def remembered_or(
    model: nn.Module, key: str, shapes: Sequence[DraftShape], measure_now: Callable[[], RoundCosts]
) -> RoundCosts:
    """What is remembered of ``shapes`` under ``key``; else what is measured now, for next time."""
    if is_sharded(model):
        # Measured anew: what one process remembers and another does not would part them.
        costs = measure_now()
        plain, *rounds = mean_over_processes([costs.plain, *costs.rounds.values()])
        return RoundCosts(plain, dict(zip(costs.rounds, rounds)))
    file = open_cost_file(user_cache() / "calibration.json")
    known = file.get(key, shapes)
    if known is None:
        known = measure_now()
        file.put(key, known)
    return known


def measure(
    decoder: Decoder, shapes: Sequence[DraftShape] = CHAINS, progress: Progress = silent
) -> RoundCosts:
    """Time real rounds from where the sequence stands, and undo them all.

    The drafter starts on caches of its own: one layer on a short text costs nearly what it costs
    on a long one. Drafts and choices are greedy, so that no sampler of the caller runs. After
    ``TIME_LIMIT`` only the first look is finished. ``progress`` is called between rounds of one
    shape and those of the next, never within.
    """
    look = first_look(this_machine())
    late = late_after(TIME_LIMIT, decoder.target.model)
    ways = fastest_ways(decoder, late)

    def measure_all(left: Sequence[DraftShape]) -> RoundCosts:
        later = [shape for shape in left if shape.tree is None and shape.size not in look]
        with trial(decoder, ways) as runner:
            return time_in_turn(runner, left, later, AMOUNT, late, progress)

    return replace(without_failed(shapes, measure_all), ways=ways)


@contextmanager
def trial(decoder: Decoder, ways: Ways) -> Iterator[Generation]:
    """Within, rounds can be run from where the sequence stands, greedily; then they are undone."""
    before = Checkpoint(decoder.cache)
    trial_decoder = on_trial(decoder)
    try:
        trial_decoder.use(ways)
        runner = Generation(trial_decoder, Limits(-1, ()))
        runner.finish(trial_decoder.launch_first())
        yield runner
    finally:
        decoder.use(Ways())
        before.rollback(0)


def fastest_ways(
    decoder: Decoder, late: Callable[[], bool], names: Collection[str] | None = None
) -> Ways:
    """Of what can be done in two ways, those that are faster here, in rounds of the longest chain.

    ``names`` are those to try: by default all that matter on a GPU, and none on a CPU. A way whose
    kernels raise an error is not taken.
    """
    if names is None:
        names = decoder.other_ways if this_machine().backend != "cpu" else ()
    ways = Ways()
    for name in names:
        other = replace(ways, **{name: True})
        seconds: dict[Ways, list[float]] = {ways: [], other: []}
        for way in [ways, other] * WAY_REPEATS:
            if not late():
                seconds[way].append(_round_time(decoder, way))
        if seconds[other] and min(seconds[other]) < WAY_GAIN * min(seconds[ways]):
            ways = other
    return ways


def _round_time(decoder: Decoder, ways: Ways) -> float:
    """Seconds of a round of the longest chain, the same in all processes; inf if it fails."""
    try:
        with trial(decoder, ways) as runner:
            seconds = min(time_rounds(runner, CHAINS[-1], AMOUNT.rounds))
    except RuntimeError:
        return float("inf")
    sharded = is_sharded(decoder.target.model)
    return mean_over_processes([seconds])[0] if sharded else seconds


def without_failed(
    shapes: Sequence[DraftShape], measure_all: Callable[[Sequence[DraftShape]], RoundCosts]
) -> RoundCosts:
    """What ``measure_all`` says of the shapes that can be run; of others, a note on stderr."""
    failed: tuple[DraftShape, ...] = ()
    while True:
        try:
            costs = measure_all([shape for shape in shapes if shape not in failed])
        except RoundFailed as failure:
            failed += (failure.shape,)
            reason = (str(failure.__cause__).strip().splitlines() or ["no reason given"])[0]
            print(
                f"Note: rounds that draft {failure.shape} fail on this device and are left out "
                f"({reason}).",
                file=sys.stderr,
            )
        else:
            return replace(costs, failed=failed)


def on_trial(decoder: Decoder) -> Decoder:
    """A greedy decoder on the same target's caches, with a drafter that starts afresh."""
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
