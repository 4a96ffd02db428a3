"""Copies beside a drafter: which of the two comes, how far, from what; and what it is for."""

import random
from copy import deepcopy
from math import prod

import mlx.core as mx
import pytest
from assistants import tiny_assistant, tiny_gemma4
from costs import FLAT, LINEAR, SettledCosts, curve
from drafter_pairs import LLAMA, nudged
from grids import thorough
from helpers import PROMPT, VOCAB, Recital, byte_tokenizer, plain, speculative, tiny_head
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from simulator import Machine
from test_seen_text import naive_match

import mlx_eagle
from mlx_eagle.decoding.auto import AdaptiveController, FixedController
from mlx_eagle.decoding.round_costs import RoundCosts
from mlx_eagle.drafters import acceptance_stats
from mlx_eagle.drafters.acceptance_stats import COPY_PLACES, CopyAcceptance, CopySeen
from mlx_eagle.drafters.base import Draft, Drafter, NullDrafter
from mlx_eagle.drafters.copies import Copies
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.drafters.seen_text import SeenText, TextMatch
from mlx_eagle.drafters.tree import CHAINS, LEAST_MATCHES, PLAIN, DraftShape

NUM_CACHES = len(LLAMA.layers)


class Guesser(NullDrafter):
    """A drafter that knows the text and drafts each token right with a chance of its own."""

    longest_draft = None

    def __init__(self, text: list[int], chance: float, seed: int = 0):
        super().__init__()
        self.text, self.chance, self.seed = text, chance, seed
        self.num_forwards, self.sizes, self.unread, self.position = 0, [], [], 0

    def begin(self, cache=None):
        begun = Guesser(self.text, self.chance, self.seed)
        begun.sizes = self.sizes
        return begun

    def extend(self, tokens, features, last=None):
        self.unread.append((tokens.shape[0], last))

    def propose(self, size, pick):
        for num, last in self.unread:
            self.position += num if last is None else last.item() + 1
        self.unread.clear()
        start = self.position
        self.num_forwards += size
        self.sizes.append(size)
        drafted = []
        for i, token in enumerate(self.text[start : start + size]):
            wrong = random.Random(f"{self.seed} {start} {i}").random() > self.chance
            drafted.append((token + 1) % VOCAB if wrong else token)
        return Draft(mx.array(drafted + [0] * (size - len(drafted)), dtype=mx.int32))


# --- how likely a copy is right ---------------------------------------------------------------


def naive_chance(seen: list[tuple[int, CopySeen]], now: int, place: int, is_answer: bool) -> float:
    """Of a copied token behind ``place`` tokens, by every copy seen, fading by rounds."""
    least = max(each for each in COPY_PLACES if each <= place)
    believed = (1 - 0.75 ** min(least, 16)) * (0.5 if is_answer else 1.0)
    kept = reached = 0.0
    for at, each in seen:
        for i in range(each.num_seen if each.is_answer == is_answer else 0):
            if max(p for p in COPY_PLACES if p <= each.match_length + i) == least:
                reached += 0.99 ** (now - at)
                kept += 0.99 ** (now - at) * (i < each.num_right)
    return (kept + 8 * believed) / (reached + 8)


@pytest.mark.parametrize("seed", range(4))
def test_chances_are_those_of_a_naive_twin(seed):
    dice, copies = random.Random(seed), CopyAcceptance()
    seen, num = {False: [], True: []}, {False: 0, True: 0}
    for _ in range(60):
        is_answer = dice.random() < 0.3
        num_seen = dice.randint(0, 20)
        right = dice.choice([num_seen, max(0, num_seen - 1)])
        one = CopySeen(dice.randint(1, 50), num_seen, right, is_answer)
        copies.learn([one])
        num[is_answer] += num_seen > 0
        seen[is_answer].append((num[is_answer], one))
    for is_answer in (False, True):
        for match_length in (1, 4, 12, 64):
            each = [
                naive_chance(seen[is_answer], num[is_answer], match_length + i, is_answer)
                for i in range(9)
            ]
            found = copies.along(match_length, 9, is_answer)
            assert found == pytest.approx([prod(each[: i + 1]) for i in range(9)])


