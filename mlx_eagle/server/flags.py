"""Flags of ``mlx_eagle.server``: mlx_lm.server's, and our own."""

import argparse
import json
from math import inf, ulp
from typing import Any

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.utils import _parse_size

from ..commands.flags import (
    PIPELINE,
    add_draft_flags,
    check_cache_flags,
    check_draft_flags,
    check_pipeline,
)
from ..decoding.setup import AUTO
from ..drafters.earlier_answers import DEFAULT_BOUND
from ..system.cli_values import Range, check_ranges
from ..system.ranks import num_ranks
from .access import is_loopback
from .body import MAX_DRAFT_TOKENS, NUMBERS
from .cache_files import FOLDER_BYTES
from .collect import COLLECT_BYTES
from .engine import TIME_LIMIT
from .listener import BODY_BYTES, CONNECTIONS, MAX_HEAD, REQUEST_SECONDS


def _size(text: str) -> int:
    """Parse a flag's number of bytes, with or without a unit."""
    try:
        return _parse_size(text)
    except (ArithmeticError, KeyError, ValueError) as err:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: give bytes, or a number with a unit, such as 16MB"
        ) from err


def _names(text: str) -> list[str]:
    """Parse a flag's names, separated by commas."""
    return [name for name in map(str.strip, text.split(",")) if name]


def _template_arguments(text: str) -> Any:
    """Parse a flag's JSON object."""
    try:
        return {**json.loads(text)}
    except (TypeError, ValueError, RecursionError) as err:
        raise argparse.ArgumentTypeError(f"{text!r} is something else than a JSON object") from err


