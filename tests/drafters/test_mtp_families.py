"""MTP layers of every family, from published tensors, against NumPy; and what they are told by.

What is drafted is compared draft by draft, with the logits behind it, after prompts and after
drafts of which none, some or all were kept.
"""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from documents import ROOT
from grids import thorough
from helpers import PROMPT, SCRIPTS, byte_tokenizer, caches_equal, plain, speculative
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mtp_checkpoints import (
    CHOOSING,
    FAMILIES,
    STEPPED,
    Published,
    entering,
    other_states,
    qwen3_by_speculators,
)

import mlx_eagle
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.mtp import MTPDrafter, load_mtp
from mlx_eagle.drafters.tree import StaticTree, parse_tree
from mlx_eagle.target_model.target import Target, find_final_norm

TOKENIZER = byte_tokenizer()

ALL = {**FAMILIES, **STEPPED}
published = cache(lambda name: ALL[name]())

# Two ways of computing the same in float32 differ by so much of the greatest: 1.06e-5 is the
# most that was seen, without AVX-512. Mistakes differ by more than 1e-2, as tests below have it.
NOISE = 3e-5


class Watched:
    """Runs a drafter, compares its logits with the reference's, and drafts by a script."""

    def __init__(self, inner: MTPDrafter, part: Published, text: list[int], script):
        self.inner, self.part, self.text, self.script = inner, part, text, script
        self.absorbed, self.num_rounds, self.furthest = [], 0, 0.0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, cache=None):
        self.begun = Watched(self.inner.begin(cache), self.part, self.text, self.script)
        return self.begun

    def extend(self, tokens, features, last=None):
        self.absorbed.append((tokens, last))
        self.inner.extend(tokens, features, last)

    def propose(self, size, pick):
        committed: list[int] = []
        for tokens, last in self.absorbed:
            committed += tokens.tolist()[: None if last is None else last.item() + 1]
        seen = []

        def watching(logits, ids):
            seen.append(np.array(logits[0]))
            return pick(logits, ids)

        drafted = self.inner.propose(size, watching)
        expected = self.part.logits(committed, size)
        for ours, theirs in zip(seen, expected, strict=True):
            far = np.abs(ours - theirs).max() / np.abs(theirs).max()
            self.furthest = max(self.furthest, far)
        right = self.script(self.num_rounds, size)
        self.num_rounds += 1
        tokens = self.text[len(committed) :][:size]
        if right < size:
            tokens[right] = (tokens[right] + 1) % 96
        return type(drafted)(mx.array(tokens, mx.int32))


def furthest(part: Published, drafter: MTPDrafter, script: str = "every length") -> float:
    """How far logits are from the reference's, at most, in units of the greatest."""
    text = PROMPT + plain(part.target, PROMPT, 20)
    watched = Watched(drafter, part, text, SCRIPTS[script])
    tokens, _ = speculative(
        part.target, watched, PROMPT, 14, num_draft_tokens=3, prefill_step_size=3
    )
    assert tokens == text[len(PROMPT) :][:14]
    assert watched.begun.num_rounds >= 3
    return watched.begun.furthest


@pytest.mark.parametrize("name", thorough(ALL, "qwen3.5", "deepseek-v3", "glm-5", "step-3.5"))
@pytest.mark.parametrize("script", thorough(SCRIPTS, "every length"))
def test_drafts_are_the_references(name, script):
    part = published(name)
    assert furthest(part, load_mtp(part.arrays(), part.target), script) < NOISE


@pytest.mark.parametrize("num_taken", thorough([9, 7, 2], 9, 2))
@pytest.mark.parametrize("name", STEPPED)
def test_a_prompt_cache_carries_what_layers_pass_on(name, num_taken, tmp_path):
    """After each turn, left early or not, all slots are those of the whole text run at once."""
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target)
    num_target = len(make_prompt_cache(part.target))
    cache, text = make_prompt_cache(part.target) + drafter.make_cache(), []
    for turn in (PROMPT, [9, 33, 7], [12]):
        steps = speculative_generate_step(
            mx.array(turn), part.target, drafter,
            num_draft_tokens=3, max_tokens=9, prompt_cache=cache,
        )  # fmt: skip
        text += turn + [next(steps)[0] for _ in range(num_taken)]
        steps.close()
        features = Target(part.target, drafter.taps)(
            mx.array(text), make_prompt_cache(part.target)
        )[1]
        whole = drafter.begin()
        whole.extend(mx.array(text[1:]), features[:-1])
        assert caches_equal(cache[num_target:-1], whole.cache[:-1])
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
        cache = load_prompt_cache(str(tmp_path / "cache.safetensors"))


