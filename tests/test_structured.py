"""Structured output: texts that a grammar allows, the same with drafts and without."""

import json
import random
import re
from collections import Counter

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from chi_square import is_far_off
from grids import thorough
from helpers import SCRIPTS, ScriptedDrafter, byte_tokenizer, speculative, tiny_head, tiny_llama
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper
from schemas import SCHEMAS, random_schema

import mlx_eagle
from mlx_eagle import structured
from mlx_eagle.batch.requests import Options, Request, first_token, prefill
from mlx_eagle.batch.rounds import Batch
from mlx_eagle.decoding.accept import Coupled
from mlx_eagle.decoding.auto import FixedController
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.draft import ForcedPicks
from mlx_eagle.decoding.processors import LogitsProcessors, RowsAsked
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.tree import DraftShape
from mlx_eagle.structured import JSONObject, JSONSchema, Lark, Regex, as_terminal, repeats

TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER.get_vocab())
(END,) = TOKENIZER.eos_token_ids
PROMPT = TOKENIZER.encode("Say it:")
MOST = 240  # tokens of a text
WAYS = {
    "chains": {"num_draft_tokens": 3},
    "long chains": {"num_draft_tokens": 7},
    "trees": {"tree": "2x3:6"},
    "static trees": {"tree": "2/2+1"},
    "auto": {"num_draft_tokens": "auto"},
}
SAMPLERS = {"greedy": lambda: None, "seeded": lambda: Sampling(temp=1.0, seed=5)}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=VOCAB)


@pytest.fixture(scope="module")
def drafters(model):
    head = tiny_head(model)
    return {"head": head, "copies": LookupDrafter(), "head+copies": head.with_copies()}


def theirs(model, grammar, prompt=PROMPT, most=MOST, more=(), **options) -> list[int]:
    """mlx-lm's own text, up to its end."""
    steps = generate_step(
        mx.array(prompt), model, max_tokens=most, logits_processors=[*more, grammar], **options
    )
    found = []
    for token, _ in steps:
        found.append(token)
        if token == END:
            break
    return found


def ours(model, drafter, grammar, prompt=PROMPT, most=MOST, more=(), **options):
    return speculative(
        model, drafter, prompt, most, logits_processors=[*more, grammar], stop_tokens=[END],
        **options,
    )  # fmt: skip


def value_of(tokens: list[int], tokenizer=TOKENIZER):
    assert tokens[-1] in tokenizer.eos_token_ids
    return json.loads(tokenizer.decode(tokens[:-1]))


def check_valid(value, schema) -> None:
    pytest.importorskip("jsonschema").validate(value, schema)


QUICK = ("head", "chains"), ("head", "trees"), ("head+copies", "long chains"), ("copies", "auto")


