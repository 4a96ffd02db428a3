"""The command ``mlx_eagle.server``: mlx-lm's flags, starting and stopping.

Parses, opens, waits for a signal. What is served is in the other files of this package.
"""

import argparse
import ipaddress
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.utils import _parse_size, maybe_set_recommended_wired_limit

from ..commands.flags import add_draft_flags, check_draft_flags, known_head
from ..decoding.limits import AUTO
from ..system.command import run_command
from .caches import PairCache
from .generator import PairGenerator
from .handler import PairServer
from .provider import PairProvider

FLAGS = {
    # What these three mean here is said by ``add_draft_flags``.
    "model": (str, None, ""),
    "draft-model": (str, None, ""),
    "num-draft-tokens": (int, 3, ""),
    "adapter-path": (str, None, "Folder of trained adapter weights for the target."),
    "host": (str, "127.0.0.1", "Address to listen at."),
    "port": (int, 8080, "Port to listen at; 0 takes a free one."),
    "allowed-origins": (lambda x: x.split(","), "*", "Origins that browsers may ask from."),
    "chat-template": (str, "", "A chat template for the tokenizer."),
    "chat-template-args": (json.loads, "{}", "Arguments of the chat template, in JSON."),
    "temp": (float, 0.0, "Default sampling temperature."),
    "top-p": (float, 1.0, "Default nucleus sampling top-p."),
    "top-k": (int, 0, "Default top-k; 0 is no limit."),
    "min-p": (float, 0.0, "Default min-p."),
    "max-tokens": (int, 512, "Default for the most tokens of an answer."),
    "decode-concurrency": (
        int,
        32,
        "Requests to decode together, without drafts, when there are several; 1 drafts for each, "
        "one after the other.",
    ),
    "prompt-concurrency": (int, 8, "Prompts to process together."),
    "prefill-step-size": (int, 2048, "Tokens of a prompt to process in one pass."),
    "prompt-cache-size": (int, 10, "Texts whose caches are kept."),
    "prompt-cache-bytes": (_parse_size, None, "Most bytes of the caches that are kept."),
    "kv-bits": (int, None, "Bits of quantized caches; requests are then served in turn."),
    "kv-group-size": (int, 64, "Group size of quantized caches."),
    "quantized-kv-start": (int, DEFAULT_QUANTIZED_KV_START, "Tokens before quantization starts."),
}
SWITCHES = {
    "trust-remote-code": "Let the tokenizer run code of its own.",
    "use-default-chat-template": "Use the tokenizer's default template where it has none.",
    "pipeline": "Not supported here: a pair runs on one machine.",
    "usage-stats": "Add drafted_tokens, accepted_tokens and tau to the usage of each answer.",
}
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
POLL = 0.1  # seconds
POSITIVE = (
    "max_tokens decode_concurrency prompt_concurrency prefill_step_size prompt_cache_size"
).split()


def build_parser() -> argparse.ArgumentParser:
    """mlx_lm.server's flags, those about drafting, and our own."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.server",
        description="mlx-lm's HTTP server, with a draft model of this package.",
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
    for name in POSITIVE:
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {getattr(args, name)}: give 1 or more.")
    if args.pipeline:
        raise ValueError("--pipeline cannot be used here: a pair runs on one machine.")
    if not isinstance(args.chat_template_args, dict):
        raise ValueError("--chat-template-args is something else than a JSON object.")
    if args.model is not None and args.draft_model is None and args.num_draft_tokens != 0:
        raise ValueError(
            "--model needs --draft-model: name a head for it, or use mlx_lm.server, which "
            "decodes without."
        )
    target_flags = (args.adapter_path, args.chat_template, args.use_default_chat_template)
    if args.model is None and any(target_flags):
        raise ValueError(
            "--adapter-path and the flags about chat templates need --model: the demo pair is "
            "served as it is."
        )


def serve(server: PairServer, generator: PairGenerator) -> None:
    """Serve until SIGINT or SIGTERM; then answer who has asked, unless a second one comes."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    announce(server, generator)
    # Polled: a signal that another thread was given wakes no lock that this one waits for.
    while not received:
        time.sleep(POLL)
    server.shutdown()
    if server.answering:
        count = len(server.answering)
        print(f"Stopping after {count} answers; once more to stop at once.", flush=True)
    while server.answering and len(received) < 2:
        time.sleep(POLL)


def announce(server: PairServer, generator: PairGenerator) -> None:
    """Say where the server is, and who can reach it."""
    host, port = server.server_address[:2]
    shown = f"[{host}]" if ":" in host else host
    name = generator.model_provider.name
    print(f"Serving {name} at http://{shown}:{port}/v1", flush=True)
    if not ipaddress.ip_address(host).is_loopback:
        print(f"Note: whoever reaches {shown} can use it; nobody is asked for a key.", flush=True)


def run(args: argparse.Namespace) -> None:
    """Open the pair and serve it."""
    check_arguments(args)
    if args.draft_model == AUTO:
        args.draft_model = None if args.model is None else known_head(args.model)
    logging.basicConfig(
        level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s"
    )
    maybe_set_recommended_wired_limit()
    max_bytes = {} if args.prompt_cache_bytes is None else {"max_bytes": args.prompt_cache_bytes}
    generator = PairGenerator(PairProvider(args), PairCache(args.prompt_cache_size, **max_bytes))
    try:
        with PairServer(args.host, args.port, generator) as server:
            generator.wait_until_loaded()
            serve(server, generator)
    except KeyboardInterrupt:
        # Nobody is served yet. The thread that loads cannot be interrupted, only left.
        print("\ninterrupted", file=sys.stderr, flush=True)
        os._exit(130)
    finally:
        generator.stop_and_join()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``mlx_eagle.server``."""
    args = build_parser().parse_args(argv)
    code = 0
    try:
        run_command(lambda: run(args))
    except SystemExit as stop:
        code = stop.code
    # A thread that has used MLX needs the interpreter for a moment after Python has joined it,
    # and aborts the process where the interpreter is gone by then: so it is not taken down.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
