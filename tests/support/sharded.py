"""One of several processes with a part of a target: compares with the whole target, says what.

Run by ``test_sharding.py``, with mlx's ring backend on this machine.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import mlx.core as mx
from architectures import build
from drafter_pairs import tiny_mtp, tiny_qwen3_5
from helpers import (
    PROMPT,
    SIZES,
    byte_tokenizer,
    plain,
    randomize,
    speculative,
    tiny_head,
    tiny_llama,
)
from mlx_lm.generate import generation_stream
from mlx_lm.models import ministral3
from mlx_lm.models.cache import make_prompt_cache

import mlx_eagle
from mlx_eagle.decoding.auto import AdaptiveController
from mlx_eagle.decoding.round_costs import costs_of
from mlx_eagle.decoding.rules import make_rule
from mlx_eagle.drafters.eagle3 import Eagle3Drafter
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.tree import PLAIN, TREES, DraftShape
from mlx_eagle.target_model.target import Target

NUM_TOKENS = 24
PROMPTS = [PROMPT, [9, 8], [11] * 12]


def tiny_ministral3():
    """Full and windowed layers in both halves; the prompt and every text cross the window."""
    args = ministral3.ModelArgs(
        "ministral3",
        **{**SIZES, "num_hidden_layers": 4},
        layer_types=["full_attention", "sliding_attention"] * 3,
        sliding_window=12,
        rope_parameters={
            "type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    )
    return randomize(ministral3.Model(args), 3)


def split(model):
    model.model.pipeline(mx.distributed.init())


def shard(model):
    model.shard(mx.distributed.init())


CASES = {
    "tensor, llama": (tiny_llama, shard),
    "tensor, qwen3": (lambda: build("qwen3"), shard),
    "tensor, qwen3_moe": (lambda: build("qwen3_moe"), shard),
    "tensor, qwen3_5 with MTP": (tiny_qwen3_5, shard),
    "pipeline, ministral3": (tiny_ministral3, split),
    "pipeline, qwen3_moe": (lambda: build("qwen3_moe"), split),
    "pipeline, deepseek_v2": (lambda: randomize(build("deepseek_v2"), 4), split),
}


def features(model, taps) -> mx.array:
    # On the stream where the latest pass may still be exchanging things with the other process.
    with mx.stream(generation_stream):
        features = Target(model, taps)(mx.array(PROMPT), make_prompt_cache(model))[1]
        mx.eval(features)
    return features


def batch(model, drafter, num_draft_tokens: int | str = 3) -> list[list[int]]:
    return mlx_eagle.batch_generate(
        model,
        byte_tokenizer(),
        PROMPTS,
        max_tokens=[20, 5, 12],
        draft_model=drafter,
        num_draft_tokens=num_draft_tokens,
        return_token_ids=True,
    ).token_ids


def written(model, drafter, has_trees: bool, in_few_ways: bool) -> dict:
    """What a target writes with a drafter, and how many drafts were accepted on the way."""
    texts = {}
    for k in (3,) if in_few_ways else (1, 3):
        tokens, stats = speculative(model, drafter, PROMPT, NUM_TOKENS, num_draft_tokens=k)
        texts[f"k = {k}"] = tokens, stats.accepted_histogram
    texts["batch"] = batch(model, drafter), None
    if in_few_ways:
        return texts
    if has_trees:
        tree = mlx_eagle.parse_tree("3x3:8")
        tokens, stats = speculative(model, drafter, PROMPT, NUM_TOKENS, tree=tree)
        texts["tree"] = tokens, stats.accepted_histogram
    tokens, _ = speculative(model, LookupDrafter(), PROMPT, NUM_TOKENS)
    texts["lookup"] = tokens, None
    texts["small chunks"] = (
        speculative(model, drafter, PROMPT * 3, NUM_TOKENS, prefill_step_size=4)[0],
        None,
    )
    return texts


@contextmanager
def counting() -> Iterator[list[str]]:
    """The exchanges that Python asks for in this block, by name."""
    names = ("all_sum", "all_gather", "send", "recv", "recv_like")
    before = {name: getattr(mx.distributed, name) for name in names}
    asked: list[str] = []

    def counted(name: str):
        def exchange(*args, **options):
            asked.append(name)
            return before[name](*args, **options)

        return exchange

    for name in names:
        setattr(mx.distributed, name, counted(name))
    try:
        yield asked
    finally:
        for name in names:
            setattr(mx.distributed, name, before[name])


def exchanges(model, drafter, num_draft_tokens: int | str) -> tuple[list[int], float, int]:
    """The text, the exchanges of a round beyond those of a plain step, and the times learnt."""
    short, long = 4, NUM_TOKENS
    speculative(model, drafter, PROMPT, short, num_draft_tokens=num_draft_tokens)  # may try trees
    with counting() as of_short:
        plain(model, PROMPT, short, prefill_step_size=512)
    with counting() as of_long:
        plain(model, PROMPT, long, prefill_step_size=512)
    per_step = (len(of_long) - len(of_short)) / (long - short)
    found = []
    for num_tokens in (short, long):
        with counting() as asked:
            tokens, stats = speculative(
                model, drafter, PROMPT, num_tokens, num_draft_tokens=num_draft_tokens
            )
        passes = stats.num_target_forwards
        found.append((len(asked) - per_step * passes, passes))
    more, passes = (b - a for a, b in zip(*found, strict=True))
    costs = costs_of(model, drafter, make_rule(None, None))
    return tokens, more / passes, len(costs._run)


@contextmanager
def trees_by_auto() -> Iterator[None]:
    """Let rank 0's ``auto`` choose trees, chains and plain steps in turn in this block."""
    before = AdaptiveController._next_shape
    turns = cycle([TREES[1], DraftShape(2), TREES[0], PLAIN, TREES[1]])
    AdaptiveController._next_shape = lambda *_: next(turns)
    try:
        yield
    finally:
        AdaptiveController._next_shape = before