FLAGS = {
    # What these three mean here is said by ``add_draft_flags``.
    "model": (str, None, ""),
    "draft-model": (str, None, ""),
    "num-draft-tokens": (int, 3, ""),
    "adapter-path": (str, None, "Folder of trained adapter weights for the target."),
    "host": (str, "127.0.0.1", "Address to listen at."),
    "port": (int, 8080, "Port to listen at, 1 to 65535; 0 takes a free one."),
    "allowed-origins": (
        _names,
        "",
        "Origins such as http://localhost:3000, commas between them, whose pages may ask in a "
        "browser; * is all. Without it, none may but the server's own page.",
    ),
    "chat-template": (str, "", "A chat template for the tokenizer."),
    "chat-template-args": (_template_arguments, "{}", "Arguments of the chat template, in JSON."),
    "temp": (float, 0.0, "Default sampling temperature."),
    "top-p": (float, 1.0, "Default nucleus sampling top-p."),
    "top-k": (int, 0, "Default top-k; 0 is no limit."),
    "min-p": (float, 0.0, "Default min-p."),
    "max-tokens": (int, 512, "Default maximum tokens per answer."),
    "decode-concurrency": (
        int,
        32,
        "Requests to answer at a time, in shared rounds where they can; 1 answers them one after "
        "the other.",
    ),
    "prompt-concurrency": (int, 8, "Prompts to read at a time, a chunk of each in turn."),
    "prefill-step-size": (int, 2048, "Tokens of a prompt to read in one pass."),
    "prompt-cache-size": (int, 10, "Number of prompts whose caches are kept in memory."),
    "prompt-cache-bytes": (
        _size,
        None,
        "Maximum bytes of the caches that are kept: in memory, where the default is no maximum, "
        f"and as many in --prompt-cache-dir, where it is {FOLDER_BYTES // 10**9}GB.",
    ),
    "prompt-cache-dir": (
        str,
        None,
        "Keep caches in files of this folder too, which their owner alone can read: they are "
        "found again after a restart.",
    ),
    "copy-answers": (
        int,
        None,
        "Tokens of earlier answers to keep in memory, from which the answers to others are copied "
        f"where they repeat them (default: {DEFAULT_BOUND}, but 0, none, where --host is not this "
        "machine alone: a right guess makes an answer come sooner, so clients could find out what "
        "others were told). Only requests with the same cache_salt, user and safety_identifier "
        "copy from each other.",
    ),
    "kv-bits": (int, None, "Bits of quantized caches; requests then share no rounds."),
    "kv-group-size": (int, 64, "Group size of quantized caches."),
    "quantized-kv-start": (int, DEFAULT_QUANTIZED_KV_START, "Tokens before quantization starts."),
    "allowed-hosts": (
        _names,
        "",
        "Names by which a proxy asks for a server that listens on this machine alone, or all "
        "names of one that other machines can reach; * is all.",
    ),
    "api-key": (
        str,
        None,
        "Key that clients must send as 'Authorization: Bearer KEY'. Other users of this machine "
        "may see it in the list of processes: --api-key-file hides it.",
    ),
    "api-key-file": (str, None, "File that holds the key."),
    "max-body-size": (
        _size,
        BODY_BYTES,
        "Maximum bytes of a request's body, such as 16MB; a larger one gets status 413. "
        f"(A request's head may have {MAX_HEAD} bytes, and 100 header lines.)",
    ),
    "max-connections": (int, CONNECTIONS, "Maximum open connections; one more gets status 503."),
    "request-timeout": (
        float,
        REQUEST_SECONDS,
        "Seconds a request may take to arrive, and a complete answer to be read.",
    ),
    "time-limit": (
        float,
        TIME_LIMIT,
        "Seconds an answer may take while another request cannot begin because of it; it then "
        "ends as at max_tokens.",
    ),
    "collect": (
        str,
        None,
        "Keep chats and their answers in this JSONL file, which its owner alone can read: data to "
        "adapt a head with, for mlx_eagle.train. Without it nothing is kept.",
    ),
    "collect-size": (
        _size,
        COLLECT_BYTES,
        "Bytes after which that file is renamed, .1 at its end, and a new one is begun.",
    ),
}
SWITCHES = {
    "no-api-key": "Answer whoever asks, also when --host is not this machine alone. Without a "
    "key, such a --host is refused otherwise.",
    "trust-remote-code": "Let the tokenizer run code of its own.",
    "use-default-chat-template": "Use the tokenizer's default template where it has none.",
    "pipeline": PIPELINE["help"],
    "strict-model": "Refuse requests that name another model, which are answered otherwise.",
    "usage-stats": "Add drafted_tokens, accepted_tokens, copied_tokens, accepted_copied_tokens "
    "and mean_acceptance_length to the usage of each answer.",
}
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_SECONDS = 10**7  # about four months
POSITIVE = (
    "max_tokens", "decode_concurrency", "prompt_concurrency", "prompt_cache_size",
    "max_body_size", "max_connections", "collect_size",
)  # fmt: skip
RANGES = (
    *(Range(name, 1, inf, "1 or more") for name in POSITIVE),
    Range("request_timeout", ulp(0.0), MAX_SECONDS, "seconds, more than 0"),
    Range("time_limit", ulp(0.0), MAX_SECONDS, "seconds, more than 0"),
    Range("copy_answers", 0, 2**30, "0 or more, at most 2**30"),
    Range("port", 0, 65535, "1 to 65535, or 0 for a free one"),
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: mlx_lm.server's flags, the drafting flags, and our own."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.server",
        description="mlx-lm's HTTP server with a draft model. It serves /v1/chat/completions, "
        "/v1/completions, /v1/responses, /v1/messages, /v1/models, Ollama's /api/chat and "
        "/api/generate, /health, /metrics for Prometheus, and a page to talk to at /.",
    )
    for name, (kind, default, text) in FLAGS.items():
        shown = f"{text} (default: {default})" if default not in (None, "") else text
        parser.add_argument(f"--{name}", type=kind, default=default, help=shown)
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    add_draft_flags(parser)
    parser.add_argument("--log-level", choices=LEVELS, default="INFO", help="What to log.")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for values that make no sense, before anything is loaded."""
    check_draft_flags(args)
    check_cache_flags(args)
    length = args.num_draft_tokens
    if length != AUTO and length > MAX_DRAFT_TOKENS:
        raise ValueError(f"--num-draft-tokens is {length}: give at most {MAX_DRAFT_TOKENS}.")
    check_ranges(args, RANGES)
    if args.copy_answers is None:
        args.copy_answers = DEFAULT_BOUND if is_loopback(args.host) else 0
    NUMBERS["temperature"].check("--temp", args.temp)
    NUMBERS["max_tokens"].check("--max-tokens", args.max_tokens)
    check_pipeline(args)
    if num_ranks() > 1:
        if args.prompt_cache_dir is not None:
            raise ValueError(
                "--prompt-cache-dir keeps the caches of a whole target, but each rank has those "
                "of a part: leave it out, or start without mlx.launch."
            )
        if args.pipeline and args.prompt_cache_bytes is not None:
            raise ValueError(
                "--prompt-cache-bytes would let each rank of a pipeline, whose caches have other "
                "sizes, drop other ones: give --prompt-cache-size."
            )
    target_flags = (args.adapter_path, args.chat_template, args.use_default_chat_template)
    if args.model is None and any(target_flags):
        raise ValueError(
            "--adapter-path and the flags about chat templates need --model: the demo pair is "
            "served as it is."
        )
