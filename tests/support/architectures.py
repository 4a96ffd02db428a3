"""Which model files of mlx-lm work with speculation: a tiny model of each, and what it does.

``python tests/support/architectures.py`` measures every architecture and rewrites the page
docs/pages/architectures.md; test_architectures.py holds the code to that table.

The configurations are data, in architecture_configs.py. Knows nothing of checkpoints.
"""

import dataclasses
import importlib
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.models
from architecture_configs import (
    NOTES,
    OVERRIDES,
    SEEDS,
    SIZES,
    TOP_LEVEL,
    TWO_WAYS,
    VOCAB,
    WRAPPED,
)
from helpers import SCRIPTS, ScriptedDrafter, plain
from metal_stand_ins import replace_kernels
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from tree_drafters import ScriptedTreeDrafter

import mlx_eagle
from mlx_eagle.batch.requests import Options, Request, first_token, prefill, reason_not_batchable
from mlx_eagle.batch.rounds import Batch
from mlx_eagle.decoding.auto import FixedController
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.base import Draft, Pick
from mlx_eagle.drafters.tree import DraftShape, TreeShape
from mlx_eagle.system.device import this_machine
from mlx_eagle.target_model.target import Target

TABLE = Path(__file__).parents[2] / "docs" / "pages" / "architectures.md"
PROMPT = [5, 17, 3, 88, 41, 2, 60]
SECOND_PROMPT = [7, 9, 11, 30]
BATCH = [PROMPT, [9], SECOND_PROMPT * 4, [33, 4, 25, 8]]  # each with another first token
TREE = "2x3:6"
COLUMNS = ("tap", "chain", "tree", "batch")
OUR_FILES = str(Path(mlx_eagle.__file__).parent)
MOST_PARAMETERS = 4_000_000


def model_file(name: str) -> str:
    """The model file of an architecture: a variant is called "file (what is special)"."""
    return name.split(" ")[0]


def may_part(name: str) -> bool:
    """Whether drafted text may part from plain text on this device, by mlx-lm's own arithmetic."""
    return model_file(name) in TWO_WAYS and this_machine().backend == "metal"


@lru_cache
def load(file: str) -> ModuleType:
    """The module of a model file."""
    # olmo.py leaves the interpreter without this package, but uses nothing of it.
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    module = importlib.import_module(f"mlx_lm.models.{file}")
    replace_kernels(file, module)
    return module


def model_files() -> list[str]:
    """The model files of the installed mlx-lm."""
    names = sorted(info.name for info in pkgutil.iter_modules(mlx_lm.models.__path__))
    return [n for n in names if hasattr(load(n), "ModelArgs") and hasattr(load(n), "Model")]


def tiny_config(name: str) -> dict:
    """A config for an architecture, as its ModelArgs.from_dict takes it."""
    file = model_file(name)
    module = load(file)
    overrides = {**OVERRIDES.get(file, {}), **OVERRIDES.get(name, {})}
    nested = [n for n in ("TextConfig", "TextArgs", "TextModelArgs") if hasattr(module, n)]
    outer = {"model_type": file, "vocab_size": VOCAB, **TOP_LEVEL.get(file, {})}
    if file in WRAPPED:
        text = tiny_config(WRAPPED[file])
        return {**outer, "text_config": {**text.get("text_config", text), **overrides}}
    args_class = getattr(module, nested[0] if nested else "ModelArgs")
    fields = {field.name for field in dataclasses.fields(args_class)}
    text = {key: value for key, value in SIZES.items() if key in fields}
    text = {**text, "model_type": file, **overrides}
    return {**outer, "text_config": text} if nested else text


ARCHITECTURES = {
    name: tiny_config(name)
    for name in sorted({*model_files(), *OVERRIDES})
    if model_file(name) in model_files()
}
"""Every architecture with a config, variants of a file included."""


def build(name: str, **changes: object) -> nn.Module:
    """A tiny model with lively random weights in float32; ``changes`` to its config."""
    module = load(model_file(name))
    seed = SEEDS.get(name, 0)
    mx.random.seed(seed)  # some decays start at random, and keep that
    config = {**deepcopy(ARCHITECTURES[name]), **changes}
    model = module.Model(module.ModelArgs.from_dict(config))
    size = sum(p.size for _, p in tree_flatten(model.parameters()))
    assert size < MOST_PARAMETERS, f"{name} has {size} parameters: a size was left to its default"
    model.eval()
    mx.random.seed(seed)
    model.update(tree_map_with_path(_lively, model.parameters()))
    mx.eval(model.parameters())
    return model


