"""Table of the fields of all requests: those that are known, translated, refused or ignored.

A field that changes the answer is heeded or refused. One that does not, or that nobody knows, is
a hint: the request is answered, and its line in the log names the field.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..system.fields import check_type

OWN = (
    "model", "draft_model", "stream", "temperature", "top_p", "top_k", "min_p", "seed",
    "num_draft_tokens", "tree", "acceptance", "reuse_caches", "logit_bias", "grammar",
    "repetition_penalty", "repetition_context_size", "presence_penalty", "presence_context_size",
    "frequency_penalty", "frequency_context_size", "xtc_probability", "xtc_threshold", "store",
    "cache_salt", "user", "safety_identifier", "exact",
)  # fmt: skip
"""Fields with one meaning in every request that generates."""
OF_CHATS = (
    "thinking_budget",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "tool_choice",
    "tools",
)
OF_OPENAI = (
    "max_tokens", "max_completion_tokens", "stop", "n", "logprobs", "top_logprobs",
    "stream_options", "include_draft", "response_format", "reasoning_effort", "role_mapping",
    "echo", "continue_final_message",
)  # fmt: skip
OF_NO_EFFECT = (
    "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "cache_prompt",
    "prompt_cache_options", "cache_control", "inference_geo", "client_metadata",
)  # fmt: skip
"""Fields about billing, routing and caches of others: no text depends on them."""
KNOWN = {
    "chat": {*OWN, *OF_CHATS, *OF_OPENAI, *OF_NO_EFFECT, "messages"},
    "text": {*OWN, *OF_CHATS, *OF_OPENAI, *OF_NO_EFFECT, "prompt"},
    "responses": {
        *OWN, *OF_CHATS, *OF_NO_EFFECT, "input", "instructions", "previous_response_id",
        "max_output_tokens", "max_tool_calls", "reasoning", "text", "include", "truncation",
        "top_logprobs", "stop",
    },
    "messages": {
        *OWN, *OF_CHATS, *OF_NO_EFFECT, "messages", "system", "max_tokens", "stop_sequences",
        "thinking", "output_config", "output_format", "thread",
    },
    "ollama": {
        *OWN, "messages", "prompt", "system", "options", "raw", "tools", "keep_alive", "logprobs",
        "top_logprobs", "name",
    },
    "options": {*OWN, "stop"},
    "tokens": {
        "model", "content", "prompt", "messages", "tokens", "tools", "with_pieces", "add_special",
        "add_special_tokens", "chat_template_kwargs",
    },
}  # fmt: skip
"""By the kind of a route, the fields that its own check reads."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "adapters": (), "allowed_token_ids": ([],), "audio": (), "background": (False,),
    "bad_words": ([],), "best_of": (1,), "context": ([],), "continue_final_message": (False,),
    "conversation": (), "dry_multiplier": (0,), "dynatemp_range": (0,), "echo": (False,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "function_call": ("none",), "functions": ([],),
    "guided_grammar": (), "ignore_eos": (False,), "image": (), "images": ([],),
    "include_draft": (False,), "include_stop_str_in_output": (False,), "length_penalty": (1,),
    "logprobs": (False,), "max_completion_tokens": (), "mcp_servers": ([],), "min_tokens": (0,),
    "mirostat": (0,), "modalities": (["text"],), "moderation": (), "n": (1,), "n_probs": (0,),
    "prompt_logprobs": (0,), "reasoning_effort": (), "response_format": (),
    "skip_special_tokens": (True,), "smoothing_factor": (0,), "stop": ([],),
    "stop_token_ids": ([],), "suffix": ("",), "template": ("",), "tfs_z": (1,), "top_a": (0,),
    "typical_p": (1,), "use_beam_search": (False,),
}  # fmt: skip
"""Fields that would change the answer, with the values that would not; of kinds that lack them."""
SEARCH = re.compile(r"web_(search|fetch)\w*")
"""Types of tools that search the web on others' servers: no model is told of them here."""


