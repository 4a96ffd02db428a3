"""Public drafters by the target they were trained for: ``--draft-model auto``.

The table of names in ``pairs.txt``, and one look into it: nothing is fetched or checked here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# What conversions append to a model's name: mlx-community/Qwen3-8B-4bit-DWQ -> Qwen3-8B
SUFFIX = re.compile(
    r"\d+bits?|b?f16|fp(?:8|16)|mxfp\d|nvfp4|mlx|dwq|qat|q\d|g[s\d]\d+|\d{6,8}", re.IGNORECASE
)
# The same, and what only a model's card tells from a fine-tune: Qwen3-8B-UD-MLX-4bit, -mixed-4-6
CONVERSION = re.compile(
    rf"(?:{SUFFIX.pattern}|ud|optiq|mixed|hi|mtp|\d(?:\.\d+)?(?:bits?)?|o?q[xp]?\d\w*)",
    re.IGNORECASE,
)
FORBIDDING = re.compile(r"\b(?:nc|nd)\b|non-?commercial|no-?derivatives", re.IGNORECASE)
"""Licences that forbid commercial use or derivatives, which a converted head is."""

BILLIONS = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
SPARSE = {
    "llama-4-scout-17b-16e-instruct": 109.0,
    "qwen3-coder-next": 80.0,
    "gemma-4-e2b-it": 5.1,
    "gemma-4-e4b-it": 8.0,
}
"""Where the name counts the parameters that are at work for one token, or none."""
BYTES_PER_WEIGHT = 4.5 / 8  # in 4 bits, each group of 64 with a scale and a bias of 16
HEAD_SHARE = 1.06
"""Target and head in 4 bits, by only the target: 5% in Llama-3.1-8B, more in small ones."""
CACHE_BYTES = 1e9  # of 8k tokens in Llama-3.1-8B
FULL_CACHES = {"vicuna-13b-v1.3": 6.6e9}  # bytes, where every query head has keys of its own


@dataclass(frozen=True)
class PublishedSpeed:
    """Measurement that somebody published of a drafter: a hint, not ours and not comparable.

    ``value`` is a speedup over the named engine's own plain decoding ("1.95-2.65x"), or another
    figure with its unit; "-" is a precision that is not said.
    """

    value: str
    machine: str
    precision: str
    source: str

    @property
    def on_gpu(self) -> bool:
        return self.machine == "GPU"

    @property
    def speedup(self) -> float:
        """The lower end of a speedup on a Mac; 0 for anything else."""
        found = re.match(r"(\d+(?:\.\d+)?)[-\d.]*x$", self.value)
        return float(found[1]) if found and not self.on_gpu else 0.0

    def __str__(self) -> str:
        where = self.machine if self.precision == "-" else f"{self.machine}, {self.precision}"
        return f"{self.value} ({where}: {self.source})"


@dataclass(frozen=True)
class Pair:
    """Hub ids of a target and of a drafter for it, which may lie in a folder of a repository.

    ``head`` is "mtp" for layers of the target's own. ``licence`` is the drafter's as its page
    states it, "none stated" where the page has none, ``kind`` as in ``kinds.py``, ``megabytes``
    what it takes as published, where that is known, and ``figures`` what is published of it.
    """

    target: str
    head: str
    licence: str
    kind: str
    megabytes: int | None
    figures: tuple[PublishedSpeed, ...] = ()

    @property
    def is_seen(self) -> bool:
        """Whether its layout is known: from its config, or as somebody has run it on a Mac."""
        is_run = any(not figure.on_gpu for figure in self.figures)
        return self.megabytes is not None or self.head == self.kind or is_run

    @property
    def is_free(self) -> bool:
        """Whether "auto" may take it: its licence allows commercial use and derivatives."""
        return FORBIDDING.search(self.licence) is None

    @property
    def rank(self) -> tuple[bool, bool, int, float]:
        """The order of "auto": a speedup on a Mac, the target's own authors, figures on GPUs."""
        best = max((figure.speedup for figure in self.figures), default=0.0)
        is_own = self.head == self.kind or self.head.split("/")[0] == self.target.split("/")[0]
        has_gpu_figure = any(figure.on_gpu for figure in self.figures)
        group = 1 if best > 1 else 2 if is_own else 3 if has_gpu_figure else 4
        return not self.is_free, not self.is_seen, group, -best if group == 1 else 0.0

    @property
    def size(self) -> str:
        """For people: "850 MB", "3.2 GB"; "" where it is not known.

        Of an EAGLE head it follows from the shapes: without, nobody here has seen its config.
        """
        if self.megabytes is None:
            return "not checked" if self.kind == "eagle3" else ""
        return (
            f"{self.megabytes / 1000:.1f} GB" if self.megabytes > 999 else f"{self.megabytes} MB"
        )