@pytest.mark.parametrize("name", thorough(["qwen3.5", "mimo", *STEPPED], "qwen3.5", "step-3.5"))
def test_the_other_states(name):
    """As a converted folder's key can ask for them."""
    part = other_states(published(name))
    drafter = load_mtp(part.arrays(), part.target)
    drafter.take_hidden(part.naive.normed)
    assert furthest(part, drafter) < NOISE
    drafter.take_hidden(not part.naive.normed)
    assert furthest(part, drafter) > 1e-2


@pytest.mark.parametrize("name", thorough(ALL, "qwen3.5", "glm-4.5"))
def test_auto_gives_the_targets_text(name):
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target)
    tokens, _ = speculative(part.target, drafter, PROMPT, 40, num_draft_tokens="auto")
    assert tokens == plain(part.target, PROMPT, 40)


@pytest.mark.parametrize("name", thorough(FAMILIES, "qwen3.5", "glm-4.5", "mimo", "nemotron-h"))
@pytest.mark.parametrize("k", thorough([1, 3], 3))
def test_k_forwards_a_round(name, k):
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target)
    tokens, stats = speculative(part.target, drafter, PROMPT, 15, num_draft_tokens=k)
    assert tokens == plain(part.target, PROMPT, 15)
    assert stats.num_head_forwards == stats.num_drafted


GOLDEN = {
    name: mx.load(str(ROOT / "tests" / "support" / "golden" / f"{name}.safetensors"))
    for name in ("mtp", "mtp-transformers")
}


@pytest.mark.parametrize(
    ("library", "name"),
    [(library, name) for library, found in GOLDEN.items() for name in found if "," not in name],
)
def test_states_are_those_of_another_library(library, name):
    """Frozen by ``tools/golden``; in one pass, row by row, and where rows are taken back.

    Of layers that choose what they attend to, fewer slots than there are.
    """
    others = {**CHOOSING, "qwen3": qwen3_by_speculators}
    part, (embeddings, states) = others.get(name, lambda: published(name))(), entering()
    head = load_mtp(part.arrays(), part.target).head
    caches = head.make_cache()
    once = head(embeddings[None], states[None], caches)[0]
    caches = head.make_cache()
    rows = zip(embeddings, states, strict=True)
    steps = [head(e[None, None], s[None, None], caches)[0, 0] for e, s in rows]
    caches, drafted = head.make_cache(), []
    for start, end in ((0, 7), (7, 9), (9, 12)):  # after each, three rows that are not kept
        drafted.append(head(embeddings[None, start:end], states[None, start:end], caches)[0])
        head(embeddings[None, :3], states[None, :3], caches)
        for own in caches:
            own.trim(3)
    wanted = GOLDEN[library][name]
    greatest = mx.abs(wanted).max()
    for found in (once, mx.stack(steps), mx.concatenate(drafted)):
        assert (mx.abs(found - wanted).max() / greatest).item() < 1e-5


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", STEPPED)
def test_states_of_each_step_are_those_of_another_library(name, index):
    """Behind as many slots as stand for nothing, which its own see nothing of."""
    part, (embeddings, states) = published(name), entering()
    head = load_mtp(part.arrays(), part.target).head
    wanted = GOLDEN["mtp-transformers"][f"{name}, {index}"]
    cache = head.make_cache()[index]
    head.advance(index, states[:index], embeddings[:index], cache) if index else None
    found = []
    for start, end in ((0, 7), (7, 9), (9, 12)):  # after each, three rows that are not kept
        made, _ = head.advance(index, embeddings[start:end], states[start:end], cache)
        found.append(head.steps[index].norm(made))
        head.advance(index, embeddings[:3], states[:3], cache)
        cache.trim(3)
    far = mx.abs(mx.concatenate(found) - wanted).max() / mx.abs(wanted).max()
    assert far.item() < 1e-5


SHARED = ["deepseek-v3", "glm-4.5", "glm-4.7-flash", "mimo"]
PROMPTS = [PROMPT, PROMPT[:5], PROMPT[2:9]]


