"""The command ``mlx_eagle.server``: open the pair, serve it, and stop without harm."""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence

from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..commands.flags import default_drafter, say_expectations
from ..draft_models import find_drafter
from ..system.device import prepare_device
from ..system.exit_codes import INTERRUPTED
from ..system.ranks import LOST, is_first, num_ranks, run_on_ranks
from ..system.stop_signals import StopSignals
from .access import is_loopback, read_access
from .caches import open_prompt_cache
from .collect import open_collector
from .engine import PairGenerator
from .flags import build_parser, check_arguments
from .handler import PairHandler
from .listener import ACCEPT_POLL, PairServer
from .provider import PairProvider
from .routes import DOCUMENTS, ROUTES

POLL = 0.1  # seconds
LOOK = 1.0  # seconds between looks at whether the other ranks are still there
LONG_ANSWER = 16384  # tokens: a file that an agent writes; most do not say how many they need
AGENTS = {
    "Claude Code": "ANTHROPIC_BASE_URL=<URL> ANTHROPIC_AUTH_TOKEN=<KEY> claude --model local",
    "Codex": "codex -m local -c web_search=disabled -c model_provider=eagle "
    """-c 'model_providers.eagle={name="eagle",base_url="<URL>/v1",env_key="EAGLE_KEY"}'""",
    "OpenCode": """OPENCODE_CONFIG_CONTENT='{"provider":{"eagle":{"npm":"@ai-sdk/openai-"""
    """compatible","options":{"baseURL":"<URL>/v1","apiKey":"{env:EAGLE_KEY}"},"models":"""
    """{"local":{}}}}}' opencode -m eagle/local""",
}
"""Shell commands that connect common coding agents to the server."""


def serve(server: PairServer, generator: PairGenerator, signals: StopSignals) -> None:
    """Serve until SIGINT or SIGTERM, then finish open requests unless a second one comes."""
    threading.Thread(target=server.serve_forever, args=[ACCEPT_POLL], daemon=True).start()
    announce(server, generator)
    while not signals.wait(None if num_ranks() == 1 else LOOK):
        if not generator.generation_available():
            break
    server.stop_listening()
    count = len(server.answering)
    if count:
        requests = "1 request" if count == 1 else f"{count} requests"
        print(f"Waiting for {requests} to finish; press Ctrl-C again to stop now.", flush=True)
    while server.answering:
        if signals.wait(POLL):
            generator.is_hurried.set()
            return
    if num_ranks() > 1 and not generator.generation_available():
        raise ValueError(LOST)


def announce(server: PairServer, generator: PairGenerator) -> None:
    """Print the address, who can reach it, and the commands for coding agents."""
    host, port = server.server_address[:2]
    shown = f"[{host}]" if ":" in host else host
    name = generator.model_provider.name
    url = f"http://{shown}:{port}/"
    lines = [f"Serving {name}: a page to talk to it at {url}, the API at {url}v1"]
    is_open = server.access.key is None and not is_loopback(host)
    if is_open:
        lines.append(f"Note: whoever reaches {shown} can use it; nobody is asked for a key.")
    if is_open and not server.access.hosts:
        lines.append(
            "Note: it answers under any name, so a page can make a browser ask it: "
            "--allowed-hosts NAMES names yours."
        )
    if server.collector is not None:
        path = server.collector.path
        lines.append(f"Note: chats and their answers are kept in {path} (--collect).")
    is_short = generator.cli_args.max_tokens < LONG_ANSWER
    hint = f" (start the server with --max-tokens {LONG_ANSWER} for them)" if is_short else ""
    lines.append(f"Coding agents, in another shell{hint}:")
    agents = agent_lines(url.rstrip("/"), server.access.key is not None)
    print("\n".join([*lines, *(f"  {line}" for line in agents)]), flush=True)


def agent_lines(url: str, has_key: bool) -> list[str]:
    """Return the commands for agents that use the server at ``url``; the key is in EAGLE_KEY."""
    lines = []
    for name, command in AGENTS.items():
        if not has_key:
            command = command.replace(',env_key="EAGLE_KEY"', "")
            command = command.replace(',"apiKey":"{env:EAGLE_KEY}"', "")
        key = "$EAGLE_KEY" if has_key else "local"
        lines.append(f"{name}: {command.replace('<URL>', url).replace('<KEY>', key)}")
    return lines


def run(args: argparse.Namespace) -> None:
    """Open the pair and serve it."""
    check_arguments(args)
    access = read_access(args) if is_first() else None
    collector = open_collector(args) if is_first() else None
    cache = open_prompt_cache(args)
    prepare_device(args.exact)
    if args.num_draft_tokens != 0:
        args.draft_model = default_drafter(args.draft_model, args.model)
    find_drafter(args.draft_model, args.model)
    logging.basicConfig(level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    maybe_set_recommended_wired_limit()
    if not is_first():
        generator = PairGenerator(PairProvider(args), cache)
        generator.join()  # which computes along with rank 0 until it stops
        if generator.model_provider.error is not None:
            raise generator.model_provider.error
        return
    with StopSignals() as signals:
        generator = PairGenerator(PairProvider(args), cache)
        try:
            with PairServer(
                PairHandler, ROUTES, DOCUMENTS, generator, access, collector
            ) as server:
                while not generator.model_provider.loaded.is_set():
                    if signals.wait(POLL):
                        # No client is served yet, and the loading thread cannot be stopped.
                        print("\ninterrupted", file=sys.stderr, flush=True)
                        os._exit(INTERRUPTED)
                generator.check_loaded()
                provider = generator.model_provider
                say_expectations(args, provider.model, provider.draft_model)
                serve(server, generator, signals)
        finally:
            generator.stop(signals.wait)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``mlx_eagle.server``."""
    args = build_parser().parse_args(argv)
    code: int | str | None = 0
    try:
        run_on_ranks(lambda: run(args))
    except SystemExit as stop:
        code = stop.code
    # A thread that has used MLX needs the interpreter for a moment after Python has joined it,
    # and aborts the process where the interpreter is gone by then: so it is not taken down.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
