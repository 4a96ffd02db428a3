"""Attention cut into parts that a kernel takes: the same text, and only what can be cut is cut."""

import mlx.core as mx
import pytest
from architectures import build
from grids import thorough
from helpers import (
    CROWDED,
    FUSED,
    PROMPT,
    SCRIPTS,
    ScriptedDrafter,
    plain,
    tiny_head,
    tiny_llama,
    tiny_qwen3,
)
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from tolerances import tolerance
from tree_drafters import ScriptedTreeDrafter

from mlx_eagle.decoding.auto import FixedController
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.loop import Pipeline, SingleRunner
from mlx_eagle.decoding.setup import open_decoder
from mlx_eagle.drafters.tree import DraftShape, TreeShape
from mlx_eagle.target_model.attention import find_attention, fused_rows
from mlx_eagle.target_model.kernels import KernelOptions
from mlx_eagle.target_model.rollback import CacheQuantization
from mlx_eagle.target_model.target import Target

MODELS = {
    "plain": (lambda: tiny_llama(**CROWDED), lambda: KVCache()),
    "rotating": (lambda: tiny_llama(**CROWDED), lambda: RotatingKVCache(max_size=12, keep=4)),
    "qk norm": (lambda: tiny_qwen3(**CROWDED), lambda: KVCache()),
}


@pytest.fixture
def rows(monkeypatch):
    """The rows and keys of every call of MLX's attention, in order."""
    seen, attention = [], mx.fast.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        seen.append((q.shape[2], k.shape[2]))
        return attention(q, k, v, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spy)
    return seen


def decode(model, drafter, cache, shape, num_tokens, options) -> list[int]:
    """The tokens of a generation whose rounds are computed by these options."""
    decoder = open_decoder(
        model, drafter.begin(), cache, CacheQuantization(None, 64, 0), mx.default_stream(mx.cpu),
        sampler=None, logits_processors=None, acceptance=None, tree=shape.tree,
    )  # fmt: skip
    decoder.use(options)
    decoder.prefill(mx.array(PROMPT), 2048, lambda *_: None)
    generation = SingleRunner(decoder, Limits(num_tokens, ()))
    rounds = Pipeline(generation, FixedController(shape), decoder.launch_first())
    return [token for done in rounds for token in done.run]


@pytest.mark.parametrize(
    "case",
    thorough(
        [(name, shape) for name in MODELS for shape in ("7", "4", "2x3:6")],
        ("plain", "2x3:6"),
        ("rotating", "7"),
    ),
)
def test_the_text_is_plain_decodings(case, rows):
    name, shape = case
    make, make_cache = MODELS[name]
    model = make()
    caches = lambda: [make_cache() for _ in model.layers]  # noqa: E731
    text = PROMPT + plain(model, PROMPT, 50, prompt_cache=caches())
    tree = TreeShape.parse(shape) if "x" in shape else None
    kind = ScriptedTreeDrafter if tree else ScriptedDrafter
    drafter = kind(text, SCRIPTS["every length"])
    size = tree.depth if tree else int(shape)
    rows.clear()
    options = KernelOptions(splits_attention=True)
    tokens = decode(model, drafter, caches(), DraftShape(size, tree), 30, options)
    assert tokens == text[len(PROMPT) :][:30]
    in_rounds = [num for num, _ in rows[len(model.layers) :]]
    assert max(in_rounds) == 4, "8 query heads per key head: 4 rows are the most"


def test_each_part_reads_the_keys_up_to_its_last_row(rows):
    model = tiny_llama(**CROWDED)
    target, cache = Target(model), make_prompt_cache(model)
    target.attention.is_on = True
    tokens = mx.array([*PROMPT, 3, 4, 5])
    target(tokens, cache)  # ten rows: another kernel's
    whole = Target(model)
    expected, _ = whole(mx.array([7, 8, 9, 1, 2, 6]), [copy(c) for c in cache])
    assert target.attention.matters and {num for num, _ in rows} == {10, 6}
    rows.clear()
    logits, _ = target(mx.array([7, 8, 9, 1, 2, 6]), cache)
    assert rows == [(4, 14), (2, 16)] * len(model.layers)
    assert mx.allclose(logits, expected, rtol=tolerance(), atol=tolerance()).item()


def copy(cache: KVCache) -> KVCache:
    new = KVCache()
    new.update_and_fetch(*(array[..., : cache.offset, :] for array in cache.keys_and_values()))
    return new