def read_table(table: str) -> tuple[Pair, ...]:
    """The pairs of a table as in ``pairs.txt``, those of a target in the order of "auto"."""
    found: list[Pair] = []
    target = ""
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        if not line.startswith(" "):
            target = line
        elif not line.startswith(" " * 8):
            head, kind, size, *said = line.split(maxsplit=3)
            licence = said[0] if said else "see its page"
            found.append(Pair(target, head, licence, kind, None if size == "-" else int(size)))
        else:
            figure = PublishedSpeed(*re.split("  +", line.strip()))
            found[-1] = replace(found[-1], figures=(*found[-1].figures, figure))
    targets = list(dict.fromkeys(pair.target for pair in found))
    return tuple(sorted(found, key=lambda pair: (targets.index(pair.target), pair.rank)))


PAIRS = read_table(Path(__file__).with_name("pairs.txt").read_text("utf-8"))


def plain_name(model: str) -> str:
    """The name of a model without its owner, folder and conversion.

    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit" -> "llama-3.1-8b-instruct"
    """
    words = Path(model).name.split("-")
    while len(words) > 1 and SUFFIX.fullmatch(words[-1]):
        words.pop()
    return "-".join(words).lower().removeprefix("meta-")


def is_named_after(model: str, base: str) -> bool:
    """Whether a name is another's with words of a conversion behind it, and no others.

    "Qwen3-8B-UD-MLX-4bit" is named after "Qwen/Qwen3-8B", "Qwen3-8B-abliterated-4bit" is not.
    """
    name = Path(model).name.lower().removeprefix("meta-")
    rest = name.removeprefix(plain_name(base))
    return rest != name and all(map(CONVERSION.fullmatch, filter(None, rest.split("-"))))


def pairs_for(model: str) -> list[Pair]:
    """The pairs whose target ``model`` is, a hub id or a folder of that name, "auto"'s first.

    Without those that their licence keeps from it.
    """
    name = plain_name(model)
    return [pair for pair in PAIRS if pair.is_free and plain_name(pair.target) == name]


def drafters_for(texts: Sequence[str]) -> tuple[str, list[str]]:
    """The target that the first telling one of some names speaks of, and its known drafters.

    "somebody/Qwen3-8B-MTP-4bit" -> ("Qwen/Qwen3-8B", ["RedHatAI/Qwen3-8B-speculator.eagle3", ...])
    """
    for text in texts:
        spoken = Path(text).name.lower()
        fitting = [pair.target for pair in PAIRS if _speaks_of(spoken, plain_name(pair.target))]
        if fitting:
            target = max(fitting, key=len)
            return target, [pair.head for pair in PAIRS if pair.target == target]
    return "", []


def _speaks_of(text: str, name: str) -> bool:
    """Whether a name is in a text whole: qwen3-8b is in qwen3-8b-mtp, not in qwen3-8b.1."""
    return re.search(rf"(?<![a-z\d.]){re.escape(name)}(?![a-z\d.])", text) is not None


def bytes_in_4_bits(target: str) -> float | None:
    """Memory that target, head and a text of 8k tokens take, roughly, by the target's name.

    None where the name does not say how many parameters there are.
    """
    name = plain_name(target)
    found = BILLIONS.search(name)
    billions = SPARSE.get(name) or (float(found[1]) if found else None)
    if billions is None:
        return None
    cache = FULL_CACHES.get(name, CACHE_BYTES)
    return billions * 1e9 * BYTES_PER_WEIGHT * HEAD_SHARE + cache


def targets_within(limit: float) -> tuple[list[str], list[str]]:
    """The targets of the table that fit into that many bytes in 4 bits, and the others.

    By name without the owner, smallest first; one whose name tells no size is taken for large.
    """
    sizes = {pair.target: bytes_in_4_bits(pair.target) or math.inf for pair in PAIRS}
    ordered = sorted(sizes, key=lambda target: sizes[target])
    fit = [Path(target).name for target in ordered if sizes[target] <= limit]
    return fit, [Path(target).name for target in ordered if sizes[target] > limit]


def pair_lines() -> list[str]:
    """The table for people, a line each."""
    rows = [(pair.target, pair.head, pair.kind, pair.size, pair.licence) for pair in PAIRS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True))
        for row in rows
    ]
    said = ["; ".join(map(str, pair.figures)) for pair in PAIRS]
    return [
        "Known public drafters (target, drafter, kind, size, licence of the drafter, what others "
        "publish of it); --draft-model auto takes the first for --model.",
        "Collected from their pages and not measured by us.",
        *(f"  {line}  {text}".rstrip() for line, text in zip(lines, said, strict=True)),
    ]
