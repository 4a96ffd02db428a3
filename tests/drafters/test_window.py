"""A window on the head's cache: what is drafted, against naive twins, and what is kept."""

import mlx.core as mx
import pytest
from drafter_pairs import LATENT, PAIRS
from grids import thorough
from heads import VARIANTS
from helpers import PROMPT, VOCAB, byte_tokenizer, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from mlx_eagle import batch_generate
from mlx_eagle.commands.flags import DRAFT_WINDOW
from mlx_eagle.decoding.accept import Match
from mlx_eagle.draft_models import open_beside
from mlx_eagle.drafters.eagle3 import EagleDrafter
from mlx_eagle.drafters.head_cache import SINKS
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.server.caches import PairCache, prepare
from mlx_eagle.target_model.rollback import Checkpoint

MODEL = tiny_llama()
NUM_CACHES = len(make_prompt_cache(MODEL))
HEADS = {
    "default": VARIANTS["default"],
    "three layers": VARIANTS["three layers, every"],
    "yarn rope": VARIANTS["yarn rope"],
    "latent": LATENT,
}
# Rows absorbed at once, and how many of them count; None: the rows of a prompt, which all do.
PASSES = [(9, None), (1, 1), (4, 2), (3, 3), (6, 1), (1, 1), (1, 1), (5, 5), (8, None), (4, 3)]


class Seen:
    """A greedy pick that remembers the logits it chose from."""

    def __init__(self) -> None:
        self.rows: list[mx.array] = []

    def __call__(self, logits: mx.array, to_target: mx.array | None) -> mx.array:
        self.rows.append(logits[0])
        return mx.argmax(logits, axis=-1)


def naive_chain(drafter: EagleDrafter, tokens: mx.array, features: mx.array, size: int):
    """Logits (size, Vd) of a draft: all slots kept, and masks that leave most of them out."""
    head, embed, window = drafter.head, drafter._embed, drafter.draft_window
    caches, num = drafter.with_draft_window(None).make_cache()[:-1], tokens.shape[0]
    rows, slots = mx.arange(num)[:, None], mx.arange(num)
    mask = (slots <= rows) & ((slots < SINKS) | (slots > rows - window))
    state = head(embed(tokens), head.fuse(features), caches, 0, mask)[-1:]
    committed, logits = ((slots < SINKS) | (slots >= num - window))[None], [head.logits(state)]
    for i in range(size - 1):
        token = drafter.to_target[mx.argmax(logits[-1], axis=-1)]
        mask = mx.concatenate([committed, mx.ones((1, i + 1), mx.bool_)], axis=1)
        state = head(embed(token), state, caches, num + i, mask)
        logits.append(head.logits(state))
    return mx.concatenate(logits)


def naive_masked(drafter: EagleDrafter, tokens: mx.array, features: mx.array, size: int):
    """The same of a P-EAGLE head, in one pass over pairs and masked slots."""
    head, window, num = drafter.head, drafter.draft_window, tokens.shape[0]
    slots = mx.arange(num + size - 1)
    rows = slots[:, None]
    mask = (slots < SINKS) | (slots > rows - window) | ((rows >= num) & (slots >= num - 1))
    masks = mx.full((size - 1,), head.config.mask_token_id)
    embeddings = drafter._embed(mx.concatenate([tokens, masks]))
    states = mx.concatenate([head.fuse(features), head.masked(size - 1)])
    caches = drafter.with_draft_window(None).make_cache()[:-1]
    states = head(embeddings, states, caches, 0, mask & (slots <= rows))
    return head.logits(states[num - 1 :])


def check_drafts(drafter: EagleDrafter, naive, sizes: list[int], most: float = 1e-3) -> None:
    """Absorb as the loop does, and compare what is drafted after every pass."""
    total, kept = sum(rows for rows, _ in PASSES), mx.zeros((0,), mx.int32)
    tokens = mx.random.randint(0, VOCAB, (total,), key=mx.random.key(1))
    features = mx.random.normal((total, drafter.width), key=mx.random.key(2))
    start, size = 0, sizes[0]
    for turn, (num_rows, num_kept) in enumerate(PASSES):
        rows = mx.arange(start, start + num_rows)
        before = Checkpoint(drafter.cache)
        last = None if num_kept is None else mx.array(num_kept - 1)
        drafter.extend(tokens[rows], features[rows], last)
        if num_kept is not None and num_kept < num_rows:
            before.rollback(num_kept)
        kept = mx.concatenate([kept, rows[:num_kept]])
        start, size, seen = start + num_rows, sizes[turn % len(sizes)], Seen()
        drafter.propose(size, seen)
        wanted = naive(drafter, tokens[kept], features[kept], size)
        assert mx.allclose(mx.stack(seen.rows), wanted, atol=most, rtol=1e-3).item()
        assert drafter.cache[0].offset == kept.size
        assert drafter.cache[0].keys.shape[2] <= SINKS + drafter.draft_window + num_rows + 4


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("window", thorough([1, 2, 5, 8, 20, 60], 5))
@pytest.mark.parametrize("variant", thorough(HEADS, "default", "three layers"))
def test_chains_equal_a_naive_twin(variant, window, tail):
    drafter = tiny_head(MODEL, 1, **HEADS[variant]).with_draft_window(window).begin()
    drafter.use_overlay(tail)
    if variant == "three layers":  # of one rounding they make a hundred at each step
        check_drafts(drafter, naive_chain, [2, 1, 2], 2e-2)
    else:
        check_drafts(drafter, naive_chain, [3, 1, 5])


