"""Whose answers a request copies from, and whose prompt caches it goes on with."""

import re
import string
from pathlib import Path

import pytest
from automaton import write_automaton
from grids import thorough
from serving import ask_json, ours, parse
from test_server_drafted import metrics_of

from mlx_eagle.drafters.earlier_answers import DEFAULT_BOUND
from mlx_eagle.server.flags import check_arguments

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
WORDS = [f"w{a}{b} " for a in "ab" for b in string.ascii_lowercase[:18]]
SCRIPTS = {"!": ["Hel", "lo ", "there."], "@": WORDS}
ANSWER = "".join(WORDS)
NUM_ANSWER = len(WORDS) + 2  # tokens that are kept of it: its end, and the gap behind it
COUNTS = ("drafted", "accepted", "copied", "accepted_copied")


@pytest.fixture(scope="module")
def automata(tmp_path_factory) -> tuple[str, ...]:
    """A target that says ``WORDS``, and a draft model whose every second token is wrong."""
    folder = tmp_path_factory.mktemp("automata")
    target = write_automaton(folder / "target", SCRIPTS)
    draft = write_automaton(folder / "draft", SCRIPTS, mistakes=2)
    return "--model", target, "--draft-model", f"{draft}+lookup"


@pytest.fixture(scope="module")
def flags(automata) -> tuple[str, ...]:
    return *automata, "--copy-answers", "10000"


@pytest.fixture(scope="module")
def server(flags):
    with ours(*flags) as asked:
        yield asked


@pytest.fixture(scope="module")
def fresh(flags) -> dict[str, list[float]]:
    """By API, the counts of the second question where it is the first one of its server."""
    found = {}
    for api in ("completions", "chat"):
        with ours(*flags) as asked:
            found[api] = counted(asked, api, SECOND)
    return dict.fromkeys(PATHS, found["chat"]) | found  # the others are translated to a chat


FIRST, SECOND = "The first one, @", "And then @"


def ask(server, api: str, text: str, most: int = 80, **fields) -> tuple[int, dict]:
    """The status and the document of one request, for at most so many tokens."""
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": most}
    bodies = {
        "completions": {"prompt": f"{text}\n", "max_tokens": most},
        "responses": {"input": text, "max_output_tokens": most},
    }
    return ask_json(server, PATHS[api], bodies.get(api, chat) | fields)


def text_of(api: str, document: dict) -> str:
    match api:
        case "chat":
            return document["choices"][0]["message"]["content"]
        case "completions":
            return document["choices"][0]["text"]
        case "responses":
            return document["output"][0]["content"][0]["text"]
    return document["content"][0]["text"]


