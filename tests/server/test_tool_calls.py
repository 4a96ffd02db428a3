"""Forced calls in all formats: texts of random tokens, read by mlx-lm's parsers and machine."""

import importlib
import json
import pkgutil
import random
import re
from itertools import product

import numpy as np
import pytest
from grids import thorough
from mlx_lm import tool_parsers
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from schemas import COUNT, WORD, items, random_schema, record
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_eagle.server.grammars import Constraint, make_grammar
from mlx_eagle.server.tool_formats import FORMATS, checked, readable

TEMPLATES = {  # what of a chat template a format is known by, and special tokens of its models
    "function_gemma": ("", "<start_function_call> <end_function_call> <escape>"),
    "gemma4": ("", '<|tool_call> <tool_call|> <|"|>'),
    "glm47": ("<arg_key>k</arg_key><arg_value>v</arg_value>", ""),
    "glm47, lines": (
        "<arg_key>k</arg_key>\n<arg_value>v</arg_value>",
        "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "json_tools": ("", "<tool_call> </tool_call>"),
    "kimi_k2": (
        "",
        "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
        "<|tool_call_end|> <|tool_call_argument_begin|>",
    ),
    "kimi_k3": ("", "<|open|> <|close|> <|sep|> <|end_of_msg|>"),
    "laguna": ("", ""),
    "longcat": ("", ""),
    "longcat, tags": ("<longcat_arg_key>", ""),
    "minicpm5": ("", ""),
    "minimax_m2": ("", "<minimax:tool_call> </minimax:tool_call>"),
    "mistral": ("", "[TOOL_CALLS]"),
    "mistral, headers": ("[ARGS]", "[TOOL_CALLS] [ARGS]"),
    "muse_spark": ("", "<|message|> <|eom|> <|eot|>"),
    "pythonic": ("", "<|tool_call_start|> <|tool_call_end|>"),
    "qwen3_coder": ("", ""),
}
END = "<end>"


def tokenizer_of(name: str, specials: bool = True) -> TokenizerWrapper:
    """A token a byte; the marks are special tokens where ``specials`` says so, else plain text."""
    kind = name.partition(",")[0]
    module = importlib.import_module(f"mlx_lm.tool_parsers.{kind}")
    template, marks = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *(marks.split() if specials else [])])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = template
    formats = {}
    if kind == "muse_spark":
        formats["response_format"] = importlib.import_module(
            "mlx_lm.chat_templates.muse_spark"
        ).RESPONSE_FORMAT
    return TokenizerWrapper(
        fast, tool_parser=module.parse_tool_call, tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end, **formats,
    )  # fmt: skip


LIKELY = "<>/|\"'{}[]()=:,\n\\ 07-.etnu"
HARD = ["null", "None", "7", "-0.5", "true", "No", "nan", "[1]", '{"a": 1}', "None # a", " ", "\n",
        "</invoke>", "</function>", "</tool_call>", "}", "<![CDATA[", ",a:", '"', "]"]  # fmt: skip
BARELY_HARD = [text for text in HARD if not text.startswith("</")]  # marks in JSON end a call
ENDS = {  # of strings that have no quotes
    "function_gemma": ["<escape>"],
    "gemma4": ['<|"|>'],
    "glm47": ["</arg_value>"],
    "glm47, lines": ["</arg_value>"],
    "laguna": ["</arg_value>"],
    "longcat, tags": ["</longcat_arg_value>"],
    "minicpm5": ["]]></param>", "</param>"],
    "minimax_m2": ["</parameter>"],
    "qwen3_coder": ["\n</parameter>"],
}


