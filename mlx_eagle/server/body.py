"""What a request may hold: wrong types, sizes and values, each said in one sentence.

Knows the fields of the OpenAI API that mlx-lm reads, and checks what mlx-lm does not: past
those checks a bad value would end the thread that generates for everybody.
"""

import json
import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.server import GenerationArguments

from ..commands.flags import read_tree
from ..decoding.accept import RULES, check_rule_for_sampling, check_rule_for_trees
from ..decoding.limits import AUTO

MAX_DRAFT_TOKENS = 64
MAX_TREE_NODES = 256
MAX_TREE_TEXT = 1000  # characters
MAX_SEED = 2**64 - 1
MAX_XTC_THRESHOLD = 0.5
NUMBERS = (
    "max_tokens max_completion_tokens temperature top_p top_k min_p seed "
    "repetition_penalty repetition_context_size presence_penalty presence_context_size "
    "frequency_penalty frequency_context_size xtc_probability xtc_threshold top_logprobs"
).split()
NULLABLE = ("tree", "acceptance")  # null asks for chains, and for the best rule
KINDS = {"chat_template_kwargs": dict, "role_mapping": dict, "draft_model": str}


@dataclass
class PairArguments(GenerationArguments):
    """What a request asks for: mlx-lm's fields, and how to draft in the words of our flags."""

    tree: str | None
    acceptance: str | None


def read_body(raw: bytes) -> dict[str, Any]:
    """The fields of a request; nulls stay where they mean something. Raises ValueError."""
    try:
        body = json.loads(raw.decode())
        # A lone surrogate is valid JSON, but no text that a tokenizer could take.
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError as err:
        raise ValueError(f"the request body is not valid UTF-8 text ({err.reason}).") from err
    except json.JSONDecodeError as err:
        raise ValueError(f"the request body is not JSON ({err}).") from err
    except RecursionError as err:
        raise ValueError("the request body is nested too deeply.") from err
    if not isinstance(body, dict):
        raise ValueError(f"the request body is {_kind(body)}: give a JSON object.")
    return {name: v for name, v in body.items() if v is not None or name in NULLABLE}


def check_body(body: dict[str, Any], needed: str) -> None:
    """Check the fields; ``needed`` is the one that holds the prompt. Raises ValueError."""
    for name in NUMBERS:
        _check_number(name, body.get(name, 0))
    _check_drafts(body)
    _check_range("seed", body.get("seed", 0), MAX_SEED)
    _check_range("xtc_threshold", body.get("xtc_threshold", 0), MAX_XTC_THRESHOLD)
    for name, kind in KINDS.items():
        _check_kind(name, body.get(name, kind()), kind)
    for name, bias in _check_kind("logit_bias", body.get("logit_bias", {}), dict).items():
        if not name.isdecimal():
            raise ValueError(f"logit_bias has the key {name!r}: give token ids.")
        _check_number(f"logit_bias of {name}", bias)
    options = _check_kind("stream_options", body.get("stream_options", {}), dict)
    _check_kind("include_usage", options.get("include_usage", False), bool)
    for tool in _check_kind("tools", body.get("tools", []), list):
        _check_kind("a tool", tool, dict)
    if "adapters" in body:
        raise ValueError("adapters cannot be chosen here: start the server with --adapter-path.")
    _check_stop(body.get("stop", []))
    if needed not in body:
        raise ValueError(f"the request has no {needed}.")
    if needed == "messages":
        _check_messages(body[needed])
    elif not isinstance(body[needed], str):
        raise ValueError(f"prompt is {_kind(body[needed])}: give one string.")


def with_drafting(
    args: GenerationArguments, body: dict[str, Any], flags: Namespace
) -> PairArguments:
    """``args`` with the request's tree and acceptance rule, or else those of the flags.

    Raises ValueError where they do not go together with each other or with the sampling. The
    rule of the flags is for the requests that it can be had for.
    """
    temp, xtc_probability = args.sampling.temperature, args.sampling.xtc_probability
    tree = body.get("tree", flags.tree)
    if "acceptance" in body:
        acceptance = body["acceptance"]
        check_rule_for_sampling(acceptance, temp, xtc_probability)
    else:
        acceptance = flags.acceptance if temp > 0 and xtc_probability == 0 else None
    if tree is not None:
        check_rule_for_trees(acceptance)
    return PairArguments(**vars(args), tree=tree, acceptance=acceptance)


