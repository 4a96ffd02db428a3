"""The sampler and the logits processors of a request that is decoded alone."""

import mlx.core as mx
from mlx_lm.server import _make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.accept import Sampler
from ..decoding.processors import LogitsProcessor
from ..decoding.samplers import SamplingOptions, sampler_for
from ..decoding.sampling import Sampling
from .body import PairArguments


def make_sampler(args: PairArguments, tokenizer: TokenizerWrapper) -> Sampler | None:
    """The sampler of a request, ready to begin."""
    options = SamplingOptions(
        temp=args.sampling.temperature,
        top_p=args.sampling.top_p,
        min_p=args.sampling.min_p,
        top_k=args.sampling.top_k,
        xtc_probability=args.sampling.xtc_probability,
        xtc_threshold=args.sampling.xtc_threshold,
        acceptance=args.acceptance,
    )
    sampler = sampler_for(options, tokenizer, args.seed)
    if args.seed is not None and not isinstance(sampler, Sampling):
        mx.random.seed(args.seed)
    return sampler


def make_processors(args: PairArguments, before: list[int]) -> list[LogitsProcessor]:
    """mlx-lm's, which also see the tokens that the cache holds, as they do in its batches."""
    processors = _make_logits_processors(args)
    if not before:
        return processors
    cached = mx.array(before)

    def seeing_all(processor: LogitsProcessor) -> LogitsProcessor:
        return lambda tokens, logits: processor(mx.concatenate([cached, tokens]), logits)

    return [seeing_all(processor) for processor in processors]
