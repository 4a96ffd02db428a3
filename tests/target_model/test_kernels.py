"""Which of Metal's kernels the passes of a round take, for four published targets in 4 bits.

Two layers each, of the published sizes but for vocabularies, which are only wide; nothing is
multiplied.
"""

from collections import Counter
from copy import deepcopy
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
import true_configs
from graph import fused, primitives
from grids import thorough
from helpers import PROMPT, speculative
from metal_rules import GENERATIONS, Attention, Calls, Recorder
from mlx_lm.models import gemma3_text, gpt_oss, llama, qwen3
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.eagle3 import Eagle3Drafter
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.target_model.attention import AttentionOptions, attend_with_options, fused_rows
from mlx_eagle.target_model.cache_view import open_windows
from mlx_eagle.target_model.ragged import RaggedCaches
from mlx_eagle.target_model.rollback import Checkpoint
from mlx_eagle.target_model.target import Target

VOCAB = 8192  # as for all of more than 4096, the output matrix is a wide one
SIZES = {
    "Llama-3.1-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": VOCAB,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": VOCAB,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "Gemma-3-12B": {
        "hidden_size": 3840, "intermediate_size": 15360, "vocab_size": VOCAB,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    },
    "gpt-oss-20b": {
        "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": VOCAB,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    },
}  # fmt: skip
MORE = {
    "Llama-3.1-8B": (llama, {}),
    "Qwen3-8B": (
        qwen3,
        {"max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False},
    ),
    "Gemma-3-12B": (gemma3_text, {"sliding_window_pattern": 2}),
    "gpt-oss-20b": (gpt_oss, {"num_local_experts": 32, "num_experts_per_tok": 4}),
}
NUM_LAYERS = 2
SHAPES = ["2x2:4", "3x3:7", "3x4:11", "6x5:31", "10x6:63"]

# Of a chain of k or a tree: what attention takes in its verify pass.
ATTENTION = {
    "Llama-3.1-8B": {"vector": "1 2 3 4 5 6 7 2x2:4 3x3:7", "tiles": "3x4:11 6x5:31 10x6:63"},
    "Qwen3-8B": {"vector": "1 2 3 4 5 6 7 2x2:4 3x3:7", "tiles": "3x4:11 6x5:31 10x6:63"},
    "Gemma-3-12B": {"vector": "1 2 3 4 5 6 7 2x2:4 3x3:7", "operations": "3x4:11 6x5:31 10x6:63"},
    "gpt-oss-20b": {
        "vector": "1 2 3", "operations": "4 5 6 7 2x2:4 3x3:7", "tiles": "3x4:11 6x5:31 10x6:63",
    },
}  # fmt: skip
# Of the widest matrices: the kernel, and how often it goes through the weights, by rows.
READ_BY_ROW = {
    "vector 2": "2", "vector 3": "3", "vector 4": "4", "vector 5": "5", "matrix 1": "6 7 8 12 32",
}  # fmt: skip
READ_BY_FIVE = {
    "vector 1": "2 3 4 5", "vector 2": "6 7 8", "vector 3": "12", "matrix 1": "32",
}  # fmt: skip
PRODUCTS = {
    generation: {**kernels, "matrix 2": "64"}
    for generations, kernels in (("M1 M2", READ_BY_ROW), ("M3 M4 M5", READ_BY_FIVE))
    for generation in generations.split()
}
# Of those up to 4096 on both sides, as attention's are, the vector kernel has more rows.
MIDDLE_BY_ROW = {f"vector {rows}": str(rows) for rows in range(2, 9)}
MIDDLE_PRODUCTS = {
    generation: {**kernels, "matrix 2": "64"}
    for generations, kernels in (
        ("M1 M2", {**MIDDLE_BY_ROW, "matrix 1": "12 32"}),
        ("M3 M4 M5", READ_BY_FIVE),
    )
    for generation in generations.split()
}


@cache
def pair(name: str) -> tuple[nn.Module, Eagle3Drafter]:
    """Target and head, as shapes: nothing in them is ever computed."""
    module, more = MORE[name]
    sizes = {**SIZES[name], **more, "num_hidden_layers": NUM_LAYERS}
    args = module.ModelArgs.from_dict({"model_type": "a", "rms_norm_eps": 1e-5, **sizes})
    model = module.Model(args)
    config = Eagle3Config(
        target_hidden_size=args.hidden_size, num_layers=1, draft_vocab_size=VOCAB, has_d2t=False,
        num_heads=args.num_attention_heads, num_kv_heads=args.num_key_value_heads,
        aux_boundary_ids=(0, 1, 2), vocab_size=VOCAB,
        **{key: SIZES[name][key] for key in ("hidden_size", "intermediate_size", "head_dim")},
    )  # fmt: skip
    head = Eagle3Head(config)
    for whole in (model, head):
        nn.quantize(whole, 64, 4)
    return model, Eagle3Drafter(head, nn.QuantizedEmbedding(8, args.hidden_size), (0, 1, 2))


@cache
def recorded(name: str, draft: str) -> Recorder:
    """One round of that draft, whose tokens are all right, for every token is the first."""
    recorder = Recorder()
    model, drafter = pair(name)
    tree = parse_tree(draft) if draft in SHAPES else None
    options = {"tree": tree} if tree else {"num_draft_tokens": int(draft)}
    with recorder.recording():
        speculative(model, drafter, PROMPT, (tree.depth if tree else int(draft)) + 2, **options)
    return recorder


def rows_of(draft: str) -> int:
    return int(draft.split(":")[-1]) + 1


def verify_pass(name: str, draft: str) -> Calls:
    """The pass of the target over that draft."""
    passes = recorded(name, draft).target
    return next(calls for calls in passes if calls.attention[0].rows == rows_of(draft))


DRAFTS = [str(k) for k in range(1, 8)] + SHAPES


@pytest.mark.parametrize("name", SIZES)
def test_attention_of_the_verify_pass(name):
    found: dict[str, list[str]] = {}
    for draft in DRAFTS:
        verify = verify_pass(name, draft)
        assert len(verify.attention) == NUM_LAYERS
        (kernel,) = {call.kernel for call in verify.attention}
        found.setdefault(kernel, []).append(draft)
        masks = {call.mask for call in verify.attention}
        assert masks == ({"array"} if ":" in draft else {"causal"})
    assert {kernel: " ".join(drafts) for kernel, drafts in found.items()} == ATTENTION[name]


@pytest.mark.parametrize("name", SIZES)
def test_attention_of_the_heads_passes(name):
    """A draft step has one row, the accept pass those of the verify pass, a tree's level few."""
    recorder = recorded(name, "3")
    steps = [call for call in recorder.head.attention if call.rows == 1]
    assert steps and {(call.kernel, call.mask) for call in steps} == {("vector", "")}
    accept = [call for call in recorder.head.attention if call.rows == 4]
    assert accept and {(call.kernel, call.mask) for call in accept} == {("vector", "causal")}
    levels = [call for call in recorded(name, "3x3:7").head.attention if call.mask == "array"]
    assert {(call.rows, call.kernel) for call in levels} == {(3, "vector")}


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", SIZES)
def test_products_of_the_verify_pass(name, generation):
    """The last matrix and, but in gpt-oss, the MLP's are wide; the price jumps where it says."""
    for draft in DRAFTS:
        products = [p for p in verify_pass(name, draft).products if not p.routed]
        wide = [p for p in products if max(p.inputs, p.outputs) > 4096]
        middle = [p for p in products if p not in wide and min(p.inputs, p.outputs) > 32]
        assert len(wide) == (1 if name == "gpt-oss-20b" else 3 * NUM_LAYERS + 1)
        assert len(middle) == 4 * NUM_LAYERS
        for layers, expected in ((wide, PRODUCTS), (middle, MIDDLE_PRODUCTS)):
            found = {"{} {}".format(*product.kernel(generation)) for product in layers}
            assert found == {of_rows(expected[generation])[rows_of(draft)]}, draft


def of_rows(kernels: dict[str, str]) -> dict[int, str]:
    """The kernel by the number of rows, of a table that has the rows by the kernel."""
    return {int(r): kernel for kernel, rows in kernels.items() for r in rows.split()}


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", SIZES)
def test_products_of_the_heads_passes(name, generation):
    """A draft step goes once through the weights; the accept pass as often as the verify pass."""
    expected = of_rows(PRODUCTS[generation])
    for draft in ("1", "2", "4", "5"):
        products = recorded(name, draft).head.products
        wide = [p for p in products if max(p.inputs, p.outputs) > 4096]
        for rows, kernel in ((1, "vector 1"), (rows_of(draft), expected[rows_of(draft)])):
            found = {"{} {}".format(*p.kernel(generation)) for p in wide if p.rows == rows}
            assert found == {kernel}


@pytest.mark.parametrize("draft, is_sorted", [("1", False), ("7", False), ("6x5:31", True)])
def test_experts_are_sorted_from_64_routed_rows(draft, is_sorted):
    verify = verify_pass("gpt-oss-20b", draft)
    experts = [product for product in verify.products if product.routed]
    assert len(experts) == 3 * NUM_LAYERS
    assert {p.sorted_rows for p in experts} == {is_sorted}
    assert {p.routed for p in experts} == {4 * rows_of(draft)}


def test_the_rule_that_cuts_rows_is_that_of_the_kernel():
    for head_dim in (32, 64, 80, 96, 128, 192, 256, 512):
        for per_key in (1, 2, 3, 4, 5, 7, 8, 16, 32, 64):
            calls = [Attention(n, per_key, 1, head_dim, 2000, "causal") for n in range(1, 9)]
            of_vector = [call for call in calls if call.kernel == "vector"]
            assert len(of_vector) == fused_rows(head_dim, per_key)


@pytest.mark.parametrize("per_key, one", [(4, "vector"), *((n, "grouped") for n in (8, 12, 16))])
def test_on_long_contexts_one_row_may_take_a_kernel_of_its_own(per_key, one):
    """With 8 query heads per key head, not with 4: c(R) has a step, and ties may fall anew."""
    kernels = [
        [Attention(n, per_key, 1, 64, num_keys, "causal").kernel for n in (1, 2)]
        for num_keys in (8191, 8192)
    ]
    assert kernels == [["vector", "vector"], [one, "vector"]]


@pytest.mark.parametrize("num_rows", [5, 8])
def test_cut_into_parts_all_of_gpt_oss_takes_the_vector_kernel(num_rows):
    model, _ = pair("gpt-oss-20b")
    target, cache, recorder = Target(model), make_prompt_cache(model), Recorder()
    target.attention.is_on = True
    with recorder.recording():
        target(mx.zeros((20,), mx.int32), cache)
        target(mx.zeros((num_rows,), mx.int32), cache)
    calls = recorder.target[1].attention
    assert [call.rows for call in calls] == [4, num_rows - 4] * NUM_LAYERS
    assert {call.kernel for call in calls} == {"vector"}


WINDOWED = {
    "gpt-oss-20b": true_configs.GPT_OSS_20B,
    "Gemma-4-31B": true_configs.GEMMA4_31B,
    "Gemma-4-26B-A4B": true_configs.GEMMA4_26B_A4B,
}


def one_period(config: dict) -> nn.Module:
    """The attention of the published sizes in one period of its layers; all else is tiny."""
    num_layers = config.get("text_config", config).get("sliding_window_pattern", 2)
    return true_configs.with_tiny_weights(config, num_hidden_layers=num_layers)


@pytest.mark.parametrize("name", thorough([*SIZES, *WINDOWED], *SIZES, "Gemma-4-26B-A4B"))
def test_a_batch_has_one_mask_a_round_and_no_kernel_copies_it(name, monkeypatch):
    """Metal's kernels copy a mask of several texts that does not go through all heads in order."""
    model = pair(name)[0] if name in SIZES else one_period(WINDOWED[name])
    target, caches, masks, recorder = Target(model), RaggedCaches(), [], Recorder()
    monkeypatch.setattr(
        recorder, "_attention", lambda q, k, v, *, mask, **_: masks.append((mask, q)) or q
    )
    for _ in range(3):
        caches.join(make_prompt_cache(model))
    kinds = {type(cache) for cache in make_prompt_cache(model)}
    for num_rows in (1, 4):
        with recorder.recording():
            target.batch(mx.zeros((3, num_rows), mx.int32), caches.open())
        assert len(masks) == len(model.layers)
        assert len({id(mask) for mask, _ in masks}) == len(kinds)
        for mask, queries in masks:
            assert mask.shape == (*queries.shape[:3], mask.shape[-1])
            mx.eval(mask)
            assert memoryview(mask).c_contiguous
        masks.clear()


@pytest.mark.parametrize("name", thorough(WINDOWED, "gpt-oss-20b"))
def test_no_pass_makes_an_array_of_a_windows_size(name):
    """Rows are written in place and windows are slices, whatever passes follow each other."""
    model = one_period(WINDOWED[name])
    mx.eval(model.parameters())
    target, caches = Target(model), make_prompt_cache(model)
    windows = [cache for cache in caches if type(cache) is RotatingKVCache]
    prompt = mx.zeros((windows[0].max_size + 8,), mx.int32)
    with fused():
        target(prompt, caches)
        mx.eval([cache.state for cache in caches])
        stock = deepcopy(caches)
        open_windows(caches)
        for made in (caches, stock):  # the first pass makes room
            mx.eval(target(prompt[:4], made)[0], [cache.state for cache in made])
        size = min(cache.max_size * cache.keys[0, :, 0].nbytes for cache in windows)
        for num_rows, kept in ((4, 2), (1, 1), (4, 0), (1, 1), (5, 3)):
            num_primitives, peak = cost_of_a_pass(target, caches, num_rows, kept)
            expected, theirs = cost_of_a_pass(target, stock, num_rows, kept)
            assert peak < size
            assert theirs > size or num_rows == 1, "that this can fail"
            # A plain step is mlx-lm's, and two slices a layer, which nothing has to run for.
            slices = 2 * len(windows) if num_rows == 1 else 0
            assert num_primitives.total() <= expected.total() + slices, num_rows
            assert num_primitives["Concatenate"] <= expected["Concatenate"]


def cost_of_a_pass(target: Target, caches: list, num_rows: int, kept: int) -> tuple[Counter, int]:
    """Its operations, and the most bytes that it takes at once; so many rows stay."""
    before, start = Checkpoint(caches, num_rows=num_rows), mx.get_active_memory()
    mx.reset_peak_memory()
    logits, _ = target(mx.zeros((num_rows,), mx.int32), caches)
    arrays = [logits, *(array for cache in caches for array in (cache.keys, cache.values))]
    found = primitives(*arrays)
    mx.eval(arrays)
    peak = mx.get_peak_memory() - start
    if kept < num_rows:
        before.rollback(kept)
    return found, peak


@pytest.mark.parametrize("num_keys, rows", [(1100, [1] * 4), (500, [4])])
def test_passes_of_gemma_4s_widest_heads_are_cut_into_single_rows(num_keys, rows):
    """Metal has a kernel for one row of 512 alone, with 8 query heads per key head."""
    options, recorder = AttentionOptions(is_on=True), Recorder()
    queries, keys = mx.zeros((1, 8, 4, 512)), mx.zeros((1, 1, num_keys, 512))
    with recorder.recording():
        attend_with_options(options, queries, keys, keys, None, 1.0, "causal")
    calls = recorder.head.attention
    assert [call.rows for call in calls] == rows and options.matters == (rows[0] == 1)
    assert [call.num_keys for call in calls] == (
        [num_keys - 3 + r for r in range(4)] if options.matters else [num_keys]
    )
