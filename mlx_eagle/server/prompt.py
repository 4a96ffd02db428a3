"""Prompts: from a request's text or messages to tokens, in the thread of its client.

A prompt that is far too long is refused before all of it was tokenized. The tokens themselves
are made by mlx-lm's own code.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError
from mlx_lm.server import CompletionRequest, convert_chat
from mlx_lm.server import process_message_content as join_content
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .answer_stream import RequestError
from .body import PairArguments
from .provider import PairProvider

PIECE = 2**15  # characters that are tokenized at once when a long text is measured
SEAM = 64  # tokens, far more than a cut between two pieces can add
LONG = 8  # characters per token of the context: beyond it a text is measured before it is used
TEMPLATE_ERRORS = (
    TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""What chat templates raise for messages that they were not written for."""


class PromptTooLong(ValueError):
    """A prompt of ``found`` tokens, which leaves no room for an answer in the model's context."""

    def __init__(self, found: str, limit: int):
        super().__init__(
            f"the prompt has {found} tokens, but this model takes texts of {limit}, the answer "
            "included: shorten it."
        )


@contextmanager
def as_request_errors() -> Iterator[None]:
    """Within, what is wrong with a prompt is raised as a RequestError."""
    try:
        yield
    except PromptTooLong as err:
        raise RequestError(str(err), code="context_length_exceeded") from err
    except ValueError as err:
        raise RequestError(str(err)) from err
    except TEMPLATE_ERRORS as err:
        raise RequestError(
            f"the chat template cannot take these messages ({type(err).__name__}: {err})."
        ) from err


@dataclass(frozen=True)
class Tokenized:
    """The tokens of a prompt; the text begins as "normal" or as "reasoning".

    ``ends``: where caches that cannot be trimmed are worth a snapshot; see ``message_ends``.
    """

    tokens: list[int]
    initial_state: str = "normal"
    ends: Mapping[int, str] = field(default_factory=dict)


def render(
    request: CompletionRequest, tokenizer: TokenizerWrapper, template_args: dict[str, Any]
) -> str:
    """The text of the prompt, as the chat template puts it together."""
    if request.request_type != "chat":
        return request.prompt
    if not tokenizer.has_chat_template:
        if "continue_final_message" in template_args:
            raise ValueError("this model has no chat template: ask for a completion of the text.")
        return convert_chat(request.messages, request.role_mapping)
    join_content(request.messages)
    return tokenizer.apply_chat_template(
        request.messages,
        add_generation_prompt="continue_final_message" not in template_args,
        tools=request.tools,
        tokenize=False,
        **template_args,
    )


def with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in text, in which the system speaks first and once, as most templates want.

    What it says later, as agents have it remind the model of something, the user says.
    """
    rules: list[str] = []
    found: list[dict[str, Any]] = []
    is_reminded = False
    for message in messages:
        is_system = message["role"] == "system"
        if is_system and not found:
            rules.append(message["content"])
            continue
        if is_system:
            text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
            message = {"role": "user", "content": text}
        joins = (is_system or is_reminded) and message["role"] == "user"
        if joins and found[-1]["role"] == "user":
            text = f"{found[-1]['content']}\n\n{message['content']}"
            found[-1] = {"role": "user", "content": text}
        else:
            found.append(message)
        is_reminded = is_system
    text = "\n\n".join(filter(None, rules))
    return [{"role": "system", "content": text}, *found] if text else found


def check_text_length(
    text: str, encode: Callable[[str], list[int]], limit: int, check: Callable[[], None]
) -> None:
    """Raise ValueError for a text of at least ``limit`` tokens, having seen no more than those.

    ``check`` is called between pieces and may raise.
    """
    num_tokens = 0
    for start in range(0, len(text), PIECE):
        check()
        num_tokens += max(0, len(encode(text[start : start + PIECE])) - SEAM)
        if num_tokens >= limit:
            raise PromptTooLong(f"more than {num_tokens}", limit)


def check_prompt(prompt: list[int], args: PairArguments, provider: PairProvider) -> None:
    """Check what needs the tokens or the model's sizes. Raises ValueError."""
    vocab_size = provider.vocab_size
    limit = provider.context
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token.")
    if max(prompt) >= vocab_size:
        raise ValueError(f"the prompt has token {max(prompt)}, but this model has {vocab_size}.")
    if limit is not None and len(prompt) >= limit:
        raise PromptTooLong(str(len(prompt)), limit)
    if args.sampling.top_k >= vocab_size:
        raise ValueError(f"top_k is {args.sampling.top_k}: give less than {vocab_size}.")
    if args.top_logprobs > vocab_size:
        raise ValueError(f"top_logprobs is {args.top_logprobs}: give at most {vocab_size}.")
    outside = [token for token in args.logits.logit_bias or () if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"logit_bias names token {outside[0]}, but this model has {vocab_size} tokens."
        )


def encoded(request: CompletionRequest, args: PairArguments, provider: PairProvider) -> list[int]:
    """The tokens of a chat's prompt, as they are counted. Raises ValueError, TEMPLATE_ERRORS."""
    tokenizer = provider.tokenizer
    text = render(request, tokenizer, template_options(request, args, provider))
    return tokenizer.encode(text, add_special_tokens=not tokenizer.has_chat_template)


def without_oldest(
    request: CompletionRequest, args: PairArguments, provider: PairProvider
) -> CompletionRequest:
    """The request, less as many of its oldest turns as leave no room for the answer.

    A turn begins with a message of the user; what the system says first stays, and so does the
    last turn. At most half of the context is kept for the answer; where the model does not say
    how long that is, all turns stay. Raises ValueError and TEMPLATE_ERRORS.
    """
    messages = request.messages
    limit = provider.context
    if limit is None:
        return request
    num_first = int(messages[0]["role"] == "system")
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    starts = [num_first, *(i for i in turns if i > num_first)]
    # Of what is far too long nothing is tokenized.
    sizes = list(accumulate(len(str(message)) for message in reversed(messages)))
    starts = [i for i in starts if sizes[len(messages) - i - 1] <= LONG * limit] or starts[-1:]

    def since(start: int) -> CompletionRequest:
        kept = [*messages[:num_first], *messages[start:]]
        return replace(request, messages=deepcopy(kept))  # templates change them

    def fits(start: int) -> bool:
        num_tokens = len(encoded(since(start), args, provider))
        return num_tokens + min(args.max_tokens, limit // 2) <= limit

    return since(starts[bisect_left(starts, True, hi=len(starts) - 1, key=fits)])


def template_options(
    request: CompletionRequest, args: PairArguments, provider: PairProvider
) -> dict[str, Any]:
    """What the chat template is given besides messages and tools.

    Raises ValueError for tools, and for an effort of reasoning, that it would leave out.
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
    if args.reasoning_effort is None:
        return options  # thoughts are ended where they begin
    raise ValueError("the chat template of this model knows no reasoning_effort: leave it out.")


def message_ends(
    request: CompletionRequest,
    prompt: list[int],
    tokenizer: TokenizerWrapper,
    template_args: dict[str, Any],
) -> dict[int, str]:
    """Behind which tokens of a prompt another is likely to go on, and whose message ends there.

    That is behind the system prompt, which other conversations have too, and behind the last
    question. How much of that comes again the template says: of the next turn it makes the same
    tokens up to there, while what was to begin the answer, or thoughts, may be left out of it.
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
