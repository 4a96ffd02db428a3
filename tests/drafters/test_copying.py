"""HEAD+lookup: which of the two drafts, and how far, against a twin; and what it is for."""

import random
from math import prod

import mlx.core as mx
import pytest
from assistants import tiny_assistant, tiny_gemma4
from drafter_pairs import LLAMA, naive_lookup, nudged
from grids import thorough
from helpers import PROMPT, VOCAB, plain, speculative, tiny_head
from mlx_lm.models.cache import make_prompt_cache
from test_lookup import Recital

import mlx_eagle
from mlx_eagle.drafters import lookup as copying
from mlx_eagle.drafters.base import Draft, Drafter
from mlx_eagle.drafters.lookup import CopyingDrafter, LookupDrafter
from mlx_eagle.drafters.model_drafter import ModelDrafter

NUM_CACHES = len(LLAMA.layers)


class Guesser(LookupDrafter):
    """A drafter that knows the text and drafts each token right with a chance of its own."""

    def __init__(self, text: list[int], chance: float, seed: int = 0):
        super().__init__()
        self.text, self.chance, self.seed = text, chance, seed
        self.num_forwards, self.sizes = 0, []

    def begin(self, cache=None):
        begun = Guesser(self.text, self.chance, self.seed)
        self.begun = begun
        return begun

    def propose(self, size, pick):
        self.read()
        start = len(self.index.text)
        self.num_forwards += size
        self.sizes.append(size)
        drafted = []
        for i, token in enumerate(self.text[start : start + size]):
            wrong = random.Random(f"{self.seed} {start} {i}").random() > self.chance
            drafted.append((token + 1) % VOCAB if wrong else token)
        return Draft(mx.array(drafted + [0] * (size - len(drafted)), dtype=mx.int32))


# --- which one drafts -----------------------------------------------------------------------


def chance(seen: list[tuple[int, int, bool]], now: int, place: int, most: int, *prior: float):
    """Of a token at ``place`` to be kept: of what was ``seen`` (round, place, kept), fading."""
    place = min(place, most)
    weights = [(0.98 ** (now - at), kept) for at, where, kept in seen if min(where, most) == place]
    before, rise = prior
    if place > 0:
        before = 1 - (1 - chance(seen, now, place - 1, most, *prior)) * (1 - rise)
    return (sum(w for w, kept in weights if kept) + 8 * before) / (sum(w for w, _ in weights) + 8)


def naive_copying(rounds: list[dict], text: list[int], size: int) -> tuple[bool, int]:
    """Whether it copies next, and how much, from all rounds before: their texts and drafts."""
    copies, drafts, both = ([], []), ([], []), ([], [])
    num_copies = num_drafts = 0
    for done, after in zip(rounds, [*[r["text"] for r in rounds[1:]], text], strict=False):
        new = after[len(done["text"]) :]
        if done["match"]:
            num_copies += 1
            for i, (token, real) in enumerate(zip(done["copy"], new, strict=False)):
                copies[0].append((num_copies, done["match"] - 1 + i, token == real))
                if token != real:
                    break
        num_kept = len(new) - 1
        places = [(i, i < num_kept) for i in range(min(num_kept + 1, done["size"]))]
        both[0].extend((len(both[1]), *place) for place in places)
        both[1].append(None)
        if not done["copied"]:
            num_drafts += 1
            drafts[0].extend((num_drafts, *place) for place in places)

    def run(seen, now, start, most, *prior):
        each = [chance(seen, now, start + i, most, *prior) for i in range(size)]
        return [prod(each[: i + 1]) for i in range(size)]

    match, copy = longest_match(text, size)
    of_copy = run(copies[0], num_copies, match - 1, 7, 0.25, 0.25)
    of_draft = run(drafts[0], num_drafts, 0, 15, 0.5, 0)
    copied = bool(copy) and sum(of_copy) >= sum(of_draft)
    least = run(both[0], len(both[1]) - 1, 0, 15, 0.5, 0)[-1] / 4
    each = of_copy if copied else of_draft
    return copied, max(1, sum(chance >= least for chance in each))


def longest_match(text: list[int], size: int) -> tuple[int, list[int]]:
    for n in range(8, 0, -1):
        copy = naive_lookup(text, size, n, n)
        if copy:
            return n, copy
    return 0, []