def test_a_text_starts_from_what_others_have_shown():
    others = CopyAcceptance()
    others.learn([CopySeen(8, 31, 31)] * 50)
    assert CopyAcceptance(others).along(8, 15) == pytest.approx(others.along(8, 15))
    assert CopyAcceptance().along(8, 15)[-1] < others.along(8, 15)[-1]


def test_what_a_copy_would_have_come_to_is_seen_whoever_drafted():
    copies = Copies(SeenText([1, 2, 3, 4, 5, 1, 2]))
    assert copies.tokens(3) == [3, 4, 5]
    assert copies.read([3, 4, 9]) == CopySeen(2, 3, 2)
    assert copies.read([7]) == CopySeen(0, 0, 0)
    copies = Copies(SeenText([1, 2, 3, 4, 5, 1, 2]))
    copies.num_unread = 1  # the 3 is in flight
    assert copies.tokens(2) == [4, 5]
    assert copies.read([3]) == CopySeen(2, 1, 1)
    assert copies.read([4, 5]) == CopySeen(3, 2, 2)


# --- which of the two comes: fixed lengths ----------------------------------------------------


@pytest.mark.parametrize("k", [3, 5])
def test_with_a_fixed_length_the_more_promising_comes(k):
    """Against sums of chances: a copy of k tokens where no fewer are expected of it."""
    controller = FixedController(DraftShape(k), copy_size=k)
    drafted = acceptance_stats.Acceptance(0.5, k)
    copied = CopyAcceptance()
    dice = random.Random(k)
    kinds = set()
    for _ in range(60):
        plan = controller.next_plan(0)
        promised = sum(drafted.along(k))
        for least, shape in zip(LEAST_MATCHES, plan.by_match, strict=True):
            copies = sum(copied.along(least, k)) >= promised
            assert shape == (DraftShape(0, copy=k) if copies else DraftShape(k))
            kinds.add(copies)
        assert plan.shape == plan.behind(0) == DraftShape(k)
        kept = dice.choice([0, k])
        seen = [CopySeen(dice.randint(1, 6), k, dice.choice([0, k]))]
        controller.record(DraftShape(k), [kept], None, (), seen)
        drafted.fade()
        drafted.observe(k, kept)
        copied.learn(seen)
        controller.record(DraftShape(0, copy=k), [k], None)  # tells nothing of drafts
    assert kinds == {True, False}


def test_a_first_match_in_an_answer_is_only_watched():
    costs = SettledCosts(CHEAP)
    controller = AdaptiveController(costs, (), copies=True)
    assert controller.next_plan(0).behind(20, is_answer=True) == PLAIN
    controller.record(PLAIN, (), None, (), [CopySeen(20, 31, 31, is_answer=True)])
    assert controller.next_plan(1).behind(20, is_answer=True).copy > 0


def test_a_plan_looks_matches_up_by_class():
    controller = FixedController(PLAIN, copy_size=4)
    plan = controller.next_plan(0)._replace(by_match=tuple(map(DraftShape, range(1, 7))))
    found = [plan.behind(length).size for length in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 64)]
    assert found == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6]


# --- what it is for -------------------------------------------------------------------------


def taus(text: list[int], num_prompt: int, chance: float, k: int) -> dict[str, float]:
    """Of the head, of lookup and of both."""
    drafters = {"head": Guesser(text, chance), "lookup": LookupDrafter()}
    drafters["both"] = drafters["head"].with_copies()
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
    assert tau["both"] >= 0.97 * max(tau["head"], tau["lookup"])


