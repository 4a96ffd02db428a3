"""Flags about drafting that the commands share, checked and turned into objects."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.pass_costs import EXPECTED, expert_layers
from ..decoding.rules import RULES, check_rule_for_sampling
from ..decoding.sampling import SamplingOptions, sampler_for
from ..decoding.setup import AUTO, read_tree
from ..demo.pair import load_demo
from ..draft_models import LOOKUP, find_drafter, known_pairs, open_beside, split_name
from ..drafters.base import Drafter, NullDrafter
from ..drafters.output_rows import read_draft_vocab
from ..structured import JSONSchema, Regex, check_installed
from ..system.cli_values import (
    GROUP_SIZES,
    LARGEST,
    LARGEST_SEED,
    QUANTIZED_BITS,
    Range,
    add_version_flag,
    check_ranges,
    read_number,
    use_plain_words,
)
from ..system.device import DTYPES, prepare_device
from ..system.fields import suggestion
from ..system.loading import load
from ..system.progress import prompt_bar, told_if_long
from ..system.ranks import num_ranks

SHARE = "a number from 0 to 1"
DRAFT_WINDOW = Range("draft_window", 1, LARGEST, "the number of slots to keep, 1 or more")
RANGES = (
    DRAFT_WINDOW,
    Range("temp", 0, 1e6, "0 (greedy) or more"),
    Range("top_p", 0, 1, SHARE),
    Range("min_p", 0, 1, SHARE),
    Range("top_k", 0, LARGEST, "0 (no limit) or more"),
    Range("min_tokens_to_keep", 1, LARGEST, "1 or more"),
    Range("xtc_probability", 0, 1, SHARE),
    Range("xtc_threshold", 0, 0.5, "a number from 0 to 0.5"),
    Range("seed", 0, LARGEST_SEED, "a whole number from 0 to 2**64 - 1"),
    Range("prefill_step_size", 1, LARGEST, "1 or more"),
    # A rotating cache never drops its first four tokens: it needs room for one more.
    Range("max_kv_size", 5, LARGEST, "5 or more"),
    Range("quantized_kv_start", 0, LARGEST, "0 or more"),
)
GROUPS = {
    "the model": (
        "model", "adapter_path", "trust_remote_code", "dtype", "quantize_activations", "pipeline",
    ),
    "drafts": (
        "draft_model", "num_draft_tokens", "tree", "acceptance", "quantize_draft", "draft_window",
        "draft_vocab", "draft_cache", "exact", "show_drafts",
    ),
    "the prompt": (
        "prompt", "system_prompt", "prefill_response", "image", "ignore_chat_template",
        "use_default_chat_template", "chat_template_config",
    ),
    "the text": (
        "max_tokens", "extra_eos_token", "json_schema", "regex", "temp", "top_p", "min_p", "top_k",
        "xtc_probability", "xtc_threshold", "min_tokens_to_keep", "seed",
    ),
    "caches": (
        "prompt_cache_file", "max_kv_size", "prefill_step_size", "kv_bits", "kv_group_size",
        "quantized_kv_start",
    ),
    "what is said": ("verbose", "memory", "stats_json", "list"),
}  # fmt: skip
"""Groups of the flags of generate and chat in their help."""
DRAFTERS = "an EAGLE, DFlash or DSpark head, MTP layers, a small model, or copies from the text"


def draft_length(text: str) -> int | str:
    """The value of ``--num-draft-tokens``: a number or "auto"."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError as err:
        near = suggestion(text, [AUTO])
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a whole number nor {AUTO}{near}"
        ) from err


def quantized_bits(text: str) -> int:
    """The value of ``--quantize-draft``: a number of bits, 0 for "none"."""
    bits = 0 if text == "none" else read_number(int, text)
    if text != "none" and bits not in QUANTIZED_BITS:
        listed = ", ".join(map(str, QUANTIZED_BITS))
        raise argparse.ArgumentTypeError(f"{text} bits cannot be had: give {listed} or none")
    return int(bits)


def json_object(text: str) -> dict[str, Any]:
    """The value of a flag that is a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text} is no JSON object: give one, such as '{{\"enable_thinking\": false}}'"
        )
    return value


def schema_text(file: str) -> str:
    """The value of ``--json-schema``: what is in that file."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is no text"
        raise argparse.ArgumentTypeError(
            f"{file} cannot be read ({reason}): give a file with a JSON schema"
        ) from err


