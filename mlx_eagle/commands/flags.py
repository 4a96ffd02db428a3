"""What the commands have in common: the flags about drafting, and what they come to."""

import argparse
import sys
from typing import Any

from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load

from ..decoding.accept import RULES, Sampler, check_rule_for_sampling, check_rule_for_trees
from ..decoding.limits import AUTO
from ..decoding.sampling import Sampling
from ..demo.pair import load_demo
from ..draft_models import open_drafter
from ..drafters.eagle3 import Eagle3Drafter
from ..drafters.pairs import pair_for
from ..drafters.tree import Tree, parse_tree
from ..system.progress import Bar
from ..system.version import add_version_flag


def add_draft_flags(parser: argparse.ArgumentParser) -> None:
    """Our flags beside mlx-lm's own, whose help says what they mean here."""
    add_version_flag(parser)
    for action in parser._actions:
        if action.dest == "model":
            action.help = "Folder or hub repo of the target. Default: the demo pair."
        elif action.dest == "draft_model":
            action.help = (
                "An EAGLE head, converted or not, or an ordinary model: folder or hub repo; "
                "'auto' for the known head of --model, or 'lookup' to copy from the prompt. "
                "Default: the demo head."
            )
        elif action.dest == "num_draft_tokens":
            action.type, action.metavar, action.default = draft_length, "K", AUTO
            action.help = (
                "Tokens to draft a round; 0 is plain decoding; auto, the default, drafts what "
                "pays, and decodes plainly where nothing does."
            )
    parser.add_argument(
        "--quantize-draft",
        type=int,
        metavar="BITS",
        help="Quantize an unquantized head while loading it.",
    )
    parser.add_argument(
        "--tree",
        metavar="SHAPE",
        help="Draft trees instead of chains. WIDTHxDEPTH:NODES, such as 4x5:16, keeps what is "
        "likeliest (EAGLE-2). Static: eagle1, the tree of EAGLE-1; root2:5, two chains of 5; "
        "or the number of children of each node, level by level, such as 3/2+1. auto: chains, "
        "trees or plain decoding, what pays.",
    )
    parser.add_argument(
        "--acceptance",
        choices=RULES,
        help="match: any sampler; coupled: same seed, same text as without a draft (the "
        "default with --temp); reject: rejection sampling.",
    )


def add_draft_cache_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-cache",
        choices=("exact", "lagging"),
        default="exact",
        help="lagging: absorb only the newest token of a round, as the first MLX prototype did.",
    )


def draft_length(text: str) -> int | str:
    """The value of ``--num-draft-tokens``: a number or "auto"."""
    return text if text == AUTO else int(text)


def check_draft_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a draft length, a tree or a temperature that make no sense."""
    if args.num_draft_tokens != AUTO and args.num_draft_tokens < 0:
        raise ValueError(
            f"--num-draft-tokens is {args.num_draft_tokens}: give 0 (plain decoding) or more, or "
            "auto."
        )
    if args.tree is not None:
        read_tree(args.tree)
        check_rule_for_trees(args.acceptance)
    if args.temp < 0:
        raise ValueError(f"--temp is {args.temp}: give 0 (greedy) or more.")


def read_tree(text: str) -> Tree | str:
    """The value of ``--tree``: a tree or "auto"; ValueError for anything else."""
    return text if text == AUTO else parse_tree(text)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for values that make no sense, before anything is loaded."""
    check_draft_flags(args)
    check_rule_for_sampling(args.acceptance, args.temp, args.xtc_probability)
    if args.max_tokens == 0 or args.max_tokens < -1:
        raise ValueError(
            f"--max-tokens is {args.max_tokens}: give a positive number, or -1 for no limit."
        )
    if args.prefill_step_size < 1:
        raise ValueError(f"--prefill-step-size is {args.prefill_step_size}: give 1 or more.")
    if args.model is not None and args.draft_model is None and args.num_draft_tokens != 0:
        raise ValueError(
            "--model needs --draft-model: name a converted head for it, 'auto' for a known one, "
            "or give --num-draft-tokens 0 for plain decoding."
        )


def load_pair(args: argparse.Namespace, tokenizer_config: dict[str, Any]) -> tuple:
    """(model, tokenizer, drafter) as the flags name them; the demo pair without --model."""
    name, is_demo = args.draft_model, args.model is None
    if name == AUTO:
        name = None if is_demo else known_head(args.model)
    if is_demo:
        if args.adapter_path is not None:
            raise ValueError("--adapter-path needs --model: the demo pair has no adapters.")
        bits = args.quantize_draft if name is None else None
        model, tokenizer, drafter = load_demo(quantize_bits=bits)
    else:
        (model, tokenizer), drafter = load_target(args, tokenizer_config), None
    if name is not None:
        drafter = open_drafter(name, model, tokenizer, quantize_bits=args.quantize_draft)
    if args.draft_cache != "exact":
        if not isinstance(drafter, Eagle3Drafter):
            raise ValueError("--draft-cache lagging is for EAGLE heads: leave it out here.")
        drafter = drafter.with_draft_cache(args.draft_cache)
    return model, tokenizer, drafter


def known_head(model: str) -> str:
    """The head of the table of pairs for ``model``, saying which."""
    pair = pair_for(model)
    print(f"Drafting with {pair.head} (licence: {pair.licence}).", file=sys.stderr)
    return pair.head


def load_target(args: argparse.Namespace, tokenizer_config: dict[str, Any]) -> tuple:
    """The target and its tokenizer, through mlx-lm's own loader."""
    return load(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config=tokenizer_config,
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
    )


def build_sampler(args: argparse.Namespace, tokenizer, seed: int | None) -> Sampler | None:
    """The sampler of the flags: None for greedy, ours where it can be coupled, else mlx-lm's.

    ``seed`` is that of ours; None takes one from mlx's global random state.
    """
    if args.temp == 0:
        return None
    options = {
        "temp": args.temp,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "min_tokens_to_keep": args.min_tokens_to_keep,
        "top_k": args.top_k,
    }
    if args.acceptance != "match" and args.xtc_probability == 0:
        return Sampling(**options, seed=seed)
    special_tokens = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    return make_sampler(
        **options,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=special_tokens,
    )


def draft_options(args: argparse.Namespace, drafter) -> dict[str, Any]:
    """What the flags say about drafting, for ``stream_generate``; mlx-lm knows none of it."""
    if drafter is None:
        return {}
    return {
        "draft_model": drafter,
        "num_draft_tokens": args.num_draft_tokens,
        "acceptance": args.acceptance,
        "tree": None if args.tree is None else read_tree(args.tree),
        "calibration_progress_callback": Bar("Measuring what rounds cost", "group"),
    }
