"""The command ``mlx_eagle.generate``: mlx-lm's own flags, and those about drafting."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import setup_arg_parser
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.stats import Stats
from ..draft_models import head_lines
from ..drafters.base import Drafter
from ..drafters.pairs import pair_lines
from ..generate import footer, stream_generate
from ..system.ansi import Marker
from ..system.atomic_folder import check_writable
from ..system.command import run_command
from ..system.machines import Machine, this_machine
from ..system.progress import prompt_bar
from .flags import (
    add_draft_cache_flag,
    add_draft_flags,
    add_show_drafts_flag,
    build_sampler,
    check_arguments,
    check_cache_flags,
    draft_options,
    load_pair,
)
from .memory import memory_line, memory_lines, memory_report
from .opening import apply_template
from .prompt_caches import check_bits, fit_prompt_cache, read_prompt_cache


def build_parser() -> argparse.ArgumentParser:
    """mlx-lm's parser, with our flags beside its own."""
    parser = setup_arg_parser()
    parser.prog = "mlx_eagle.generate"
    parser.description = "Generate text with a target model and an EAGLE-3 draft head."
    add_draft_flags(parser)
    add_draft_cache_flag(parser)
    add_show_drafts_flag(parser)
    parser.add_argument(
        "--memory",
        action="store_true",
        help="Report the memory of weights and caches, and what drafting adds.",
    )
    parser.add_argument(
        "--stats-json",
        metavar="FILE",
        help="Write the counts as one JSON document to this file; '-' prints it as the last line.",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="List converted heads and known pairs, and exit.",
    )
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
    options = read_template_options(args.chat_template_config)

    def render() -> str:
        return apply_template(
            tokenizer,
            messages,
            tokenize=False,
            continue_final_message=prefilled,
            add_generation_prompt=not prefilled,
            **options,
        )

    prompt = render()
    if has_cache:
        # The cache holds what comes before the question, as mlx_lm.cache_prompt made it.
        messages[-1]["content"] = "<query>"
        prompt = prompt[render().index("<query>") :]
    return tokenizer.encode(prompt, add_special_tokens=False)


def read_template_options(text: str | None) -> dict[str, Any]:
    """The value of --chat-template-config; ValueError where it is no JSON object."""
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise ValueError(
            f"--chat-template-config is {text}: give a JSON object, such as "
            "'{\"enable_thinking\": false}'."
        )
    return options


def read_cache(args: argparse.Namespace) -> tuple[list[Any] | None, dict[str, str]]:
    """The prompt cache of --prompt-cache-file and its metadata; None without the flag.

    ``args.model`` is the model it was made with from then on.
    """
    if args.prompt_cache_file is None:
        return None, {}
    cache, metadata = read_prompt_cache(args.prompt_cache_file)
    if args.model not in (None, metadata["model"]):
        raise ValueError(
            f"the prompt cache was made with {metadata['model']}, not with {args.model}: "
            "give the same --model."
        )
    args.model = metadata["model"]
    if args.draft_model is None and args.num_draft_tokens != 0:
        print(
            "Note: decoding without a drafter, because the prompt cache was made with "
            f"{args.model} and --draft-model names none for it.",
            file=sys.stderr,
        )
    check_bits(cache, args.kv_bits)
    return cache, metadata


def write_stats(destination: str, document: dict[str, Any]) -> None:
    """Write the counts to a file, or print them where it is "-"."""
    line = json.dumps(document)
    if destination == "-":
        print(line)
    else:
        Path(destination).write_text(line + "\n")


def machine_lines(machine: Machine) -> list[str]:
    """What drafting can be expected to gain here, a line each."""
    return [
        f"This machine, {machine.name}: {machine.advice}.",
        "mlx_eagle.doctor says which targets fit its memory, and with --model what one costs.",
    ]


def run(args: argparse.Namespace) -> None:
    """Generate once, as the flags say."""
    if args.list:
        print("\n".join([*head_lines(), "", *pair_lines(), "", *machine_lines(this_machine())]))
        return
    check_arguments(args)
    check_cache_flags(args)
    read_template_options(args.chat_template_config)
    if args.stats_json not in (None, "-"):
        check_writable(Path(args.stats_json), "--stats-json", ", or '-'")
    if args.image:
        raise ValueError("--image cannot be used here: a drafter needs tokens, not embeddings.")
    if args.seed is not None:
        mx.random.seed(args.seed)
    cache, metadata = read_cache(args)
    tokenizer_config = json.loads(metadata.get("tokenizer_config", "{}"))
    tokenizer_config["trust_remote_code"] = args.trust_remote_code
    model, tokenizer, drafter = load_pair(args, tokenizer_config)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    prompt = read_prompt(args, tokenizer, has_cache=cache is not None)
    if cache is None:
        fresh = [] if drafter is None else drafter.make_cache()
        cache = make_prompt_cache(model, args.max_kv_size) + fresh
    else:
        cache = fit_prompt_cache(args.prompt_cache_file, cache, model, drafter)
    generate_and_report(args, model, tokenizer, drafter, prompt, cache)


def generate_and_report(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter | None,
    prompt: list[int],
    cache: list[Any],
) -> None:
    """Stream the text, then print the footer and write the counts."""
    responses = stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=args.max_tokens,
        sampler=build_sampler(args, tokenizer, args.seed),
        prompt_cache=cache,
        prefill_step_size=args.prefill_step_size,
        prompt_progress_callback=prompt_bar(args.prefill_step_size),
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
        **draft_options(args, drafter, args.recalibrate),
    )
    if args.verbose:
        print("=" * 10)
    mark = Marker.of(sys.stdout, args.show_drafts)
    print(mark.legend, end="")
    before = memory_report(model, drafter, cache)
    for response in responses:
        print(mark(response.text, response.from_draft), end="", flush=True)
    print()
    stats = Stats() if drafter is None else response.stats
    memory = memory_report(model, drafter, cache)
    if args.verbose:
        print("=" * 10)
        print("\n".join([*footer(response), memory_line(memory)]))
    if args.memory:
        print("\n".join(memory_lines(before, memory)))
    if args.stats_json:
        counts = {
            "prompt_tokens": response.prompt_tokens,
            "prompt_tps": response.prompt_tps,
            "generation_tokens": response.generation_tokens,
            "generation_tps": response.generation_tps,
            "peak_memory_gb": response.peak_memory,
            "finish_reason": response.finish_reason,
        }
        write_stats(args.stats_json, {**stats.to_dict(), **counts, **memory})


def main() -> None:
    """Entry point of ``mlx_eagle.generate``."""
    args = build_parser().parse_args()
    run_command(lambda: run(args))
