"""Counters of the server, and ``/metrics`` in Prometheus's text format 0.0.4."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from threading import Lock
from typing import Any

from .. import __version__
from ..decoding.stats import Stats
from ..drafters.earlier_answers import EarlierAnswers
from .answer_stream import counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
FIRST_TOKEN = "time_to_first_token_seconds"
HELP = {
    "build_info": "The version.",
    "requests_total": "Requests to generate, and what was no HTTP, by what became of them.",
    "prompt_tokens_total": "Prompt tokens of requests that ended.",
    "cached_prompt_tokens_total": "Prompt tokens that an earlier request had computed.",
    "generated_tokens_total": "Tokens generated for requests that ended.",
    "refused_connections_total": "Connections refused because there were too many.",
    "prompt_cache_hits_total": "Requests that began on caches, by where these were.",
    "prompt_cache_misses_total": "Requests that found none.",
    "prompt_cache_snapshots": "Texts kept.",
    "prompt_cache_bytes": "Bytes of these.",
    FIRST_TOKEN: "Seconds from a request to the first token of its answer.",
    "drafted_tokens_total": "Draft tokens.",
    "accepted_tokens_total": "Draft tokens that were kept.",
    "copied_tokens_total": "Of the draft tokens, those copied from a text.",
    "accepted_copied_tokens_total": "Copied tokens that were kept.",
    "copy_answers_tokens": "Tokens of earlier answers kept to be copied from.",
    "drafted_by_position_total": "Drafts that reached a position; the first is 1.",
    "accepted_by_position_total": "Drafts that were kept up to a position.",
    "acceptance_by_position": "Of the drafts that reached a position, the part kept up to it.",
    "draft_target_passes_total": "Passes of the target, where drafting was on.",
    "draft_emitted_tokens_total": "Tokens of these passes, drafted or not.",
    "mean_acceptance_length": "Tokens per pass of the target (tau), where drafting was on.",
    "requests_waiting": "Requests in the queue.",
    "requests_running": "Requests being answered.",
    "connections": "Open connections.",
}
"""Metrics in the order of the page. Counters end with _total, as is usual for Prometheus."""
BY_OUTCOME = (
    "requests_total", "prompt_tokens_total", "cached_prompt_tokens_total",
    "generated_tokens_total",
)  # fmt: skip
"""Counters of ``count_request``, in this order: requests, then their tokens of each kind."""
Values = float | Mapping[str, float]
"""One value, or several by the suffix of the metric's name."""


class RequestOutcome(StrEnum):
    """Outcome of a request to generate."""

    ANSWERED = "answered"  # whole and without an error
    REFUSED = "refused"  # status 400 to 499
    FAILED = "failed"  # status 500 and above, or an error within a stream
    LEFT = "left"  # the client left, or was too slow

    @classmethod
    def of_status(cls, status: int) -> "RequestOutcome":
        if status < 400:
            return cls.ANSWERED
        return cls.REFUSED if status < 500 else cls.FAILED


def _by_storage() -> dict[str, int]:
    return {"memory": 0, "disk": 0}


@dataclass
class CacheCounts:
    """Counts of cache hits since the server was started, and of caches kept now."""

    hits: dict[str, int] = field(default_factory=_by_storage)
    misses: int = 0
    snapshots: dict[str, int] = field(default_factory=_by_storage)
    bytes: dict[str, int] = field(default_factory=_by_storage)


class Metrics:
    """Counts since the server was started; safe in any thread."""

    def __init__(self, caches: CacheCounts, answers: EarlierAnswers) -> None:
        self._lock = Lock()
        self._answers = answers
        self._caches = caches
        self._by_outcome = {name: dict.fromkeys(RequestOutcome, 0) for name in BY_OUTCOME}
        self._first_tokens = [0] * (len(FIRST_TOKEN_BOUNDS) + 1)  # by the bound it lies under
        self._first_token_seconds = 0.0
        self.refused_connections = 0  # as the thread that accepts them counts
        self._drafts = Stats()

    def count_request(self, outcome: RequestOutcome, *num_tokens: int) -> None:
        """Count a request that has ended, with ``num_tokens`` of each kind."""
        with self._lock:
            for found, num in zip(self._by_outcome.values(), (1, *num_tokens), strict=False):
                found[outcome] += num

    def count_first_token(self, seconds: float) -> None:
        """Count an answer that began ``seconds`` after its request arrived."""
        with self._lock:
            self._first_tokens[sum(seconds > bound for bound in FIRST_TOKEN_BOUNDS)] += 1
            self._first_token_seconds += seconds

    def count_drafts(self, stats: Stats) -> None:
        """Count the drafts of an answer that has ended."""
        with self._lock:
            total = self._drafts + stats
            # What is kept in order would grow for as long as the server runs.
            self._drafts = replace(total, draft_lengths=[], drafting_events=[])

    def text(self, num_waiting: int, num_running: int, num_connections: int) -> str:
        """Return all metrics; the arguments are the values of this moment."""
        with self._lock:
            values = self._values()
        values |= {
            "requests_waiting": num_waiting,
            "requests_running": num_running,
            "connections": num_connections,
        }
        return "".join(_family(name, text, values[name]) for name, text in HELP.items())

    def _values(self) -> dict[str, Values]:
        caches = self._caches
        # Drafts are counted as in the reports of answers; "draft_" and "_total" are ours alone.
        names = {name.removeprefix("draft_").removesuffix("_total"): name for name in HELP}
        drafts = {names[key]: v for key, v in counts(self._drafts, 0).items() if key in names}
        reached = list(accumulate(self._first_tokens))
        bounds = [*map(str, FIRST_TOKEN_BOUNDS), "+Inf"]
        buckets = _by("le", dict(zip(bounds, reached, strict=True)), "_bucket")
        return {
            "build_info": _by("version", {__version__: 1}),
            **{name: _by("outcome", found) for name, found in self._by_outcome.items()},
            "refused_connections_total": self.refused_connections,
            "prompt_cache_hits_total": _by("place", caches.hits),
            "prompt_cache_misses_total": caches.misses,
            "prompt_cache_snapshots": _by("place", caches.snapshots),
            "prompt_cache_bytes": _by("place", caches.bytes),
            FIRST_TOKEN: buckets | {"_sum": self._first_token_seconds, "_count": reached[-1]},
            "copy_answers_tokens": self._answers.num_tokens,
            **{
                name: _by("position", dict(enumerate(v, 1))) if isinstance(v, list) else v
                for name, v in drafts.items()
            },
        }


def _by(label: str, values: Mapping[Any, float], suffix: str = "") -> dict[str, float]:
    """Return the values of a metric by its label."""
    return {f'{suffix}{{{label}="{key}"}}': value for key, value in values.items()}


def _family(name: str, text: str, values: Values) -> str:
    """Format a metric with its help, type and values."""
    metric_type = "counter" if name.endswith("_total") else "gauge"
    metric_type = "histogram" if name == FIRST_TOKEN else metric_type
    full = f"mlx_eagle_{name}"
    samples = values if isinstance(values, Mapping) else {"": values}
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {metric_type}"]
    lines += [f"{full}{behind} {value}" for behind, value in samples.items()]
    return "\n".join(lines) + "\n"
