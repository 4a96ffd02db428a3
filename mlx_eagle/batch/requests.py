"""One request of a batch: its prompt, limits, decoding options and results."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..decoding.accept import AskedLogprobs, TokenLogprobs
from ..decoding.decoder import Decoder, Limits, Round
from ..decoding.processors import LogitsProcessor, is_grammar, is_pure
from ..decoding.sampling import Sampler, Sampling
from ..decoding.setup import AUTO, begin_copies, begin_drafter, open_decoder, split_cache
from ..decoding.stats import Stats
from ..drafters.acceptance_stats import CopySeen
from ..drafters.base import Drafter
from ..drafters.copies import Tokens
from ..drafters.tree import DraftPlan, DraftShape
from ..system.fields import check_names
from ..target_model.masks_and_ropes import BY_LENGTH, find_ropes
from ..target_model.probe import batch_mask_axes, cuts_states_by_text
from ..target_model.ragged import can_share
from ..target_model.rollback import CacheQuantization
from ..target_model.states import recurrent_caches
from .acceptance import BatchVerification

FOR_ONE_PROMPT = ("tree", "kv_bits", "input_embeddings")  # as ``speculative_generate_step`` has it
NAMED = {"prompt_caches", "max_tokens", "draft_model", "known_tokens", "max_speculative_batch"}
UNQUANTIZED = CacheQuantization(None, 64, 0)


@dataclass(eq=False)
class Request:
    """One prompt and its results; ``row`` distinguishes requests that have the same seed.

    ``cache`` has the target's caches, then the drafter's, if any; the decoder has its own while
    the request runs. ``tokens_after_leave`` follow ``tokens``: they come from a round that was in
    flight when the request left its batch.
    """

    prompt: list[int]
    limits: Limits
    cache: list[Any]
    row: int = 0
    known_tokens: Tokens | None = None  # that ``cache`` holds
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    tokens_after_leave: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the tokens, where they are asked for
    cancelled: bool = False
    decoder: Decoder = field(init=False, repr=False)  # from ``prefill`` on

    @property
    def ended(self) -> bool:
        """Whether nothing is left to generate."""
        has_room = self.limits.has_room_after(len(self.tokens), *self.tokens[-1:])
        return self.cancelled or not has_room


class BatchOptions(TypedDict, total=False):
    """Options of ``batch_generate`` that are not among its parameters."""

    stream: mx.Stream | mx.ThreadLocalStream | None
    num_draft_tokens: int | str
    sampler: Sampler | None
    logits_processors: list[LogitsProcessor] | None
    acceptance: str | None
    exact: bool
    prefill_step_size: int
    max_kv_size: int | None
    completion_batch_size: int | None
    prefill_batch_size: int | None


@dataclass(frozen=True)
class Options:
    """Settings for decoding requests, and what is returned; a batch may hold several settings."""

    stream: mx.Stream | mx.ThreadLocalStream = generation_stream
    num_draft_tokens: int | str = AUTO
    sampler: Sampler | None = None
    logits_processors: list[LogitsProcessor] | None = None
    acceptance: str | None = None
    exact: bool = False
    prefill_step_size: int = 2048
    max_kv_size: int | None = None
    completion_batch_size: int | None = None
    prefill_batch_size: int | None = None
    return_prompt_caches: bool = False
    return_token_ids: bool = False
    return_logprobs: bool = False
    verbose: bool = False

    @classmethod
    def by_names(cls, given: dict[str, Any]) -> "Options":
        """Make options from keyword arguments.

        Raises ValueError for options of a single prompt only, TypeError for an unknown name.
        """
        for name in FOR_ONE_PROMPT:
            if given.pop(name, None) is not None:
                raise ValueError(
                    f"{name} is for one prompt at a time: leave it out, or give it to "
                    "mlx_eagle.generate, prompt by prompt."
                )
        if given.get("stream", generation_stream) is None:
            del given["stream"]  # as mlx-lm's batches have it by default
        check_names("batch_generate", given, {known.name for known in fields(cls)} | NAMED)
        return cls(**given)

    def sampler_of(self, request: Request) -> Sampler | None:
        """The sampler for one request: a ``Sampling`` has its own noise for each row."""
        if isinstance(self.sampler, Sampling):
            return self.sampler.begin(request.row)
        return self.sampler

    def own_processors(self) -> list[LogitsProcessor]:
        """The logits processors for one request; processors with a state are copied."""
        given = self.logits_processors or ()
        return [p if is_pure(p) or is_grammar(p) else deepcopy(p) for p in given]


def prefill(
    model: nn.Module, draft_model: Drafter, request: Request, options: Options
) -> Iterator[int]:
    """Run all but the last token of a prompt, in chunks; yields the number of tokens done.

    Rounds of a batch may run between the steps.
    """
    request.stats.start()
    cache, draft_cache = split_cache(request.cache, model, None)
    request.decoder = open_decoder(
        model,
        begin_drafter(draft_model, draft_cache),
        cache,
        UNQUANTIZED,
        options.stream,
        sampler=options.sampler_of(request),
        logits_processors=options.own_processors(),
        acceptance=options.acceptance,
        copies=begin_copies(draft_model, cache, mx.array(request.prompt), request.known_tokens),
    )
    request.decoder.num_top = None if request.logprobs is None else 0
    prompt = mx.array(request.prompt)
    yield from request.decoder.prefill_chunks(prompt, options.prefill_step_size)


def first_token(request: Request) -> Round:
    """Run the prompt's last token, which ends prefill: the request may then join a batch."""
    first = request.decoder.launch_first()
    first.run = first.read().run
    request.decoder.commit(first, 1)
    request.decoder.see(first.run)
    first.num_taken = 1
    request.stats.end_prefill()
    request.tokens += first.run
    if request.logprobs is not None:
        request.logprobs += [own for own, _ in first.verification.read_logprobs(1)]
    return first