@pytest.mark.parametrize(
    "changes, num_rows",
    [
        ({"num_key_value_heads": 2, "head_dim": 64}, 8),  # 2 query heads per key head: 8 rows fit
        ({**CROWDED, "head_dim": 16}, 8),  # no kernel for the head dimension
        (CROWDED, 9),  # rows of the next kernel
    ],
)
def test_what_need_not_or_cannot_be_cut_is_left_alone(changes, num_rows, rows):
    model = tiny_llama(**changes)
    target, cache = Target(model), make_prompt_cache(model)
    target.attention.is_on = True
    target(mx.arange(num_rows), cache)
    assert rows == [(num_rows, num_rows)] * len(model.layers)


def test_the_users_model_and_others_targets_keep_their_attention(rows):
    model = tiny_llama(**CROWDED)
    target = Target(model)
    target.attention.is_on = True
    Target(model)(mx.arange(8), make_prompt_cache(model))
    model(mx.arange(8)[None], cache=make_prompt_cache(model))
    assert rows == [(8, 8)] * 2 * len(model.layers)


def test_attention_sinks_and_windows_go_through(rows):
    """gpt-oss: 8 query heads per key head, sinks in every layer, windows in every other."""
    model = build("gpt_oss (20b)", head_dim=64)
    tokens = mx.array(PROMPT * 2)
    split, whole = (Target(model) for _ in range(2))
    split.attention.is_on = True
    results = []
    for target in (split, whole):
        cache = make_prompt_cache(model)
        target(tokens, cache)
        results.append(target(mx.arange(8), cache)[0])
    assert mx.allclose(*results, rtol=10 * tolerance(), atol=10 * tolerance()).item()
    assert [num for num, _ in rows].count(4) == 2 * len(model.layers)


@pytest.fixture
def seen(is_there, monkeypatch) -> list[tuple[int, bool]]:
    """The rows of each call, and whether a kernel was forced; MLX may have none."""
    calls, attention = [], mx.fast.scaled_dot_product_attention

    def stand_in(q, k, v, *, force_fused=False, **options):
        if force_fused and not is_there:
            raise ValueError("no fused kernel is available")
        calls.append((q.shape[2], force_fused))
        return attention(q, k, v, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", stand_in)
    return calls


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("changes", [CROWDED, {"head_dim": 80}, FUSED], ids=str)
def test_a_kernel_is_forced_where_mlx_would_take_none(changes, is_there, seen):
    """In passes of 2 to 8 rows, and mlx-lm's way stays where there is no kernel; by a stand-in."""
    model = tiny_llama(**changes)
    text = PROMPT + plain(model, PROMPT, 40)
    drafter = ScriptedDrafter(text, SCRIPTS["every length"])
    for size, num_rows in ((3, 4), (7, 8)):
        seen.clear()
        options, cache = KernelOptions(forces_fused=True), make_prompt_cache(model)
        tokens = decode(model, drafter, cache, DraftShape(size), 20, options)
        assert tokens == text[len(PROMPT) :][:20]
        ways = {is_forced for rows, is_forced in seen if rows == num_rows}
        most = fused_rows(model.args.head_dim, 8 if changes == CROWDED else 2)
        assert ways == {is_there and num_rows > most}
        assert not any(is_forced for rows, is_forced in seen if rows == 1)


@pytest.mark.parametrize("is_there, expected", [(True, [(8, True)]), (False, [(4, False)] * 2)])
def test_a_kernel_is_forced_in_place_of_parts(is_there, expected, seen):
    """Parts may have been chosen before it is tried, and stay where MLX has no such kernel."""
    model = tiny_llama(**CROWDED)
    target = Target(model)
    target.attention.use(is_on=True, is_forced=True)
    target(mx.arange(8), make_prompt_cache(model))
    assert seen == expected * len(model.layers)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "gpt_oss (20b)", "qwen3_next", "qwen3_moe"]
)
def test_attention_modules_are_found(name):
    model = build(name)
    caches = [c for c in make_prompt_cache(model) if type(c) in (KVCache, RotatingKVCache)]
    assert len(find_attention(model)) == len(caches)


def test_a_head_is_no_part_of_it():
    """What a drafter runs is not the target's: one row per step, or the rows of a tree."""
    model = tiny_llama(**CROWDED)
    text = plain(model, PROMPT, 20)
    drafter = tiny_head(model)
    options = KernelOptions(splits_attention=True, uses_overlay=True)
    assert decode(model, drafter, make_prompt_cache(model), DraftShape(7), 20, options) == text
