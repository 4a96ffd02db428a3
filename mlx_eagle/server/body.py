"""Request bodies: wrong types, sizes and values of their fields, each refused in one sentence.

Every field of the OpenAI API that changes the answer is checked here: past these checks a bad
value would end the thread that generates for all clients. Fields that would be ignored although
they change the answer are refused.
"""

import json
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import (
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)

from ..decoding.rules import RULES, check_rule_for_sampling
from ..decoding.setup import AUTO, read_tree
from ..drafters.copies import Scope
from ..structured import Grammar
from ..system.fields import check_type, type_of
from .answer_stream import as_request_errors
from .grammars import Constraint, read_constraint
from .identity import digest
from .request_fields import check_fields, is_search

MAX_DRAFT_TOKENS = 64
MAX_TREE_NODES = 256
MAX_TREE_TEXT = 1000  # characters
MAX_STOP_WORDS = 64
MAX_STOP_TEXT = 1000  # characters
MAX_TOKEN_DIGITS = 9
SHOWN = 60  # characters of a value in a message
MAX_TOP = 20  # alternatives to each token
MAX_MESSAGES = 20_000  # templates take them one by one: 500,000 empty ones took 21 seconds
MAX_CHOICES = 64  # answers to one request


@dataclass(frozen=True)
class Bounds:
    """Range ``low`` to ``high``; values other than 0 are at least ``smallest``."""

    low: float
    high: float
    smallest: float = 0.0
    is_whole: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError unless ``value`` is a finite number in the range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} is {type_of(value)}: give a number.")
        if self.is_whole and not isinstance(value, int):
            raise ValueError(f"{name} is {value}: give a whole number.")
        if not self.low <= value <= self.high or 0 < value < self.smallest:
            zero = f"0, or {self.smallest}" if self.smallest else f"{self.low}"
            raise ValueError(f"{name} is {shortened(repr(value))}: give {zero} to {self.high}.")


TOKENS = Bounds(1, 2**31 - 1, is_whole=True)
ROWS = Bounds(0, 2**20, is_whole=True)
SHARE = Bounds(0, 1)
PENALTY = Bounds(-100, 100)
BIAS = Bounds(-(10**9), 10**9)
NUMBERS = {
    "max_tokens": TOKENS,
    "max_completion_tokens": TOKENS,
    "n": TOKENS,
    "temperature": Bounds(0, 100, smallest=1e-20),
    "top_p": SHARE,
    "top_k": Bounds(0, 2**31 - 1, is_whole=True),
    "min_p": SHARE,
    "seed": Bounds(0, 2**64 - 1, is_whole=True),
    "repetition_penalty": Bounds(0, 100, smallest=0.01),
    "repetition_context_size": ROWS,
    "presence_penalty": PENALTY,
    "presence_context_size": ROWS,
    "frequency_penalty": PENALTY,
    "frequency_context_size": ROWS,
    "xtc_probability": SHARE,
    "xtc_threshold": Bounds(0, 0.5),
    "thinking_budget": Bounds(0, 2**31 - 1, is_whole=True),
    "top_logprobs": Bounds(-1, MAX_TOP, is_whole=True),
}
SCOPE = ("cache_salt", "user", "safety_identifier")
"""Fields that identify the owner of a request: only equal ones copy from each other."""
NULLABLE = ("tree", "acceptance")  # null means chains, and the best rule
NAMES = ("model", "draft_model")  # empty ones count as none
TYPES: dict[type, tuple[str, ...]] = {
    dict: ("chat_template_kwargs", "role_mapping", "logit_bias", "stream_options"),
    list: ("tools",),
    str: ("model", "draft_model", "reasoning_effort", *SCOPE),
    bool: (
        "stream", "echo", "parallel_tool_calls", "continue_final_message", "include_draft",
        "reuse_caches", "store", "exact",
    ),
}  # fmt: skip
TEMPLATE_OPTIONS = frozenset({
    "self", "conversation", "messages", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})  # fmt: skip
"""Arguments of the tokenizer that a client may not set."""


@dataclass
class PairArguments(GenerationArguments):
    """Arguments of a request: mlx-lm's fields, and drafting options named as our flags.

    ``reuse_caches`` False: both models compute the whole prompt, whatever is cached of it.
    ``reports_drafts``: the client asks for drafts. ``keeps_space``: the text continues the
    prompt's, and may begin with a space. ``has_followers``: other answers to the same prompt
    wait for its caches. Only requests with the same ``cache_salt`` (a digest of the field) share
    prompt caches, only those with the same ``scope`` copy from each other's answers, and only
    where these are ``is_stored``.
    """

    tree: str | None
    acceptance: str | None
    exact: bool = False
    reuse_caches: bool = True
    reports_drafts: bool = False
    keeps_space: bool = False
    has_followers: bool = False
    cache_salt: str = ""
    scope: Scope = ()
    is_stored: bool = True
    thinking_budget: int | None = None  # tokens after which thoughts are ended
    reasoning_effort: str | None = None
    constraint: Constraint | None = None
    grammar: Grammar | None = None  # of the constraint, made in the client's own thread


