"""Prompts: from a request's text or messages to tokens, in the thread of its client.

A prompt that is far too long is refused before all of it is tokenized. mlx-lm's own code makes
the tokens.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.server import CompletionRequest, convert_chat
from mlx_lm.server import process_message_content as join_content
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .answer_stream import TEMPLATE_ERRORS, RequestError, as_request_errors
from .body import PairArguments
from .provider import PairProvider

SEAM = 64  # tokens, far more than a cut can add to the beginning of a text
LONG = 8  # characters per token of the context: so much of a longer text is tokenized first


def _too_long(found: str, limit: int) -> RequestError:
    """Make the error of a prompt of ``found`` tokens, which leaves no room for an answer."""
    return RequestError(
        f"the prompt has {found} tokens, but this model takes texts of {limit}, the answer "
        "included: shorten it.",
        code="context_length_exceeded",
    )


@dataclass(frozen=True)
class Tokenized:
    """Tokens of a prompt; the answer begins as "normal" or as "reasoning".

    ``ends``: positions where caches that cannot be trimmed deserve a snapshot; see
    ``message_ends``.
    """

    tokens: list[int]
    initial_state: str = "normal"
    ends: Mapping[int, str] = field(default_factory=dict)


def render(
    request: CompletionRequest,
    tokenizer: TokenizerWrapper,
    template_args: dict[str, Any],
    tokenize: bool = False,
) -> Any:
    """Build the text of the prompt with the chat template, or its tokens."""
    if request.request_type == "chat" and tokenizer.has_chat_template:
        join_content(request.messages)
        return tokenizer.apply_chat_template(
            request.messages,
            add_generation_prompt="continue_final_message" not in template_args,
            tools=request.tools,
            tokenize=tokenize,
            **template_args,
        )
    text = request.prompt
    if request.request_type == "chat":
        if "continue_final_message" in template_args:
            raise ValueError("this model has no chat template: ask for a completion of the text.")
        text = convert_chat(request.messages, request.role_mapping)
    return tokenizer.encode(text) if tokenize else text


def num_letters(request: CompletionRequest) -> int:
    """Count the letters of a request, about."""
    return len(str((request.prompt, request.messages, request.tools)))


@as_request_errors()
def read_prompt(
    request: CompletionRequest, args: PairArguments, provider: PairProvider
) -> Tokenized:
    """Tokenize a request.

    A prompt that is far too long is refused before all of it is tokenized. Raises RequestError.
    """
    tokenizer = provider.tokenizer
    if isinstance(request.prompt, list):
        check_prompt(request.prompt, args, provider)
        return Tokenized(request.prompt, ends={len(request.prompt) - 1: "user"})
    if provider.context is not None and num_letters(request) > LONG * provider.context:
        options = provider.cli_args.chat_template_args | (args.chat_template_kwargs or {})
        text = render(request, tokenizer, options)
        check_text_length(text, tokenizer.encode, provider.context)
    tokens = encoded(request, args, provider)
    check_prompt(tokens, args, provider)
    options = args.chat_template_kwargs or {}
    state = "normal"
    is_templated = request.request_type == "chat" and tokenizer.has_chat_template
    if is_templated and "continue_final_message" not in options:
        thinks = tokenizer.has_thinking
        thinks = thinks and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
        state = tokenizer.response_initial_state or ("reasoning" if thinks else "normal")
    if not provider.needs_snapshots:
        return Tokenized(tokens, state)
    return Tokenized(tokens, state, message_ends(request, tokens, tokenizer, options))


def with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a conversation whose only system message comes first, as most templates require.

    Later system messages, with which agents remind the model, become messages of the user.
    """
    num_first = [*(message["role"] == "system" for message in messages), False].index(False)
    text = "\n\n".join(filter(None, (rules["content"] for rules in messages[:num_first])))
    found = [{"role": "system", "content": text}] if text else []
    was_reminder = False
    for message in messages[num_first:]:
        is_reminder = message["role"] == "system"
        if is_reminder:
            text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
            message = {"role": "user", "content": text}
        if (is_reminder or was_reminder) and found[-1]["role"] == message["role"] == "user":
            text = f"{found[-1]['content']}\n\n{message['content']}"
            found[-1] = {"role": "user", "content": text}
        else:
            found.append(message)
        was_reminder = is_reminder
    return found


def check_text_length(text: str, encode: Callable[[str], list[int]], limit: int) -> None:
    """Raise RequestError for a text whose beginning alone has ``limit`` tokens."""
    num_tokens = len(encode(text[: LONG * limit])) - SEAM
    if num_tokens >= limit:
        raise _too_long(f"more than {num_tokens}", limit)


