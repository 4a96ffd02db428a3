"""The command ``mlx_eagle.generate``: mlx-lm's own flags, and those about drafting."""

import argparse
import json
import secrets
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import setup_arg_parser
from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.stats import Stats
from ..draft_models import head_lines
from ..drafters.base import Drafter
from ..drafters.pairs import pair_lines
from ..drafters.quantize import packing_words
from ..generate import footer, stream_generate
from ..system.atomic_folder import check_writable
from ..system.cli_values import LARGEST, group_flags
from ..system.device import num_parameters, this_machine, weight_bytes
from ..system.loading import apply_template
from ..system.marks import Marker
from ..system.ranks import is_first, num_ranks, run_on_ranks, share
from .flags import (
    DRAFTERS,
    GROUPS,
    PIPELINE,
    TEXT_FLAGS,
    add_draft_flags,
    check_arguments,
    grammar_options,
    load_pair,
    text_options,
)

FLAG = "--prompt-cache-file"
COUNTS = (
    "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "finish_reason"
)  # fmt: skip
"""Attributes of mlx-lm's response that go into the file of --stats-json."""
REMEDY = "make it again with mlx_lm.cache_prompt."
FLAGS = {
    "memory": {
        "action": "store_true",
        "help": "Report the memory of weights and caches, and what drafting adds.",
    },
    "stats-json": {
        "metavar": "FILE",
        "help": "Write the counts as one JSON document to this file; '-' prints it as the last "
        "line.",
    },
    "pipeline": PIPELINE,
    "list": {"action": "store_true", "help": "List converted heads and known pairs, and exit."},
}


def build_parser() -> argparse.ArgumentParser:
    """mlx-lm's parser, with our flags beside its own."""
    parser = setup_arg_parser()
    parser.prog = "mlx_eagle.generate"
    parser.description = f"Generate text with a target model and a drafter: {DRAFTERS}."
    add_draft_flags(parser, TEXT_FLAGS | FLAGS)
    group_flags(parser, GROUPS)
    return parser