@pytest.mark.parametrize("chance", thorough([0.3, 0.75], 0.75))
def test_nothing_is_lost_where_nothing_repeats(chance):
    """Not one draft, not one forward."""
    text = random.Random(6).sample(range(VOCAB), VOCAB)
    alone, both = Guesser(text, chance), Guesser(text, chance)
    counts = []
    for drafter in (alone, both.with_copies()):
        _, stats = speculative(
            Recital(text + [0] * 10), drafter, text[:6], VOCAB - 6, num_draft_tokens=4
        )
        counts.append((stats.num_rounds, stats.num_head_forwards, stats.accepted_histogram))
    assert counts[0] == counts[1]
    assert alone.sizes == both.sizes


def test_little_is_lost_where_what_repeats_misleads():
    dice = random.Random(7)
    text = [dice.randrange(VOCAB) for _ in range(400)]
    tau = taus(text, 100, 0.7, 4)
    assert tau["both"] > 0.975 * tau["head"]


def test_lookup_copies_what_a_naive_search_finds():
    """Round by round: the longest match, its copy of k tokens, cut at the end of the text."""
    dice = random.Random(2)
    phrase = [dice.randrange(20) for _ in range(12)]
    text = []
    while len(text) < 200:
        text += phrase if dice.random() < 0.6 else [dice.randrange(20) for _ in range(3)]
    position, expected = 40, []
    while position < 140:
        size = min(5, 140 - position - 1)
        length, copied = naive_match(text[:position], size)
        kept = 0
        while length and kept < size and copied[kept] == text[position + kept]:
            kept += 1
        if length and size:
            expected.append(kept)
        position += kept + 1
    tokens, stats = speculative(Recital(text), LookupDrafter(), text[:39], 101, num_draft_tokens=5)
    assert tokens == text[39:140]
    found = [n for n, count in enumerate(stats.accepted_histogram) for _ in range(count)]
    assert sorted(found) == sorted(expected) and len(expected) > 9
    assert (
        stats.num_copied == stats.num_drafted and stats.num_accepted_copied == stats.num_accepted
    )


def test_lookup_on_a_repetitive_text():
    _, stats = speculative(
        Recital([4, 5, 6] * 30), LookupDrafter(), [4, 5, 6, 4], 25, num_draft_tokens=5
    )
    assert stats.tau == 6


# --- the other drafter ----------------------------------------------------------------------


@pytest.fixture
def always_copies(monkeypatch):
    """Wherever there is a match."""
    monkeypatch.setattr("mlx_eagle.decoding.auto.FIXED_PRIOR", 0.0)


HEAD = tiny_head(LLAMA)
LOOPING = [*PROMPT, *plain(LLAMA, PROMPT, 20), *PROMPT]  # what follows it may follow again


@pytest.mark.parametrize("k", thorough([2, 3, 6], 3))
def test_the_head_misses_nothing_of_copied_rounds(always_copies, k):
    cache = make_prompt_cache(LLAMA) + HEAD.make_cache()
    options = {"num_draft_tokens": k, "prompt_cache": cache}
    tokens, stats = speculative(LLAMA, HEAD.with_copies(), LOOPING, 20, **options)
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
    _, stats = speculative(LLAMA, HEAD.with_copies(), LOOPING, 20, num_draft_tokens=3)
    prefill_waits = 2  # one chunk, and the first token
    assert len(waits) == stats.num_target_forwards + prefill_waits


def test_trees(always_copies):
    tree = mlx_eagle.parse_tree("3x3:7")
    tokens, stats = speculative(LLAMA, HEAD.with_copies(), LOOPING, 20, tree=tree)
    assert tokens == plain(LLAMA, LOOPING, 20)
    # A copy is a chain of 3, and costs no forward of the head, which absorbs it with others.
    assert stats.num_head_forwards < 3 * stats.num_rounds
    assert 3 * stats.num_rounds - 3 <= stats.num_drafted < 7 * stats.num_rounds