def check_fields(body: Mapping[str, Any], api: str, chat: dict[str, Any]) -> None:
    """Add to ``chat`` what a request means by other servers' names of the fields of a chat.

    ``api`` is a key of ``KNOWN``. Raises ValueError for what is refused.
    """
    for name in sorted(body.keys() - KNOWN[api]):
        if name in REFUSED and not any(body[name] == neutral for neutral in REFUSED[name]):
            raise ValueError(f"{name} is not supported: leave it out.")
        meant = MAPPED[name](body[name]) if name in MAPPED else {}
        for other, value in meant.items():
            if other == "chat_template_kwargs":
                value = {**check_type(other, chat.get(other, {}), dict), **value}
            elif other in chat:
                raise ValueError(f"{name} and {other} exclude each other: give one of them.")
            chat[other] = value


def ignored_fields(body: Mapping[str, Any], api: str) -> list[str]:
    """List the fields of a request without effect on its answer, and the tools."""
    heeded = KNOWN[api] | MAPPED.keys() | REFUSED.keys()
    tools = body["tools"] if isinstance(body.get("tools"), list) else []
    searches = [f"the tool {tool['type']}" for tool in tools if is_search(tool)]
    options = body.get("options") if api == "ollama" else None
    inner = ignored_fields(options, "options") if isinstance(options, dict) else []
    return [*sorted(body.keys() - heeded), *inner, *searches]


def is_search(tool: Any) -> bool:
    """Whether a tool is a search of the web, which is never called here."""
    tool_type = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(tool_type, str) and SEARCH.fullmatch(tool_type) is not None


def _limit(value: Any) -> dict[str, Any]:
    """Translate a number of tokens, of which -1 and -2 are none."""
    return {} if value in (-1, -2) else {"max_tokens": value}


def _schema(value: Any) -> dict[str, Any]:
    """Translate a schema, which may be text."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as err:
        raise ValueError(f"the schema is not JSON ({err}).") from err
    response_format = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    return {"response_format": response_format}


def _words(value: Any) -> dict[str, Any]:
    """Translate texts of which the answer is one."""
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError("the choice is something else than a list of texts.")
    choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
    return {"grammar": {"lark": f"start: {choices}"}}


def _structure(value: Any) -> dict[str, Any]:
    """Translate vLLM's ``structured_outputs``."""
    readers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "json": _schema,
        "regex": MAPPED["guided_regex"],
        "choice": _words,
        "json_object": lambda is_one: _format("json" if is_one else ""),
    }
    fields = check_type("structured_outputs", value, dict)
    given = {k: v for k, v in fields.items() if v is not None}
    if len(given) != 1 or not given.keys() <= readers.keys():
        raise ValueError(f"structured_outputs has not one of {', '.join(readers)}: give one.")
    ((name, inner),) = given.items()
    return readers[name](inner)


def _format(value: Any) -> dict[str, Any]:
    """Translate Ollama's ``format``: "json", or a schema."""
    if value == "":
        return {}
    return {"response_format": {"type": "json_object"}} if value == "json" else _schema(value)


def _think(value: Any) -> dict[str, Any]:
    """Translate whether to think, or how much."""
    if isinstance(value, str):
        return {"reasoning_effort": value}
    if not isinstance(value, bool):
        raise ValueError("think is something else than true, false, or how much.")
    return {"reasoning_effort": "medium"} if value else {"thinking_budget": 0}


def _thinking(value: Any) -> dict[str, Any]:
    """Translate ``thinking`` of a chat, as the servers of DeepSeek and GLM have it."""
    mode = check_type("thinking", value, dict).get("type")
    return {"thinking_budget": 0} if mode == "disabled" else {}


def _reasoning(value: Any) -> dict[str, Any]:
    """Translate ``reasoning`` of a chat, as routers have it."""
    effort = check_type("reasoning", value, dict).get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


MAPPED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "enable_thinking": lambda value: {"chat_template_kwargs": {"enable_thinking": value}},
    "format": _format,
    "guided_choice": _words,
    "guided_json": _schema,
    "guided_regex": lambda value: {"grammar": {"regex": value}},
    "json_schema": _schema,
    "max_new_tokens": _limit,
    "n_predict": _limit,
    "num_predict": _limit,
    "reasoning": _reasoning,
    "repeat_last_n": lambda value: {"repetition_context_size": 2**20 if value == -1 else value},
    "repeat_penalty": lambda value: {"repetition_penalty": value},
    "structured_outputs": _structure,
    "think": _think,
    "thinking": _thinking,
}
"""Fields of llama-server, vLLM, Ollama and others, with those of a chat that mean the same."""
