"""The sampler and the logits processors of a request."""

import random

import mlx.core as mx
from mlx_lm.server import _make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.sampling import LogitsProcessor, Sampler, Sampling, SamplingOptions, sampler_for
from .body import PairArguments


class SeededSampler:
    """One of mlx-lm's samplers, whose draws follow from a seed, whoever else draws meanwhile.

    Those samplers follow mlx's random state, which all requests have in common: it is set before
    each draw, and afterwards to where nobody can foresee.
    """

    def __init__(self, sampler: Sampler, seed: int):
        self._sampler = sampler
        self._seeds = random.Random(seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        mx.random.seed(self._seeds.getrandbits(64))
        try:
            return self._sampler(logprobs)
        finally:
            mx.random.seed(random.getrandbits(64))


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
    if args.seed is None or sampler is None or isinstance(sampler, Sampling):
        return sampler
    return SeededSampler(sampler, args.seed)


def make_processors(args: PairArguments, before: list[int]) -> list[LogitsProcessor]:
    """mlx-lm's, which also see the tokens that the cache holds."""
    processors = _make_logits_processors(args)
    if not before:
        return processors
    cached = mx.array(before)

    def seeing_all(processor: LogitsProcessor) -> LogitsProcessor:
        return lambda tokens, logits: processor(mx.concatenate([cached, tokens]), logits)

    return [seeing_all(processor) for processor in processors]