@pytest.mark.parametrize("window", thorough([1, 2, 5, 8, 20, 60], 5))
@pytest.mark.parametrize("sizes", thorough([[1], [2], [4], [1, 2, 5, 3]], [1, 2, 5, 3]), ids=str)
def test_masked_slots_equal_a_naive_twin(sizes, window):
    head = tiny_head(MODEL, 4, num_layers=2, mask_token_id=9).with_draft_window(window)
    check_drafts(head.begin(), naive_masked, sizes)


@pytest.mark.parametrize("tail", [False, True])
def test_trees_see_the_window_and_their_ancestors(tail):
    """Every path of a tree has the logits of a chain of those tokens."""
    drafter = tiny_head(MODEL, 1).with_draft_window(5).begin()
    drafter.use_overlay(tail)
    tokens = mx.random.randint(0, VOCAB, (30,), key=mx.random.key(1))
    features = mx.random.normal((30, drafter.width), key=mx.random.key(2))
    drafter.extend(tokens, features)
    chain = drafter.propose(4, Match().pick).tokens.tolist()
    tree = drafter.propose_tree(parse_tree("2x4:12"), Match().pick_children)
    row, found = 0, []
    parents, ids = tree.parents.tolist(), tree.tokens.tolist()
    for token in chain:
        row = 1 + next(
            i for i, (p, t) in enumerate(zip(parents, ids, strict=True)) if (p, t) == (row, token)
        )
        found.append(ids[row - 1])
    assert found == chain and drafter.cache[0].offset == 30


WINDOWED = [
    "eagle-3", "eagle-3, latent", "eagle-3, parallel heads", "p-eagle", "lagging", "head+lookup",
]  # fmt: skip
OPTIONS = {
    "k=1": {"num_draft_tokens": 1},
    "k=4": {"num_draft_tokens": 4},
    "tree": {"tree": "2x3:6"},
}


def pair_of(name: str, window: int | None):
    if name == "lagging":
        return MODEL, tiny_head(MODEL).with_draft_cache("lagging").with_draft_window(window)
    if name == "head+lookup":
        return MODEL, tiny_head(MODEL).with_draft_window(window).with_copies()
    model, drafter = PAIRS[name]
    return model, drafter.with_draft_window(window)


def takes(name: str, options: dict) -> bool:
    return "tree" not in options or name not in ("p-eagle", "lagging")


@pytest.mark.parametrize("name", thorough(WINDOWED, "eagle-3", "p-eagle"))
@pytest.mark.parametrize("options", thorough(OPTIONS, "k=4"))
def test_the_text_is_the_targets_and_the_cache_is_bounded(name, options):
    if not takes(name, OPTIONS[options]):
        return
    model, drafter = pair_of(name, 3)
    cache = make_prompt_cache(model) + drafter.make_cache()
    num_target = len(make_prompt_cache(model))
    tokens, stats = speculative(
        model, drafter, PROMPT, 40, prefill_step_size=4, prompt_cache=cache, **OPTIONS[options]
    )
    assert tokens == plain(model, PROMPT, 40)
    assert stats.num_drafted > 0
    head = cache[num_target]
    assert head.keys.shape[2] <= SINKS + 3 + 7
    if name != "lagging":
        assert head.offset == len(PROMPT) + len(tokens) - 1


@pytest.mark.parametrize("name", thorough(WINDOWED, "eagle-3"))
@pytest.mark.parametrize("options", thorough(OPTIONS, "tree"))
def test_a_window_longer_than_the_text_changes_nothing(name, options):
    if not takes(name, OPTIONS[options]):
        return
    drafts = []
    for window in (None, 60):
        model, drafter = pair_of(name, window)
        drafts.append(speculative(model, drafter, PROMPT, 30, **OPTIONS[options]))
    (tokens, stats), (others, their_stats) = drafts
    assert tokens == others
    assert stats.accepted_histogram == their_stats.accepted_histogram
    assert stats.num_head_forwards == their_stats.num_head_forwards


