"""What rounds of each draft shape cost here: remembered, guessed for a start, or measured.

Measuring runs real rounds on the caches of a generation, and undoes them; it takes long, so a
text does not wait for it unasked. ``remembered.py`` keeps what is known. What rounds of a batch
cost is always measured, by ``batch/costs.py``, and kept in the same file.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..drafters.base import Draft, Drafter, Pick
from ..drafters.tree import TreeShape
from ..system.atomic_folder import user_cache
from ..system.machines import first_look, this_machine
from ..system.progress import Progress, silent
from ..target.rollback import Checkpoint
from ..target.sharding import is_sharded, mean_over_processes
from .controller import failure_note
from .cost_keys import context_bucket, make_key
from .costs import DraftShape, RoundCosts, Ways
from .decoder import Decoder, Limits
from .generation import Generation
from .guess import guess_costs
from .live_costs import LiveCosts
from .remembered import CostFile, open_cost_file
from .sampling import LogitsProcessors, stand_in
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
LONG_PREFILL = 1.0  # seconds, beside which trying ways takes little
WAY_REPEATS = 2  # of each of two ways, in turn
WAY_GAIN = 0.98  # of the time of the ordinary way, at most, for another to be taken
# How many times what is remembered is worth: from this process, or from one before it.
OF_TODAY, OF_OLD = 2.0, 0.5


def round_costs(
    decoder: Decoder,
    with_trees: bool = False,
    progress: Progress = silent,
    recalibrate: bool = False,
) -> LiveCosts:
    """Costs of ``decoder``'s rounds where its sequence stands: as remembered, or guessed.

    They are then corrected by the rounds themselves, and kept for the next text. Nothing is
    measured before, unless it is asked for by ``recalibrate``, or a model is shared by processes,
    which must all decide alike: there they are measured, and not corrected. From now on
    ``decoder`` computes its rounds in the ways that these are the costs of; where nothing is
    known of other ways, and the prompt took long, they are tried for half as long.
    """
    shapes = CHAINS + TREES if with_trees else CHAINS
    what = "chains and trees" if with_trees else "chains"
    if is_sharded(decoder.target.model):
        costs = measured_alike(measure(decoder, shapes, progress))
        decoder.use(costs.ways)
        return LiveCosts(costs)
    file, key = cost_file(), _key(decoder, what)
    if recalibrate:
        costs = measure(decoder, shapes, progress)
        file.put(key, costs)
    else:
        costs = file.get(key, shapes) or _guess(decoder, file, what, shapes)
        if not costs.knows_ways and decoder.prefill_time > LONG_PREFILL:
            late = late_after(decoder.prefill_time / 2, decoder.target.model)
            costs = replace(costs, ways=fastest_ways(decoder, late), knows_ways=True)
    decoder.use(costs.ways)

    def keep(learned: RoundCosts) -> None:
        """For texts that begin where this one has ended."""
        file.correct(_key(decoder, what), learned)

    return LiveCosts(costs, _trust(file, key), keep)


def cost_file() -> CostFile:
    """Where what is known of this machine is kept."""
    return open_cost_file(user_cache() / "calibration.json")


def trust_in(model: nn.Module, key: str) -> float:
    """How many times what is remembered under ``key`` is worth: see ``LiveCosts``.

    Infinite where a model is shared by processes.
    """
    if is_sharded(model):
        return math.inf
    return _trust(cost_file(), key)


def _trust(file: CostFile, key: str) -> float:
    return OF_TODAY if file.is_recent(key) else OF_OLD


def _key(decoder: Decoder, what: str, scale: float = 1.0) -> str:
    """That of the decoder's context, or of one ``scale`` times as large."""
    return make_key(
        decoder.target.model,
        decoder.drafter,
        decoder.cache,
        decoder.quantization,
        decoder.rule,
        decoder.processors,
        round(scale * context_bucket(decoder.cache, 0)),
        what,
    )


def _guess(
    decoder: Decoder, file: CostFile, what: str, shapes: Sequence[DraftShape]
) -> RoundCosts:
    """What is known of contexts of half or twice the size, or else nothing but a guess."""
    for scale in (0.5, 2.0):
        costs = file.get(_key(decoder, what, scale), shapes)
        if costs is not None and not costs.failed:
            return replace(costs.as_guess(), knows_ways=False)
    return guess_costs(decoder.target.model, decoder.drafter, shapes)


def measured_alike(costs: RoundCosts) -> RoundCosts:
    """The mean of what the processes that share a model have measured."""
    plain, *rounds = mean_over_processes([costs.plain, *costs.rounds.values()])
    return replace(costs, plain=plain, rounds=dict(zip(costs.rounds, rounds)))


def remembered_or(
    model: nn.Module, key: str, shapes: Sequence[DraftShape], measure_now: Callable[[], RoundCosts]
) -> RoundCosts:
    """What was measured of ``shapes`` and is remembered under ``key``; else what is measured now.

    For those who do not correct it: what was guessed, or is to be refreshed, does not count.
    """
    if is_sharded(model):
        # Measured anew: what one process remembers and another does not would part them.
        return measured_alike(measure_now())
    file = cost_file()
    known = file.get(key, shapes)
    if known is None or known.guessed:
        known = measure_now()
        file.put(key, known)
    return known


def measure(
    decoder: Decoder, shapes: Sequence[DraftShape] = CHAINS, progress: Progress = silent
) -> RoundCosts:
    """Time real rounds from where the sequence stands, and undo them all.

    The drafter starts on caches of its own: one layer on a short text costs nearly what it costs
    on a long one. No sampler and no logits processor of the caller runs, but others in their
    place (``Rule.on_trial``). After ``TIME_LIMIT`` only the first look is finished. ``progress``
    is called between rounds of one shape and those of the next, never within.
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
    """Within, rounds can be run from where the sequence stands; then they are undone."""
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
            print(failure_note(failure.shape, failure.__cause__), file=sys.stderr)
        else:
            return replace(costs, failed=failed)


def on_trial(decoder: Decoder) -> Decoder:
    """A decoder on the same target's caches, with a drafter that starts afresh."""
    trial = Decoder(
        decoder.target,
        _AlwaysDrafts(decoder.drafter.begin()),
        decoder.cache,
        decoder.rule.on_trial(),
        LogitsProcessors((stand_in,) * len(decoder.processors)),
        decoder.quantization,
        decoder.stream,
    )
    trial.root, trial.root_embedding = decoder.root, decoder.root_embedding
    trial.history = decoder.history
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