def test_it_can_do_what_the_other_can():
    assert HEAD.with_copies().supports_trees and HEAD.with_copies().supports_overlay
    lagging = HEAD.with_copies().with_draft_cache("lagging")
    assert (
        lagging.lagging
        and lagging.copies
        and speculative(LLAMA, lagging, LOOPING, 9)[0] == plain(LLAMA, LOOPING, 9)
    )
    chains = ModelDrafter(nudged(LLAMA)).with_copies()
    assert isinstance(chains, Drafter) and not chains.supports_trees
    with pytest.raises(ValueError, match="proposes chains only"):
        speculative(LLAMA, chains, PROMPT, 4, tree=mlx_eagle.parse_tree("3x3:7"))
    assert speculative(LLAMA, chains, LOOPING, 9)[0] == plain(LLAMA, LOOPING, 9)


def test_auto():
    tokens, _ = speculative(LLAMA, HEAD.with_copies(), LOOPING, 20, num_draft_tokens="auto")
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
    tokens, stats = speculative(target, drafter.with_copies(), text, 30, num_draft_tokens=3)
    assert tokens == wanted
    assert 0 < len(seen) < stats.num_rounds  # some were copied
    assert all(not each._rows for each in seen)


# --- all that a request has seen --------------------------------------------------------------

FIRST = list(range(20, 40))
ANSWER = [50, 3, 51, 52, 53, 4, 54, 55, 56, 57, 58, 59]
SECOND = [60, 61]
TURNS = [*FIRST, *ANSWER, *SECOND, *ANSWER, *[0] * 10]
RECITAL = Recital(TURNS)  # its second answer repeats the first


def second_turn(prepare, **options) -> int:
    """How many tokens of a second turn were copied right, on the cache of the first turn.

    ``prepare`` may change the cache, and gives options.
    """
    drafter, cache = LookupDrafter(), make_prompt_cache(RECITAL)
    options = {"num_draft_tokens": 4, "prompt_cache": cache} | options
    first, _ = speculative(RECITAL, drafter, FIRST, len(ANSWER), **options)
    assert first == ANSWER
    options["prompt_cache"], more = prepare(cache, [*FIRST, *first])
    tokens, stats = speculative(RECITAL, drafter, SECOND, len(ANSWER), **options | more)
    assert tokens == ANSWER
    return stats.num_accepted


def accepted_without_cache() -> int:
    _, stats = speculative(
        RECITAL, LookupDrafter(), [*FIRST, *ANSWER, *SECOND], len(ANSWER), num_draft_tokens=4
    )
    return stats.num_accepted