Flags = dict[str, dict[str, Any]]
"""Options of ``add_argument`` by a flag's name."""
OWN_FLAGS: Flags = {
    "quantize-draft": {
        "type": quantized_bits,
        "metavar": "BITS",
        "help": "Quantize an unquantized drafter while loading it; none: leave it as it is. "
        "Default: as converted, or, if it is not converted, 4 bits for a target in 4 or fewer, 8 "
        "for one in more.",
    },
    "draft-window": {
        "type": int,
        "metavar": "N",
        "help": "Keep only the newest N slots of the head's cache, beside the first few: drafts "
        "then cost the same on any context. Default: keep all.",
    },
    "draft-vocab": {
        "metavar": "N|FILE|full",
        "help": "Draft only the N first tokens of the vocabulary, or those whose ids are in a "
        "file, and with them what ends a text and what the prompt holds: cheaper drafts, lower "
        "acceptance, the same text. Default: full.",
    },
    "dtype": {
        "choices": DTYPES,
        "help": "Floats of the target. Default: as stored; on a CPU float32, with packed weights "
        "unpacked, where the memory is enough.",
    },
    "tree": {
        "metavar": "SHAPE",
        "help": "Draft a tree instead of a chain. WIDTHxDEPTH:NODES (for example 3x3:7) is an "
        "EAGLE-2 tree.",
    },
    "acceptance": {
        "choices": RULES,
        "help": "match: works with any sampler. coupled (default with --temp): the same seed "
        "gives the same text with or without drafting. reject: rejection sampling, in a tree "
        "child by child.",
    },
    "exact": {
        "action": "store_true",
        "help": "Compute each row of a verify pass as a plain step: the text is that of plain "
        "decoding in every type, and a row costs about what a plain step costs.",
    },
}
"""Flags about drafting, of all commands that draft."""
PIPELINE = {
    "action": "store_true",
    "help": "Under mlx.launch: give each rank some of the target's layers, and not a part of "
    "every layer.",
}
ADAPTED: Flags = {
    "model": {"help": "Folder or hub repo of the target. Default: the demo pair."},
    "kv_bits": {"choices": QUANTIZED_BITS, "metavar": "BITS"},
    "kv_group_size": {"choices": GROUP_SIZES, "metavar": "SIZE"},
    "chat_template_config": {"type": json_object, "default": {}},
    "draft_model": {
        "help": "An EAGLE head, converted or not, or an ordinary model: folder or hub repo; "
        "'auto' for the known head of --model, 'mtp' for the layers that --model was published "
        "with to predict several tokens, or 'lookup' to copy from the text; with '+lookup' behind "
        "any of the others, as auto has it, whichever gains more. Default: the demo head, and "
        "copies; auto with --model.",
    },
    "num_draft_tokens": {
        "type": draft_length,
        "metavar": "K",
        "default": AUTO,
        "help": "Draft tokens per step. 0 turns drafting off; auto (default) picks the length per "
        "step and turns drafting off where it does not help.",
    },
}
"""mlx-lm's own flags, by attribute, where they mean something else here."""
TEXT_FLAGS: Flags = {
    "draft-cache": {
        "choices": ("exact", "lagging"),
        "default": "exact",
        "help": "Advanced: cheaper draft-cache update, lower acceptance.",
    },
    "show-drafts": {
        "action": "store_true",
        "help": "Mark drafted tokens in the text, where it goes to a terminal: coloured and "
        "underlined, or underlined alone where NO_COLOR is set.",
    },
    "json-schema": {
        "type": schema_text,
        "metavar": "FILE",
        "help": "Answer in JSON that is valid under the schema in this file; needs the extra "
        "'structured'.",
    },
    "regex": {
        "metavar": "PATTERN",
        "help": "Answer with a text that this regular expression matches as a whole; needs the "
        "extra 'structured'.",
    },
}
"""Flags of commands that print texts, which a server does not have."""


def add_draft_flags(parser: argparse.ArgumentParser, more: Flags | None = None) -> None:
    """Add ``--version``, our flags and ``more`` to mlx-lm's, whose help is adapted."""
    add_version_flag(parser)
    for action in parser._actions:
        vars(action).update(ADAPTED.get(action.dest, {}))
    for name, options in (OWN_FLAGS | (more or {})).items():
        parser.add_argument(f"--{name}", **options)
    use_plain_words(parser)


def check_pipeline(args: argparse.Namespace) -> None:
    """Raise ValueError where ``--pipeline`` has nothing to split, or cannot."""
    if args.pipeline and num_ranks() == 1:
        raise ValueError(
            "--pipeline spreads the layers over several processes, but there is one: start the "
            "command with mlx.launch, or leave the flag out."
        )
    if args.pipeline and args.model is None:
        raise ValueError(
            "--pipeline needs --model: mlx-lm splits the demo target within its layers only."
        )