def _lively(path: str, parameter: mx.array) -> mx.array:
    """Random values for a parameter by its kind."""
    shape, noise = parameter.shape, mx.random.normal(parameter.shape)
    if parameter.dtype == mx.uint8:  # four ternary weights a byte
        return sum(mx.random.randint(0, 3, shape).astype(mx.uint8) << 2 * i for i in range(4))
    if parameter.dtype == mx.uint32:  # packed quantized weights
        return mx.random.randint(0, 2**16, shape).astype(mx.uint32) * (2**16 + 1)
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    if parameter.ndim < 2:  # norms, biases, decays, gains: around what the model starts with
        return parameter.astype(mx.float32) + 0.25 * noise
    if "embed" in path or "wte" in path:  # small, or tied embeddings repeat the last token
        return 0.05 * noise
    width = next((n for n in reversed(shape) if n > 1), 1)
    return 2.0 * width**-0.5 * noise


@dataclass(frozen=True)
class Result:
    """What works, and the reason for all that does not."""

    tap: bool
    chain: bool
    tree: bool
    batch: bool
    reason: str


def check(
    name: str,
    what: Collection[str] = COLUMNS,
    ks: Collection[int] = (1, 3, 5),
    scripts: Collection[str] = ("all", "none", "alternating", "every length"),
    num_tokens: int = 32,
    batch_sizes: Collection[int] = (2, 3, 4),
) -> Result:
    """Measure one architecture; ``num_tokens`` of text for every script and draft length k.

    What is not in ``what`` counts as not working.
    """
    model = build(name)
    drafts = [_Drafts(f"k = {k}", ScriptedDrafter, {"num_draft_tokens": k}) for k in ks]
    tree = _Drafts(f"tree {TREE}", ScriptedTreeDrafter, {"tree": TreeShape.parse(TREE)})
    texts = lru_cache(lambda: _plain_texts(model, num_tokens))
    measures = {
        "tap": lambda: _check_tap(model),
        "chain": lambda: _check_text(model, texts(), drafts, scripts),
        "tree": lambda: _check_text(model, texts(), [tree], scripts),
        "batch": lambda: _check_batch(model, num_tokens, batch_sizes),
    }
    reasons = {key: _reason(measures[key]) for key in what}
    works = [reasons.get(key, "not measured") == "" for key in measures]
    keys: dict[str, list[str]] = {}  # by reason
    for key, reason in reasons.items():
        keys.setdefault(reason, []).append(key)
    named = [f"{', '.join(of)}: {reason}" for reason, of in keys.items() if reason]
    return Result(*works, "; ".join(named))


@dataclass(frozen=True)
class _Drafts:
    """A kind of draft: what it is called, who makes it, and the loop's arguments for it."""

    name: str
    drafter_class: type[ScriptedDrafter]
    options: dict


def _reason(measure: Callable[[], str]) -> str:
    """What ``measure`` says, or the exception it met."""
    try:
        return measure()
    except Exception as error:  # any: the walk goes on, and the table says what happened
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and last.filename.startswith(OUR_FILES):
            return "refused, " + re.split("[:;] ", re.sub(r" \(.*?\)", "", text))[0]
        return f"{type(error).__name__} in {last.name} of {Path(last.filename).name}: {text}"


def _check_tap(model: nn.Module) -> str:
    """The reason why taps do not show what enters each layer; "" where they do."""
    num_layers = len(model.layers)
    taps = tuple(range(num_layers + 1))
    target = Target(model, taps)
    tokens = mx.array(PROMPT)
    expected = model(tokens[None], cache=make_prompt_cache(model))[0]
    logits, features = target(tokens, make_prompt_cache(model))
    if not mx.array_equal(logits, expected):
        return "the logits change when tapped"
    if features.ndim != 2 or features.shape[0] != len(PROMPT) or features.shape[1] % len(taps):
        return f"features of shape {features.shape} for {len(PROMPT)} rows: not one vector a row"
    streams = mx.split(features, len(taps), axis=-1)
    same = [i for i in range(num_layers) if mx.array_equal(streams[i], streams[i + 1])]
    if same:
        return f"taps {same[0]} and {same[0] + 1} are equal: the first argument is no stream"
    # Another first token: the last row of the embeddings stays, and of all else changes.
    _, other = target(mx.array([1, *PROMPT[1:]]), make_prompt_cache(model))
    others = mx.split(other, len(taps), axis=-1)
    if not mx.array_equal(streams[0][-1], others[0][-1]):
        return "tap 0 depends on earlier tokens: it is not the embedding"
    if mx.array_equal(streams[0][0], others[0][0]):
        return "tap 0 does not depend on its token"
    if mx.array_equal(streams[-1][-1], others[-1][-1]):
        return "the last tap does not depend on earlier tokens"
    return ""


