"""What rounds of each draft shape cost here, measured on the caches of a running generation.

Once per device, target, drafter, versions and context bucket; ``remembered.py`` keeps it. What
rounds of a batch cost is measured by ``batch/costs.py`` and kept in the same file.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version
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
from ..target.sharding import is_sharded, mean_over_processes
from .accept import Match
from .costs import DraftShape, RoundCosts
from .decoder import Decoder
from .generation import Generation
from .limits import Limits
from .live_costs import LiveCosts
from .remembered import open_cost_file
from .timing import Amount, late_after, time_in_turn

CHAINS = tuple(DraftShape(size) for size in range(1, 8))  # verify passes of 2 to 8 rows
FIRST_LOOK = (DraftShape(1), DraftShape(3), DraftShape(7))  # are timed first, in each repeat
TREES = tuple(
    DraftShape(tree.depth, tree)
    for tree in map(TreeShape.parse, ("2x2:4", "3x3:8", "4x4:16", "6x5:32", "10x6:59"))
)
# Repeats, so that every length is timed at several moments: other work comes and goes.
AMOUNT = Amount(plain_steps=6, rounds=3, repeats=6)
TIME_LIMIT = 30.0  # seconds; whatever they take, the first look is finished
SMALLEST_BUCKET = 512
# How many times what is remembered is worth: from this process, or from one before it.
OF_TODAY, OF_OLD = 2.0, 0.5


def round_costs(
    decoder: Decoder, with_trees: bool = False, progress: Progress = silent
) -> LiveCosts:
    """Costs of ``decoder``'s rounds where its sequence stands: as remembered, or measured now.

    They are then corrected by the rounds themselves, but where a model is shared by processes,
    which must all decide alike.
    """
    shapes = CHAINS + TREES if with_trees else CHAINS
    model, key = decoder.target.model, _key(decoder, with_trees)
    costs = remembered_or(model, key, shapes, lambda: measure(decoder, shapes, progress))
    if is_sharded(model):
        return LiveCosts(costs)
    file = open_cost_file(user_cache() / "calibration.json")

    def keep(learned: RoundCosts) -> None:
        """For texts that begin where this one has ended."""
        file.put(_key(decoder, with_trees), learned)

    return LiveCosts(costs, OF_TODAY if file.is_recent(key) else OF_OLD, keep)


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
    trial = on_trial(decoder)
    before = Checkpoint(decoder.cache)
    later = [shape for shape in shapes if shape.tree is None and shape not in FIRST_LOOK]
    late = late_after(TIME_LIMIT, decoder.target.model)
    try:
        runner = Generation(trial, Limits(-1, ()))
        runner.finish(trial.launch_first())
        return time_in_turn(runner, shapes, later, AMOUNT, late, progress)
    finally:
        before.rollback(0)


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