@pytest.mark.parametrize("sampler", thorough(SAMPLERS, "greedy"))
@pytest.mark.parametrize("schema", thorough(SCHEMAS, "two"))
def test_texts_are_mlx_lms(model, drafters, schema, sampler):
    grammar = JSONSchema(SCHEMAS[schema], TOKENIZER)
    expected = theirs(model, grammar, sampler=SAMPLERS[sampler]())
    if expected[-1] == END:
        check_valid(value_of(expected), SCHEMAS[schema])
    for drafter, way in QUICK:
        found, stats = ours(
            model, drafters[drafter], grammar, sampler=SAMPLERS[sampler](), **WAYS[way]
        )
        assert found == expected, (drafter, way)
        assert stats.num_target_forwards < len(expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("acceptance", ["match", "coupled"])
def test_a_seeds_text_is_the_same_under_either_rule(model, drafters, acceptance):
    grammar = JSONSchema(SCHEMAS["union of objects"], TOKENIZER)
    expected = theirs(model, grammar, sampler=Sampling(seed=11))
    for way in ("chains", "static trees"):
        options = WAYS[way] | {"acceptance": acceptance, "sampler": Sampling(seed=11)}
        assert ours(model, drafters["head"], grammar, **options)[0] == expected


def test_rejected_drafts_leave_no_trace(model):
    """Scripted drafts: each length is accepted, and others are wrong or not allowed at all."""
    grammar = JSONSchema(SCHEMAS["nested"], TOKENIZER)
    text = PROMPT + theirs(model, grammar)
    drafter = ScriptedDrafter(text + [0] * 20, SCRIPTS["every length"], VOCAB)
    assert ours(model, drafter, grammar, num_draft_tokens=4)[0] == text[len(PROMPT) :]


def test_forced_tokens_are_drafts_for_free(model, monkeypatch):
    """A drafter that is never right: only what the grammar forces is kept, a run in a pass."""
    grammar = JSONSchema(SCHEMAS["nested deep"], TOKENIZER)
    expected = theirs(model, grammar)
    drafter = ScriptedDrafter(PROMPT + expected + [0] * 20, SCRIPTS["none"], VOCAB)
    found, stats = ours(model, drafter, grammar, num_draft_tokens=2)
    assert found == expected
    # {"a": {"b": {"c": {"d": {"e": 7}}}}} and the end: two runs of 15 at most, and a digit or two.
    assert stats.num_target_forwards <= 6 < len(expected) // 5
    assert drafter.num_forwards == 0
    monkeypatch.setattr(LogitsProcessors, "forced", lambda self, most: [])
    found, stats = ours(model, drafter, grammar, num_draft_tokens=2)
    assert found == expected and stats.num_target_forwards == len(expected) - 1


def test_picks_behind_forced_tokens_have_the_noise_of_their_positions():
    sampling, ids = Sampling(seed=2), mx.array([9, 3, 8, 4, 7])
    picks = ForcedPicks(Coupled(sampling, vocab_size=VOCAB).open(7, 4), [3, 4])
    logits = mx.array([[0.1, 0.3, 0.2, 0.0, 0.4]])
    picked = [picks.pick(logits, ids).item() for _ in range(3)]
    assert picked[:2] == [1, 3]
    assert picked[2] == mx.argmax(logits[0] + sampling.noise(9, VOCAB)[ids]).item()


@pytest.mark.parametrize("sampler", thorough(SAMPLERS, "seeded"))
def test_batches_of_four(model, drafters, sampler):
    grammar = JSONSchema(SCHEMAS["two"], TOKENIZER)
    prompts = [TOKENIZER.encode(text) for text in ("A", "Bo:", "Say it:", "Once more, say it:")]
    expected = []
    for row, prompt in enumerate(prompts):
        draw = None if sampler == "greedy" else Sampling(seed=5, row=row)
        expected.append(theirs(model, grammar, prompt, sampler=draw))
    for name in ("head", "head+copies"):
        response = mlx_eagle.batch_generate(
            model, TOKENIZER, prompts, max_tokens=MOST, draft_model=drafters[name],
            num_draft_tokens=3, sampler=SAMPLERS[sampler](), logits_processors=[grammar],
            return_token_ids=True,
        )  # fmt: skip
        assert response.token_ids == [text[:-1] for text in expected]
        num_passes = [stats.num_target_forwards for stats in response.stats]
        assert max(num_passes) < max(map(len, expected)) * 2 // 3


class Counting:
    """llguidance's executor, and for how many rows and texts it was asked each time."""

    def __init__(self):
        self.asked = []
        self.own = structured.LLExecutor()

    def unsafe_compute_mask_ptr_with_draft_token(self, texts, pointer, size, num_rows):
        self.asked.append((len(texts), num_rows))
        self.own.unsafe_compute_mask_ptr_with_draft_token(texts, pointer, size, num_rows)


def test_all_texts_of_a_round_are_asked_for_at_once(model, drafters, monkeypatch):
    """Three requests with grammars of their own, and one without."""
    counting = Counting()
    monkeypatch.setattr(structured._vocabulary_of(TOKENIZER), "executor", counting)
    grammars = [JSONSchema(SCHEMAS["two"], TOKENIZER), Regex("[a-f]{20}", TOKENIZER),
                Lark('start: ("x" | "yz")~12', TOKENIZER), None]  # fmt: skip
    batch, requests = Batch(model, drafters["head"], FixedController(DraftShape(3))), []
    for i, grammar in enumerate(grammars):
        prompt = [*PROMPT, i]
        request = Request(prompt, Limits(30, [END]), make_prompt_cache(model))
        options = Options(logits_processors=[] if grammar is None else [grammar])
        for _ in prefill(model, drafters["head"], request, options):
            pass
        first_token(request)
        requests.append(request)
        batch.join(request)
    counting.asked.clear()
    num_rounds = 0
    while batch.round() is not None:
        num_rounds += 1
    assert len(counting.asked) <= num_rounds
    assert all(num_rows % num_texts == 0 for num_texts, num_rows in counting.asked)
    assert counting.asked[0][0] == 3
    for request, grammar in zip(requests, grammars, strict=True):
        own = (lambda tokens, logits: logits) if grammar is None else grammar
        assert request.tokens == theirs(model, own, request.prompt, 30)


def test_mlx_lms_batches_with_one_processor(model):
    """The texts of a batch are decoded in turn with one object; two of them are alike."""
    grammar = JSONSchema(SCHEMAS["two"], TOKENIZER)
    prompts = [PROMPT, TOKENIZER.encode("Bo:"), PROMPT]
    found = mlx_lm.batch_generate(
        model, TOKENIZER, prompts, max_tokens=MOST, logits_processors=[grammar],
        return_token_ids=True,
    )  # fmt: skip
    expected = [theirs(model, grammar, prompt)[:-1] for prompt in prompts]
    assert found.token_ids == expected


def naive_masks(grammar, said: list[int], drafts: list[int], parents) -> list[set[int] | None]:
    """Token by token from the beginning, for each row; None behind a token that is not allowed."""
    found = []
    for row in range(len(drafts) + 1):
        path, at = [], row
        while at > 0:
            path.insert(0, drafts[at - 1])
            at = at - 1 if parents is None else parents[at - 1]
        matcher = grammar._matcher.deep_copy()
        is_allowed = all(matcher.try_consume_tokens([token]) == 1 for token in said + path)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = set(np.unpackbits(bits, bitorder="little")[:VOCAB].nonzero()[0].tolist())
        found.append(allowed if is_allowed and END not in path else None)
    return found


@pytest.mark.parametrize("is_tree", [False, True])
def test_masks_are_those_of_single_steps(is_tree):
    rng = random.Random(3)
    grammar = JSONSchema(SCHEMAS["union of objects"], TOKENIZER)
    whole = [*TOKENIZER.encode('{"shape": {"kind": "square", "side": 40}}'), END]
    other = [*TOKENIZER.encode('{"shape": {"kind": "circle", "radius": 7}}'), END]
    num_allowed = 0
    for start in range(0, len(whole) - 1, 4):
        text = grammar.begin_text()
        text.start(PROMPT)
        text.follow(whole[:start])
        right, drafts, parents = [0], [], []
        for i in range(10):
            row = rng.choice(right) if is_tree else i
            at = start
            while row > 0:
                at, row = at + 1, (parents[row - 1] if is_tree else row - 1)
            parents.append(rng.choice(right) if is_tree else i)
            source = rng.choice([whole] * 9 + [other])
            drafts.append(source[min(at, len(source) - 1)])
            right.append(i + 1)
        known = parents if is_tree else None
        (bits,) = text.masks([RowsAsked(text, drafts, known)])
        found = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
        expected = naive_masks(grammar, whole[:start], drafts, known)
        for row, allowed in zip(found, expected, strict=True):
            assert allowed is None or set(row.nonzero()[0].tolist()) == allowed
        num_allowed += sum(allowed is not None for allowed in expected[1:])
    assert num_allowed > 30


class Guide:
    """A processor that follows the text call by call and cannot go back."""

    def __init__(self):
        self.num = 0

    def __call__(self, tokens, logits):
        assert self.num in (0, tokens.size - 1)
        self.num = tokens.size
        return logits + (tokens.size % 3) * mx.sin(mx.arange(logits.shape[-1]))


def test_with_other_processors(model, drafters):
    grammar = JSONSchema(SCHEMAS["two"], TOKENIZER)
    for more, way in (
        (lambda: make_logits_processors({65: 3.0}, repetition_penalty=1.3), "trees"),
        (lambda: [Guide()], "chains"),
    ):
        expected = theirs(model, grammar, more=more())
        assert ours(model, drafters["head"], grammar, more=more(), **WAYS[way])[0] == expected


def test_a_cut_text_is_a_beginning(model, drafters):
    grammar = JSONSchema(SCHEMAS["enum"], TOKENIZER)
    whole = theirs(model, grammar)
    for most in (1, 2, len(whole) - 1):
        assert ours(model, drafters["head"], grammar, most=most)[0] == whole[:most]
    *_, last = mlx_eagle.stream_generate(
        model, TOKENIZER, PROMPT, 9, draft_model=drafters["head"], logits_processors=[grammar]
    )
    assert last.finish_reason == "length"


def test_the_end_comes_where_nothing_else_may(model, drafters):
    grammar = Regex("yes|no", TOKENIZER)
    found, _ = ours(model, drafters["head"], grammar, num_draft_tokens=3)
    assert TOKENIZER.decode(found[:-1]) in ("yes", "no") and found[-1] == END
    text = mlx_eagle.generate(
        model, TOKENIZER, PROMPT, draft_model=drafters["head"], logits_processors=[grammar]
    )
    assert text in ("yes", "no")


def test_json_is_in_one_line(model, drafters):
    """The byte of a line feed or a second space would be the likeliest everywhere."""
    more = make_logits_processors({198: 90.0, 220: 40.0, 10: 90.0, 32: 40.0})
    found, _ = ours(
        model, drafters["head"], JSONObject(TOKENIZER), most=60, more=more, num_draft_tokens=3
    )
    text = TOKENIZER.decode(found)
    assert text.startswith("{") and "\n" not in text


def thinking_tokenizer() -> TokenizerWrapper:
    inner = byte_tokenizer()._tokenizer
    inner.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return TokenizerWrapper(inner)


@pytest.mark.exhaustive
def test_thoughts_are_free_and_what_follows_is_not():
    tokenizer = thinking_tokenizer()
    start, end = tokenizer.think_start_id, tokenizer.think_end_id
    model = tiny_llama(vocab_size=VOCAB + 2)
    drafter = tiny_head(model)
    grammar = JSONSchema(SCHEMAS["two"], tokenizer)
    (brace,) = tokenizer.encode("{")
    thoughts = 5  # tokens, the mark of their end among them

    for prompt, thinks in (
        ([*PROMPT, start], True),  # the template has begun
        (PROMPT, True),  # the model begins
        (PROMPT, False),  # and does not
        ([*PROMPT, start, 5, end, 6], False),  # they are switched off
    ):
        begun = len(prompt) + (prompt[-1] != start)

        def likely(tokens, logits, prompt=prompt, thinks=thinks, begun=begun):
            wanted = {len(prompt): start if thinks else brace, begun + thoughts - 1: end}
            return logits + 90.0 * (mx.arange(logits.shape[-1]) == wanted.get(tokens.size, END))

        likely.is_pure = True
        expected = theirs(model, grammar, prompt, more=[likely])
        assert (end in expected) == thinks
        for way in ("chains", "trees"):
            assert ours(model, drafter, grammar, prompt, more=[likely], **WAYS[way])[0] == expected
        answer = expected[expected.index(end) + 1 :] if thinks else expected
        assert len(expected) - len(answer) == thinks * (thoughts + (prompt[-1] != start))
        check_valid(value_of(answer, tokenizer), SCHEMAS["two"])


def test_a_text_that_was_begun_before(model, drafters):
    """As after an error in the server: a part of prompt and text is not shown again."""
    grammar = JSONSchema(SCHEMAS["two"], TOKENIZER)
    whole = theirs(model, grammar)
    said, before = whole[:20], PROMPT + whole[:15]
    text = grammar.behind(before, num_said=len(said)).begin_text()
    text.start(whole[15:20])
    whole_text = grammar.begin_text()
    whole_text.start(PROMPT)
    whole_text.follow(said)
    (found,), (expected,) = (t.masks([RowsAsked(t, [], None)]) for t in (text, whole_text))
    assert (found == expected).all()


def chain_of_references(length: int) -> dict:
    """A schema that llguidance follows to its end by recursion: long ones end the process."""
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}}


