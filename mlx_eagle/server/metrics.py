"""Counters of the server, and ``/metrics``: Prometheus's text format 0.0.4."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from threading import Lock

from ..decoding.stats import Stats
from ..system.cli_values import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
Labels = Mapping[str, str]


class RequestOutcome(Enum):
    """What became of a request to generate."""

    ANSWERED = "answered"  # whole and without an error
    REFUSED = "refused"  # status 400 to 499
    FAILED = "failed"  # status 500 and above, or an error within a stream
    LEFT = "left"  # the client left, or was too slow

    @property
    def is_bad(self) -> bool:
        return self is not RequestOutcome.ANSWERED

    @classmethod
    def of_status(cls, status: int) -> "RequestOutcome":
        if status < 400:
            return cls.ANSWERED
        return cls.REFUSED if status < 500 else cls.FAILED


def _places() -> dict[str, int]:
    return {"memory": 0, "disk": 0}


@dataclass
class CacheCounts:
    """Where requests have found caches since the server was started, and what is kept now."""

    hits: dict[str, int] = field(default_factory=_places)
    misses: int = 0
    snapshots: dict[str, int] = field(default_factory=_places)
    bytes: dict[str, int] = field(default_factory=_places)


class Metrics:
    """Counts since the server was started; to be used from any thread."""

    def __init__(self, caches: CacheCounts | None = None) -> None:
        self._lock = Lock()
        self._caches = caches or CacheCounts()
        self._requests = dict.fromkeys(RequestOutcome, 0)
        self._prompt_tokens = dict.fromkeys(RequestOutcome, 0)
        self._cached_tokens = dict.fromkeys(RequestOutcome, 0)
        self._generated_tokens = dict.fromkeys(RequestOutcome, 0)
        self._first_tokens = [0] * (len(FIRST_TOKEN_BOUNDS) + 1)  # by the bound it lies under
        self._first_token_seconds = 0.0
        self._refused_connections = 0
        self._drafted = self._accepted = self._forwards = self._emitted = 0
        self._drafted_by_position: list[int] = []
        self._accepted_by_position: list[int] = []

    def count_request(
        self,
        outcome: RequestOutcome,
        num_prompt: int = 0,
        num_cached: int = 0,
        num_generated: int = 0,
    ) -> None:
        """A request has ended, with so many tokens of each kind."""
        with self._lock:
            self._requests[outcome] += 1
            self._prompt_tokens[outcome] += num_prompt
            self._cached_tokens[outcome] += num_cached
            self._generated_tokens[outcome] += num_generated

    def count_first_token(self, seconds: float) -> None:
        """An answer began, so long after its request had come."""
        with self._lock:
            self._first_tokens[sum(seconds > bound for bound in FIRST_TOKEN_BOUNDS)] += 1
            self._first_token_seconds += seconds

    def count_refused_connection(self) -> None:
        """A connection was one too many."""
        with self._lock:
            self._refused_connections += 1

    def count_drafts(self, stats: Stats) -> None:
        """An answer that was drafted has ended."""
        with self._lock:
            self._drafted += stats.num_drafted
            self._accepted += stats.num_accepted
            self._forwards += stats.num_target_forwards
            self._emitted += stats.num_emitted
            _add(self._drafted_by_position, stats.drafted_by_position)
            _add(self._accepted_by_position, stats.accepted_by_position)

    def text(self, num_waiting: int, num_running: int, num_connections: int) -> str:
        """All of it, and how things stand at this moment."""
        with self._lock:
            pages = [
                _family("build_info", "gauge", "The version.", [({"version": __version__}, 1)]),
                *self._request_families(),
                *self._cache_families(),
                self._histogram(),
                *self._draft_families(),
            ]
        pages += [
            _family("requests_waiting", "gauge", "Requests in the queue.", num_waiting),
            _family("requests_running", "gauge", "Requests being answered.", num_running),
            _family("connections", "gauge", "Open connections.", num_connections),
        ]
        return "".join(pages)

    def _request_families(self) -> list[str]:
        kinds = {
            "requests": (
                self._requests,
                "Requests to generate, and what was no HTTP, by what became of them.",
            ),
            "prompt_tokens": (self._prompt_tokens, "Prompt tokens of requests that ended."),
            "cached_prompt_tokens": (
                self._cached_tokens,
                "Of the prompt tokens, those that an earlier request had computed.",
            ),
            "generated_tokens": (
                self._generated_tokens,
                "Tokens generated for requests that ended.",
            ),
        }
        families = [
            _family(
                f"{name}_total",
                "counter",
                text,
                [({"outcome": outcome.value}, n) for outcome, n in counts.items()],
            )
            for name, (counts, text) in kinds.items()
        ]
        text = "Connections refused because there were too many."
        return [
            *families,
            _family("refused_connections_total", "counter", text, self._refused_connections),
        ]

    def _cache_families(self) -> list[str]:
        caches = self._caches
        return [
            _family(
                "prompt_cache_hits_total",
                "counter",
                "Requests that began on caches of an earlier text, by where these were.",
                _by_place(caches.hits),
            ),
            _family(
                "prompt_cache_misses_total",
                "counter",
                "Requests that found none.",
                caches.misses,
            ),
            _family("prompt_cache_snapshots", "gauge", "Texts kept.", _by_place(caches.snapshots)),
            _family("prompt_cache_bytes", "gauge", "Bytes of these.", _by_place(caches.bytes)),
        ]

    def _histogram(self) -> str:
        bounds = [*(str(bound) for bound in FIRST_TOKEN_BOUNDS), "+Inf"]
        name, counts = "time_to_first_token_seconds", list(accumulate(self._first_tokens))
        samples: list[tuple[str, Labels, float]] = [
            ("_bucket", {"le": bound}, count) for bound, count in zip(bounds, counts, strict=True)
        ]
        samples += [("_sum", {}, self._first_token_seconds), ("_count", {}, counts[-1])]
        text = "Seconds from a request to the first token of its answer."
        return _page(name, "histogram", text, samples)

    def _draft_families(self) -> list[str]:
        drafted, accepted = self._drafted_by_position, self._accepted_by_position
        mean = self._emitted / self._forwards if self._forwards else 0.0
        rates = [a / d if d else 0.0 for d, a in zip(drafted, accepted, strict=True)]
        passes = "Passes of the target, where drafting was on."
        return [
            _family("drafted_tokens_total", "counter", "Draft tokens.", self._drafted),
            _family(
                "accepted_tokens_total", "counter", "Draft tokens that were kept.", self._accepted
            ),
            _family(
                "drafted_by_position_total",
                "counter",
                "Drafts that reached a position; the first is 1.",
                _by_position(drafted),
            ),
            _family(
                "accepted_by_position_total",
                "counter",
                "Drafts that were kept up to a position.",
                _by_position(accepted),
            ),
            _family(
                "acceptance_by_position",
                "gauge",
                "Of the drafts that reached a position, the part kept up to it.",
                _by_position(rates),
            ),
            _family("draft_target_passes_total", "counter", passes, self._forwards),
            _family(
                "draft_emitted_tokens_total",
                "counter",
                "Tokens of these passes, drafted or not.",
                self._emitted,
            ),
            _family(
                "mean_acceptance_length",
                "gauge",
                "Tokens per pass of the target (tau), where drafting was on.",
                mean,
            ),
        ]


def _add(totals: list[int], counts: list[int]) -> None:
    totals += [0] * (len(counts) - len(totals))
    for i, count in enumerate(counts):
        totals[i] += count


def _by_position(values: Iterable[float]) -> list[tuple[Labels, float]]:
    return [({"position": str(i + 1)}, value) for i, value in enumerate(values)]


def _by_place(counts: Mapping[str, int]) -> list[tuple[Labels, float]]:
    return [({"place": place}, count) for place, count in counts.items()]


def _family(
    name: str, kind: str, text: str, values: float | Iterable[tuple[Labels, float]]
) -> str:
    """A metric and its values: one without labels, or several with."""
    if isinstance(values, (int, float)):
        values = [({}, values)]
    return _page(name, kind, text, [("", labels, value) for labels, value in values])


def _page(name: str, kind: str, text: str, samples: Iterable[tuple[str, Labels, float]]) -> str:
    full = f"mlx_eagle_{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    for suffix, labels, value in samples:
        pairs = ",".join(f'{key}="{label}"' for key, label in labels.items())
        lines.append(f"{full}{suffix}{'{' + pairs + '}' if pairs else ''} {value}")
    return "\n".join(lines) + "\n"
