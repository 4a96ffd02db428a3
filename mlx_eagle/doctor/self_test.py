"""The self-test: attention, speed and parity tried part by part, and one report for an issue.

If a part fails, or if its kernel raises an error, that is a line of the report, and the rest goes
on. Parts for which there is no time any more are left out, and named. The report names no path,
no user and no host.
"""

import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import product
from math import inf, isnan
from operator import itemgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .. import __version__
from ..bench.conditions import DEMO_NAMES, machine
from ..bench.configurations import PLAIN, Configuration, chain_of
from ..bench.figures import markdown_table
from ..bench.flags import Settings
from ..bench.measure import Measurement
from ..bench.parity import compare, parity_words
from ..bench.questions import load_questions, prompt_tokens
from ..bench.report_file import SELF_TEST, report_of, write_report
from ..bench.runner import Models, run_batch, run_once
from ..decoding.sampling import Sampling
from ..decoding.setup import AUTO
from ..demo.pair import demo_target_path, load_demo
from ..drafters.base import Drafter
from ..drafters.tree import TreeShape
from ..system.device import prepare_device
from .checks import TF32, check_all
from .packages import Finding

FAILED = "FAILED"
KERNEL_ERRORS = (RuntimeError, ValueError)
"""Errors of MLX if a kernel cannot be built or run, and ours if something is refused."""
PRIVATE = ("cache", "known pairs")
"""Findings about the user, or not about the machine."""
PATH = re.compile(r"(?<![\w./~])~?(?:/[^\s/:'\"`,()]+)+/?")
LONGEST_ERROR = 300  # characters
LEGEND = (
    "Written by `mlx_eagle.doctor --self-test`, which tries what a machine could get wrong. A "
    "near-tie is no failure: two tokens are so close there that rounding decides between them."
)

# Seconds after the start by which a group of parts has to have begun its last one. All of it is to
# end in five minutes on an M1 with 8 GB, so 20 are left for a part that is slower than any before.
ATTENTION_UNTIL = 90.0
SPEED_UNTIL = 140.0
PARITY_UNTIL = {"float32": 190.0, "float16": 235.0, "bfloat16": 280.0}

Line = tuple[str, ...]
"""A line of a table of the report; the last cell is ``FAILED`` if something is wrong."""


@dataclass
class Part:
    """One trial: ``run`` returns its lines of the table, or raises the error that ends it.

    It is left out where it would not end within ``until`` seconds of the start, judged by the
    longest part before it that has the same limit.
    """

    name: str
    run: Callable[[], Sequence[Line]]
    until: float = inf
    lines: Sequence[Line] = ()
    error: str = ""
    seconds: float = 0.0
    is_left_out: bool = False

    @property
    def has_failed(self) -> bool:
        return bool(self.error) or any(line[-1] == FAILED for line in self.lines)

    def attempt(self) -> None:
        """Run the trial and keep its lines, or the error of a kernel."""
        start = time.perf_counter()
        try:
            self.lines = self.run()
        except KERNEL_ERRORS as err:
            self.error = f"{type(err).__name__}: {' '.join(str(err).split()) or 'no reason given'}"
        self.seconds = time.perf_counter() - start


@dataclass(frozen=True)
class Section:
    """A table of the report: its columns, and the parts that fill it."""

    title: str
    header: Line
    parts: Sequence[Part]
    remark: str = ""


def all_parts(tried: Sequence[Section]) -> list[Part]:
    return [part for section in tried for part in section.parts]


def sections(file: Path) -> list[Section]:
    """All sections, quick ones first; ``file`` is where the figures of the benchmark go.

    The demo target is fetched here, so that no part waits for the network.
    """
    with suppress(ValueError):  # the parts that need it will say why
        demo_target_path()
    load = lru_cache(1)(DemoPair.load)
    attention = "attention, head dimension {}, {}".format
    ties = ", ".join(f"{limit:g} in {name}" for name, limit in NEAR_TIES.items())
    return [
        Section(
            "Attention: several rows against one by one",
            ("head dimension", "type", "largest difference", "allowed", "at", "verdict"),
            [
                Part(attention(*each), partial(try_attention, *each), ATTENTION_UNTIL)
                for each in product(HEAD_DIMS, ATTENTION_LIMITS)
            ],
            "Random queries, keys and values; differences are shares of the largest output.",
        ),
        Section(
            "Speed: the demo pair as the commands load it",
            ("what", "milliseconds", "of a plain step"),
            [Part("speed", partial(measure_speed, SAMPLES, file), SPEED_UNTIL)],
            f"Medians of {SAMPLES} times or more, and texts of {NUM_PROMPTS} prompts; one of each "
            "where a machine is so slow that there is no time for more.",
        ),
        Section(
            "Parity with mlx-lm: the demo pair",
            ("weights", "drafts", "tokens", "result", "verdict"),
            [
                Part(
                    f"parity, {name}, {way}",
                    lambda name=name, way=way: load(name).attempt(way),
                    PARITY_UNTIL[name],
                )
                for name, way in product(NEAR_TIES, WAYS)
            ],
            f"Chains of {CHAIN} draft tokens, a tree {TREE}, samples at temperature 1, a batch of "
            f"{len(PROMPTS)}; answers are as long as there is time for. Where two texts part, the "
            f"margin says how far the worse of the two tokens is below the best: up to {ties} it "
            "is a near-tie.",
        ),
    ]