def chain_of_rules(length: int) -> str:
    rules = [f'r{i}: "x" (r{i + 1} | "b")' for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: JSONSchema({"type": "colour"}, TOKENIZER), "Invalid type: colour."),
        (lambda: JSONSchema({"type": "array", "uniqueItems": True}, TOKENIZER), "uniqueItems"),
        (lambda: JSONSchema("{", TOKENIZER), "the schema is no JSON"),
        (lambda: JSONSchema([], TOKENIZER), "the schema is no JSON object"),
        (lambda: JSONSchema({"enum": [b"x"]}, TOKENIZER), "the schema is no JSON"),
        (lambda: JSONSchema({"$ref": "#"}, TOKENIZER), "nothing satisfies it"),
        (lambda: JSONSchema({"$ref": "https://x.y/z"}, TOKENIZER), "is not present"),
        (lambda: JSONSchema({"pattern": "(?=a)"}, TOKENIZER), "look-around"),
        (lambda: JSONSchema({"enum": ["x" * 9] * 9000}, TOKENIZER), "9002 values: give at most"),
        (lambda: JSONSchema({"const": "x" * 300_000}, TOKENIZER), "characters: give at most"),
        (lambda: JSONSchema("[" * 9000 + "]" * 9000, TOKENIZER), "nested too deeply"),
        (lambda: JSONSchema({"minimum": 2**64}, TOKENIZER), "a number beyond 64 bits"),
        (lambda: JSONSchema({"const": -(2**63)}, TOKENIZER), "a number beyond 64 bits"),
        (lambda: JSONSchema('{"maximum": Infinity}', TOKENIZER), "or none that JSON has"),
        (lambda: JSONSchema({"const": "\ud800"}, TOKENIZER), "half of a letter"),
        (lambda: JSONSchema(chain_of_references(900), TOKENIZER), "objects and lists: give"),
        (lambda: Lark('start: %json {"const": -9223372036854775808}', TOKENIZER), "64 bits"),
        (lambda: Lark(chain_of_rules(2500), TOKENIZER), "rules and brackets: give at most"),
        (lambda: Regex("(", TOKENIZER), "unclosed group"),
        (lambda: Regex("", TOKENIZER), "the regular expression is empty"),
        (lambda: Lark('start: "a" b', TOKENIZER), "no text can be held to this grammar"),
        (lambda: Regex("x" * 30_000, TOKENIZER), "30000 characters: give at most 20000"),
        (lambda: Regex("a{100000}", TOKENIZER), "repeats a part 100000 times: give at most"),
        (lambda: Regex("((a{50}){50}){50}", TOKENIZER), "repeats a part 125000 times"),
        (lambda: JSONSchema({"const": "x" * 199_000}, TOKENIZER), "takes too long to check"),
    ],
)
def test_what_cannot_be_held_to_is_said_in_a_sentence(make, sentence):
    with pytest.raises(ValueError) as found:
        make()
    said = str(found.value)
    assert sentence in said and "\n" not in said and said.endswith(".") and len(said) < 400


