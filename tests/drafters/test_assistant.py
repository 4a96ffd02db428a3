"""Gemma 4 assistants: against transformers, in the loop on all kinds of caches, refusals."""

import json
import math
from copy import copy
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from assistants import (
    FULL,
    LARGE,
    SLIDING,
    golden_folder,
    golden_target,
    published,
    tiny_assistant,
    tiny_gemma4,
    twin_logits,
)
from checkpoints import write_config
from grids import thorough
from helpers import PROMPT, byte_tokenizer, plain, plain_with_cache, speculative, tiny_llama
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from public_drafters import ASSISTANTS

import mlx_eagle
from mlx_eagle.convert import convert
from mlx_eagle.convert.stored import Stored
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.assistant import AssistantConfig, sources
from mlx_eagle.drafters.base import Draft
from mlx_eagle.drafters.kinds import KINDS, load_drafter, recognise
from mlx_eagle.drafters.pairs import PAIRS as PUBLIC
from mlx_eagle.drafters.target_parts import TargetSizes
from mlx_eagle.target_model.cache_view import CacheView
from mlx_eagle.target_model.ragged import RaggedCaches
from mlx_eagle.target_model.target import Target

TOLERANCE = 1e-5
WINDOW = 12  # of the frozen targets, as in tools/golden/make_assistant.py
LEARNED = [[5, 17, 3, 48, 41, 2, 60, 9], [7, 9, 11, 30, 8], [33, 4, 25, 8, 1, 50, 12]]
FROZEN = ("dense", "clusters")
TARGETS = {
    "shared rows": (tiny_gemma4(), {}),
    "clusters": (tiny_gemma4(seed=33), {"num_centroids": 12, "centroid_top_k": 4}),
    "keys as values": (tiny_gemma4(**LARGE), {}),
    "sliding layers alone": (tiny_gemma4(), {"layer_types": (SLIDING, SLIDING)}),
}
PAIRS = {name: (t, tiny_assistant(t, **more)) for name, (t, more) in TARGETS.items()}


def relative(found, wanted) -> float:
    """The largest difference where a token can be drafted, by the largest logit."""
    found, wanted = np.array(found, np.float64), np.array(wanted, np.float64)
    there = np.isfinite(found)
    return float(np.abs(found[there] - wanted[there]).max() / np.abs(wanted[there]).max())


# What transformers makes of the same files


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """The frozen assistants, converted and loaded for their targets."""
    folder, found = tmp_path_factory.mktemp("frozen"), {}
    for name in (*FROZEN, "learned"):
        target = golden_target(name)
        source, place = str(golden_folder(name)), str(folder / name)
        assert convert(source, place, quantize=False, dtype="float32")["kind"] == "assistant"
        expected = mx.load(str(golden_folder(name) / "expected.safetensors"))
        found[name] = target, load_drafter(place, target), expected
    return found


class Rows:
    """What stands in a target's caches after so many positions, by the frozen rows."""

    def __init__(self, drafter, expected, num_rows, window=WINDOW, surplus=0):
        self.kinds = {index: kind for kind, index in drafter._sources.items()}
        self.expected, self.end, self.window = expected, num_rows + surplus, window

    def rows(self, index):
        kind = self.kinds[index]
        first = max(0, self.end - self.window) if kind == SLIDING else 0
        parts = (self.expected[f"{kind}.{part}"] for part in ("keys", "values"))
        return tuple(part[:, :, first : self.end] for part in parts)


def drafted_logits(drafter, caches, tokens: list[int], states: mx.array, size: int = 3):
    """The logits (size, V) of a draft, after tokens that are absorbed with states."""
    begun, seen = drafter.begin(), []

    def pick(logits, ids):
        seen.append(logits)
        return mx.argmax(logits, axis=-1)

    begun.extend(mx.array(tokens), states)
    begun.see_target(caches)
    begun.propose(size, pick)
    assert begun.num_forwards == size
    return mx.concatenate(seen)