def check_prompt(prompt: list[int], args: PairArguments, provider: PairProvider) -> None:
    """Raise ValueError or RequestError for tokens or arguments beyond the model's sizes."""
    vocab_size = provider.vocab_size
    limit = provider.context
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token.")
    if max(prompt) >= vocab_size:
        raise ValueError(f"the prompt has token {max(prompt)}, but this model has {vocab_size}.")
    if limit is not None and len(prompt) >= limit:
        raise _too_long(str(len(prompt)), limit)
    if args.sampling.top_k >= vocab_size:
        raise ValueError(f"top_k is {args.sampling.top_k}: give less than {vocab_size}.")
    if args.top_logprobs > vocab_size:
        raise ValueError(f"top_logprobs is {args.top_logprobs}: give at most {vocab_size}.")
    outside = [token for token in args.logits.logit_bias or () if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"logit_bias names token {outside[0]}, but this model has {vocab_size}.")


@as_request_errors()
def encoded(request: CompletionRequest, args: PairArguments, provider: PairProvider) -> list[int]:
    """Tokenize a prompt, with the options of the template that ``args`` gets.

    Raises RequestError.
    """
    args.chat_template_kwargs = template_options(request, args, provider)
    tokens: list[int] = render(request, provider.tokenizer, args.chat_template_kwargs, True)
    return tokens


def without_oldest(
    request: CompletionRequest, args: PairArguments, provider: PairProvider
) -> CompletionRequest:
    """Drop the oldest turns of a request until there is room for the answer.

    A turn begins with a message of the user; the first system message and the last turn stay. At
    most half of the context is kept for the answer; all turns stay if the model does not say how
    long its context is. Raises RequestError.
    """
    messages = request.messages
    limit = provider.context
    if limit is None:
        return request
    num_first = int(messages[0]["role"] == "system")
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    starts = [num_first, *(i for i in turns if i > num_first)]

    def since(start: int) -> CompletionRequest:
        kept = [*messages[:num_first], *messages[start:]]
        return replace(request, messages=deepcopy(kept))  # templates change them

    def fits(start: int) -> bool:
        if len(str(messages[start:])) > LONG * limit:  # far too long
            return False
        num_tokens = len(encoded(since(start), args, provider))
        return num_tokens + min(args.max_tokens, limit // 2) <= limit

    return since(starts[bisect_left(starts, True, hi=len(starts) - 1, key=fits)])


def template_options(
    request: CompletionRequest, args: PairArguments, provider: PairProvider
) -> dict[str, Any]:
    """Return the arguments of the chat template besides messages and tools.

    Raises ValueError for tools that the template would ignore; the log names an effort of
    reasoning that it does.
    """
    tokenizer = provider.tokenizer
    options = provider.cli_args.chat_template_args | (args.chat_template_kwargs or {})
    if request.request_type != "chat":
        return options
    if request.tools and not tokenizer.has_tool_calling:
        without = render(replace(request, tools=None), tokenizer, options)
        if render(request, tokenizer, options) == without:
            raise ValueError("the chat template of this model takes no tools: leave them out.")
    effort = "none" if args.thinking_budget == 0 else args.reasoning_effort
    if effort is None:
        return options
    for name, values in (
        ("reasoning_effort", ("low", "high")),
        ("enable_thinking", (False, True)),
    ):
        texts = {render(request, tokenizer, options | {name: value}) for value in values}
        if len(texts) > 1:
            value = effort if name == "reasoning_effort" else effort not in ("none", "minimal")
            return options | {name: value}
    if args.reasoning_effort is not None:
        logging.info("reasoning_effort is ignored: the chat template of this model knows none.")
    return options  # with a budget, thoughts are ended where they begin


def message_ends(
    request: CompletionRequest,
    prompt: list[int],
    tokenizer: TokenizerWrapper,
    template_args: dict[str, Any],
) -> dict[int, str]:
    """Find positions where later prompts are likely to differ, with the role that ends there.

    They are the ends of the system prompt, which other conversations share, and of the last
    question. The template is asked for the next turn: its tokens are the same up to there, while
    the beginning of the answer, or thoughts, may be left out of it.
    """
    if request.request_type != "chat" or not tokenizer.has_chat_template:
        return {len(prompt) - 1: "user"}
    template_args = {k: v for k, v in template_args.items() if k != "continue_final_message"}
    messages = request.messages
    is_system = [message["role"] == "system" for message in messages]
    num_system = [*is_system, False].index(False)
    question = {"role": "user", "content": ""}
    others = {"user": [*messages, {"role": "assistant", "content": "."}, question]}
    if num_system:
        others["system"] = [*messages[:num_system], question]
    ends = {}
    for whose, other in others.items():
        try:
            tokens = tokenizer.apply_chat_template(
                other, tools=request.tools, return_dict=False, **template_args
            )
        except TEMPLATE_ERRORS:  # it cannot take such messages
            continue
        pairs = enumerate(zip(prompt[:-1], tokens, strict=False))
        ends[next((i for i, (a, b) in pairs if a != b), len(prompt) - 1)] = whose
    return ends