def test_repeats_are_counted():
    """As the text that each pattern repeats most is long."""
    for pattern, text in (
        ("abc", "a"), ("a{3}b", "aaa"), ("(a{3}b){4}", "aaa" * 4), ("[a(]{5}", "a" * 5),
        ("a{2}{3}", "a" * 6), (r"\({7}", "a" * 7), ("(a|b{2}){3,}c{5}", "b" * 6),
        ("a{0,9}", "a" * 9),
        ("((a{2}){2}){2}", "a" * 8), ("[]{9}]", "9"), ("{a{2}", "aa"), (")a{4}", "aaaa"),
    ):  # fmt: skip
        assert repeats(pattern) == len(text), pattern


def test_a_text_whose_masks_take_long_ends(model, monkeypatch):
    """Where the cost comes late, no look at the first masks finds it."""
    grammar = Lark('start: /[a-c]{3}/ "' + "x" * 40_000 + '"', TOKENIZER)
    monkeypatch.setattr(structured, "SLOW_MASK", 0.001)
    monkeypatch.setattr(structured, "MOST_SLOW", 0.05)
    with pytest.raises(structured.GrammarError, match="takes too long to check"):
        theirs(model, grammar)
    texts = [grammar.begin_text(), Regex("[a-c]{90}", TOKENIZER).begin_text()]
    for text in texts:
        text.start(PROMPT)
        text.follow(TOKENIZER.encode("abc", add_special_tokens=False))
    asked = [RowsAsked(text, [0, 0], None) for text in texts]
    with pytest.raises(structured.GrammarError):  # for the one that is slow, by itself
        for _ in range(50):
            texts[0].masks(asked)
    assert texts[0]._slow_seconds > 0.05 and texts[1]._slow_seconds == 0.0


