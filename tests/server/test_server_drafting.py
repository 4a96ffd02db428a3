"""How a request or a flag of the server says to draft: length, tree, rule; and who refuses it."""

import re
from pathlib import Path

import mlx_lm
import pytest
from costs import SettledCosts, curve
from openai import BadRequestError
from serving import ENDLESS, NUM_CHARACTERS, ask_json, ours, parse, theirs

from mlx_eagle.commands import generate as cli
from mlx_eagle.decoding import generate_step
from mlx_eagle.decoding.decoder import Decoder
from mlx_eagle.decoding.setup import read_tree
from mlx_eagle.draft_models import open_drafter
from mlx_eagle.drafters import pairs
from mlx_eagle.server import __main__ as command
from mlx_eagle.server import active_requests, provider
from mlx_eagle.server.caches import PairCache

VOCAB = NUM_CHARACTERS + 2
TEXT = {"prompt": "Once upon a time", "max_tokens": 40, "logit_bias": ENDLESS}
SAMPLED = TEXT | {"temperature": 0.9, "seed": 5, "max_tokens": 24}


@pytest.fixture(scope="module")
def expected(pair):
    """mlx_lm.server's answer to ``TEXT``."""
    with theirs(pair["target"]) as asked:
        yield asked.complete(**TEXT).choices


@pytest.fixture(scope="module")
def server(pair):
    with ours("--model", pair["target"], "--draft-model", pair["head"], "--usage-stats") as asked:
        yield asked


@pytest.fixture
def asked_of_decoder(monkeypatch) -> list[tuple]:
    """The trees and rules that decoders are asked for."""
    found, open_decoder = [], active_requests.open_decoder

    def watch(*args, **options):
        found.append((options["tree"], options["acceptance"]))
        return open_decoder(*args, **options)

    monkeypatch.setattr(active_requests, "open_decoder", watch)
    return found


WISHES = {
    "auto": {"num_draft_tokens": "auto"},
    "growing tree": {"tree": "3x3:8"},
    "static tree": {"tree": "3/2+1"},
    "tree auto": {"tree": "auto"},
    "chains": {"tree": None, "acceptance": None},
    "match": {"acceptance": "match"},
}


@pytest.mark.parametrize("name", WISHES)
def test_a_request_says_how_to_draft(server, expected, asked_of_decoder, name):
    wish = WISHES[name]
    got = server.complete(**TEXT, **wish)
    assert got.choices == expected
    tree = wish.get("tree") and read_tree(wish["tree"])
    assert asked_of_decoder == [(tree, wish.get("acceptance"))]
    if name.endswith(" tree"):  # more of them are drafted than a chain has
        chain = server.complete(**TEXT).usage
        assert got.usage.drafted_tokens / chain.drafted_tokens > 1.2


@pytest.mark.parametrize("flag", [False, True])
def test_a_request_says_whether_it_is_exact(server, expected, flag, monkeypatch):
    """What it does not say the flag of the server does."""
    found = []
    launch = Decoder.launch

    def watch(decoder, *args, **options):
        found.append(decoder.is_exact)
        return launch(decoder, *args, **options)

    monkeypatch.setattr(Decoder, "launch", watch)
    monkeypatch.setattr(server.generator.cli_args, "exact", flag)
    for wish, is_exact in [({}, flag), ({"exact": True}, True), ({"exact": False}, False)]:
        found.clear()
        assert server.complete(**TEXT, **wish).choices == expected
        assert set(found) == {is_exact}