def self_test(tried: Sequence[Section], file: Path) -> list[str]:
    """Run all parts, with progress on standard error, and write the report to ``file``.

    The report is also written before each part: if one ends the whole process, it says which.
    Returns the names of the parts that failed.
    """
    prepare_device()
    # MLX reads it once, at the first product: float32 is to be compared as float32.
    os.environ.setdefault(TF32, "0")
    findings = check_all()
    start = time.perf_counter()
    parts = all_parts(tried)
    longest: dict[float, float] = {}  # seconds of a part, by the limit of its group
    for number, part in enumerate(parts, 1):
        took = time.perf_counter() - start
        part.is_left_out = took + longest.get(part.until, 0.0) > part.until
        verdict = "left out, there is no time"
        if not part.is_left_out:
            file.write_text(report(findings, tried, took, part.name))
            part.attempt()
            longest[part.until] = max(longest.get(part.until, 0.0), part.seconds)
            verdict = f"{FAILED if part.has_failed else 'ok'} ({part.seconds:.1f} s)"
        line = f"[{number}/{len(parts)}] {part.name}: {verdict}"
        print(line, file=sys.stderr, flush=True)
    file.write_text(report(findings, tried, time.perf_counter() - start))
    return [part.name for part in parts if part.has_failed]


# --- the report ---------------------------------------------------------------------------------


def report(
    findings: Sequence[Finding], tried: Sequence[Section], seconds: float, running: str = ""
) -> str:
    """The results in Markdown; ``running`` is the part that has not come back."""
    parts = all_parts(tried)
    failed = [part.name for part in parts if part.has_failed]
    left_out = [part.name for part in parts if part.is_left_out]
    verdict = f"{len(failed)} of {len(parts)} parts failed" if failed else "all parts passed"
    if left_out:
        verdict += f", {len(left_out)} left out"
    if running:
        verdict = f'ended in the part "{running}"'
    shown = [finding for finding in findings if finding.name not in PRIVATE]
    rows = [(f.name, f.text if f.level == "ok" else f"{f.text} ({f.level})") for f in shown]
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    blocks = [
        f"## mlx-eagle {__version__} self-test: {verdict}",
        f"{day}, {seconds:.0f} seconds, {TF32}={os.environ.get(TF32, 'unset')}",
        LEGEND,
        f"Failed: {'; '.join(failed)}" if failed else "",
        f"Left out, as there was no time: {'; '.join(left_out)}" if left_out else "",
        markdown_table(("this machine", "what is there"), rows),
    ]
    for section in tried:
        lines: list[Line] = []
        for part in section.parts:
            lines += part.lines
            if part.error:
                empty = [""] * (len(section.header) - 3)
                lines.append((part.name, *empty, part.error[:LONGEST_ERROR], FAILED))
        if lines:
            table = markdown_table(section.header, lines)
            blocks += [f"### {section.title}", section.remark, table]
    return redact("\n\n".join(filter(None, blocks)) + "\n")


def redact(text: str) -> str:
    """Remove what is private: only the last part of a path stays, and the host has no name.

    "/home/ann/models/x.json cannot be read" -> ".../x.json cannot be read"
    """
    text = PATH.sub(lambda path: f".../{path[0].rstrip('/').rpartition('/')[2]}", text)
    host = platform.node()
    return re.sub(rf"\b{re.escape(host)}\b", "(host)", text) if len(host) > 2 else text