def whole_and_part(name: str):
    """A target, this rank's part of one, and a drafter for each."""
    make, spread = CASES[name]
    whole, part = make(), make()
    if name.endswith("MTP"):
        drafter = tiny_mtp(whole)
        mine = tiny_mtp(part)
    else:
        drafter = tiny_head(whole)
        mine = Eagle3Drafter(drafter.head, drafter._embed, drafter.taps, drafter.to_target)
    return whole, part, drafter, mine, spread


def compare(name: str, in_few_ways: bool) -> dict[str, bool]:
    whole, part, drafter, mine, spread = whole_and_part(name)
    num_layers = len(whole.layers)
    taps = (0, 1, num_layers // 2, num_layers - 1, num_layers, num_layers + 1)
    has_trees = "MTP" not in name
    reference = written(whole, drafter, has_trees, in_few_ways)
    spread(part)
    ours = written(part, mine, has_trees, in_few_ways)
    results = {f"{what} as whole": ours[what] == reference[what] for what in reference}
    results["plain as whole"] = plain(part, PROMPT, NUM_TOKENS) == ours["k = 3"][0]
    seen, expected = features(part, taps), features(whole, taps)
    error = mx.abs(seen - expected).max() / mx.abs(expected).max()
    results["features as whole"] = error.item() < 1e-4
    if not in_few_ways:
        # What rounds cost is measured by rank 0: the choice must still be one.
        text, more, num_timed = exchanges(part, mine, "auto")
        results["auto"] = text == ours["k = 3"][0]
        results["batch, auto"] = batch(part, mine, "auto") == ours["batch"][0]
        # The choice, which in a pipeline travels with what the head reads.
        results[f"{more:.2f} exchanges more a round"] = more <= 1
        if has_trees:
            with trees_by_auto():
                text, stats = speculative(part, mine, PROMPT, NUM_TOKENS, num_draft_tokens="auto")
            results["trees by auto"] = text == ours["k = 3"][0]
            results["trees were drawn"] = stats.num_drafted > sum(stats.draft_lengths)
        results["rank 0 learns"] = (num_timed > 0) == (mx.distributed.init().rank() == 0)
    results["is split"] = len(part.layers) < num_layers or "tensor" in name
    return results


def refusal() -> str:
    """What is said of a pipeline with recurrent layers."""
    model = randomize(build("qwen3_next"), 4)
    split(model)
    try:
        speculative(model, LookupDrafter(), PROMPT, 4)
    except ValueError as err:
        return str(err)
    return "nothing"


if __name__ == "__main__":
    mx.distributed.init(strict=True, backend="ring")
    (name,) = sys.argv[1:]
    if name == "refusal":
        print(json.dumps(refusal()))
    else:
        case, _, how = name.partition("/")
        print(json.dumps(compare(case, how == "few")))