@pytest.mark.parametrize("name", FROZEN)
def test_logits_are_those_of_transformers(frozen, name):
    """From its own rows and states, after each place of a text that goes beyond the window."""
    _, drafter, expected = frozen[name]
    text, states = expected["text"].tolist(), expected["states"][0]
    num_places = expected["logits"].shape[0]
    start = 8
    assert start + num_places > WINDOW + 8
    for i, wanted in enumerate(expected["logits"]):
        n = start + i
        # As after a prompt, and as after a draft of which two tokens were kept.
        tokens, seen = text[n - 2 : n + 1], states[n - 3 : n]
        found = drafted_logits(drafter, Rows(drafter, expected, n), tokens, seen)
        assert relative(found, wanted) < TOLERANCE
        assert mx.argmax(found, axis=-1).tolist() == mx.argmax(wanted, axis=-1).tolist()


def test_only_tokens_of_the_best_clusters_can_be_drafted(frozen):
    _, drafter, expected = frozen["clusters"]
    text, states = expected["text"].tolist(), expected["states"][0]
    found = np.array(drafted_logits(drafter, Rows(drafter, expected, 9), [text[9]], states[8:9]))
    assert np.isfinite(found).sum(axis=-1).tolist() == [5 * 64 // 16] * 3
    wanted = np.array(expected["logits"][1])
    # transformers gives all others one value below the rest.
    assert (np.isfinite(found) == (wanted > wanted.min(axis=-1, keepdims=True))).all()


def unnormed(expected) -> mx.array:
    """What enters the final norm of the target, (P, H)."""
    target = golden_target("dense")
    tapped = Target(target, (len(target.layers),))
    return tapped(expected["text"], make_prompt_cache(target))[1]


MISTAKES = {
    "the row before": lambda d, e, n: (Rows(d, e, n - 1), e["states"][0][n - 1 : n]),
    "a stale row": lambda d, e, n: (Rows(d, e, n, surplus=1), e["states"][0][n - 1 : n]),
    "a shorter window": lambda d, e, n: (Rows(d, e, n, window=4), e["states"][0][n - 1 : n]),
    "another state": lambda d, e, n: (Rows(d, e, n), e["states"][0][n - 2 : n - 1]),
    "the state before the norm": lambda d, e, n: (Rows(d, e, n), unnormed(e)[n - 1 : n]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(frozen, mistake):
    _, drafter, expected = frozen["dense"]
    caches, states = MISTAKES[mistake](drafter, expected, 14)
    found = drafted_logits(drafter, caches, [expected["text"][14].item()], states)
    assert relative(found, expected["logits"][6]) > 1e-3


def test_a_position_that_moves_and_an_embedding_without_its_scale_are_seen(frozen):
    _, drafter, expected = frozen["dense"]
    token, states = [expected["text"][14].item()], expected["states"][0][13:14]

    def found(**changes):
        other = drafter.begin()
        other.__dict__.update(changes)
        return drafted_logits(other, Rows(drafter, expected, 14), token, states)

    class Moving:
        """The head with a position that is one more at each step."""

        def __init__(self):
            self.config, self.norm, self.steps = drafter.head.config, drafter.head.norm, 0

        def __call__(self, joined, rows, position, project):
            self.steps += 1
            return drafter.head(joined, rows, position + self.steps - 1, project)

    wanted = expected["logits"][6]
    assert relative(found(), wanted) < TOLERANCE
    moved = found(head=Moving())
    assert relative(moved[:1], wanted[:1]) < TOLERANCE
    assert relative(moved[1:2], wanted[1:2]) > 1e-3
    assert relative(found(_scale=1.0), wanted) > 0.01


def test_the_other_convention_of_positions_is_an_option(tmp_path, frozen):
    _, drafter, expected = frozen["dense"]
    target = golden_target("dense")
    convert(str(golden_folder("dense")), str(tmp_path / "head"), quantize=False, dtype="float32")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    write_config(tmp_path / "head", config | {"position": "newest"})
    other = load_drafter(tmp_path / "head", target)
    token, states = [expected["text"][14].item()], expected["states"][0][13:14]
    caches = Rows(drafter, expected, 14)
    ours, theirs = (drafted_logits(d, caches, token, states) for d in (drafter, other))
    assert relative(theirs, ours) > 1e-3
    # As if there were a position less, with all its rows.
    shorter = drafter.head(
        other.joined(other._embed(mx.array(token)), states), rows_in(drafter, caches), 13
    )
    assert relative(theirs[:1], shorter[0]) < TOLERANCE


def rows_in(drafter, caches) -> dict:
    return {kind: (*caches.rows(index), None) for kind, index in drafter._sources.items()}


# In the loop


class Checked:
    """Compares an assistant's drafts with the twin's, and hands on what a script says."""

    def __init__(self, inner, target, text, kept):
        self.inner, self.target, self.text, self.kept = inner, target, text, kept
        self.committed, self.absorbed, self.num_rounds = [], [], 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, cache=None):
        self.begun = Checked(self.inner.begin(cache), self.target, self.text, self.kept)
        return self.begun

    def extend(self, tokens, features, last=None):
        self.absorbed.append((tokens, last))
        self.inner.extend(tokens, features, last)

    def propose(self, size, pick):
        seen = []
        for tokens, last in self.absorbed:
            self.committed += tokens.tolist()[: None if last is None else last.item() + 1]
        self.absorbed = []
        assert self.committed == self.text[: len(self.committed)]
        self.inner.propose(size, lambda logits, ids: (seen.append(logits), pick(logits, ids))[1])
        wanted = twin_logits(self.inner, self.target, self.committed, size)
        assert relative(mx.concatenate(seen), wanted) < 1e-3
        right = self.kept[self.num_rounds % len(self.kept)]
        self.num_rounds += 1
        tokens = self.text[len(self.committed) : len(self.committed) + size]
        tokens[right:] = [(token + 1) % 64 for token in tokens[right:]]
        return Draft(mx.array(tokens, mx.int32))


@pytest.mark.parametrize("kept", thorough([[3], [0], [2, 0, 3, 1]], [2, 0, 3, 1]), ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_after_each_round_it_sees_what_was_kept_and_nothing_else(name, kept):
    """Beyond the window; rejected rows, and rings left by plain steps, would be seen."""
    target, inner = PAIRS[name]
    text = PROMPT * 2 + plain(target, PROMPT * 2, 32)
    drafter = Checked(inner, target, text, kept)
    tokens, _ = speculative(target, drafter, PROMPT * 2, 24, num_draft_tokens=3)
    assert tokens == text[len(PROMPT) * 2 :][:24]
    assert drafter.begun.num_rounds >= 6


@pytest.mark.parametrize("k", thorough([1, 3], 3))
@pytest.mark.parametrize("name", thorough(PAIRS, "shared rows", "keys as values"))
def test_texts_caches_and_counts(name, k):
    target, drafter = PAIRS[name]
    wanted, theirs = plain_with_cache(target, PROMPT, 30)
    ours = make_prompt_cache(target) + drafter.make_cache()
    tokens, stats = speculative(target, drafter, PROMPT, 30, num_draft_tokens=k, prompt_cache=ours)
    assert tokens == wanted
    assert stats.num_head_forwards == stats.num_drafted
    assert stats.num_evals == stats.num_target_forwards
    assert any(isinstance(cache, RotatingKVCache) for cache in theirs)
    assert same_rows(ours[: len(theirs)], theirs)


def same_rows(ours: list, theirs: list) -> bool:
    """Whether caches hold the same rows as far as the window goes, in the order of the text."""

    def newest(cache):
        size = min(cache.offset, getattr(cache, "max_size", cache.offset))
        ordered = [cache.keys, cache.values]
        if isinstance(cache, RotatingKVCache):
            ordered = [cache._temporal_order(part) for part in ordered]
        else:
            ordered = [part[..., : cache.offset, :] for part in ordered]
        return [part[..., -(size - 1) :, :] for part in ordered]

    return all(
        a.offset == b.offset
        and all(
            mx.allclose(x, y, rtol=1e-3, atol=1e-3).item()
            for x, y in zip(newest(a), newest(b), strict=True)
        )
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("num_taken", thorough([1, 2, 3, 5, 8, 13, 14], 5))
def test_stopped_anywhere_and_continued(frozen, num_taken):
    """With an assistant that knows the text, so that runs are long."""
    target, drafter, _ = frozen["learned"]
    cache, reference = make_prompt_cache(target) + drafter.make_cache(), make_prompt_cache(target)
    prompt = LEARNED[0]
    steps = speculative_generate_step(
        mx.array(prompt), target, drafter, num_draft_tokens=3, max_tokens=-1, prompt_cache=cache
    )
    taken = [next(steps)[0] for _ in range(num_taken)]
    steps.close()
    assert taken == plain(target, prompt, num_taken, prompt_cache=reference)
    # What was taken last has been run as well, as mlx-lm leaves it.
    assert same_rows(cache[: len(reference)], reference)
    tokens, _ = speculative(target, drafter, [3, 4], 12, num_draft_tokens=3, prompt_cache=cache)
    assert tokens == plain(target, [3, 4], 12, prompt_cache=reference)


@pytest.mark.exhaustive
@pytest.mark.parametrize("prompt", LEARNED, ids=str)
def test_plain_steps_in_between(frozen, prompt):
    """``auto`` turns drafting on and off; after single steps the rotating caches are rings."""
    target, drafter, _ = frozen["learned"]
    tokens, _ = speculative(target, drafter, prompt, 60, num_draft_tokens="auto")
    assert tokens == plain(target, prompt, 60)


@pytest.mark.parametrize("k", thorough([1, 2, 3], 3))
def test_an_assistant_that_knows_the_texts(frozen, k):
    target, drafter, expected = frozen["learned"]
    emitted = rounds = 0
    for prompt, text in zip(LEARNED, expected["texts"].tolist(), strict=True):
        tokens, stats = speculative(target, drafter, prompt, 25, num_draft_tokens=k)
        assert tokens == text[:25] == plain(target, prompt, 25)
        # The last round is cut short by the end of the text.
        emitted += (stats.num_rounds - 1) * stats.tau
        rounds += stats.num_rounds - 1
        assert stats.tau >= 0.9 * (k + 1) * (1 - 1 / stats.num_rounds)
    assert emitted / rounds >= 0.9 * (k + 1)


@pytest.mark.parametrize("name", PAIRS)
def test_drafts_in_a_batch_are_those_of_each_request(name):
    """Beyond the windows, with lengths of all kinds, and the position of either convention."""
    target, inner = PAIRS[name]
    prompts = [PROMPT, [9], [70, 71, 72] * 7]
    for position in ("next", "newest"):
        drafter = inner.begin()
        drafter.head = copy(inner.head)
        drafter.head.config = replace(inner.head.config, position=position)
        caches, alone, batch = RaggedCaches(), [], drafter.batch_drafter()
        for prompt in prompts:
            cache = make_prompt_cache(target)
            _, features = Target(target, drafter.taps)(mx.array(prompt), cache)
            caches.join(cache)
            begun = drafter.begin()
            begun.extend(mx.array([5]), features[-1:])
            batch.join(begun)
            begun.see_target(CacheView(cache))
            alone.append(begun.propose(3, greedy).tokens.tolist())
        batch.see_target(caches)
        tokens, lengths = batch.propose(3, Greedy(), [True] * 3)
        assert tokens.tolist() == alone and lengths == [3, 3, 3]
        assert batch.num_forwards(2) == 3


def greedy(logits, ids):
    return mx.argmax(logits, axis=-1)


class Greedy:
    pick = staticmethod(greedy)


def test_batches_and_wrapped_targets(frozen, recwarn):
    target, drafter, _ = frozen["learned"]
    options = {"draft_model": drafter, "num_draft_tokens": 3, "max_tokens": 20}
    made = mlx_eagle.batch_generate(
        target, byte_tokenizer(), LEARNED, return_token_ids=True, **options
    )
    for prompt, tokens, stats in zip(LEARNED, made.token_ids, made.stats, strict=True):
        alone, own = speculative(target, drafter, prompt, 20, num_draft_tokens=3)
        assert tokens == alone == plain(target, prompt, 20)
        assert stats.num_accepted >= own.num_accepted - 2
    assert not recwarn.list, "drafts are made prompt by prompt"
    # The same behind the wrapper that vision models have.
    args = {k: v for k, v in vars(target.args).items() if v is not None}
    wrapped = gemma4.Model(gemma4.ModelArgs(text_config=args, vocab_size=args["vocab_size"]))
    wrapped.language_model.load_weights(tree_flatten(target.parameters()))
    own = type(drafter)(drafter.head, wrapped)
    tokens, stats = speculative(wrapped, own, LEARNED[0], 20, num_draft_tokens=3)
    assert tokens == plain(target, LEARNED[0], 20) and stats.tau > 3


@pytest.mark.parametrize("name", thorough(["shared rows", "clusters"], "clusters"))
def test_coupled_texts_depend_on_the_seed_alone(name):
    target, drafter = PAIRS[name]

    def run(k):
        options = {"sampler": Sampling(temp=0.8, seed=3), "acceptance": "coupled"}
        return speculative(target, drafter, PROMPT, 20, num_draft_tokens=k, **options)[0]

    assert run(3) == run(1) == run(0)


# Folders and refusals


def test_four_bits_by_default(tmp_path):
    target, drafter = PAIRS["clusters"]
    source = published(tmp_path / "source", drafter)
    written = convert(str(source), str(tmp_path / "head"))
    assert written["quantization"]["bits"] == 4
    loaded = load_drafter(tmp_path / "head", target)
    assert isinstance(loaded.head.embed_tokens, nn.QuantizedEmbedding)
    tokens, _ = speculative(target, loaded, PROMPT, 20, num_draft_tokens=3)
    assert tokens == plain(target, PROMPT, 20)
    # Rows that are gathered from the packed table are those of the table unpacked.
    x = mx.random.normal((1, 32), key=mx.random.key(1))
    found = np.array(loaded.head.logits(x))
    dense = np.array(loaded.head.embed_tokens.as_linear(x))
    assert relative(found, dense) < 1e-4 and np.isfinite(found).sum() == 32


@pytest.mark.parametrize("name", ["clusters", "shared rows", "keys as values"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_published_checkpoints(tmp_path, name, prefix):
    target, drafter = PAIRS[name]
    source = published(tmp_path / "source", drafter, prefix)
    convert(str(source), str(tmp_path / "head"), quantize=False)
    loaded = load_drafter(tmp_path / "head", target)
    assert loaded.head.config == drafter.head.config
    weights = dict(tree_flatten(loaded.head.parameters()))
    for path, array in tree_flatten(drafter.head.parameters()):
        assert mx.array_equal(weights[path], array).item()


def test_an_output_that_is_not_tied(tmp_path):
    """It is the one table that is kept; the assistant's own embedding is used for nothing."""
    target, drafter = PAIRS["shared rows"]
    source = published(tmp_path / "source", drafter, tie_word_embeddings=False)
    weights = mx.load(str(source / "model.safetensors"))
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    convert(str(source), str(tmp_path / "head"), quantize=False)
    loaded = load_drafter(tmp_path / "head", target)
    assert mx.array_equal(loaded.head.embed_tokens.weight, weights["lm_head.weight"]).item()


def test_it_is_told_by_its_tensors():
    names = ["pre_projection.weight", "post_projection.weight", "model.norm.weight"]
    assert recognise(names, {"model_type": "gemma4_text"}) == "assistant"
    assert recognise(names[2:], {"model_type": "gemma4_assistant"}) == "model"


CENTROIDS = "masked_embedding.centroids.weight"
REFUSED = {
    "a missing tensor": ({"drop": ("pre_projection.weight",)}, r"lacks pre_projection\.weight"),
    "a missing layer": (
        {"drop": ("model.layers.2.self_attn.q_proj.weight",)},
        r"lacks layers\.2\.self_attn\.q_proj\.weight",
    ),
    "no centroids": ({"drop": (CENTROIDS,)}, r"lacks centroids\.weight"),
    "no ordering": ({"drop": ("masked_embedding.token_ordering",)}, "token_ordering"),
    "experts": ({"text_config": {"enable_moe_block": True}}, "enable_moe_block true"),
    "inputs per layer": (
        {"text_config": {"hidden_size_per_layer_input": 8}},
        "hidden_size_per_layer_input 8",
    ),
    "an activation": ({"text_config": {"hidden_activation": "silu"}}, "hidden_activation"),
    "other types of layers": ({"text_config": {"layer_types": ["dense"] * 4}}, "layer_types"),
    "more clusters than there are": (
        {"centroid_intermediate_top_k": 99},
        "centroid_top_k 99, num_centroids",
    ),
    "a number that is none": ({"centroid_intermediate_top_k": "x"}, "centroid_intermediate_top_k"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    changes, words = REFUSED[case]
    source = published(tmp_path / "source", PAIRS["clusters"][1], **changes)
    with pytest.raises(ValueError, match=words) as caught:
        convert(str(source), str(tmp_path / "head"))
    assert "\n" not in str(caught.value) and not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    "target, words",
    [
        (tiny_llama(), "the target is a llama model"),
        (tiny_gemma4(hidden_size=32), "hidden size 64, but this target's is 32"),
        (tiny_gemma4(vocab_size=128), "96 tokens, but the target's has 128"),
        (tiny_gemma4(global_head_dim=16), "full_attention layers, of which the target has 2"),
        (
            tiny_gemma4(layer_types=[FULL] * 6),
            "sliding_attention layers, of which the target has none",
        ),
    ],
)
def test_another_target(tmp_path, target, words):
    source = published(tmp_path / "source", PAIRS["shared rows"][1])
    convert(str(source), str(tmp_path / "head"), quantize=False)
    with pytest.raises(ValueError, match=words) as caught:
        load_drafter(tmp_path / "head", target)
    assert "\n" not in str(caught.value)


def test_which_layers_are_read():
    """The last of each type before those that share; at full size, from real configs."""
    config = PAIRS["shared rows"][1].head.config
    assert sources(config, PAIRS["shared rows"][0]) == {SLIDING: 2, FULL: 3}
    large = PAIRS["keys as values"]
    assert sources(large[1].head.config, large[0]) == {SLIDING: 4, FULL: 5}


def test_a_folder_that_lacks_its_ordering(tmp_path):
    target, drafter = PAIRS["clusters"]
    convert(str(published(tmp_path / "source", drafter)), str(tmp_path / "head"), quantize=False)
    path = tmp_path / "head" / "model.safetensors"
    weights = mx.load(str(path))
    del weights["token_ordering"]
    mx.save_safetensors(str(path), weights)
    with pytest.raises(ValueError, match="lacks token_ordering"):
        load_drafter(tmp_path / "head", target)
    with pytest.raises(ValueError, match="has no hidden_size"):
        AssistantConfig.from_dict({}, "config.json")


def test_rounds_before_prompts_of_one_token():
    target, drafter = PAIRS["shared rows"]
    for prompt in ([5], [5, 17]):
        tokens, _ = speculative(target, drafter, prompt, 12, num_draft_tokens=3)
        assert tokens == plain(target, prompt, 12)


@pytest.mark.parametrize("name", ASSISTANTS)
def test_a_public_one_resolves(name):
    """At full size, from its config and shapes alone; an ordering is stored in 64 bits."""
    row = ASSISTANTS[name]
    depth, width, vocab = row["target"]
    nothing = np.zeros(0, np.uint8)
    tensors = {tensor: Stored("BF16", shape, nothing) for tensor, shape in row["shapes"].items()}
    assert recognise(tensors, row["config"]) == "assistant"
    written, _ = KINDS["assistant"].convert(tensors, row["config"])
    config = AssistantConfig.from_dict(written, "config.json")
    assert config.num_centroids == 2048 * ("masked_embedding.centroids.weight" in tensors)
    assert (config.head_dim, config.global_head_dim) == (256, 512)
    config.check_fit(TargetSizes(width, depth, vocab))
    with pytest.raises(ValueError, match="hidden size"):
        config.check_fit(TargetSizes(width + 64, depth, vocab))
    wide = {"masked_embedding.token_ordering": 8}
    num_bytes = [wide.get(n, 2) * math.prod(shape) for n, shape in row["shapes"].items()]
    (pair,) = [pair for pair in PUBLIC if pair.head == name]
    assert (pair.kind, pair.megabytes) == ("assistant", round(sum(num_bytes) / 1e6))
