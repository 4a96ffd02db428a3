"""mlx-lm's ``stream_generate`` and ``generate``, for a drafter as ``draft_model``.

Tokenizers, timing and responses. The loop itself is in ``decoding/loop.py``, the command
``python -m mlx_eagle.generate`` in ``commands/generate.py``.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Unpack, overload

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse as MlxGenerationResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decoding.generate_step import StepOptions, speculative_generate_step
from .decoding.setup import AUTO
from .decoding.stats import Stats
from .drafters.base import Drafter, is_drafter
from .system.fields import check_names


class GenerateOptions(StepOptions, total=False):
    """Options of ``generate``: those of ``stream_generate``."""

    max_tokens: int
    draft_model: Drafter | nn.Module | None
    stream: mx.Stream | mx.ThreadLocalStream


@dataclass
class GenerationResponse(MlxGenerationResponse):
    """mlx-lm's response, with facts about drafts.

    ``draft_depth`` is the position of the token in its draft, the first is 1; 0 where the target
    chose it, as ``from_draft`` also says. ``draft_length`` is how far its round had drafted: 0 in
    plain decoding and for the first token. ``stats`` are the running counts, final in the last
    response.
    """

    stats: Stats = field(default_factory=Stats)
    draft_depth: int = 0
    draft_length: int = 0


@overload
def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    *,
    draft_model: Drafter,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    **kwargs: Unpack[StepOptions],
) -> Iterator[GenerationResponse]: ...


@overload
def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int,
    draft_model: Drafter,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    **kwargs: Unpack[StepOptions],
) -> Iterator[GenerationResponse]: ...


@overload
def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    **kwargs: Unpack[StepOptions],
) -> Iterator[MlxGenerationResponse]: ...


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: Drafter | nn.Module | None = None,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    **kwargs: Unpack[StepOptions],
) -> Iterator[MlxGenerationResponse]:
    """Generate text piece by piece, as ``mlx_lm.stream_generate`` does.

    With one of our drafters as ``draft_model`` our loop runs, and responses carry ``stats``
    (``GenerationResponse``); anything else (no draft model, an ordinary one) goes to mlx-lm
    unchanged. ``kwargs`` are those of ``speculative_generate_step``, but ``num_draft_tokens`` is
    "auto" by default. Raises ValueError for ``max_tokens`` 0 and for what
    ``speculative_generate_step`` refuses, TypeError for an unknown name.
    """
    if not is_drafter(draft_model):
        yield from mlx_lm.stream_generate(
            model, tokenizer, prompt, max_tokens, draft_model, stream, **kwargs
        )
        return
    if max_tokens == 0:
        raise ValueError("Maximum number of tokens must be non-zero (use -1 for no limit).")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    check_names("stream_generate", kwargs, GenerateOptions.__optional_keys__)
    prompt = _encode(tokenizer, prompt)
    stats = kwargs.pop("stats", None) or Stats()
    kwargs.setdefault("num_draft_tokens", AUTO)
    steps = speculative_generate_step(
        prompt,
        model,
        draft_model,
        stream,
        max_tokens=max_tokens,
        stop_tokens=tokenizer.eos_token_ids,
        stats=stats,
        **kwargs,
    )
    with wired_limit(model, [stream]):
        yield from _responses(steps, tokenizer, prompt.size, max_tokens, stats)


def _responses(
    steps: Iterator[tuple[int, mx.array, bool]],
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    max_tokens: int,
    stats: Stats,
) -> Iterator[GenerationResponse]:
    """Turn tokens into responses; the last one is always given, a stop token without its text."""
    detokenizer = tokenizer.detokenizer
    tic = time.perf_counter()
    prompt_tps = 0.0
    depth = 0

    def response(finish_reason: str | None) -> GenerationResponse:
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=from_draft,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tps,
            generation_tokens=n + 1,
            generation_tps=(n + 1) / (time.perf_counter() - tic),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            stats=stats,
            draft_depth=depth,
            draft_length=0 if n == 0 else stats.draft_lengths[-1],
        )

    for n, (token, logprobs, from_draft) in enumerate(steps):  # noqa: B007 (used in response)
        if n == 0:  # given after the first round was launched, which a CPU has nearly done by then
            prompt_tps = prompt_tokens / stats.prompt_time
            tic += stats.prompt_time
        depth = depth + 1 if from_draft else 0  # a round ends with a token of the target's own
        if token in tokenizer.eos_token_ids:
            break
        detokenizer.add_token(token)
        if n + 1 == max_tokens:
            break
        yield response(None)
    steps.close()
    detokenizer.finalize()
    yield response("stop" if token in tokenizer.eos_token_ids else "length")


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | list[int],
    verbose: bool = False,
    **kwargs: Unpack[GenerateOptions],
) -> str:
    """Generate a text and return it, as ``mlx_lm.generate`` does.

    ``kwargs`` are those of ``stream_generate``. ``verbose`` prints the text as it comes, then
    mlx-lm's footer and the speculative counts.
    """
    if not is_drafter(kwargs.get("draft_model")):
        return mlx_lm.generate(model, tokenizer, prompt, verbose=verbose, **kwargs)
    check_names("generate", kwargs, GenerateOptions.__optional_keys__)
    text = ""
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print("\n" + "=" * 10)
        print("\n".join(footer(response)) if text else "No text generated for this prompt")
    return text


def footer(response: MlxGenerationResponse) -> list[str]:
    """mlx-lm's lines about a finished generation, then ours where our loop ran."""
    return [
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {response.peak_memory:.3f} GB",
        *(response.stats.lines() if isinstance(response, GenerationResponse) else []),
    ]


def _encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | list[int]) -> mx.array:
    """Token ids (n,), with special tokens unless the text already starts with BOS."""
    if isinstance(prompt, mx.array):
        return prompt
    if isinstance(prompt, str):
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=not has_bos)
    return mx.array(prompt, dtype=mx.int32) if len(prompt) == 0 else mx.array(prompt)


if __name__ == "__main__":
    from .commands.generate import main

    main()