def restore_caches(request: Request) -> None:
    """Put the caches into ``request.cache`` that its own generation would have left.

    This takes one pass, over the last token of a request that left its batch with its caches.
    """
    request.decoder.stop_at_root()
    request.cache = request.decoder.cache + request.decoder.drafter.cache


def reason_not_batchable(model: nn.Module, caches: list[Any], plainly: bool = False) -> str | None:
    """Reason why requests on these target caches cannot share passes; None if they can.

    ``plainly``: passes of plain steps, one row per request.
    """
    for cache in caches:
        if not can_share([cache]):
            kept = ", with first tokens that are kept" if getattr(cache, "keep", 0) else ""
            return f"the target's caches are for one text at a time ({type(cache).__name__}{kept})"
    if any(isinstance(rope, BY_LENGTH) for rope in find_ropes(model)):
        return "the target's rotary embedding goes by the length of one text"
    if batch_mask_axes(model) == 0:
        return "the target does not compute several texts in one pass as it does each of them"
    if not plainly and any(recurrent_caches(caches)) and not cuts_states_by_text(model):
        return "the target's recurrent states are not seen to be updated for each text by itself"
    return None


def mlx_lm_can_batch(model: nn.Module, requests: list[Request]) -> bool:
    """Whether mlx-lm's own batch can be right.

    Its masks have four axes, its rotating caches keep no first tokens when they drop others, and
    the padding of shorter prompts enters the states of many recurrent layers.
    """
    for request in requests:
        length = len(request.prompt) + request.limits.max_tokens
        for cache in split_cache(request.cache, model, None)[0]:
            if type(cache) not in (KVCache, RotatingKVCache):
                return False
            if getattr(cache, "keep", 0) and cache.offset + length > cache.max_size:
                return False
    return batch_mask_axes(model) == 4


@dataclass
class RoundPart:
    """One request's part in a shared round.

    Rows are as in ``decoding.decoder.Round``: row 0 is the root, row i + 1 draft token i.
    """

    request: Request
    position: int  # how many tokens it had emitted before
    room: int  # tokens to draft or copy that its limits let be kept
    is_drafter_asked: bool
    forced: list[int]  # tokens that a grammar forces, and that drafts and copies begin with
    copied: list[int]  # its whole draft, or none
    num_drafted: int = 0  # known ones included
    num_kept: int = 0  # of these, once read
    run: list[int] = field(default_factory=list)  # the tokens emitted, once read

    @classmethod
    def of(cls, request: Request, plan: DraftPlan, most_forced: int) -> "RoundPart":
        """The part in the next round, by its plan and the end of the request's text."""
        decoder = request.decoder
        at = decoder.num_emitted
        shape = decoder.choose(plan)
        room = request.limits.at_most(shape, at).num_levels
        most = request.limits.at_most(DraftShape(most_forced), at).size
        forced = [] if decoder.discards_features else decoder.processors.forced(most)
        copied = decoder.copy(min(shape.copy, room), forced)
        room = len(copied) if shape.copy else room
        return cls(request, at, room, shape.size > 0 and room > len(forced), forced, copied)

    @property
    def known(self) -> list[int]:
        """The tokens that its draft begins with."""
        return self.copied or self.forced


@dataclass
class SharedRound:
    """A round of several requests in flight, later its result."""

    parts: list[RoundPart]
    shape: DraftShape  # what was asked for: a copy where all copy, else a draft
    verification: BatchVerification
    features: mx.array | None  # (B, R, F)
    asked: AskedLogprobs | None = None
    absorbed: bool = False
    committed: bool = False
    copies_seen: list[CopySeen] = field(default_factory=list)  # once read, of those who can copy

    def of(self, index: list[int]) -> "SharedRound":
        """Select some of the requests, before the round is read."""
        chosen = mx.array(index)
        return replace(
            self,
            parts=[self.parts[b] for b in index],
            verification=self.verification.of(chosen),
            features=None if self.features is None else self.features[chosen],
            asked=None if self.asked is None else self.asked.of_texts(chosen),
        )

    @property
    def pending(self) -> list[mx.array]:
        """The arrays that the host reads, to be computed at once."""
        return [self.verification.packed, *([] if self.asked is None else self.asked.arrays)]

    def logprobs(self, b: int) -> list[TokenLogprobs]:
        """Log-probabilities of request b's emitted tokens, once read; [] if not asked for."""
        num_top = self.parts[b].request.decoder.num_top
        if self.asked is None or num_top is None:
            return []
        return self.asked.read(len(self.parts[b].run), num_top, text=b)

    def read(self) -> None:
        """Wait for the device, and cut what was emitted to the limits of each request."""
        mx.eval(self.pending)
        rows: Any = self.verification.packed.tolist()
        for part, (num_kept, *following) in zip(self.parts, rows, strict=True):
            part.num_kept = num_kept
            part.run = part.request.limits.cut(following[: num_kept + 1], part.position)