def in_a_batch(part, num_draft_tokens, max_tokens):
    """The counts of each prompt, whose texts are the target's own."""
    options = {"num_draft_tokens": num_draft_tokens, "max_tokens": max_tokens}
    drafter = load_mtp(part.arrays(), part.target)
    made = mlx_eagle.batch_generate(
        part.target, TOKENIZER, PROMPTS, draft_model=drafter, return_token_ids=True, **options
    )
    assert made.token_ids == [plain(part.target, prompt, max_tokens) for prompt in PROMPTS]
    return made.stats


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*SHARED, *CHOOSING])
def test_several_requests_share_the_passes(name):
    """One forward of the layers for all, however long each text is."""
    found = in_a_batch(published(name), 3, 14)
    forwards = [stats.num_head_forwards for stats in found]
    assert max(forwards) <= 3 * max(stats.num_rounds for stats in found) + 3


def test_recurrent_targets_are_drafted_for_in_shared_rounds():
    found = in_a_batch(published("qwen3.5"), 2, 10)
    assert all(stats.num_drafted > 0 for stats in found)


# What is easily done wrong, and each of it is seen.


def swapped(part: Published) -> MTPDrafter:
    tensors = part.arrays()
    first, second = mx.split(tensors[part.naive.join], 2, axis=-1)
    tensors[part.naive.join] = mx.concatenate([second, first], axis=-1)
    return load_mtp(tensors, part.target)


def before_the_final_norm(part: Published) -> MTPDrafter:
    drafter = load_mtp(part.arrays(), part.target)
    drafter.taps = (len(part.target.layers),)
    return drafter


def a_layer_off(part: Published) -> MTPDrafter:
    drafter = load_mtp(part.arrays(), part.target)
    drafter.taps = (len(part.target.layers) - 1,)
    return drafter


def with_the_targets_norm(part: Published) -> MTPDrafter:
    drafter = load_mtp(part.arrays(), part.target)
    drafter.head.norm.weight = find_final_norm(part.target).weight
    return drafter


def with_bare_norms(part: Published) -> MTPDrafter:
    """Of Qwen's files, which hold norms less one."""
    drafter = load_mtp(part.arrays(), part.target)
    for name, array in part.arrays().items():
        if name in ("mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"):
            drafter.head[name.split(".")[1]].weight = array
    return drafter


MISTAKES = [swapped, before_the_final_norm, a_layer_off, with_the_targets_norm]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("name", thorough(FAMILIES, "qwen3.5", "mimo"))
def test_mistakes_are_seen(name, mistake):
    part = published(name)
    assert furthest(part, mistake(part)) > 1e-2


def after_the_final_norm(part: Published) -> MTPDrafter:
    drafter = load_mtp(part.arrays(), part.target)
    drafter.taps = (len(part.target.layers) + 1,)
    return drafter


def passed_on_otherwise(part: Published) -> MTPDrafter:
    drafter = load_mtp(part.arrays(), part.target)
    drafter.head.chained = not drafter.head.chained
    return drafter


def the_first_layer_again(part: Published) -> MTPDrafter:
    drafter = load_mtp(part.arrays(), part.target)
    drafter.head.steps[1:] = drafter.head.steps[:1] * 2
    return drafter


def seeing_one_slot(part: Published) -> MTPDrafter:
    drafter = load_mtp(part.arrays(), part.target)
    drafter.head._windows = [1, 1, 1]
    return drafter


STEP_MISTAKES = [
    swapped,
    a_layer_off,
    after_the_final_norm,
    passed_on_otherwise,
    the_first_layer_again,
    seeing_one_slot,
]


@pytest.mark.parametrize("mistake", STEP_MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("name", thorough(STEPPED))
def test_mistakes_of_steps_are_seen(name, mistake):
    part = published(name)
    assert furthest(part, mistake(part)) > 1e-2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_each_step_drafts_one_token(name, k):
    """A pass of each layer over what is new, and one more for each draft but the first."""
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target)
    tokens, stats = speculative(part.target, drafter, PROMPT, 25, num_draft_tokens=k)
    assert tokens == plain(part.target, PROMPT, 25)
    assert stats.num_drafted <= min(k, 3) * stats.num_rounds
    more = stats.num_drafted - stats.num_rounds
    assert (
        3 * stats.num_rounds + more <= stats.num_head_forwards <= 3 * stats.num_rounds + more + 3
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPPED)
def test_steps_for_several_requests(name):
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target)
    alone = [
        speculative(part.target, drafter, prompt, 14, num_draft_tokens=3)[1].num_accepted
        for prompt in PROMPTS
    ]
    assert [stats.num_accepted for stats in in_a_batch(part, 3, 14)] == alone


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("stop", [1, 2, 5, 11])
def test_steps_go_on_from_a_prompt_cache(name, stop):
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target)
    caches = [*make_prompt_cache(part.target), *drafter.make_cache()]
    options = {"num_draft_tokens": 3, "prompt_cache": caches}
    text = plain(part.target, PROMPT, 40)
    first, _ = speculative(part.target, drafter, PROMPT, stop, **options)
    assert first == text[:stop]
    more, _ = speculative(part.target, drafter, text[stop : stop + 3], 20, **options)
    assert more == text[stop + 3 :][:20]