def num_cached(server, api: str, text: str, **fields) -> int:
    """Tokens of a prompt that were in a cache, of a request that is answered in short."""
    status, document = ask(server, api, text, most=3, **fields)
    assert status == 200 and text_of(api, document).strip() == "".join(WORDS[:3]).strip()
    usage = document["usage"]
    match api:
        case "responses":
            return usage["input_tokens_details"]["cached_tokens"]
        case "messages":
            return usage["cache_read_input_tokens"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def counted(server, api: str, text: str, **fields) -> list[float]:
    """``COUNTS`` of a request, which is answered in full."""
    before = metrics_of(server)
    status, document = ask(server, api, text, **fields)
    assert status == 200, document
    assert text_of(api, document) == ANSWER
    after = metrics_of(server)
    return [after[f"{name}_tokens_total"] - before[f"{name}_tokens_total"] for name in COUNTS]


def num_kept(server) -> float:
    return metrics_of(server)["copy_answers_tokens"]


FIELDS = ("cache_salt", "user", "safety_identifier")
SCOPES = [(api, name) for api in PATHS for name in FIELDS] + [("messages", "user_id")]


def as_scope(name: str, value: str) -> dict:
    return {"metadata": {"user_id": value}} if name == "user_id" else {name: value}


@pytest.mark.parametrize(
    "where",
    thorough(
        SCOPES,
        ("chat", "cache_salt"),
        ("completions", "safety_identifier"),
        ("responses", "user"),
        ("messages", "cache_salt"),
        ("messages", "user_id"),
    ),
)
def test_only_requests_of_one_scope_copy_from_each_other(server, fresh, where):
    api, name = where
    own, other = (as_scope(name, f"{who}, by {name} of {api}") for who in ("one", "another"))
    assert counted(server, api, FIRST, **own)[3] == 0
    assert counted(server, api, SECOND, **other) == fresh[api]
    drafted, accepted, copied, accepted_copied = counted(server, api, SECOND, **own)
    assert drafted >= copied >= accepted_copied > 0
    assert accepted > fresh[api][1] and fresh[api][2:] == [0, 0]


def test_the_same_word_in_another_field_is_another_scope(server, fresh):
    word = dict.fromkeys(FIELDS, "word")
    counted(server, "chat", FIRST, user="word")
    for scope in ({"cache_salt": "word"}, {"safety_identifier": "word"}, word):
        assert counted(server, "chat", SECOND, **scope) == fresh["chat"]
    # A user is one, by whichever name an API has for it.
    assert counted(server, "messages", SECOND, metadata={"user_id": "word"})[3] > 0


@pytest.mark.parametrize("api", thorough(PATHS, "messages"))
def test_requests_without_a_scope_share_one(flags, fresh, api):
    with ours(*flags) as asked:
        counted(asked, "completions", FIRST)
        assert num_kept(asked) == NUM_ANSWER
        assert counted(asked, api, SECOND, user=None)[3] > 0
        assert num_kept(asked) == 2 * NUM_ANSWER
        assert counted(asked, api, SECOND, user="somebody") == fresh[api]


@pytest.mark.parametrize("api", PATHS)
def test_an_answer_that_is_not_stored_is_not_copied_from(server, fresh, api):
    scope, before = {"user": f"nobody of {api}"}, num_kept(server)
    counted(server, api, FIRST, store=False, **scope)
    assert num_kept(server) == before
    assert counted(server, api, SECOND, **scope) == fresh[api]
    assert counted(server, api, SECOND, **scope)[3] > 0  # from the one before


def test_an_answer_that_is_too_long_for_the_bound_is_not_kept(automata, fresh):
    for bound, number in (("0", 0), (NUM_ANSWER - 1, 0), (NUM_ANSWER, NUM_ANSWER)):
        with ours(*automata, "--copy-answers", bound) as asked:
            counted(asked, "chat", FIRST)
            assert num_kept(asked) == number
            is_alone = counted(asked, "chat", SECOND) == fresh["chat"]
            assert is_alone == (number == 0) and num_kept(asked) == number


@pytest.mark.parametrize(
    "host, flags, number",
    [
        ("127.0.0.1", (), DEFAULT_BOUND),
        ("localhost", (), DEFAULT_BOUND),
        ("::1", (), DEFAULT_BOUND),
        ("127.0.0.1", ("--copy-answers", "0"), 0),
        ("0.0.0.0", (), 0),
        ("::", (), 0),
        ("192.168.1.7", (), 0),
        ("example.org", (), 0),
        ("0.0.0.0", ("--copy-answers", "500"), 500),
    ],
)
def test_none_are_kept_where_other_machines_reach_the_server(host, flags, number):
    args = parse("--host", host, *flags)
    check_arguments(args)
    assert args.copy_answers == number


@pytest.mark.parametrize("number", [-1, 2**30 + 1])
def test_bounds_that_make_no_sense(number):
    with pytest.raises(ValueError, match=r"--copy-answers is .*: give 0 or more, at most"):
        check_arguments(parse("--copy-answers", number))


# --- prompt caches ----------------------------------------------------------------------------


@pytest.mark.parametrize("api", PATHS)
def test_a_salt_separates_prompt_caches_in_memory(server, api):
    salts = [f"{name} of {api}" for name in ("salt", "salt", "pepper", "pepper", "salt")]
    found = [num_cached(server, api, "The same @", cache_salt=salt) for salt in salts]
    whole = found[1]
    assert whole >= len("The same @") and found == [0, whole, 0, whole, whole]


SALTS = {"salt": {"cache_salt": "a-salt-of-its-own"}, "pepper": {"cache_salt": "pepper"}, "": {}}


def test_a_salt_separates_prompt_caches_on_disk(flags, tmp_path):
    flags = (*flags, "--prompt-cache-dir", tmp_path)

    def ask_each(*names: str) -> list[int]:
        return [num_cached(asked, "chat", "The same @", **SALTS[name]) for name in names]

    with ours(*flags) as asked:
        assert ask_each("salt", "") == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2
    for path in tmp_path.iterdir():
        for told in (path.name.encode(), path.read_bytes()):
            assert SALTS["salt"]["cache_salt"].encode() not in told
    with ours(*flags) as asked:
        pepper, salt, none = ask_each("pepper", "salt", "")
        places = metrics_of(asked)
    assert pepper == 0 < salt == none
    assert places["prompt_cache_hits_total:disk"] == 2 and places["prompt_cache_misses_total"] == 1


def test_users_share_prompt_caches(server):
    """Only a salt separates these: what a provider was told of its users is not one."""
    for name in ("user", "safety_identifier"):
        text = f"Shared by each {name} @"
        one, another = (num_cached(server, "chat", text, **{name: who}) for who in ("I", "you"))
        assert one < len(text) < another


def test_answers_are_in_no_file(automata, fresh, tmp_path):
    """The folder is the same without them, and a server that finds it knows none."""

    def files_of(folder: Path, *more: object) -> dict[str, bytes]:
        with ours(*automata, *more, "--prompt-cache-dir", folder) as asked:
            counted(asked, "chat", FIRST, user="one")
            assert num_kept(asked) == NUM_ANSWER * bool(more)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    expected = files_of(tmp_path / "without")
    assert files_of(tmp_path / "with", "--copy-answers", 10000) == expected != {}
    flags = (*automata, "--copy-answers", 10000, "--prompt-cache-dir", tmp_path / "with")
    with ours(*flags) as asked:
        assert num_kept(asked) == 0
        assert counted(asked, "chat", SECOND, user="one") == fresh["chat"]


# --- values of no use -------------------------------------------------------------------------

BAD = {
    "cache_salt": (5, "cache_salt is a number: give a string."),
    "user": ([], "user is a list: give a string."),
    "safety_identifier": ({"id": 1}, "safety_identifier is an object: give a string."),
    "store": ("yes", "store is a string: give a boolean."),
}
REFUSED = [(api, name, *found) for api in PATHS for name, found in BAD.items()] + [
    (api, "metadata", "x", "metadata is a string: give an object.")
    for api in ("responses", "messages")
]


@pytest.mark.parametrize("api, name, value, sentence", REFUSED)
def test_values_of_no_use_are_refused(server, api, name, value, sentence):
    for stream in (False, True):
        status, document = ask(server, api, "Who @", stream=stream, **{name: value})
        said = document["error"]["message"]
        assert status == 400 and re.fullmatch(sentence, said)