def grammar_options(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """Options of ``stream_generate`` that hold texts to the schema or to ``--regex``.

    Raises ValueError for a schema or expression that no text can satisfy.
    """
    if args.json_schema is not None:
        return {"logits_processors": [JSONSchema(args.json_schema, tokenizer)]}
    if args.regex is not None:
        return {"logits_processors": [Regex(args.regex, tokenizer)]}
    return {}


def check_draft_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a draft length, a tree or a temperature that make no sense."""
    length = args.num_draft_tokens
    if length != AUTO and not 0 <= length <= LARGEST:
        raise ValueError(
            f"--num-draft-tokens is {length}: give 0 (plain decoding) or more, or auto."
        )
    if args.tree is not None:
        read_tree(args.tree)
    read_draft_vocab(args.draft_vocab)
    check_ranges(args, RANGES)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for values that make no sense, before anything is loaded."""
    check_draft_flags(args)
    check_pipeline(args)
    if args.json_schema is not None and args.regex is not None:
        raise ValueError("--json-schema and --regex exclude each other: give one of them.")
    if args.json_schema is not None or args.regex is not None:
        check_installed()
    check_rule_for_sampling(args.acceptance, args.temp, args.xtc_probability)
    if args.max_tokens == 0 or not -1 <= args.max_tokens <= LARGEST:
        raise ValueError(
            f"--max-tokens is {args.max_tokens}: give a positive number, or -1 for no limit."
        )


def load_pair(
    args: argparse.Namespace, tokenizer_config: dict[str, Any]
) -> tuple[nn.Module, TokenizerWrapper, Drafter | None]:
    """(model, tokenizer, drafter) as the flags name them; the demo pair without --model.

    Standard error says so where this machine cannot gain from drafting.
    """
    prepare_device(args.exact)
    bits = args.quantize_draft
    own = None
    # Plain decoding needs no head where the user named none.
    is_plain = args.num_draft_tokens == 0 and args.draft_model is None and args.model is not None
    name = None if is_plain else default_drafter(args.draft_model, args.model)
    find_drafter(name, args.model)
    if args.model is None:
        if args.adapter_path is not None:
            raise ValueError("--adapter-path needs --model: the demo pair has no adapters.")
        is_own = name is None or split_name(name)[0] == AUTO
        bits_of_own = bits if is_own else None
        model, tokenizer, own = load_demo(dtype=args.dtype, quantize_bits=bits_of_own)
    else:
        with told_if_long(f"Loading {args.model}."):
            model, tokenizer = load(
                args.model,
                tokenizer_config,
                adapter_path=args.adapter_path,
                model_config={"quantize_activations": args.quantize_activations},
                trust_remote_code=args.trust_remote_code,
                dtype=args.dtype,
                pipeline=args.pipeline,
            )
    with told_if_long("Opening the draft model."):
        _, drafter = open_beside(
            own,
            name,
            model,
            tokenizer,
            quantize_bits=bits,
            draft_window=args.draft_window,
            draft_vocab=args.draft_vocab,
            target=args.model,
        )
    say_expectations(args, model, drafter)
    if args.draft_cache != "exact":
        drafter = (drafter or NullDrafter()).with_draft_cache(args.draft_cache)
    return model, tokenizer, drafter


def default_drafter(name: str | None, model: str | None) -> str | None:
    """The name of the draft model: for a model with known ones, "auto" where none is named."""
    if name is not None or model is None or next(known_pairs(model), None) is None:
        return name
    return AUTO


def say_expectations(args: argparse.Namespace, model: nn.Module, drafter: Drafter | None) -> None:
    """Say on standard error where nothing is known to draft with, or little can be gained."""
    if args.num_draft_tokens == 0:
        return
    if drafter is None:
        said = f"no public head is known here for {args.model}, so nothing is drafted: name one "
        said += f"with --draft-model, or copy from the text with --draft-model {LOOKUP}"
        print(f"Note: {said}.", file=sys.stderr)
    elif expert_layers(model):
        print(f"Note: {EXPECTED}.", file=sys.stderr)


def text_options(
    args: argparse.Namespace,
    tokenizer: TokenizerWrapper,
    drafter: Drafter | None,
    seed: int | None,
) -> dict[str, Any]:
    """The flags about a text and its drafts as options of ``stream_generate``.

    The sampler is None for greedy, ours where it can be coupled, else mlx-lm's. ``seed`` is for
    our sampler; None takes one from mlx's global random state.
    """
    given = {field.name: getattr(args, field.name) for field in fields(SamplingOptions)}
    options = {
        "max_tokens": args.max_tokens,
        "sampler": sampler_for(SamplingOptions(**given), tokenizer, seed),
        "prefill_step_size": args.prefill_step_size,
        "prompt_progress_callback": prompt_bar(args.prefill_step_size),
    }
    if drafter is None:
        return options
    return options | {
        "draft_model": drafter,
        "num_draft_tokens": args.num_draft_tokens,
        "acceptance": args.acceptance,
        "tree": read_tree(args.tree),
        "exact": args.exact,
    }