def check_prompt(
    prompt: list[int], args: GenerationArguments, vocab_size: int, model: nn.Module
) -> None:
    """Check what needs the model: the length of the prompt, and token ids. Raises ValueError."""
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token.")
    limit = context_size(model)
    if limit is not None and len(prompt) >= limit:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but this model takes texts of {limit}, the "
            "answer included: shorten it."
        )
    if args.sampling.top_k >= vocab_size:
        raise ValueError(f"top_k is {args.sampling.top_k}: give less than {vocab_size}.")
    outside = [token for token in args.logits.logit_bias or () if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"logit_bias names token {outside[0]}, but this model has {vocab_size} tokens."
        )


def context_size(model: nn.Module) -> int | None:
    """Tokens of a text the model was made for, where its configuration says so."""
    args = vars(model).get("args")
    size = vars(args).get("max_position_embeddings") if args is not None else None
    return size if isinstance(size, int) and size > 0 else None


def _check_drafts(body: dict[str, Any]) -> None:
    """Check what says how to draft."""
    length, tree, rule = map(body.get, ("num_draft_tokens", "tree", "acceptance"))
    if isinstance(length, str) and length != AUTO:
        raise ValueError(f"num_draft_tokens is {length!r}: give a number or 'auto'.")
    if length not in (None, AUTO):
        _check_number("num_draft_tokens", length)
        _check_range("num_draft_tokens", length, MAX_DRAFT_TOKENS)
    if tree is not None and _check_kind("tree", tree, str) != AUTO:
        if len(tree) > MAX_TREE_TEXT:
            raise ValueError(
                f"the tree has {len(tree)} characters: give at most {MAX_TREE_TEXT}."
            )
        shape = read_tree(tree)
        if max(shape.nodes, shape.width) > MAX_TREE_NODES:
            raise ValueError(
                f"the tree {tree} is too large: give at most {MAX_TREE_NODES} nodes, and as many "
                "children of one node."
            )
    if rule is not None and rule not in RULES:
        raise ValueError(f"acceptance is {rule!r}: give one of {', '.join(RULES)}.")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {_kind(value)}: give a number.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}: give a finite number.")


def _check_range(name: str, value: float, largest: float) -> None:
    if not 0 <= value <= largest:
        raise ValueError(f"{name} is {value}: give 0 to {largest}.")


def _check_kind(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {_kind(value)}: give {_kind(kind())}.")
    return value


def _check_stop(stop: Any) -> None:
    words = [stop] if isinstance(stop, str) else stop
    strings = isinstance(words, list) and all(isinstance(word, str) for word in words)
    if not strings or "" in words:
        raise ValueError("stop is something else than a string or a list of strings, not empty.")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {_kind(messages)}: give a list of at least one message.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message is something else than an object with a role.")
        content = message.get("content") or ""
        for part in content if isinstance(content, list) else []:
            _check_part(part)
        if not isinstance(content, (str, list)):
            raise ValueError(f"a message's content is {_kind(content)}: give a string.")
        for call in _check_kind("tool_calls", message.get("tool_calls") or [], list):
            _check_call(_check_kind("a tool call", call, dict).get("function") or {})


def _check_part(part: Any) -> None:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ValueError(
            "a message has a part that is not text, but images cannot be combined with a draft "
            "model: use mlx_lm.server for them."
        )
    _check_kind("the text of a message's part", part.get("text"), str)


def _check_call(function: Any) -> None:
    arguments = _check_kind("the function of a tool call", function, dict).get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            json.loads(arguments)
        except json.JSONDecodeError as err:
            raise ValueError(f"the arguments of a tool call are not JSON ({err}).") from err


def _kind(value: Any) -> str:
    """What JSON calls it."""
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names[type(value)]