def document(tried: Sequence[Section]) -> dict[str, Any]:
    """The results for ``--json``."""
    parts = [
        {
            "section": section.title,
            "name": part.name,
            "ok": not part.has_failed,
            "left_out": part.is_left_out,
            "seconds": round(part.seconds, 2),
            "lines": [list(line) for line in part.lines],
            "error": redact(part.error),
        }
        for section in tried
        for part in section.parts
    ]
    return {"version": __version__, "ok": all(part["ok"] for part in parts), "parts": parts}


# --- attention: passes of several rows against the same rows one by one -------------------------

HEAD_DIMS = (128, 64, 256, 96, 80)  # those of most models first, should the time not do
GROUPS = (4, 8)  # query heads per key head
PREFIXES = (100, 1100)  # keys before the pass: from 1024 on, Metal's kernel works in two steps
PASS_ROWS = (2, 3, 4, 5, 8, 9, 16)
NUM_HEADS = 8
ATTENTION_LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}
"""Shares of the largest output: a pass rounds its rows in another order than single rows."""


def try_attention(head_dim: int, dtype_name: str) -> list[Line]:
    """Find the largest difference in outputs over all groups, prefixes and numbers of rows."""
    found = [
        (difference, f"{rows} rows, {group} heads per key, {prefix} keys")
        for group, prefix in product(GROUPS, PREFIXES)
        for rows, difference in differences(head_dim, getattr(mx, dtype_name), group, prefix)
    ]
    worst, where = max(found, key=itemgetter(0))
    limit = ATTENTION_LIMITS[dtype_name]
    verdict = "ok" if worst <= limit else FAILED
    return [(str(head_dim), dtype_name, f"{worst:.1e}", f"{limit:.0e}", where, verdict)]