def test_bare_norms_are_seen():
    part = published("qwen3.5")
    assert furthest(part, with_bare_norms(part)) > 1e-2


# Trees, on targets that verify them.


@pytest.mark.parametrize("tree", thorough(["3x3:7", "2/2+1/1+0+0"], "3x3:7"))
@pytest.mark.parametrize("name", thorough(SHARED, "glm-4.5", "mimo"))
def test_trees_give_the_targets_text(name, tree):
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target)
    tokens, stats = speculative(part.target, drafter, PROMPT, 16, tree=parse_tree(tree))
    assert tokens == plain(part.target, PROMPT, 16)
    assert stats.num_head_forwards <= 3 * stats.num_rounds


@pytest.mark.parametrize("name", [*CHOOSING, "step-3.5"])
def test_layers_that_draft_no_trees(name):
    """Those that choose what they attend to, and those that draft one token each."""
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target)
    with pytest.raises(ValueError, match="these MTP layers draft chains only"):
        speculative(part.target, drafter, PROMPT, 4, tree=parse_tree("3x3:7"))


@pytest.mark.parametrize("name", SHARED)
def test_every_branch_of_a_tree_is_drafted_as_a_chain(name):
    """Below each node stand the children that the reference gives after that branch alone."""
    part = published(name)
    drafter = load_mtp(part.arrays(), part.target).begin()
    text = PROMPT + plain(part.target, PROMPT, 4)
    states = mx.array(part.states(text)[:-1])
    drafter.extend(mx.array(text[1:2]), None)
    drafter.extend(mx.array(text[1:]), states)
    seen = []

    def pick(logits, ids, count):
        seen.extend(np.array(logits))
        best = mx.argsort(-logits, axis=-1)[:, :count]
        return best, mx.take_along_axis(logits, best, axis=-1)

    draft = drafter.propose_tree(StaticTree(((2,), (2, 1), (1, 1, 1))), pick)
    assert drafter.cache[0].offset == len(text) - 1
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    assert len(seen) == 1 + 2 + 3
    for row in range(len(seen)):
        branch, node = [], row
        while node:
            branch.insert(0, tokens[node - 1])
            node = parents[node - 1]
        theirs = part.logits(text, len(branch) + 1, branch)[-1]
        assert np.abs(seen[row] - theirs).max() / np.abs(theirs).max() < 1e-5


# A layer that knows a text by heart, so that drafts are kept with real features.


def by_heart() -> tuple[Published, MTPDrafter]:
    """Trained by ``tools/golden/learn_mtp.py``, with mlx-vlm's own class."""
    part = published("qwen3.5")
    path = ROOT / "tests" / "support" / "golden" / "mtp-by-heart.safetensors"
    return part, load_mtp(mx.load(str(path)), part.target)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_what_is_known_by_heart_is_accepted(k):
    part, drafter = by_heart()
    tokens, stats = speculative(part.target, drafter, PROMPT, 45, num_draft_tokens=k)
    assert tokens == plain(part.target, PROMPT, 45)
    assert stats.tau >= 0.9 * (k + 1)


@pytest.mark.parametrize("rule", ["match", "coupled", "reject"])
def test_what_is_known_by_heart_is_accepted_when_sampled(rule):
    part, drafter = by_heart()
    sampler = Sampling(temp=0.005, seed=3)
    _, stats = speculative(
        part.target, drafter, PROMPT, 40, num_draft_tokens=2, sampler=sampler, acceptance=rule
    )
    assert stats.tau >= 0.9 * 3


@pytest.mark.parametrize("stop", [1, 2, 5, 11])
def test_a_prompt_cache_goes_on_wherever_it_was_left(stop):
    """The pairs of a partly taken round are cut, and the last features kept."""
    part, drafter = by_heart()
    caches = [*make_prompt_cache(part.target), *drafter.make_cache()]
    options = {"num_draft_tokens": 3, "prompt_cache": caches}
    text = plain(part.target, PROMPT, 40)
    first, _ = speculative(part.target, drafter, PROMPT, stop, **options)
    assert first == text[:stop]
    more, stats = speculative(part.target, drafter, text[stop : stop + 3], 20, **options)
    assert more == text[stop + 3 :][:20]
    assert stats.tau >= 0.9 * 4