@pytest.mark.parametrize("seed", thorough(range(12), 0, 1))
def test_the_choice_is_that_of_a_naive_twin(seed):
    dice = random.Random(seed)
    phrase = [dice.randrange(5) for _ in range(6)]
    text = []
    while len(text) < 90:
        text += phrase if dice.random() < 0.5 else [dice.randrange(5) for _ in range(3)]
    guesser = Guesser(text, dice.choice([0.2, 0.5]), seed)
    drafter, rounds, position = CopyingDrafter(guesser).begin(), [], 9
    drafter.extend(mx.array(text[:position]), None)
    kinds = set()
    while position < len(text) - 8:
        size = dice.randint(1, 6)
        so_far = text[:position]
        match, copy = longest_match(so_far, size)
        copied, num = naive_copying(rounds, so_far, size)
        before = len(drafter.drafter.sizes)
        draft = drafter.propose(size, None).tokens.tolist()
        assert (len(drafter.drafter.sizes) == before) == copied
        assert len(draft) == num
        assert draft == copy[:num] or not copied
        rounds.append(
            {"text": so_far, "match": match, "copy": copy, "copied": copied, "size": num}
        )
        kept = 0
        while kept < len(draft) and draft[kept] == text[position + kept]:
            kept += 1
        window = text[position : position + kept + 1] + [0] * (num - kept)
        drafter.extend(mx.array(window), None, last=mx.array(kept))
        position += kept + 1
        kinds.add(copied)
    assert kinds == {True, False}


# --- what it is for -------------------------------------------------------------------------


def taus(text: list[int], num_prompt: int, chance: float, k: int) -> dict[str, float]:
    """Of the head, of lookup and of both."""
    drafters = {"head": Guesser(text, chance), "lookup": LookupDrafter()}
    drafters["both"] = CopyingDrafter(drafters["head"])
    found = {}
    for name, drafter in drafters.items():
        length = len(text) - num_prompt
        tokens, stats = speculative(
            Recital([*text, *[0] * 10]), drafter, text[:num_prompt], length, num_draft_tokens=k
        )
        assert tokens == text[num_prompt:]
        found[name] = stats.tau
    return found


@pytest.mark.parametrize("k", thorough([3, 5, 7], 5))
@pytest.mark.parametrize("chance", thorough([0.3, 0.6, 0.75], 0.6))
def test_copy_and_edit(chance, k):
    dice = random.Random(5)
    original = [dice.randrange(VOCAB) for _ in range(120)]
    edited = list(original)
    for place in range(9, 120, 17):
        edited[place : place + 3] = [dice.randrange(VOCAB) for _ in range(3)]
    tau = taus([*original, 1, *edited], 121, chance, k)
    assert tau["both"] >= max(tau["head"], tau["lookup"])


@pytest.mark.parametrize("chance", thorough([0.3, 0.75], 0.75))
def test_nothing_is_lost_where_nothing_repeats(chance):
    """Not one draft, not one forward."""
    text = random.Random(6).sample(range(VOCAB), VOCAB)
    alone, both = Guesser(text, chance), Guesser(text, chance)
    counts = []
    for drafter in (alone, CopyingDrafter(both)):
        _, stats = speculative(
            Recital(text + [0] * 10), drafter, text[:6], VOCAB - 6, num_draft_tokens=4
        )
        counts.append((stats.num_rounds, stats.num_head_forwards, stats.accepted_histogram))
    assert counts[0] == counts[1]
    assert alone.begun.sizes == both.begun.sizes


def test_little_is_lost_where_what_repeats_misleads():
    dice = random.Random(7)
    text = [dice.randrange(VOCAB) for _ in range(400)]
    tau = taus(text, 100, 0.7, 4)
    assert tau["both"] > 0.99 * tau["head"]


def test_a_weak_drafter_drafts_less_where_copies_raise_what_is_asked_for():
    dice = random.Random(8)
    original = [dice.randrange(VOCAB) for _ in range(90)]
    text, fresh = [*original, 1], iter(range(10_000))
    for start in range(0, 90, 15):
        text += original[start : start + 15] + [(next(fresh) * 37 + 11) % VOCAB for _ in range(4)]
    guesser = Guesser(text, 0.3)
    speculative(
        Recital([*text, *[0] * 10]), CopyingDrafter(guesser), text[:91], 110, num_draft_tokens=7
    )
    assert max(guesser.begun.sizes) == 7 and min(guesser.begun.sizes) < 4