def random_text(grammar, tokenizer, rng: random.Random, ends: list[str], most: int = 6000) -> str:
    """A text of the grammar, of random tokens that it allows, and pieces that are hard to read.

    Later ones of its tokens end strings wherever they may.
    """
    vocabulary = tokenizer.get_vocab()
    likely = {vocabulary[token] for text in LIKELY for token in tokenizer.tokenize(text)}
    (end,) = tokenizer.eos_token_ids
    matcher, said = grammar._matcher.deep_copy(), []

    def say(pieces: list[str]) -> None:
        for piece in pieces:
            tokens = tokenizer.encode(piece, add_special_tokens=False)
            num = matcher.try_consume_tokens(tokens)
            if num == len(tokens):
                said.extend(tokens)
                return
            matcher.rollback(num)

    while len(said) < most:
        forced = matcher.compute_ff_tokens()
        assert matcher.consume_tokens(forced)
        said += forced
        piece = rng.choice(HARD if ends else BARELY_HARD)
        if rng.random() < 0.3:
            say([piece + rng.choice(ends or [""])])
        elif rng.random() < 0.05:
            say([piece])
        if rng.random() < 0.15 or len(said) > 200:
            say([*ends, '"', "}", "]"])
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
        if allowed == [end] or (end in allowed and rng.random() < 0.5):
            return tokenizer.decode(said)
        preferred = [token for token in allowed if token in likely]
        token = rng.choice(preferred if preferred and rng.random() < 0.7 else allowed)
        if token != end:
            assert matcher.consume_token(token), matcher.get_error()
            said.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(said)[-300:]!r}")


def calls_in(text: str, tokenizer, tools: list[dict]) -> tuple[str, list[dict]]:
    """The free text and the calls in an answer, by mlx-lm's machine and parser."""
    machine = make_text_state_machine(tokenizer)
    state = machine.make_state(tokenizer.response_initial_state or "normal")
    state, segments = TextStateMachine.split(state, text)
    _, rest, last = TextStateMachine.flush(state)
    free, called, calls = "", "", []
    for kind, part in [*segments, (last, rest), ("normal", "")]:
        if kind == "tool":
            called += part
        elif called:
            parsed = tokenizer.tool_parser(called, tools)
            calls += parsed if isinstance(parsed, list) else [parsed]
            called = ""
        if kind == "normal":
            free += part
    return free, calls


def form_of(tools: dict[str, dict], **fields) -> Constraint:
    strict = fields.pop("strict", True)
    triples = tuple((name, json.dumps(schema), strict) for name, schema in tools.items())
    return Constraint(tools=triples, **{"must_call": True, **fields})


def offered(tools: dict[str, dict]) -> list[dict]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in tools.items()
    ]


