"""One of several processes with a part of a target: compares with the whole target, says what.

Run by ``test_sharding.py``, with mlx's ring backend on this machine.
"""

import json
import sys

import mlx.core as mx
from architectures import build
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
from mlx_eagle.drafters.eagle3 import Eagle3Drafter
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.target.target import Target

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
    "pipeline, ministral3": (tiny_ministral3, split),
    "pipeline, deepseek_v2": (lambda: randomize(build("deepseek_v2"), 4), split),
}


def features(model, taps) -> mx.array:
    # On the stream where the latest pass may still be exchanging things with the other process.
    with mx.stream(generation_stream):
        features = Target(model, taps)(mx.array(PROMPT), make_prompt_cache(model))[1]
        mx.eval(features)
    return features


def batch(model, drafter) -> list[list[int]]:
    return mlx_eagle.batch_generate(
        model,
        byte_tokenizer(),
        PROMPTS,
        max_tokens=[20, 5, 12],
        draft_model=drafter,
        num_draft_tokens=3,
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


def compare(name: str, in_few_ways: bool) -> dict[str, bool]:
    make, spread = CASES[name]
    whole, part = make(), make()
    num_layers = len(whole.layers)
    drafter = tiny_head(whole)
    taps = (0, 1, num_layers // 2, num_layers - 1, num_layers, num_layers + 1)
    has_trees = "deepseek" not in name
    reference = written(whole, drafter, has_trees, in_few_ways)
    spread(part)
    mine = Eagle3Drafter(drafter.head, drafter._embed, drafter.taps, drafter.to_target)
    ours = written(part, mine, has_trees, in_few_ways)
    results = {f"{what} as whole": ours[what] == reference[what] for what in reference}
    results["plain as whole"] = plain(part, PROMPT, NUM_TOKENS) == ours["k = 3"][0]
    seen, expected = features(part, taps), features(whole, taps)
    error = mx.abs(seen - expected).max() / mx.abs(expected).max()
    results["features as whole"] = error.item() < 1e-4
    if "ministral3" in name:
        # What rounds cost is measured by each: the choice must still be one.
        tokens, _ = speculative(part, mine, PROMPT, NUM_TOKENS, num_draft_tokens="auto")
        results["auto"] = tokens == ours["k = 3"][0]
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
