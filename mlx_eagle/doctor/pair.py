"""Parts of the self-test on the demo pair: the same text as mlx-lm's, and what rounds cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from ..batch.generate import batch_generate
from ..bench.parity import compare, margin, next_logprobs, parity_words
from ..bench.part_timing import Bench, Timing, sample_head, sample_verify
from ..decoding.sampling import Sampling
from ..demo.pair import load_demo
from ..drafters.base import Drafter
from ..drafters.tree import TreeShape
from ..generate import stream_generate
from .parts import Line, Part, Section

QUESTIONS = (
    "What is 12 * 8?",
    "Tom has 3 boxes with 7 pens each and buys 4 more pens. How many pens does he have?",
)
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHAIN, TREE, SEED = 4, TreeShape(4, 4, 15), 7
ROWS, DRAFTS, CONTEXT, SAMPLES = range(1, 9), (1, 4), 128, 5
LEAST_TOKENS, MOST_TOKENS = 4, 96  # of an answer
SECONDS = 8.0  # for one answer, plain and drafted: there are fifteen pairs of them


@dataclass(frozen=True)
class Precision:
    """A type of weights, and which margin is a near-tie there."""

    dtype: mx.Dtype
    near_tie: float


PRECISIONS = {
    "float32": Precision(mx.float32, 1e-3),
    "float16": Precision(mx.float16, 0.1),
    "bfloat16": Precision(mx.bfloat16, 0.5),
}


@dataclass
class DemoPair:
    """The demo pair in one precision, and mlx-lm's own outputs on it, each made once."""

    model: nn.Module
    tokenizer: Any
    drafter: Drafter
    precision: Precision
    num_tokens: int

    @classmethod
    def load(cls, name: str) -> "DemoPair":
        """Packed on a GPU, as people run it; dense on a CPU, where packed weights are slow."""
        on_gpu, precision = mx.default_device() == mx.gpu, PRECISIONS[name]
        model, tokenizer, drafter = load_demo(precision.dtype, quantized=on_gpu)
        pair = cls(model, tokenizer, drafter, precision, LEAST_TOKENS)
        pair.num_tokens = num_tokens_within(SECONDS, model, pair.prompts()[0])
        return pair

    def prompts(self) -> list[list[int]]:
        """The questions as tokens."""
        encode = self.tokenizer.encode
        return [encode(TEMPLATE.format(question)) for question in QUESTIONS]

    def run(self, generate: Callable[..., Any], **options: Any) -> list[int]:
        """The tokens of one answer."""
        found = generate(
            self.model, self.tokenizer, self.prompts()[0], max_tokens=self.num_tokens, **options
        )
        return [response.token for response in found]


def num_tokens_within(seconds: float, model: nn.Module, prompt: list[int]) -> int:
    """How many tokens a plain and a drafted answer may have to take that long together here.

    By single passes, of which the first is the slowest, and as if every draft were wrong: half
    precision on a CPU, or a CPU without OpenBLAS, is many times slower than a GPU.
    """
    cache, took = make_prompt_cache(model), []
    for tokens in (prompt, prompt[:1], (prompt * TREE.nodes)[: TREE.nodes + 1]):
        start = time.perf_counter()
        mx.eval(model(mx.array([tokens]), cache=cache))
        took.append(time.perf_counter() - start)
    prefill, step, verify = took
    most = (seconds - 2 * prefill) / (step + verify)
    return min(max(int(most), LEAST_TOKENS), MOST_TOKENS)


class Pairs:
    """The demo pair, loaded when it is first asked for in a precision; one at a time."""

    def __init__(self) -> None:
        self._name = ""
        self._pair: DemoPair | None = None
        self._greedy: list[int] = []

    def get(self, name: str) -> DemoPair:
        if self._pair is None or name != self._name:
            self._pair, self._greedy = None, []  # before the next one takes its memory
            self._pair, self._name = DemoPair.load(name), name
        return self._pair

    def greedy(self, name: str) -> list[int]:
        """mlx-lm's greedy answer."""
        pair = self.get(name)
        if not self._greedy:
            self._greedy = pair.run(mlx_lm.stream_generate)
        return self._greedy


def parity_section() -> Section:
    """Every way to draft in every precision, against plain mlx-lm."""
    pairs = Pairs()
    ways: dict[str, Callable[[Pairs, str], list[Line]]] = {
        "chain": partial(try_greedy, num_draft_tokens=CHAIN),
        "tree": partial(try_greedy, tree=TREE),
        "sampled": partial(try_sampled, num_draft_tokens=CHAIN),
        "sampled tree": partial(try_sampled, tree=TREE),
        "batch": try_batch,
    }
    parts = [
        Part(f"parity, {name}, {way}", partial(_named, run, pairs, name, way))
        for name in PRECISIONS
        for way, run in ways.items()
    ]
    return Section(
        "Parity with mlx-lm: the demo pair",
        ("weights", "drafts", "tokens", "result", "verdict"),
        parts,
        f"Chains of {CHAIN} draft tokens, a tree {TREE}, samples at temperature 1, a batch of "
        f"{len(QUESTIONS)}; answers are as long as there is time for. Where two texts part, the "
        "margin says how far the worse of the two tokens is below the best: up to "
        f"{', '.join(f'{p.near_tie:g} in {name}' for name, p in PRECISIONS.items())} it is a "
        "near-tie.",
    )