PLAIN = {
    "look_up": record("hard", "size", word=WORD, size=COUNT, hard={"type": "boolean"}),
    "write": record(
        path={"type": "string"}, mode={"type": "string", "enum": ["a", "null", "w x"]}
    ),
    "now": record(),
}  # fmt: skip
LOOSE = {  # what Python's libraries make of optional arguments, and arguments without a type
    "find": record(
        "most",
        most={"anyOf": [COUNT, {"type": "null"}], "default": None},
        text={"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
        kind={"$ref": "#/$defs/kind"},
        either={"type": ["string", "integer"], "maxLength": 8},
        flag={"type": ["boolean", "null"]},
    )
    | {"$defs": {"kind": {"enum": ["new", "7", "old one"]}}},
}
DEEP = {
    "search": record(
        "within",
        tags=items(WORD, 0, 2),
        where=record(name=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
        within=record("b", a={"type": "number"}, b={"anyOf": [WORD, items(COUNT)]}),
        flags=items({"type": "boolean"}, 1, 2),
        tree={"$ref": "#/$defs/tree"},
    )
    | {"$defs": {"tree": record(name=WORD, below=items({"$ref": "#/$defs/tree"}, 0, 1))}},
}
FLAT = {"function_gemma"}  # formats without arrays and objects


def check_calls(name, tools, rng, specials=True, num=1, **fields) -> list[str]:
    """The names that are called in texts of the grammar, whose calls have valid arguments."""
    validate = pytest.importorskip("jsonschema").validate
    tokenizer = tokenizer_of(name, specials)
    grammar = make_grammar(form_of(tools, **fields), tokenizer)
    shown = readable(offered(tools), tokenizer.tool_parser)
    called = []
    for _ in range(num):
        text = random_text(grammar, tokenizer, rng, ENDS.get(name, []))
        _, calls = calls_in(text, tokenizer, shown)
        assert calls or not fields.get("must_call", True), text
        assert len(calls) <= 1 or not fields.get("calls_once")
        for call in calls:
            validate(call["arguments"], tools[call["name"]])
            called.append(call["name"])
    return called


def test_every_parser_of_mlx_lm_has_a_format():
    assert {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)} == {*FORMATS}


@pytest.mark.parametrize("name", thorough(TEMPLATES, "qwen3_coder"))
@pytest.mark.parametrize("specials", thorough([True, False], True))
def test_calls_are_read_by_mlx_lm(name, specials):
    rng = random.Random(name)
    for tool, schema in PLAIN.items():
        assert {*check_calls(name, {tool: schema}, rng, specials, 3)} == {tool}
    check_calls(name, PLAIN, rng, specials, 3)
    if name not in FLAT:
        check_calls(name, DEEP, rng, specials, 5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_of_several_types(name):
    check_calls(name, LOOSE, random.Random(name), True, 20)


@pytest.mark.parametrize("name", thorough(ENDS, "qwen3_coder"))
@pytest.mark.parametrize("types", ["string", ["string", "integer"]], ids=str)
def test_words_that_parsers_take_for_something_else(name, types):
    """A string without quotes is read as that string, or cannot be said."""
    validate = pytest.importorskip("jsonschema").validate
    tokenizer = tokenizer_of(name)
    tools = {"do_it": record(a={"type": types})}
    grammar = make_grammar(form_of(tools, calls_once=True), tokenizer)
    matcher = grammar._matcher.deep_copy()
    begun = matcher.compute_ff_tokens()
    num_said = 0
    mark = ENDS[name][-1]
    for word, opening in product(HARD, ("", mark)):  # a mark opens it too, where it has two
        matcher.reset()
        tokens = begun + tokenizer.encode(opening + word + mark, add_special_tokens=False)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            continue
        tokens += matcher.compute_ff_tokens()
        shown = readable(offered(tools), tokenizer.tool_parser)
        _, (call,) = calls_in(tokenizer.decode(tokens), tokenizer, shown)
        validate(call["arguments"], tools["do_it"])
        assert types != "string" or call["arguments"] == {"a": word}
        num_said += 1
    assert num_said >= 1


@pytest.mark.parametrize("name", thorough(TEMPLATES, "minimax_m2"))
def test_a_text_before_one_call_at_most(name):
    """Calls are held to their schemas, and a text may come first, or do without."""
    tokenizer = tokenizer_of(name, specials=False)
    if name in ("kimi_k3", "muse_spark"):
        with pytest.raises(ValueError, match=f"free text .* format {name}: give tool_choice"):
            make_grammar(form_of(PLAIN, must_call=False), tokenizer_of(name))
        return
    grammar = make_grammar(form_of(PLAIN, must_call=False, calls_once=True), tokenizer)
    now = make_grammar(form_of({"now": record()}, calls_once=True), tokenizer)
    call = random_text(now, tokenizer, random.Random(5), [])
    matcher = grammar._matcher.deep_copy()
    for said, is_whole in (
        ("So", True),
        (f"So: {call[:-1]}", False),
        (f"< So: {call}", True),
        (call, True),
    ):
        matcher.reset()
        tokens = tokenizer.encode(said, add_special_tokens=False)
        assert matcher.try_consume_tokens(tokens) == len(tokens), said
        assert matcher.is_accepting() == is_whole, said
    more = tokenizer.encode(tokenizer.tool_call_start, add_special_tokens=False)
    assert matcher.try_consume_tokens(more) < len(more)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TEMPLATES)
def test_random_tools(name):
    """Most can be held to; the others are refused in a sentence that names the argument."""
    num_held = 0
    for seed in range(10):
        rng = random.Random(seed)
        names = rng.sample(["id", "size", "kind", "where", "x"], 3)
        schema = record(names[0], **{each: random_schema(rng, 2) for each in names})
        try:
            make_grammar(form_of({"do_it": schema}), tokenizer_of(name))
        except ValueError as err:
            assert re.search(r"cannot hold to .* argument '.+': give", str(err)), schema
        else:
            check_calls(name, {"do_it": schema}, rng, specials=seed % 2 == 0, num=2)
            num_held += 1
    assert num_held >= {"function_gemma": 0, "gemma4": 3, "qwen3_coder": 3}.get(name, 6)


REFUSED = [
    ("pythonic", record(**{"from": WORD}), "the argument 'from'"),
    ("function_gemma", record(tags=items(WORD)), "type array in the argument 'tags'"),
    ("qwen3_coder", record(**{"a>b": WORD}), "the argument 'a>b'"),
    ("qwen3_coder", record(a={"anyOf": [COUNT, WORD, {"type": "null"}]}), "the type integer"),
    ("gemma4", record(a={"$ref": "#/$defs/a"}) | {"$defs": {"a": {"$ref": "#/$defs/a"}}},
     "a schema that nothing satisfies"),
    ("glm47", record(a=COUNT) | {"minProperties": 1}, "the keyword 'minProperties'"),
    ("minimax_m2", record(a={"type": 5}), "no JSON schema"),
    ("json_tools", record(a={"enum": [*range(9000)]}), "values: give at most 4000"),
    ("kimi_k2", record(a={"type": "colour"}), "Invalid type: colour"),
]  # fmt: skip


@pytest.mark.parametrize("name, schema, sentence", REFUSED)
def test_what_a_format_cannot_say_is_refused_in_a_sentence(name, schema, sentence):
    with pytest.raises(ValueError) as found:
        make_grammar(form_of({"do_it": schema}), tokenizer_of(name))
    said = str(found.value)
    assert sentence in said and "\n" not in said and said.endswith(".") and len(said) < 400


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
def test_references_that_lead_back_end_at_once(name):
    """Each definition offers each other one: there are more ways through them than anyone has."""
    refs = [{"$ref": f"#/$defs/d{i}"} for i in range(30)]
    for leaf, is_held in (([WORD], True), ([], False), ([items(COUNT)], name == "qwen3_coder")):
        tool = record(a=refs[0]) | {"$defs": {f"d{i}": {"anyOf": leaf + refs} for i in range(30)}}
        if is_held:
            called = check_calls(name, {"do_it": tool}, random.Random(1), calls_once=True)
            assert called == ["do_it"]
        else:
            with pytest.raises(ValueError, match=r"without an end|nothing satisfies"):
                make_grammar(form_of({"do_it": tool}), tokenizer_of(name))


def test_a_model_without_a_format_is_told_which_have_one():
    tokenizer = tokenizer_of("json_tools")
    tokenizer._tool_parser = None
    with pytest.raises(ValueError, match=r"reads as function_gemma, .* qwen3_coder can be"):
        make_grammar(form_of(PLAIN), tokenizer)


def test_what_is_not_strict_ignores_what_it_cannot_hold_to():
    schema = record(a=COUNT) | {"minProperties": 1}
    assert check_calls("glm47", {"do_it": schema}, random.Random(1), strict=False)


def test_a_number_too_large_is_no_call():
    """mlx-lm's parser fails with an error that nobody expects, which would end the answer."""
    tokenizer, tools = tokenizer_of("qwen3_coder"), offered({"do_it": record(a=COUNT)})
    call = "<function=do_it>\n<parameter=a>\n1e999\n</parameter>\n</function>"
    with pytest.raises(OverflowError):
        tokenizer.tool_parser(call, tools)
    with pytest.raises(ValueError, match="the parser failed with OverflowError"):
        checked(tokenizer.tool_parser)(call, tools)