@pytest.mark.exhaustive
def test_saved_and_loaded_between_turns(tmp_path):
    drafter, file = tiny_head(MODEL).with_draft_window(4), str(tmp_path / "cache.safetensors")
    kept, saved = (make_prompt_cache(MODEL) + drafter.make_cache() for _ in range(2))
    for turn in (PROMPT, [9, 33, 7], [12]):
        ours = speculative(MODEL, drafter, turn, 12, num_draft_tokens=3, prompt_cache=kept)
        save_prompt_cache(file, saved)
        saved = load_prompt_cache(file)
        theirs = speculative(MODEL, drafter, turn, 12, num_draft_tokens=3, prompt_cache=saved)
        assert ours[0] == theirs[0]
        assert ours[1].accepted_histogram == theirs[1].accepted_histogram


def test_caches_of_another_window_are_refused():
    with_all, with_4 = tiny_head(MODEL), tiny_head(MODEL).with_draft_window(4)
    cache = make_prompt_cache(MODEL) + with_4.make_cache()
    with pytest.raises(ValueError, match=r"holds a window of 8 slots .* keeps all slots: give"):
        speculative(MODEL, with_all, PROMPT, 5, prompt_cache=cache)
    cache = make_prompt_cache(MODEL) + with_all.make_cache()
    with pytest.raises(ValueError, match=r"holds all slots .* keeps a window of 8 slots: give"):
        speculative(MODEL, with_4, PROMPT, 5, prompt_cache=cache)


@pytest.mark.parametrize("window", [4, 60])
def test_the_servers_store_trims_the_text_or_starts_cold(window):
    """A full window cannot be cut back: then the target's part is still found."""
    drafter, store = tiny_head(MODEL).with_draft_window(window), PairCache()
    caches = prepare(None, MODEL, drafter, [])
    tokens, _ = speculative(MODEL, drafter, PROMPT, 10, prompt_cache=caches)
    store.insert_cache(PROMPT + tokens, caches)
    text = PROMPT + tokens[:6] + [50, 51, 52]
    fetched, rest = store.fetch(text)
    assert len(rest) == 3 and bool(fetched.draft) == (window == 60)
    fetched = prepare(fetched, MODEL, drafter, text[: -len(rest)])
    again, _ = speculative(MODEL, drafter, rest, 10, prompt_cache=fetched)
    assert again == plain(MODEL, text, 10)


def test_a_batch_is_drafted_for_one_by_one():
    drafter = tiny_head(MODEL).with_draft_window(3)
    assert drafter.batch_drafter() is None
    model, tokenizer = tiny_llama(vocab_size=258), byte_tokenizer()
    drafter = tiny_head(model).with_draft_window(3)
    prompts = [[5, 6, 7], [9, 8], [1, 2, 3, 4]]
    with pytest.warns(UserWarning, match="prompt by prompt"):
        response = batch_generate(
            model,
            tokenizer,
            prompts,
            max_tokens=14,
            draft_model=drafter,
            num_draft_tokens=2,
            return_token_ids=True,
        )
    assert response.token_ids == [plain(model, prompt, 14) for prompt in prompts]


def test_what_cannot_have_a_window_is_told():
    with pytest.raises(ValueError, match=r"^the draft window is 0: give .*$"):
        tiny_head(MODEL).with_draft_window(0)
    with pytest.raises(ValueError, match=r"^this head was trained with a window of 4 slots"):
        tiny_head(MODEL, sliding_window=4).with_draft_window(8)
    with pytest.raises(ValueError, match=r"^a draft window is for EAGLE heads"):
        open_beside(LookupDrafter(), None, MODEL, draft_window=8)
    with pytest.raises(ValueError, match=r"^--draft-window is 0: give"):
        DRAFT_WINDOW.check(0)
    assert open_beside(tiny_head(MODEL), None, MODEL, draft_window=8)[1].draft_window == 8


def test_a_text_shorter_than_the_window_can_be_trimmed():
    drafter = tiny_head(MODEL).with_draft_window(60)
    cache, reference = make_prompt_cache(MODEL) + drafter.make_cache(), make_prompt_cache(MODEL)
    speculative(MODEL, drafter, PROMPT, 10, num_draft_tokens=3, prompt_cache=cache)
    plain(MODEL, PROMPT, 10, prompt_cache=reference)
    for caches in (cache, reference):
        trim_prompt_cache(caches, 4)
    tokens, _ = speculative(MODEL, drafter, [4, 5], 12, num_draft_tokens=3, prompt_cache=cache)
    assert tokens == plain(MODEL, [4, 5], 12, prompt_cache=reference)