def read_prompt(
    args: argparse.Namespace, tokenizer: TokenizerWrapper, has_cache: bool
) -> list[int]:
    """The prompt's tokens: standard input or flag, through the chat template."""
    text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if text == "-" else text
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(text, add_special_tokens=True)
    messages = [{"role": "user", "content": text}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    prefilled = args.prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": args.prefill_response})

    def render() -> str:
        return apply_template(
            tokenizer,
            messages,
            tokenize=False,
            continue_final_message=prefilled,
            add_generation_prompt=not prefilled,
            **args.chat_template_config,
        )

    prompt = render()
    if has_cache:
        # The cache holds what comes before the question, as mlx_lm.cache_prompt made it.
        messages[-1]["content"] = "<query>"
        prompt = prompt[render().index("<query>") :]
    return tokenizer.encode(prompt, add_special_tokens=False)


def read_cache(args: argparse.Namespace) -> tuple[list[Any] | None, dict[str, Any]]:
    """The caches of --prompt-cache-file, None without it, and the tokenizer's configuration.

    ``args.model`` is the model that they were made with from then on. Raises ValueError, naming
    the file, for anything that ``mlx_lm.cache_prompt`` did not write, and for other flags than
    it was written with.
    """
    file = args.prompt_cache_file
    if file is None:
        return None, {}
    if not Path(file).is_file():
        raise ValueError(f"{FLAG} {file} does not exist, or is no file: {REMEDY}")
    try:
        cache, metadata = load_prompt_cache(file, return_metadata=True)
        first = cache[0]
        tokenizer_config = {**json.loads(metadata.get("tokenizer_config", "{}"))}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as err:
        # MLX says whether the file is whole; what is wrong in a cache, its type alone can tell.
        raise ValueError(f"{FLAG} {file} holds no prompt cache ({err}): {REMEDY}") from err
    if "model" not in metadata:
        raise ValueError(f"{FLAG} {file} does not say which model it was made with: {REMEDY}")
    if args.model not in (None, metadata["model"]):
        raise ValueError(
            f"the prompt cache was made with {metadata['model']}, not with {args.model}: "
            "give the same --model."
        )
    args.model = metadata["model"]
    if isinstance(first, QuantizedKVCache) and args.kv_bits not in (None, first.bits):
        raise ValueError(
            f"--kv-bits is {args.kv_bits}, but the prompt cache has {first.bits} bits: leave the "
            "flag out, or give the same number."
        )
    return cache, tokenizer_config


def in_terminal(line: str) -> str:
    """A line broken between words where the terminal ends; whole if the output is a file."""
    columns = shutil.get_terminal_size((LARGEST, 24)).columns
    if len(line) <= columns:
        return line
    start = " " * (len(line) - len(line.lstrip()))
    indents = {"initial_indent": start, "subsequent_indent": start + "    "}
    words = "  ".join(line.split()) if start else line
    return textwrap.fill(words, columns, break_on_hyphens=False, break_long_words=False, **indents)


def run(args: argparse.Namespace) -> None:
    """Generate once, as the flags say."""
    if args.list:
        machine = this_machine()
        lines = [*head_lines(), "", *pair_lines(), ""]
        lines.append(f"This machine, {machine.name}: {machine.advice}.")
        lines.append("mlx_eagle.doctor --model says whether a target fits, and what it costs.")
        print("\n".join(map(in_terminal, lines)))
        return
    check_arguments(args)
    if num_ranks() > 1:
        settle_ranks(args)
    if args.stats_json not in (None, "-"):
        check_writable(Path(args.stats_json), "--stats-json", ", or '-'")
    if args.image:
        raise ValueError(
            "--image cannot be used here, for mlx-lm's models read text: in Python, generate "
            "takes an image's embeddings as input_embeddings."
        )
    if args.seed is not None:
        mx.random.seed(args.seed)
    cache, tokenizer_config = read_cache(args)
    tokenizer_config["trust_remote_code"] = args.trust_remote_code
    model, tokenizer, drafter = load_pair(args, tokenizer_config)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    grammar = grammar_options(args, tokenizer)
    prompt = read_prompt(args, tokenizer, has_cache=cache is not None)
    if cache is None:
        cache = make_prompt_cache(model, args.max_kv_size)
    cache = fit_prompt_cache(args.prompt_cache_file, cache, model, drafter)
    generate_and_report(args, model, tokenizer, drafter, prompt, cache, grammar)


def settle_ranks(args: argparse.Namespace) -> None:
    """Give all ranks one seed, and files to rank 0 alone.

    Raises ValueError for what cannot be read there.
    """
    if args.prompt == "-":
        raise ValueError(
            "--prompt - waits for the end of standard input, which mlx.launch does not pass on: "
            "give the prompt itself."
        )
    if args.prompt_cache_file is not None:
        raise ValueError(
            "--prompt-cache-file holds the caches of a whole target, but each rank has those of "
            "a part: leave it out, or start without mlx.launch."
        )
    args.seed = share(secrets.randbits(32) if args.seed is None else args.seed)
    if not is_first():
        args.stats_json = None


def generate_and_report(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter | None,
    prompt: list[int],
    cache: list[Any],
    grammar: dict[str, Any],
) -> None:
    """Stream the text, then print the footer and write the counts."""
    responses = stream_generate(
        model,
        tokenizer,
        prompt,
        prompt_cache=cache,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
        **text_options(args, tokenizer, drafter, args.seed),
        **grammar,
    )
    if args.verbose:
        print("=" * 10)
    mark = Marker.of(sys.stdout, args.show_drafts)
    print(mark.legend, end="")
    before = memory_report(model, drafter, cache)
    for response in responses:
        print(mark(response.text, response.from_draft), end="", flush=True)
    print()
    if grammar and response.finish_reason == "length":
        print("Note: --max-tokens cut the text before it was complete.", file=sys.stderr)
    stats = Stats() if drafter is None else response.stats
    memory = memory_report(model, drafter, cache)
    if args.verbose:
        print("=" * 10)
        print("\n".join(footer(response)))
    if args.memory:
        print("\n".join(memory_lines(before, memory)))
        if drafter is not None and drafter.modules():
            bits = 8 * memory["head_weight_bytes"] / memory["head_parameters"]
            print(f"The head is {packing_words(drafter.modules())}: {bits:.1f} bits a parameter.")
    if args.stats_json:
        counts = {name: getattr(response, name) for name in COUNTS}
        counts["peak_memory_gb"] = response.peak_memory
        line = json.dumps({**stats.to_dict(), **counts, **memory})
        if args.stats_json == "-":
            print(line)
        else:
            Path(args.stats_json).write_text(line + "\n")


def fit_prompt_cache(
    file: str, cache: list[Any], model: nn.Module, drafter: Drafter | None
) -> list[Any]:
    """The caches for ``model`` and ``drafter``: those given, the drafter's fresh if missing.

    Raises ValueError where the file has caches neither for the model by itself nor for both.
    """
    num_target = len(make_prompt_cache(model))
    fresh = [] if drafter is None else drafter.make_cache()
    if len(cache) == num_target:
        return cache + fresh
    if drafter is None or len(cache) != num_target + len(fresh):
        both = f", or {num_target + len(fresh)} with the draft model's" if fresh else ""
        raise ValueError(
            f"{FLAG} {file} holds {len(cache)} caches, but this model has {num_target}{both}: "
            "give a file that was made with this model."
        )
    return cache


def memory_report(model: nn.Module, drafter: Drafter | None, cache: list) -> dict[str, int]:
    """Bytes of what is loaded and of the caches as they stand: the target's, then the head's."""
    num_target = len(make_prompt_cache(model))
    report = {
        "target_weight_bytes": weight_bytes(model),
        "target_cache_bytes": sum(entry.nbytes for entry in cache[:num_target]),
        "peak_bytes": mx.get_peak_memory(),
    }
    if drafter is not None:
        report["head_parameters"] = sum(num_parameters(m) for m in drafter.modules())
        report["head_weight_bytes"] = sum(weight_bytes(m) for m in drafter.modules())
        report["head_cache_bytes"] = sum(entry.nbytes for entry in cache[num_target:])
    return report


def memory_lines(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """The memory report as a table: before and after the generation, and the increment."""
    lines = [f"{'Memory (MB)':<24}{'before':>10}{'after':>10}"]
    for name in after:
        if name.endswith("bytes"):
            label = name.removesuffix("_bytes").replace("_", " ")
            lines.append(f"{label:<24}{before[name] / 1e6:>10.1f}{after[name] / 1e6:>10.1f}")
    if "head_parameters" in after:
        added = after["head_weight_bytes"] + after["head_cache_bytes"]
        plain = after["target_weight_bytes"] + after["target_cache_bytes"]
        lines.append(
            f"Drafting adds {added / 1e6:.1f} MB ({added / plain:.1%}) to weights and caches."
        )
    return lines


def main() -> None:
    """Entry point of ``mlx_eagle.generate``."""
    args = build_parser().parse_args()
    run_on_ranks(lambda: run(args))