def _named(
    run: Callable[[Pairs, str], list[Line]], pairs: Pairs, name: str, way: str
) -> list[Line]:
    """The lines of ``run``, with precision and way in front."""
    return [Line((name, way, *line.cells), line.ok) for line in run(pairs, name)]


def try_greedy(pairs: Pairs, name: str, **options: Any) -> list[Line]:
    """A greedy answer, drafted with these options, against mlx-lm's."""
    pair = pairs.get(name)
    drafted = pair.run(stream_generate, draft_model=pair.drafter, **options)
    result = compare(pair.model, pair.prompts()[0], pairs.greedy(name), drafted)
    return [judged(result, pair, len(drafted))]


def try_sampled(pairs: Pairs, name: str, **options: Any) -> list[Line]:
    """With a seed, a drafted text is the one that the same sampler draws from plain decoding."""
    pair, sampling = pairs.get(name), Sampling(temp=1.0, seed=SEED)
    plain = pair.run(mlx_lm.stream_generate, sampler=sampling.begin())
    drafted = pair.run(stream_generate, draft_model=pair.drafter, sampler=sampling, **options)
    result = compare(pair.model, pair.prompts()[0], plain, drafted)
    if not result["identical"]:
        index = result["index"]
        scores = noisy_scores(pair.model, pair.prompts()[0] + plain[:index], sampling, index)
        result["margin"] = margin(scores, index, plain, drafted)
    return [judged(result, pair, len(drafted))]


def noisy_scores(
    model: nn.Module, tokens: list[int], sampling: Sampling, position: int
) -> mx.array:
    """What the token after ``tokens`` is the best of, (V,), the ``position``-th drawn."""
    logprobs = next_logprobs(model, tokens)
    return sampling.log_probabilities(logprobs) + sampling.noise(position, logprobs.shape[-1])


def try_batch(pairs: Pairs, name: str) -> list[Line]:
    """Two answers at once against mlx-lm's own batch."""
    pair = pairs.get(name)
    prompts = pair.prompts()
    options: dict[str, Any] = {"max_tokens": pair.num_tokens, "return_token_ids": True}
    plain = mlx_lm.batch_generate(pair.model, pair.tokenizer, prompts, **options).token_ids
    options |= {"draft_model": pair.drafter, "num_draft_tokens": CHAIN}
    drafted = batch_generate(pair.model, pair.tokenizer, prompts, **options).token_ids
    results = [
        compare(pair.model, prompt, one, other)
        for prompt, one, other in zip(prompts, plain or [], drafted or [], strict=True)
    ]
    return [
        judged(result, pair, len(one)) for result, one in zip(results, drafted or [], strict=True)
    ]


def judged(result: dict[str, Any], pair: DemoPair, num_tokens: int) -> Line:
    """Identical, or parted at a near-tie: fine; anything else is not."""
    ok = result["identical"] or result["margin"] <= pair.precision.near_tie
    verdict = "ok" if result["identical"] else "near-tie" if ok else "FAILED"
    return Line((str(num_tokens), parity_words(result), verdict), ok)


def cost_section(samples: int = SAMPLES) -> Section:
    """What passes of the demo target cost by rows, and what the head costs."""
    return Section(
        "Costs: the demo pair as the commands load it",
        ("what", "milliseconds", "of a plain step"),
        [Part("costs", partial(measure_costs, samples))],
        f"After {CONTEXT} tokens, the median of {samples} times.",
    )


def measure_costs(samples: int) -> list[Line]:
    """c(R) for R of 1 to 8, an accept pass, and one more draft token."""
    model, _, drafter = load_demo()
    context = [token % 1000 + 100 for token in range(CONTEXT)]
    bench = Bench(model, drafter, context)
    verify = sample_verify(bench, ROWS, samples)
    accept, propose = sample_head(bench, (CHAIN,), DRAFTS, samples)
    plain = milliseconds(verify[1])
    lines = [(f"pass of {rows} rows, c({rows})", milliseconds(verify[rows])) for rows in ROWS]
    first, last = (milliseconds(propose[size]) for size in DRAFTS)
    lines.append((f"accept pass of {CHAIN} rows", milliseconds(accept[CHAIN])))
    lines.append(("draft step of the head", (last - first) / (DRAFTS[1] - DRAFTS[0])))
    return [Line((what, f"{time:.2f}", f"{time / plain:.2f}")) for what, time in lines]


def milliseconds(timing: Timing) -> float:
    """The median time of the device."""
    return 1000 * median(timing.run)