def differences(
    head_dim: int, dtype: mx.Dtype, group: int, prefix: int
) -> list[tuple[int, float]]:
    """Numbers of rows, and the differences of their passes as shares of the largest output."""
    most = max(PASS_ROWS)
    mx.random.seed(0)
    # Large enough that a few keys count for a row, so that one key too many is seen.
    queries = 2 * mx.random.normal((1, NUM_HEADS, most, head_dim))
    keys, values = mx.random.normal((2, 1, NUM_HEADS // group, prefix + most, head_dim))

    def attend(first: int, last: int, mask: str | None) -> mx.array:
        seen = [array[..., : prefix + last, :].astype(dtype) for array in (keys, values)]
        rows = queries[..., first:last, :].astype(dtype)
        attention = mx.fast.scaled_dot_product_attention
        return attention(rows, *seen, scale=head_dim**-0.5, mask=mask).astype(mx.float32)

    single = mx.concatenate([attend(i, i + 1, None) for i in range(most)], axis=2)
    found = []
    for num_rows in PASS_ROWS:
        several = attend(0, num_rows, "causal")
        difference = mx.abs(several - single[..., :num_rows, :]).max() / mx.abs(single).max()
        number: Any = difference.item()
        found.append((num_rows, inf if isnan(number) else number))
    return found


# --- speed: the benchmark on the demo pair, with costs of passes by rows ------------------------

CHAIN = 4  # draft tokens, also of the chains below
SPEED_LENGTHS = (CHAIN, AUTO)
PROMPT_SET = "gsm8k"
NUM_PROMPTS = 2
SPEED_TOKENS = (16, 64)  # of an answer, at least and at most: fewer cannot be timed
SAMPLES = 5


def measure_speed(samples: int, file: Path) -> list[Line]:
    """Measure c(R) for R of 1 to 8, an accept pass, one more draft token, and short texts.

    The same figures are written to ``file``, as ``mlx_eagle.bench --report`` does.
    """
    conditions = machine()
    model, tokenizer, drafter = load_demo()
    questions = load_questions((PROMPT_SET,), NUM_PROMPTS)
    least, most = SPEED_TOKENS
    affordable = num_tokens_within(SECONDS / 2, model, prompt_tokens(questions[0], tokenizer))
    if affordable < least:
        samples = 1
        del questions[1:]
    settings = Settings(
        prompts=(PROMPT_SET,), limit=len(questions), sizes=SPEED_LENGTHS, repeats=1,
        max_tokens=min(max(affordable, least), most), order="weave", samples=samples,
    )  # fmt: skip
    models = Models(model, tokenizer, {DEMO_NAMES["head"]: drafter})
    found, _ = Measurement(models, DEMO_NAMES, questions, settings).run(lambda: None)
    found["conditions"] |= conditions
    write_report(report_of(found, by=SELF_TEST), file)
    (scenario,) = found["scenarios"]
    costs = scenario["drafters"][0]["costs"]
    step = costs["plain_step_seconds"]
    rows = costs["verify_seconds"].items()
    timed = [(f"pass of {number} rows, c({number})", seconds) for number, seconds in rows]
    timed.append((f"accept pass of {CHAIN} rows", costs["accept_seconds"][CHAIN]))
    timed.append(("draft step of the head", costs["chain_step_seconds"]))
    ways = [(way["label"], way["overall"]) for way in scenario["configurations"]]
    timed.append(("token of a plain text", 1 / ways[0][1]["plain_tps"]))
    timed += [(f"token of a text with {label}", 1 / way["tps"]) for label, way in ways]
    return [(what, f"{1e3 * s:.2f}", f"{s / step:.2f}") for what, s in timed]


# --- parity: the demo pair, drafted in every way, against plain mlx-lm --------------------------

PROMPTS = tuple(  # short ones: half precision on a CPU takes a second for a few tokens
    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in (
        "What is 12 * 8?",
        "Tom has 3 boxes with 7 pens each and buys 4 more pens. How many pens does he have?",
    )
)
TREE = TreeShape(4, 4, 15)
SEED = 7  # of samples, at temperature 1
LEAST_TOKENS = 4  # of an answer
MOST_TOKENS = 96
SECONDS = 6.0  # for one answer, plain and drafted: there are fifteen such pairs
NEAR_TIES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Margins up to which two tokens are so close that rounding may decide between them."""
WAYS = {
    "chain": chain_of(CHAIN),
    "tree": Configuration("tree", "tree", None, {"tree": TREE}),
    "sampled": chain_of(CHAIN),
    "sampled tree": Configuration("tree", "tree", None, {"tree": TREE}),
    "batch": chain_of(CHAIN),
}


class DemoPair:
    """The demo pair in one type of weights, and the length of its answers in tokens."""

    def __init__(self, name: str, model: nn.Module, tokenizer: Any, drafter: Drafter):
        self.name = name
        self.models = Models(model, tokenizer, {"": drafter})
        self.prompts: list[list[int]] = [tokenizer.encode(prompt) for prompt in PROMPTS]
        self.num_tokens = num_tokens_within(SECONDS, model, self.prompts[0])

    @classmethod
    def load(cls, name: str) -> "DemoPair":
        """Packed on a GPU, as people run it; dense on a CPU, where packing is slow."""
        return cls(name, *load_demo(name, quantized=mx.default_device() == mx.gpu))

    def attempt(self, way: str) -> list[Line]:
        """Compare drafted answers with those of plain mlx-lm: two of a batch, else one."""
        both = (PLAIN, WAYS[way])
        prompts = self.prompts if way == "batch" else self.prompts[:1]
        temp = 1.0 if way.startswith("sampled") else 0.0
        sampling = Sampling(temp=temp, seed=SEED) if temp else None
        if way == "batch":
            runs = [run_batch(self.models, prompts, self.num_tokens, c) for c in both]
        else:
            options = (self.num_tokens, temp, SEED)
            runs = [run_once(self.models, c, prompts[0], *options) for c in both]
        lines = []
        for prompt, *texts in zip(prompts, *(run.texts for run in runs), strict=True):
            result = compare(self.models.target, prompt, *texts, sampling=sampling)
            lines.append(self.line(way, result, len(texts[1])))
        return lines

    def line(self, way: str, result: dict[str, Any], num_tokens: int) -> Line:
        """The line of one comparison: identical, a near-tie, or a failure."""
        verdict = "ok"
        if not result["identical"]:
            verdict = "near-tie" if result["margin"] <= NEAR_TIES[self.name] else FAILED
        return (self.name, way, str(num_tokens), parity_words(result), verdict)


def num_tokens_within(seconds: float, model: nn.Module, prompt: list[int]) -> int:
    """Number of tokens that a plain and a drafted answer may have to take this long here.

    It is estimated from single passes, of which the first is the slowest, and as if every draft
    were wrong: half precision on a CPU, or a CPU without a fast BLAS, is many times slower than a
    GPU.
    """
    cache = make_prompt_cache(model)
    took = []
    for tokens in (prompt, prompt[:1], (prompt * TREE.nodes)[: TREE.nodes + 1]):
        start = time.perf_counter()
        mx.eval(model(mx.array([tokens]), cache=cache))
        took.append(time.perf_counter() - start)
    prefill, step, verify = took
    most = (seconds - 2 * prefill) / (step + verify)
    return min(max(int(most), LEAST_TOKENS), MOST_TOKENS)