WAYS = {
    "remembered": lambda cache, text: (cache, {}),
    "known_tokens": lambda cache, text: (deepcopy(cache), {"known_tokens": text}),
    "an array": lambda cache, text: (deepcopy(cache), {"known_tokens": mx.array(text)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_second_turn_copies_as_if_it_had_the_whole_text(way):
    assert second_turn(WAYS[way]) == accepted_without_cache() > 6
    assert second_turn(lambda cache, text: (deepcopy(cache), {})) == 0, "nothing is remembered"


def test_a_turn_that_was_decoded_plainly_is_remembered():
    drafter, cache = LookupDrafter(), make_prompt_cache(RECITAL)
    first = {"prompt_cache": cache, "num_draft_tokens": 0}
    speculative(RECITAL, drafter, FIRST, len(ANSWER), **first)
    _, stats = speculative(
        RECITAL, drafter, SECOND, len(ANSWER), prompt_cache=cache, num_draft_tokens=4
    )
    assert stats.num_accepted == accepted_without_cache()


def test_what_is_remembered_is_cut_with_a_cache_that_is_trimmed():
    drafter, cache = LookupDrafter(), make_prompt_cache(LLAMA)
    first, _ = speculative(LLAMA, drafter, FIRST, 30, prompt_cache=cache)
    trim_prompt_cache(cache, 12)
    whole = [*FIRST, *first]
    assert drafter.copies.remembered(cache).tolist() == whole[:-12]
    copies = []
    begin = drafter.copies.begin
    drafter.copies.begin = lambda *args: copies.append(begin(*args)) or copies[-1]
    tokens, _ = speculative(LLAMA, drafter, SECOND, 5, prompt_cache=cache)
    assert tokens == plain(LLAMA, [*whole[:-12], *SECOND], 5)
    assert copies[0].text.tokens.tolist() == [*whole[:-12], *SECOND, *tokens]


@pytest.mark.parametrize("num_taken", [1, 2, 5, 9])
@pytest.mark.parametrize("k", [0, 4, "auto"])
def test_a_caller_who_stops_early_leaves_what_the_caches_hold(k, num_taken):
    drafter, cache = HEAD.with_copies(), make_prompt_cache(LLAMA) + HEAD.make_cache()
    steps = mlx_eagle.speculative_generate_step(
        mx.array(LOOPING), LLAMA, drafter, prompt_cache=cache, num_draft_tokens=k
    )
    taken = [next(steps)[0] for _ in range(num_taken)]
    steps.close()
    remembered = drafter.copies.remembered(cache).tolist()
    assert remembered == [*LOOPING, *taken][: cache[0].offset]
    tokens, _ = speculative(LLAMA, drafter, SECOND, 8, prompt_cache=cache)
    assert tokens == plain(LLAMA, [*remembered, *SECOND], 8)


def test_what_was_remembered_goes_with_its_cache():
    drafter, cache = LookupDrafter(), make_prompt_cache(LLAMA)
    speculative(LLAMA, drafter, FIRST, 5, prompt_cache=cache)
    assert len(drafter.copies._texts) == 1
    assert len(deepcopy(drafter).copies._texts) == 0
    del cache
    assert len(drafter.copies._texts) == 0


@pytest.mark.parametrize("wrong", [[], [1] * 500, list(range(40)), [5, -1, 5]])
def test_known_tokens_are_only_a_hint(wrong):
    cache = make_prompt_cache(LLAMA)
    first = plain(LLAMA, FIRST, 9, prompt_cache=cache)
    tokens, _ = speculative(
        LLAMA, LookupDrafter(), SECOND, 20, prompt_cache=cache, known_tokens=wrong
    )
    assert tokens == plain(LLAMA, [*FIRST, *first, *SECOND], 20)


@pytest.mark.parametrize("wrong", ["text", [1.5, 2.0], [[1], [2]], [None], [[1], [2, 3]], 7])
def test_known_tokens_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=r"known_tokens are .* give the token ids"):
        speculative(LLAMA, LookupDrafter(), SECOND, 5, known_tokens=wrong)


def test_nothing_is_copied_from_embeddings():
    copies = []
    drafter = HEAD.with_copies()
    begin = drafter.copies.begin
    drafter.copies.begin = lambda *args: copies.append(begin(*args)) or copies[-1]
    embeddings = LLAMA.model.embed_tokens(mx.array(PROMPT))
    tokens, _ = speculative(
        LLAMA, drafter, [], 9, input_embeddings=embeddings, known_tokens=[1, 2]
    )
    assert copies[0].text.tokens.tolist() == [1, 2, -1, *tokens]


# --- rounds that several share ----------------------------------------------------------------


def together(drafter: Drafter, prompts: list[list[int]], num_tokens: int, **options):
    return mlx_eagle.batch_generate(
        LLAMA, byte_tokenizer(), prompts, max_tokens=num_tokens, draft_model=drafter,
        return_token_ids=True, **options,
    )  # fmt: skip


MANY = [LOOPING, [9, 8, 7], LOOPING[3:]]


@pytest.mark.parametrize("k", [3, "auto"])
def test_a_batch_copies_for_some_and_drafts_for_others(always_copies, k):
    head, plain_head = HEAD.with_copies(), HEAD
    made = together(head, MANY, 24, num_draft_tokens=k)
    assert made.token_ids == [plain(LLAMA, prompt, 24) for prompt in MANY]
    if k == 3:
        copied = [stats.num_copied for stats in made.stats]
        drafted = [stats.num_drafted - stats.num_copied for stats in made.stats]
        assert copied[0] > 0 and drafted[1] > 0
        alone = [
            speculative(LLAMA, head, prompt, 24, num_draft_tokens=k)[1].num_accepted_copied
            for prompt in MANY
        ]
        assert sum(stats.num_accepted_copied for stats in made.stats) > 0.5 * sum(alone)
    assert together(plain_head, MANY, 24, num_draft_tokens=3).stats.total.num_copied == 0


def test_the_head_does_not_run_where_all_copy(always_copies):
    """Text that goes on as it began: copies from the first round on."""
    loop_text = [4, 5, 6, 7] * 40
    model = Recital(loop_text)
    calls = []
    guesser = Guesser(loop_text, 0.0)

    class Counted(Guesser):
        def propose(self, size, pick):
            calls.append(size)
            return super().propose(size, pick)

    guesser.__class__ = Counted
    made = mlx_eagle.batch_generate(
        model, byte_tokenizer(), [loop_text[:9], loop_text[:9]], max_tokens=40,
        draft_model=guesser.with_copies(), num_draft_tokens=5, return_token_ids=True,
    )  # fmt: skip
    assert made.token_ids == [loop_text[9:49]] * 2
    assert not calls
    assert made.stats.total.num_accepted_copied > 60


def test_a_second_turn_of_a_batch_copies_from_the_first():
    drafter = LookupDrafter()

    def turn(prompt: list[int], **options):
        return mlx_eagle.batch_generate(
            RECITAL, byte_tokenizer(), [prompt] * 2, max_tokens=len(ANSWER), draft_model=drafter,
            num_draft_tokens=4, return_prompt_caches=True, return_token_ids=True, **options,
        )  # fmt: skip

    first = turn(FIRST)
    assert first.token_ids == [ANSWER] * 2
    text = [*FIRST, *ANSWER]
    counts = []
    for known in (None, [text, text], [[], []]):
        second = turn(SECOND, prompt_caches=first.caches, known_tokens=known)
        assert second.token_ids == [ANSWER] * 2
        counts.append([stats.num_accepted for stats in second.stats])
    assert counts[0] == counts[1] == [accepted_without_cache()] * 2
    assert counts[2] == [0, 0]
    with pytest.raises(ValueError, match="known_tokens has 1 entries for 2 prompts"):
        turn(SECOND, known_tokens=[text])


# --- auto -------------------------------------------------------------------------------------


class Repeating(Machine):
    """A repeating text: a token behind ``length`` matching ones is right with ``sure``."""

    def __init__(self, cost, alpha: float, length: int, sure: float, seed: int = 1):
        super().__init__(cost, lambda n: alpha, seed)
        self.length, self.sure = length, sure

    def write(self, controller, num_tokens: int) -> float:
        begun, shape = self.num_tokens, PLAIN
        while self.num_tokens - begun < num_tokens:
            plan = controller.next_plan(int(self.num_tokens - begun))
            shape = plan.behind(self.length)
            right = 0
            while right < 31 and self.dice.random() < self.sure:
                right += 1
            kept = min(right, shape.copy) if shape.copy else len(self.kept_of(shape))
            self.shapes.append(shape)
            self.seconds += self.took(shape)
            self.num_tokens += 1 + kept
            seen = CopySeen(self.length, min(kept + 1, 31), min(right, kept + 1, 31))
            seconds = self.took(shape)
            controller.record(shape, () if shape.is_plain else [kept], seconds, (), [seen])
        return self.seconds / self.num_tokens

    def kept_of(self, shape: DraftShape) -> list[int]:
        return [rank for rank in self.ranks(shape) if rank >= 0] if shape.size else []


def most_used(cost, alpha: float, length: int, sure: float, chains=CHAINS) -> DraftShape:
    machine = Repeating(cost, alpha, length, sure)
    machine.write(AdaptiveController(SettledCosts(cost), chains, copies=True), 1500)
    late = machine.shapes[len(machine.shapes) // 2 :]
    return max(set(late), key=late.count)


CHEAP = curve(lambda k: 1.05 + 0.02 * k)


def test_copied_text_ends_at_the_longest_copies():
    assert most_used(CHEAP, 0.5, 20, 0.99).copy == 31
    assert most_used(CHEAP, 0.5, 20, 0.8).copy < 31


def test_where_each_row_costs_a_pass_no_copy_is_below_its_worth():
    assert most_used(LINEAR, 0.5, 20, 0.9) == PLAIN
    assert most_used(LINEAR, 0.5, 2, 0.3) == PLAIN


def test_copies_that_are_wrong_leave_the_drafts_to_the_head():
    shape = most_used(FLAT, 0.7, 2, 0.05)
    assert shape.size > 0 and shape.copy == 0


def test_a_head_that_never_pays_is_off_while_long_matches_are_copied():
    def cost(shape: DraftShape, num: int) -> float:
        return CHEAP(shape, num) + (9.0 if shape.size else 0.0)

    controller = AdaptiveController(SettledCosts(cost), CHAINS, copies=True)
    assert controller.never_pays
    machine = Repeating(cost, 0.8, 20, 0.97)
    machine.write(controller, 600)
    assert {shape.size for shape in machine.shapes} == {0}
    assert sum(shape.copy for shape in machine.shapes) > 300
    assert controller.next_plan(700).shape == PLAIN and controller.drafting_off


def test_what_copies_accept_is_not_taken_for_the_drafts():
    costs = SettledCosts(CHEAP)
    controller = AdaptiveController(costs, CHAINS, copies=True)
    before = list(costs.acceptance.places)
    Repeating(CHEAP, 0.1, 20, 0.99).write(controller, 400)
    copied = [p for p, q in zip(costs.acceptance.places, before, strict=True) if p > q + 0.05]
    assert not copied
    assert costs.copies.along(20, 31)[-1] > CopyAcceptance().along(20, 31)[-1]


def test_drafts_after_copies_are_as_long_as_they_would_be_without():
    """A chat in the process where files were edited: the same lengths as in a fresh one."""
    fresh, after = SettledCosts(FLAT), SettledCosts(FLAT)
    Repeating(FLAT, 0.4, 20, 0.99).write(AdaptiveController(after, (), copies=True), 600)
    used = []
    for costs in (fresh, after):
        machine = Machine(FLAT, lambda n: 0.4, 3)
        machine.write(AdaptiveController(costs, CHAINS, copies=True), 400)
        used.append(machine.shapes)
    assert used[0] == used[1]


def test_costs_of_copies_have_keys_of_their_own():
    def cost(shape: DraftShape, num: int) -> float:
        return FLAT(shape, num) * (2.0 if shape.size else 1.0)

    costs = RoundCosts(FLAT)
    for _ in range(30):
        for shape in (PLAIN, DraftShape(7), DraftShape(0, copy=7)):
            costs.record(1, shape, cost(shape, 1))
    estimates = costs.estimates([DraftShape(7), DraftShape(0, copy=7)], 1)
    drafted, copied = (estimates[s].seconds for s in (DraftShape(7), DraftShape(0, copy=7)))
    assert drafted == pytest.approx(2 * copied, rel=0.1)


def test_one_length_for_all_of_a_batch():
    """Long matches in most requests: a copy for them, and the head's drafts for the rest."""
    controller = AdaptiveController(SettledCosts(CHEAP), CHAINS, 4, copies=True)
    controller.record(DraftShape(3), [1] * 4, None, (), [CopySeen(20, 31, 31)] * 60)
    matches = [TextMatch(20, (1,) * 32)] * 3 + [TextMatch()]
    plan = controller.next_plan(0, matches)
    shapes = [plan.behind(match.length) for match in matches]
    assert [shape.copy > 0 for shape in shapes] == [True, True, True, False]
    assert len({shape.num_levels for shape in shapes if not shape.is_plain}) == 1
    assert all(4 * shape.num_rows <= 32 for shape in shapes)