def read_body(raw: bytes) -> dict[str, Any]:
    """Parse the fields of a request; nulls stay where they have a meaning. Raises ValueError."""
    try:
        body = json.loads(raw.decode("utf-8-sig"))  # some clients begin with a byte order mark
        # A lone surrogate is valid JSON, but no text that a tokenizer could take.
        json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as err:
        raise ValueError(f"the request body is not valid UTF-8 text ({err.reason}).") from err
    except RecursionError as err:
        raise ValueError("the request body is nested too deeply.") from err
    except json.JSONDecodeError as err:
        raise ValueError(f"the request body is not JSON ({err}).") from err
    except ValueError as err:  # Python's own words tell programmers how to let it through
        raise ValueError("the request body holds a number of thousands of digits.") from err
    if not isinstance(body, dict):
        raise ValueError(f"the request body is {type_of(body)}: give a JSON object.")
    fields = {name: v for name, v in body.items() if v is not None or name in NULLABLE}
    return {name: v for name, v in fields.items() if not (name in NAMES and v == "")}


def check_body(body: dict[str, Any], needed: str) -> dict[str, Any]:
    """Check the fields; ``needed`` is the one that holds the prompt. Raises ValueError.

    Numbers that may have a fraction become floats: mlx-lm takes some of them in no other form.
    """
    check_fields(body, "chat" if needed == "messages" else "text", body)
    for name, bounds in NUMBERS.items():
        if name in body:
            bounds.check(name, body[name])
            body[name] = body[name] if bounds.is_whole else float(body[name])
    _check_drafts(body)
    for json_type, names in TYPES.items():
        for name in names:
            check_type(name, body.get(name, json_type()), json_type)
    for name in TEMPLATE_OPTIONS & body.get("chat_template_kwargs", {}).keys():
        raise ValueError(f"chat_template_kwargs names {name!r}: leave it out.")
    for token, bias in body.get("logit_bias", {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_TOKEN_DIGITS):
            raise ValueError(f"logit_bias has the key {shortened(repr(token))}: give token ids.")
        BIAS.check(f"logit_bias of {token}", bias)
    for name in ("include_usage", "include_draft"):
        value = body.get("stream_options", {}).get(name, False)
        check_type(f"stream_options.{name}", value, bool)
    _check_tools(body)
    if needed == "prompt" and type(body.get("logprobs")) is int:  # a number of alternatives
        Bounds(0, MAX_TOP, is_whole=True).check("logprobs", body["logprobs"])
    else:
        check_type("logprobs", body.get("logprobs", False), bool)
    if body.get("echo") and body.get("logprobs", False) is not False:
        raise ValueError("echo and logprobs together are not supported: leave one out.")
    _check_stop(body.get("stop", []))
    if needed not in body:
        raise ValueError(f"the request has no {needed}.")
    if needed == "messages":
        check_messages(body[needed])
        last = body[needed][-1]
        is_answer = last["role"] == "assistant" and last.get("content")
        if body.get("continue_final_message") and (not is_answer or last.get("tool_calls")):
            raise ValueError(
                "continue_final_message is set, but the last message is no text of the assistant: "
                "give the answer that is to go on."
            )
    num_answers = body.get("n", 1) * (len(read_prompts(body)) if needed == "prompt" else 1)
    if num_answers > MAX_CHOICES:
        raise ValueError(f"this asks for {num_answers} answers: ask for at most {MAX_CHOICES}.")
    return body


@as_request_errors()
def read_arguments(body: dict[str, Any], flags: Namespace, is_chat: bool = True) -> PairArguments:
    """Read the arguments of a checked body; the flags give those that are missing.

    Raises RequestError if tree, acceptance rule and sampling do not go together, and for a form
    that cannot be enforced. The flags' rule applies only to requests that it is possible for.
    Greedy decoding needs no seed.
    """
    get = body.get
    sampling = SamplingArguments(
        get("temperature", flags.temp),
        get("top_p", flags.top_p),
        get("top_k", flags.top_k),
        get("min_p", flags.min_p),
        get("xtc_probability", 0.0),
        get("xtc_threshold", 0.1),
    )
    bias = {int(token): float(value) for token, value in get("logit_bias", {}).items()}
    penalties = {"logit_bias": bias or None}
    for name in ("repetition", "presence", "frequency"):
        penalties[f"{name}_penalty"] = get(f"{name}_penalty", 0.0)
        penalties[f"{name}_context_size"] = get(f"{name}_context_size", 20)
    temp = sampling.temperature
    if "acceptance" in body:
        acceptance = body["acceptance"]
        check_rule_for_sampling(acceptance, temp, sampling.xtc_probability)
    else:
        acceptance = flags.acceptance if temp > 0 and sampling.xtc_probability == 0 else None
    logprobs = get("logprobs", False)
    stop = get("stop") or []
    goes_on = get("continue_final_message", False)
    template = get("chat_template_kwargs")
    if goes_on:
        template = (template or {}) | {"continue_final_message": True}
    options = get("stream_options", {}) if get("stream") else {}
    return PairArguments(
        model=ModelDescription(get("model", ""), get("draft_model", ""), ""),
        sampling=sampling,
        logits=LogitsProcessorArguments(**penalties),
        stop_words=[stop] if isinstance(stop, str) else stop,
        max_tokens=get("max_completion_tokens", get("max_tokens", flags.max_tokens)),
        num_draft_tokens=get("num_draft_tokens", flags.num_draft_tokens),
        logprobs=logprobs is not False,
        top_logprobs=get("top_logprobs", -1) if isinstance(logprobs, bool) else logprobs,
        seed=get("seed") if temp > 0 else None,
        chat_template_kwargs=template,
        tree=get("tree", flags.tree),
        acceptance=acceptance,
        exact=get("exact", flags.exact),
        reuse_caches=get("reuse_caches", True),
        cache_salt=digest(get("cache_salt")) if get("cache_salt") else "",
        scope=tuple(get(name) for name in SCOPE),
        is_stored=get("store", True),
        reports_drafts=True in (get("include_draft"), options.get("include_draft")),
        keeps_space=not is_chat or goes_on,
        thinking_budget=get("thinking_budget"),
        reasoning_effort=get("reasoning_effort"),
        constraint=read_constraint(body),
    )


def read_prompts(body: dict[str, Any]) -> list[str | list[int]]:
    """Read the prompts of a completion, each a text or a list of tokens. Raises ValueError."""
    given = body["prompt"]
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise ValueError(f"prompt is {type_of(given)}: give a string, tokens, or a list of these.")
    prompts = [given] if all(type(part) is int for part in given) else given
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ValueError("a prompt is something else than a string or a list of tokens.")
        if not all(0 <= token < 2**31 for token in prompt):
            raise ValueError("a prompt has a token below 0 or far too large.")
    return prompts


def _check_drafts(body: dict[str, Any]) -> None:
    """Check the fields about drafting."""
    length, tree, rule = map(body.get, ("num_draft_tokens", "tree", "acceptance"))
    if isinstance(length, str) and length != AUTO:
        raise ValueError(
            f"num_draft_tokens is {shortened(repr(length))}: give a number or 'auto'."
        )
    if length not in (None, AUTO):
        Bounds(0, MAX_DRAFT_TOKENS, is_whole=True).check("num_draft_tokens", length)
    if tree is not None and check_type("tree", tree, str) != AUTO:
        if len(tree) > MAX_TREE_TEXT:
            raise ValueError(f"the tree has {len(tree)} characters: give at most {MAX_TREE_TEXT}.")
        shape = read_tree(tree)
        if max(shape.nodes, shape.width) > MAX_TREE_NODES:
            raise ValueError(
                f"the tree {tree} is too large: give at most {MAX_TREE_NODES} nodes, and as many "
                "children of one node."
            )
    if rule is not None and rule not in RULES:
        raise ValueError(f"acceptance is {shortened(repr(rule))}: give one of {', '.join(RULES)}.")


def _check_tools(body: dict[str, Any]) -> None:
    """Check the tools, of which ``tool_choice`` "none" leaves none."""
    if "tools" in body:
        body["tools"] = [tool for tool in body["tools"] if not is_search(tool)]
    for tool in body.get("tools", []):
        function = check_type("a tool", tool, dict).get("function") or tool
        check_type("a tool's function", function, dict)
        if not isinstance(function.get("name"), str):
            raise ValueError("a tool has no name: give its function one.")
    if body.get("tool_choice") == "none":
        body.pop("tools", None)


def _check_stop(stop: Any) -> None:
    words = [stop] if isinstance(stop, str) else stop
    strings = isinstance(words, list) and all(isinstance(word, str) for word in words)
    if not strings or "" in words:
        raise ValueError("stop is something else than a string or a list of strings, not empty.")
    if len(words) > MAX_STOP_WORDS or any(len(word) > MAX_STOP_TEXT for word in words):
        raise ValueError(
            f"stop is too long: give {MAX_STOP_WORDS} strings of {MAX_STOP_TEXT} letters at most."
        )


def check_messages(messages: Any) -> None:
    """Raise ValueError unless the messages are a conversation in text."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {type_of(messages)}: give a list of at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"there are {len(messages)} messages: give at most {MAX_MESSAGES}.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message is something else than an object with a role.")
        content = message.get("content") or ""
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(
                    "a message has a part that is not text, but images cannot be combined with a "
                    "draft model: use mlx_lm.server for them."
                )
            check_type("the text of a message's part", part.get("text"), str)
        if not isinstance(content, (str, list)):
            raise ValueError(f"a message's content is {type_of(content)}: give a string.")
        for call in check_type("tool_calls", message.get("tool_calls") or [], list):
            _check_call(check_type("a tool call", call, dict).get("function") or {})


def _check_call(function: Any) -> None:
    arguments = check_type("the function of a tool call", function, dict).get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            json.loads(arguments)
        except (ValueError, RecursionError) as err:
            raise ValueError(f"the arguments of a tool call are not JSON ({err}).") from err


def shortened(said: object) -> str:
    """Cut what a client says to the length that error messages repeat."""
    text = str(said)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