def _plain_texts(model: nn.Module, num_tokens: int) -> tuple[list[int], list[int]]:
    """What mlx-lm alone says to the prompt, and then to a second one on the same cache."""
    cache = make_prompt_cache(model)
    expected = plain(model, PROMPT, num_tokens, prompt_cache=cache)
    assert len(set(expected)) > 5, f"a text without life tests nothing: {expected}"
    return expected, plain(model, SECOND_PROMPT, num_tokens // 2, prompt_cache=cache)


def _check_text(
    model: nn.Module,
    texts: tuple[list[int], list[int]],
    kinds: list[_Drafts],
    scripts: Collection[str],
) -> str:
    """The reason why drafts change the text or the caches behind it; "" where they do not."""
    expected, after = texts
    text = PROMPT + expected
    for drafts in kinds:
        for script in scripts:
            cache = make_prompt_cache(model)
            drafter = drafts.drafter_class(text, SCRIPTS[script], VOCAB)
            options = {**drafts.options, "prompt_cache": cache, "max_tokens": len(expected)}
            case = f'with {drafts.name} and script "{script}"'
            steps = speculative_generate_step(mx.array(PROMPT), model, drafter, **options)
            if not _says(expected, steps):
                return f"another text {case}{_rows_say(model, text)}"
            again = plain(model, SECOND_PROMPT, len(after), prompt_cache=cache)
            if again != after:
                return f"another text in the next request {case}{_rows_say(model, text)}"
    return ""


def _runs_again(name: str) -> bool:
    """Whether recurrent states are not seen to be updated: a rejection takes a whole pass."""
    model = build(name)
    stats, wrong = Stats(), ScriptedDrafter([0] * 99, SCRIPTS["none"], VOCAB)
    wrong.may_part = True
    steps = speculative_generate_step(mx.array(PROMPT), model, wrong, max_tokens=6, stats=stats)
    try:
        return bool(list(steps)) and stats.num_reruns > 0
    except ValueError:  # refused, which is said elsewhere
        return False


class _ScriptedTexts(ScriptedDrafter):
    """Knows every text by the first token of its prompt, and drafts every length of it.

    In one round each text has another number of right tokens.
    """

    def __init__(self, texts: list[list[int]]):
        self.texts = {text[0]: (i, text) for i, text in enumerate(texts)}
        super().__init__([], SCRIPTS["every length"], VOCAB)

    def propose(self, size: int, pick: Pick | None = None) -> Draft:
        i, self.text = self.texts[self.absorbed[0][0][0].item()]
        self.script = lambda r, size: (r + i) % (size + 1)
        return super().propose(size, pick)


def _check_batch(model: nn.Module, num_tokens: int, sizes: Collection[int]) -> str:
    """The reason why texts in shared passes are not those of each; "" where they are."""
    reason = reason_not_batchable(model, make_prompt_cache(model))
    if reason is not None:
        return f"one by one, {reason}"
    expected = [plain(model, prompt, num_tokens) for prompt in BATCH]
    drafter = _ScriptedTexts(
        [prompt + text + text for prompt, text in zip(BATCH, expected, strict=True)]
    )
    for num in sizes:
        requests = [
            Request(prompt, Limits(num_tokens, ()), make_prompt_cache(model), row)
            for row, prompt in enumerate(BATCH[:num])
        ]
        batch = Batch(model, drafter, FixedController(DraftShape(3)))
        for request in requests:
            for _ in prefill(model, drafter, request, Options()):
                pass
            first_token(request)
            batch.join(request)
        while batch.round() is not None:
            pass
        if [request.tokens for request in requests] != expected[:num]:
            return f"other texts in a batch of {num}"
    return ""


def _says(expected: list[int], steps: Iterator[tuple[int, mx.array, bool]]) -> bool:
    """Whether the loop yields this text; the scripted drafter stops it where it does not."""
    try:
        return [token for token, _, _ in steps] == expected
    except AssertionError:
        return False


def row_difference(model: nn.Module, text: list[int], num_rows: int = 4) -> tuple[float, float]:
    """mlx-lm alone: logits of blocks of rows against row by row, and the size of the logits."""

    def run(size: int) -> mx.array:
        cache = make_prompt_cache(model)
        blocks = [text[i : i + size] for i in range(0, len(text), size)]
        return mx.concatenate([model(mx.array([block]), cache=cache)[0] for block in blocks])

    one, several = run(1), run(num_rows)
    banned = mx.isinf(one)  # tokens that a model rules out
    difference = mx.where(banned, 0.0, mx.abs(one - several))
    return difference.max().item(), mx.where(banned, 0.0, mx.abs(one)).max().item()


def _rows_say(model: nn.Module, text: list[int]) -> str:
    """Whether it is mlx-lm that treats rows run together otherwise than rows run one by one."""
    difference, size = row_difference(model, text)
    if difference < 0.01 * size:
        return ""
    return (
        "; mlx-lm is not consistent with itself: logits of rows run together and one by one "
        f"differ by {difference:.2g} of {size:.2g}"
    )


RUNS_AGAIN = "after a rejection the kept rows run through the whole target again"


def cache_types(name: str) -> str:
    """The cache classes of an architecture, members of a CacheList in brackets."""
    kinds: dict[str, None] = {}
    for cache in make_prompt_cache(build(name)):
        members = getattr(cache, "caches", ())
        inner = ", ".join(dict.fromkeys(type(member).__name__ for member in members))
        kinds[type(cache).__name__ + (f"[{inner}]" if members else "")] = None
    return ", ".join(kinds)


def write_table() -> None:
    """Measure every architecture and write the table."""
    results = {}
    for name in ARCHITECTURES:
        results[name] = check(name)
        print(f"{name}: {results[name]}", flush=True)
    counts = {key: sum(getattr(r, key) for r in results.values()) for key in COLUMNS}
    lines = [
        "# Which architectures work",
        "",
        "A model's architecture is the `model_type` in its `config.json`. This table says what "
        f"works with each one that mlx-lm {mlx_lm.__version__} has: {len(model_files())} model "
        f"files, {len(results)} architectures (a variant of a file is named in brackets).",
        "",
        f"* **tap** ({counts['tap']} architectures): EAGLE heads can draft, because the "
        "activations that enter each layer can be read.",
        f"* **chain** ({counts['chain']}): drafted text, and the caches after it, are those of "
        "plain greedy decoding.",
        f"* **tree** ({counts['tree']}): the same with draft trees.",
        f"* **batch** ({counts['batch']}): the same with chains for 2, 3 and 4 prompts in shared "
        "passes. The others are decoded one by one, each with drafts.",
        "",
        "Recurrent states (`ArraysCache`) are [made again](caches.md#recurrent-states) after a "
        "rejection, except where the last column says that the kept rows run again.",
        "",
        "`python tests/support/architectures.py` measured and wrote this, with tiny models with "
        f"random weights in float32, mlx {mx.__version__}, {mx.default_device().type.name}.",
        "",
        "| architecture | caches | " + " | ".join(COLUMNS) + " | reason, or what to know |",
        "|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for name, result in results.items():
        works = ["yes" if getattr(result, key) else "no" for key in COLUMNS]
        again = RUNS_AGAIN if _runs_again(name) else ""
        remark = "; ".join(filter(None, [result.reason, again, NOTES.get(name, "")]))
        row = [name, cache_types(name), *works, remark.replace("|", "\\|")]
        lines.append("| " + " | ".join(row) + " |")
    TABLE.write_text("\n".join(lines) + "\n")


def recorded() -> dict[str, list[str]]:
    """What the table says works, for every architecture in it."""
    rows = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) > len(COLUMNS) and cells[2] in ("yes", "no"):
            rows[cells[0]] = [
                key
                for key, cell in zip(COLUMNS, cells[2 : 2 + len(COLUMNS)], strict=True)
                if cell == "yes"
            ]
    return rows


if __name__ == "__main__":
    write_table()