@pytest.mark.exhaustive
def test_rules_for_sampling(server, asked_of_decoder):
    """Coupled gives the text of the seed alone; the others draw in ways of their own."""
    rules = (None, "coupled", "match", "reject")
    texts = [server.complete(**SAMPLED, acceptance=r).choices[0].text for r in rules]
    assert asked_of_decoder == [(None, rule) for rule in rules]
    plain_text = server.complete(**SAMPLED, num_draft_tokens=0).choices[0].text
    trees = [
        server.complete(**SAMPLED, tree="2x2:4", acceptance=rule).choices[0].text
        for rule in ("coupled", None)
    ]
    assert texts[0] == texts[1] == plain_text == trees[0] == trees[1]
    rejected = {"tree": "2x2:4", "acceptance": "reject"}
    texts.append(server.complete(**SAMPLED, **rejected).choices[0].text)
    assert len({plain_text, *texts[2:]}) == 4
    again = [server.complete(**SAMPLED, acceptance=r).choices[0].text for r in rules[2:]]
    again.append(server.complete(**SAMPLED, **rejected).choices[0].text)
    assert again == texts[2:], "a seed gives one text under each rule"


REFUSED = {
    "word": ({"num_draft_tokens": "three"}, "num_draft_tokens is 'three': give a number or"),
    "not yes": ({"exact": "yes"}, "exact is a string: give a boolean"),
    "number": ({"tree": 4}, "tree is a number: give a string"),
    "no tree": ({"tree": "4x4"}, "give WIDTHxDEPTH:NODES"),
    "empty": ({"tree": ""}, "give WIDTHxDEPTH:NODES"),
    "impossible": ({"tree": "2x2:9"}, "is impossible"),
    "static": ({"tree": "2/0"}, "give at most one number a node"),
    "nodes": ({"tree": "20x20:257"}, "is too large: give at most 256 nodes"),
    "width": ({"tree": f"{10**9}x1:5"}, "is too large"),
    "long": ({"tree": "1/" * 10**6}, "the tree has 2000000 characters"),
    "wide": ({"tree": "50x1:50"}, f"the head drafts only {VOCAB // 2} different tokens"),
    "rule": ({"acceptance": "always"}, "give one of match, coupled, reject"),
    "no rule": ({"acceptance": ["match"]}, "give one of match, coupled, reject"),
    "greedy": ({"acceptance": "reject"}, "needs a temperature above 0"),
    "xtc": (
        {"acceptance": "coupled", "temperature": 1, "xtc_probability": 0.5},
        "cannot replay XTC",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wishes_that_make_no_sense(server, expected, name):
    wish, sentence = REFUSED[name]
    for stream in (False, True):
        with pytest.raises(BadRequestError, match=re.escape(sentence)) as error:
            server.complete(**TEXT | {"stream": stream} | wish)
        assert error.value.body["message"].endswith(".")
    if name in ("wide", "both"):
        assert server.complete(**TEXT).choices == expected


@pytest.mark.exhaustive
def test_flags_are_what_requests_say_nothing_of(pair, expected, asked_of_decoder):
    flags = ("--model", pair["target"], "--draft-model", pair["head"], "--tree", "2x2:4")
    with ours(*flags, "--acceptance", "match", "--num-draft-tokens", "auto") as asked:
        assert asked.complete(**TEXT).choices == expected
        assert asked.complete(**TEXT, tree=None, num_draft_tokens=3).choices == expected
        asked.complete(**SAMPLED)
        asked.complete(**SAMPLED, tree=None, acceptance=None)
        asked.complete(**SAMPLED, acceptance="reject")
    tree = read_tree("2x2:4")
    # Greedy decoding has one rule.
    sampled = [(tree, "match"), (None, None), (tree, "reject")]
    assert asked_of_decoder == [(tree, None), (None, None), *sampled]


@pytest.mark.exhaustive
def test_pairs_without_trees_refuse_them(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["model"])
    with ours(*flags) as asked:
        for num_draft_tokens in (3, "auto"):
            with pytest.raises(BadRequestError, match="this drafter proposes chains only"):
                asked.complete(**TEXT, tree="2x2:4", num_draft_tokens=num_draft_tokens)
        plain_answer = asked.complete(**TEXT, tree="2x2:4", num_draft_tokens=0)
        assert plain_answer.choices == asked.complete(**TEXT).choices
    with pytest.raises(ValueError, match="this drafter proposes chains only"):
        ours(*flags, "--tree", "2x2:4")


@pytest.mark.exhaustive
def test_targets_without_trees_refuse_them(pair, recurrent):
    flags = ("--model", recurrent, "--draft-model", pair["head"], "--usage-stats")
    with ours(*flags) as asked, theirs(recurrent) as reference:
        for stream in (False, True):
            with pytest.raises(BadRequestError, match="tree drafts need caches whose rows"):
                asked.complete(**TEXT, tree="2x2:4", stream=stream)
        got = asked.complete(**TEXT)
        assert got.choices == reference.complete(**TEXT).choices
        assert got.usage.drafted_tokens > 0
    with pytest.raises(ValueError, match="tree drafts need caches whose rows"):
        ours(*flags, "--tree", "auto")


@pytest.mark.exhaustive
def test_no_draft_could_pay_here(pair, expected, monkeypatch):
    """What was decoded without the drafter is filed without its part of the caches."""
    hopeless = SettledCosts(curve(lambda k: 100.0))
    monkeypatch.setattr(generate_step, "costs_of", lambda *_: hopeless)
    filed, insert = [], PairCache.insert_cache

    def watch(self, tokens, caches, **options):
        filed.append(len(caches.draft))
        insert(self, tokens, caches, **options)

    monkeypatch.setattr(PairCache, "insert_cache", watch)
    flags = ("--model", pair["target"], "--draft-model", pair["head"], "--usage-stats")
    with ours(*flags, "--num-draft-tokens", "auto") as asked:
        got = asked.complete(**TEXT)
        assert got.choices == expected and got.usage.drafted_tokens == 0
        longer = TEXT | {"prompt": TEXT["prompt"] + got.choices[0].text[:20], "max_tokens": 20}
        got = asked.complete(**longer, num_draft_tokens=3)
    assert got.choices[0].text == expected[0].text[20:] and got.usage.drafted_tokens > 0
    assert filed[0] == 0 and filed[1] > 0


MISTAKES = {
    "tree": (("--tree", "4x4"), "give WIDTHxDEPTH:NODES"),
    "length": (("--num-draft-tokens", "-2"), "give 0 (plain decoding) or more, or auto"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_flags_that_make_no_sense(name):
    flags, sentence = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        command.check_arguments(parse(*flags))


def test_drafting_flags_are_those_of_generate():
    def told(parser) -> dict:
        return {
            action.dest: (action.help, action.type, action.choices, action.default)
            for action in parser._actions
        }

    ours_, theirs_ = told(command.build_parser()), told(cli.build_parser())
    for name in (
        "draft_model",
        "num_draft_tokens",
        "quantize_draft",
        "draft_vocab",
        "tree",
        "acceptance",
    ):
        assert ours_[name] == theirs_[name]
    assert ours_["num_draft_tokens"][3] == "auto"


def test_auto_is_known_by_the_name_of_what_it_stands_for(pair, monkeypatch):
    """In ``/props`` and in requests, which may also call it "auto"."""
    rows = f"a/{Path(pair['target']).name}\n    {pair['head']}  eagle3  1  MIT\n"
    monkeypatch.setattr(pairs, "PAIRS", pairs.read_table(rows))
    named = f"{pair['head']}+lookup"
    with ours("--model", pair["target"], "--draft-model", "auto") as asked:
        assert ask_json(asked, "/props", {}, "GET")[1]["draft_model"] == named
        for name in ("auto", named):
            assert asked.complete(prompt="a", max_tokens=2, draft_model=name).choices


def test_the_demo_head_has_a_name(pair, monkeypatch):
    """Its own, not the word that asked for it."""
    model, tokenizer = mlx_lm.load(pair["target"])
    own = open_drafter(pair["head"], model, tokenizer)
    monkeypatch.setattr(provider, "load_demo", lambda dtype: (model, tokenizer, own))
    with ours() as asked:
        named = ask_json(asked, "/props", {}, "GET")[1]["draft_model"]
        assert named == asked.server.page_settings()["draft_model"] == "demo-head+lookup"
        assert asked.complete(prompt="a", max_tokens=2, draft_model=named).choices
