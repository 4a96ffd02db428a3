"""Plain steps on rotating caches that are full: mlx-lm's against ours while drafting is off.

Both go on from the same prompt in turns of some steps, greedily. Ours keeps what its drafter would
have to absorb if drafting was turned on again.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.batch.requests import UNQUANTIZED
from mlx_eagle.decoding.controller import FixedController
from mlx_eagle.decoding.costs import PLAIN
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.generation import Generation
from mlx_eagle.decoding.pipeline import Pipeline
from mlx_eagle.decoding.setup import begin_drafter, open_decoder
from mlx_eagle.system.render import Table

from .questions import Question, prompt_tokens
from .runner import Models
from .summary import spread_of
from .tables import milliseconds, number, with_spread

BEYOND = 64  # tokens by which a prompt is longer than the cache
TURN_STEPS = 16  # timed from the first to the last: pipelined as in one go
TURNS = 8  # of each, in every repeat
PREFILL_STEP = 512


@dataclass(frozen=True)
class Turn:
    """Some steps in a row: their tokens, and the seconds that each took but the first."""

    tokens: list[int]
    seconds: float


def num_turns(settings: Any) -> int:
    """Measured pairs of turns in all; ``settings`` are ``Settings``."""
    return len(settings.max_kv_sizes) * settings.repeats * TURNS


def num_tokens(size: int, repeats: int) -> int:
    """Of prompt and text together, with a cache of ``size``."""
    return size + BEYOND + (repeats * TURNS + 1) * TURN_STEPS


def measure_plain_steps(
    models: Models, question: Question, settings: Any, progress: Callable[[Turn], None]
) -> list[dict[str, Any]]:
    """A row of figures for each size of the caches; ``settings`` are ``Settings``."""
    rows = []
    for size in settings.max_kv_sizes:
        prompt = prompt_tokens(question, models.tokenizer, size + BEYOND)
        plain, ours = mlx_lm_tokens(models, prompt, size), our_tokens(models, prompt, size)
        pairs = []
        with wired_limit(models.target, [generation_stream]):
            for tokens in (plain, ours):
                take_turn(tokens)  # with the prompt
            for number in range(settings.repeats * TURNS):
                order = (plain, ours) if number % 2 else (ours, plain)
                turns = {tokens: take_turn(tokens) for tokens in order}
                pairs.append((turns[plain], turns[ours]))
                progress(turns[ours])
        rows.append(plain_steps_result(size, len(prompt), pairs))
    return rows


def mlx_lm_tokens(models: Models, prompt: list[int], size: int) -> Iterator[int]:
    """mlx-lm's own text without end."""
    cache = make_prompt_cache(models.target, size)
    steps = generate_step(
        mx.array(prompt),
        models.target,
        max_tokens=-1,
        prompt_cache=cache,
        prefill_step_size=PREFILL_STEP,
    )
    return (token for token, _ in steps)


def our_tokens(models: Models, prompt: list[int], size: int) -> Iterator[int]:
    """The same from our loop, with drafting off from the beginning."""
    decoder = open_decoder(
        models.target,
        begin_drafter(models.drafter, None),
        make_prompt_cache(models.target, size),
        UNQUANTIZED,
        generation_stream,
        sampler=None,
        logits_processors=None,
        acceptance=None,
    )
    for _ in decoder.prefill_chunks(mx.array(prompt), PREFILL_STEP):
        pass
    generation = Generation(decoder, Limits(-1, ()))
    controller = FixedController(PLAIN, drafting_off=True)
    for done in Pipeline(generation, controller, decoder.launch_first()):
        yield from done.run


def take_turn(tokens: Iterator[int]) -> Turn:
    """So many steps, after which nothing is left in flight."""
    taken, ends = [], []
    for token in islice(tokens, TURN_STEPS):
        taken.append(token)
        ends.append(time.perf_counter())
    mx.synchronize(generation_stream)
    return Turn(taken, (ends[-1] - ends[0]) / (len(ends) - 1))


def plain_steps_result(size: int, context: int, pairs: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    """One size: seconds per step of the median turn, and the ratio within pairs of turns.

    ``ratio`` is ours in steps per second over mlx-lm's.
    """
    plain, ours = zip(*pairs)
    return {
        "max_kv_size": size,
        "context": context,
        "plain_step_seconds": spread_of(turn.seconds for turn in plain),
        "step_seconds": spread_of(turn.seconds for turn in ours),
        "ratio": spread_of(p.seconds / o.seconds for p, o in pairs),
        "identical": [turn.tokens for turn in plain] == [turn.tokens for turn in ours],
    }


def plain_steps_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Plain steps on full rotating caches, ours while drafting is off beside mlx-lm's."""
    header = ["entries", "prompt tokens", "mlx-lm ms", "drafting off ms", "ratio of speeds",
              "tokens identical"]  # fmt: skip
    lines = [
        [
            str(row["max_kv_size"]),
            str(row["context"]),
            with_spread(row["plain_step_seconds"], milliseconds),
            with_spread(row["step_seconds"], milliseconds),
            with_spread(row["ratio"], lambda value: number(value, 3)),
            "yes" if row["identical"] else "no",
        ]
        for row in rows
    ]
    return Table(header, lines)