# --- the other drafter ----------------------------------------------------------------------


@pytest.fixture
def always_copies(monkeypatch):
    """Wherever there is a match."""
    monkeypatch.setattr(copying, "DRAFT_FIRST", 0.0)


HEAD = tiny_head(LLAMA)
LOOPING = [*PROMPT, *plain(LLAMA, PROMPT, 20), *PROMPT]  # what follows it may follow again


@pytest.mark.parametrize("k", thorough([2, 3, 6], 3))
def test_the_head_misses_nothing_of_copied_rounds(always_copies, k):
    cache = make_prompt_cache(LLAMA) + HEAD.make_cache()
    options = {"num_draft_tokens": k, "prompt_cache": cache}
    tokens, stats = speculative(LLAMA, CopyingDrafter(HEAD), LOOPING, 20, **options)
    assert tokens == plain(LLAMA, LOOPING, 20)
    assert stats.num_head_forwards < stats.num_drafted
    whole = make_prompt_cache(LLAMA) + HEAD.make_cache()
    speculative(LLAMA, HEAD, LOOPING + tokens, 1, prompt_cache=whole)
    ours, theirs = cache[NUM_CACHES], whole[NUM_CACHES]
    assert ours.offset == len(LOOPING + tokens) - 1
    for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
        assert mx.allclose(a, b[..., : ours.offset, :], atol=1e-4).item()


def test_one_eval_a_round(always_copies, monkeypatch):
    waits, mx_eval = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *args: (waits.append(1), mx_eval(*args)))
    _, stats = speculative(LLAMA, CopyingDrafter(HEAD), LOOPING, 20, num_draft_tokens=3)
    prefill_waits = 2  # one chunk, and the first token
    assert len(waits) == stats.num_target_forwards + prefill_waits


def test_trees(always_copies):
    tree = mlx_eagle.parse_tree("3x3:7")
    tokens, stats = speculative(LLAMA, CopyingDrafter(HEAD), LOOPING, 20, tree=tree)
    assert tokens == plain(LLAMA, LOOPING, 20)
    # Of a round that is copied only the pass that absorbs it, and its draft is a chain of 3.
    assert stats.num_rounds <= stats.num_head_forwards < 3 * stats.num_rounds
    assert 3 * stats.num_rounds <= stats.num_drafted < 7 * stats.num_rounds


def test_it_can_do_what_the_other_can():
    assert CopyingDrafter(HEAD).supports_trees and CopyingDrafter(HEAD).supports_overlay
    lagging = CopyingDrafter(HEAD).with_draft_cache("lagging")
    assert lagging.drafter.lagging and speculative(LLAMA, lagging, LOOPING, 9)[0] == plain(
        LLAMA, LOOPING, 9
    )
    chains = CopyingDrafter(ModelDrafter(nudged(LLAMA)))
    assert isinstance(chains, Drafter) and not chains.supports_trees
    with pytest.raises(ValueError, match="proposes chains only"):
        speculative(LLAMA, chains, PROMPT, 4, tree=mlx_eagle.parse_tree("3x3:7"))
    assert speculative(LLAMA, chains, LOOPING, 9)[0] == plain(LLAMA, LOOPING, 9)


def test_auto():
    tokens, _ = speculative(LLAMA, CopyingDrafter(HEAD), LOOPING, 20, num_draft_tokens="auto")
    assert tokens == plain(LLAMA, LOOPING, 20)


def test_an_assistant_sees_the_target_when_it_drafts_alone():
    """What it keeps of the target's caches would make the next pass copy them."""
    target = tiny_gemma4()
    drafter = tiny_assistant(target)
    seen = []

    class Counted(type(drafter)):
        def see_target(self, caches):
            seen.append(self)
            super().see_target(caches)

    drafter.__class__ = Counted
    text = [*LOOPING, *LOOPING]
    wanted = plain(target, text, 30)
    tokens, stats = speculative(target, CopyingDrafter(drafter), text, 30, num_draft_tokens=3)
    assert tokens == wanted
    assert 0 < len(seen) < stats.num_rounds  # some were copied
    assert all(not each._rows for each in seen)
