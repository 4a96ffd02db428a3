"""Which sampler decodes for a set of sampling options, for the commands and the server alike."""

from dataclasses import dataclass

from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .accept import Sampler
from .sampling import Sampling


@dataclass(frozen=True)
class SamplingOptions:
    """What mlx-lm's ``make_sampler`` takes, and the acceptance rule (None: the best there is)."""

    temp: float
    top_p: float
    min_p: float
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    min_tokens_to_keep: int = 1
    acceptance: str | None = None


def sampler_for(
    options: SamplingOptions, tokenizer: TokenizerWrapper, seed: int | None
) -> Sampler | None:
    """None for greedy decoding, a ``Sampling`` where the draft can share its noise, else mlx-lm's.

    ``seed`` is the ``Sampling``'s; mlx-lm's sampler follows mlx's global random state.
    """
    if options.temp == 0:
        return None
    filters = {
        "temp": options.temp,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "min_tokens_to_keep": options.min_tokens_to_keep,
        "top_k": options.top_k,
    }
    if options.acceptance != "match" and options.xtc_probability == 0:
        return Sampling(**filters, seed=seed)
    return make_sampler(
        **filters,
        xtc_probability=options.xtc_probability,
        xtc_threshold=options.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