def test_patterns_are_searched_for():
    for pattern in (r"a/b", r"^a|b$", r"^(a|b)c$", r"[|^]a\$", r"^\d{2}", r"x\\$", r"(a|c)"):
        grammar = Lark(f"start: A\nA: {as_terminal(pattern)}", TOKENIZER)
        for text in (
            "a/b",
            "xa/by",
            "a",
            "ac",
            "bc",
            "acc",
            "|a$",
            "|a$$",
            "12c",
            "c12",
            "x\\",
            "b",
            "ab",
        ):
            matcher = grammar._matcher.deep_copy()
            tokens = TOKENIZER.encode(text)
            is_taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert is_taken == (re.search(pattern, text) is not None), (pattern, text)


def test_what_is_not_strict_ignores_what_it_cannot_hold_to():
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}
    JSONSchema(schema, TOKENIZER, strict=False)


def test_without_llguidance(monkeypatch):
    monkeypatch.setattr(structured, "LLMatcher", None)
    with pytest.raises(ValueError, match=r"pip install 'mlx-eagle\[structured\]'"):
        JSONObject(TOKENIZER)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"num_draft_tokens": 3}, {"tree": "2x2:4"}], ids=str)
def test_rejection_has_the_targets_law(options):
    """Some tokens are forced, some drafted, some not allowed: exact probabilities, chi-square."""
    model = tiny_llama(seed=3, vocab_size=VOCAB, num_hidden_layers=4)
    drafter, grammar = tiny_head(model), Regex("x(a[bdf]|b[ac]x|d)y(b|d)", TOKENIZER)

    def law(said: list[int]) -> dict[tuple[int, ...], float]:
        text = grammar.begin_text()
        text.start(PROMPT)
        text.follow(said)
        (bits,) = text.masks([RowsAsked(text, [], None)])
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        logits = mx.where(mx.array(allowed), model(mx.array([PROMPT + said]))[0, -1], -mx.inf)
        chances = mx.softmax(logits).tolist()
        found = {}
        for token in allowed.nonzero()[0].tolist():
            if token == END:
                return {tuple(said): 1.0}
            for whole, chance in law([*said, token]).items():
                found[whole] = chances[token] * chance
        return found

    counts = Counter()
    for seed in range(400):
        tokens, _ = ours(
            model, drafter, grammar, sampler=Sampling(seed=seed), acceptance="reject", **options
        )
        counts[tuple(tokens[:-1])] += 1
    assert not is_far_off(law([]), counts)


@pytest.mark.exhaustive
def test_500_random_schemas(model, drafters):
    check = pytest.importorskip("jsonschema").validate
    num_complete = 0
    for seed in range(500):
        rng = random.Random(seed)
        schema = random_schema(rng)
        grammar = JSONSchema(schema, TOKENIZER)
        prompt = [*PROMPT, seed % 256]
        sampler = None if seed % 2 else Sampling(temp=1.5, seed=seed)
        expected = theirs(model, grammar, prompt, 120, sampler=sampler and sampler.begin())
        if expected[-1] == END:
            check(value_of(expected), schema)
            num_complete += 1
        drafter, way = rng.choice(QUICK)
        found, _ = ours(
            model, drafters[drafter], grammar, prompt, 120, sampler=sampler, **WAYS[way]
        )
        assert found == expected, (seed, schema, drafter, way)
    assert num_complete > 400
