"""Acceptance rules by name, and which go with which sampler."""

from .accept import Coupled, Match, Rule
from .rejection import Reject
from .sampling import Sampler, Sampling

RULES = ("match", "coupled", "reject")


def make_rule(acceptance: str | None, sampler: Sampler | None) -> Rule:
    """The rule of that name (None: the best for the sampler), for one generation.

    Raises ValueError where rule and sampler do not fit.
    """
    if acceptance is None:
        acceptance = "coupled" if isinstance(sampler, Sampling) else "match"
    if acceptance not in RULES:
        raise ValueError(f"acceptance is {acceptance!r}: give one of {', '.join(RULES)}.")
    if acceptance == "match":
        if isinstance(sampler, Sampling):
            return Coupled(sampler, drafts_greedily=True)
        return Match(sampler)
    if not isinstance(sampler, Sampling):
        found = "greedy decoding" if sampler is None else "another sampler"
        raise ValueError(
            f"acceptance {acceptance!r} needs mlx_eagle.Sampling as the sampler, but this is "
            f"{found}: give one (temp, top_p, min_p, top_k, seed), or use 'match'."
        )
    return Coupled(sampler) if acceptance == "coupled" else Reject(sampler)


def check_rule_for_sampling(acceptance: str | None, temp: float, xtc_probability: float) -> None:
    """Raise ValueError for a rule that cannot work with samplers of these options."""
    if acceptance not in ("coupled", "reject"):
        return
    if temp == 0:
        raise ValueError(
            f"acceptance {acceptance!r} needs a temperature above 0: greedy decoding takes "
            "'match'."
        )
    if xtc_probability > 0:
        raise ValueError(
            f"acceptance {acceptance!r} cannot replay XTC, which draws random numbers of its own: "
            "use 'match' with it."
        )
