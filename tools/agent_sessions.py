"""Conversations of eight turns, as an agent's client has them, with a server that drafts.

    python tools/agent_sessions.py [--kinds KIND ...] [--check] [--json FILE] [-- FLAGS]
    python tools/agent_sessions.py --url http://127.0.0.1:8080

Each turn sends the whole conversation again, the answers among it, and asks greedily for the next
version of a text: a file, a letter, a tool call. Printed are tokens per pass of the target, and
what was drafted and kept, from the counts that the server reports. Chat is played first and last,
for what the server learns from edits decides how it drafts afterwards. Without ``--url`` a server
is started, with the flags behind ``--``, and ended afterwards; without ``--model`` among them it
serves the demo pair, whose target the texts are made for. ``--check`` compares each text with that
of mlx-lm, in float32.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from difflib import SequenceMatcher
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlx_eagle
from mlx_eagle.bench.servers import running

LONGEST_WAIT = 900.0  # seconds for one answer: a busy machine without a GPU needs minutes
MAX_TOKENS = 96  # of an answer: room for each of the texts below, and an end to one that rambles
CHAT_TOKENS = 48  # of an answer in a chat, which goes on and on and is played twice
NUM_TURNS = 8
SERVER = "mlx_eagle.server"
CHAT = "chat"

CONFIG = """name: harbor
port: 8080
host: localhost
workers: 4
timeout: 30
log_level: info
cache_size: 256
database: tides.db
retries: 3"""

LETTER = """Dear Anna,

Thank you for your letter of May.
The old boat is painted green and lies in the harbor.
We will sail on Sunday at nine.
Please bring bread, a warm coat and your brother.

Yours,
Thomas"""

CODE = """LIMIT = 10
SCALE = 0.5

def read_tides(path, station):
    rows = []
    for line in open(path):
        name, height = line.split(",")
        if name == station:
            rows.append(SCALE * float(height))
    return rows[:LIMIT]"""

CALL = (
    '{"tool": "search_files", "arguments": {"folder": "src/harbor", "pattern": "open_gate", '
    '"case_sensitive": false, "max_results": 20}}'
)

ARTICLE = """The lighthouse of Marrow Point was built in 1871 by two brothers from Norway.
Its lamp burned whale oil until 1902, when the village paid for an electric light.
The keeper wrote the height of every tide into a green book that lies in the museum.
In the storm of 1953 the tower lost its roof, but nobody in the village was hurt."""


def edits(text: str, *changes: str) -> list[str]:
    """Ask for ``text`` and then, a change at a time, for its next versions."""
    first = f"Repeat this text exactly:\n\n{text}"
    return [first, *(f"Repeat the text exactly, but with {change}" for change in changes)]


# Lists of lines, so that a conversation reads as one.
# fmt: off
CONVERSATIONS = {
    "config": edits(
        CONFIG, "port: 9090", "workers: 8", "log_level: debug", "timeout: 60",
        "host: example.com", "cache_size: 512", "name: bridge",
    ),
    "letter": edits(
        LETTER,
        "The old boat is painted blue and lies in the harbor.",
        "We will sail on Monday at nine.",
        "Please bring bread, a warm hat and your sister.",
        "Thank you for your letter of June.",
        "The old boat is painted blue and lies on the beach.",
        "We will sail on Monday at noon.",
        "Dear Paul,",
    ),
    "code": edits(
        CODE, "LIMIT = 20", "SCALE = 0.3", "LIMIT = 50", 'line.split(";")', "SCALE = 2.0",
        "rows[-LIMIT:]", "LIMIT = 5",
    ),
    "tools": edits(
        CALL, '"pattern": "close_gate"', '"folder": "src/bridge"', '"max_results": 50',
        '"case_sensitive": true', '"pattern": "close_door"', '"folder": "tests/bridge"',
        '"max_results": 10',
    ),
    "quotes": [
        f"{ARTICLE}\n\nWhat does the text say about the brothers?",
        *(
            f"What does the text say about the {subject}?"
            for subject in (
                "lamp", "storm", "green book", "electric light", "keeper", "tower", "museum",
            )
        ),
    ],
    CHAT: [
        "Why is the sky blue?",
        "Give me some tips for better sleep.",
        "How do plants drink water?",
        "Tell me a story about a lost dog.",
        "What can I cook with apples?",
        "Why do ships float?",
        "What is a good present for my grandmother?",
        "How does a clock work?",
    ],
}
# fmt: on


@dataclass(frozen=True)
class Counts:
    """Tokens of answers, and passes of the target; without copies where a server counts none.

    ``emitted`` leaves out the first token of an answer, which its prompt yields.
    """

    emitted: int
    passes: int
    drafted: int
    accepted: int
    copied: int | None
    accepted_copied: int | None

    @property
    def per_pass(self) -> float:
        return self.emitted / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Turn:
    """One answer. ``repeated`` is its similarity to the answer before, from 0 to 1."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    repeated: float
    seconds: float
    counts: Counts


@dataclass(frozen=True)
class Conversation:
    """A conversation as it was played, the answers in ``messages``."""

    kind: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


def total(turns: Sequence[Turn]) -> Counts:
    """Add up the counts of ``turns``."""
    sums = {}
    for name in [each.name for each in fields(Counts)]:
        values = [getattr(turn.counts, name) for turn in turns]
        sums[name] = None if None in values else sum(values)
    return Counts(**sums)


def main() -> None:
    """Play the conversations, print the counts, and exit with 1 where a text differs."""
    args, flags = read_arguments(sys.argv[1:])
    with served(args.url, flags) as address:
        played = []
        for kind in order(args.kinds):
            conversation = play(address, kind, args.turns, longest(kind, args.max_tokens))
            print(turn_table(conversation), flush=True)
            played.append(conversation)
    print(summary(played))
    if args.json is not None:
        write_json(args.json, flags, played)
    if args.check:
        check(played, args.max_tokens)


def read_arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read our own arguments, and the server's, which stand behind ``--``."""
    own = list(words)
    flags: list[str] = []
    if "--" in own:
        at = own.index("--")
        flags = own[at + 1 :]
        own = own[:at]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=CONVERSATIONS, default=list(CONVERSATIONS))
    parser.add_argument("--turns", type=int, choices=range(1, NUM_TURNS + 1), default=NUM_TURNS)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="Of each answer.")
    parser.add_argument("--url", help="Of a running server; without it one is started.")
    parser.add_argument("--check", action="store_true", help="Compare the texts with mlx-lm's.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the counts there.")
    args = parser.parse_args(own)
    if args.url is not None and flags:
        parser.error("--url names a running server: flags behind -- are for one started here.")
    if args.check and "--model" in flags:
        parser.error("--check compares with the demo target: leave --model out.")
    if args.check and args.url is None and "--dtype" not in flags:
        flags += ["--dtype", "float32"]
    return args, flags


def order(kinds: Sequence[str]) -> list[str]:
    """The conversations to play: chat, where it is among ``kinds``, first and last."""
    others = [kind for kind in kinds if kind != CHAT]
    return [CHAT, *others, CHAT] if CHAT in kinds and others else list(kinds)


def longest(kind: str, max_tokens: int) -> int:
    """Tokens that an answer of such a conversation may have, where others have ``max_tokens``."""
    return min(max_tokens, CHAT_TOKENS) if kind == CHAT else max_tokens


# --- the server and its answers ---


@contextmanager
def served(url: str | None, flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The address of the server at ``url``, or of one that runs as long as the block does."""
    if url is not None:
        parts = urlsplit(url)
        if parts.hostname is None:
            sys.exit(f"{url} is no URL of a server: give one like http://127.0.0.1:8080.")
        yield parts.hostname, parts.port or 80
        return
    command = [f"{SERVER}.__main__", "--log-level", "WARNING", *flags]
    with running({SERVER: command}) as servers:
        yield servers[SERVER].address


def play(address: tuple[str, int], kind: str, num_turns: int, max_tokens: int) -> Conversation:
    """Hold the conversation called ``kind``; each answer goes into the next request."""
    conversation = Conversation(kind)
    before = ""
    for question in CONVERSATIONS[kind][:num_turns]:
        conversation.messages.append({"role": "user", "content": question})
        turn = ask(address, conversation.messages, max_tokens, before)
        before = turn.text
        conversation.messages.append({"role": "assistant", "content": turn.text})
        conversation.turns.append(turn)
    return conversation


def ask(
    address: tuple[str, int], messages: Sequence[dict[str, str]], max_tokens: int, before: str
) -> Turn:
    """Get one greedy answer and its counts; ``before`` is the answer to the last question."""
    start = time.perf_counter()
    document = request(address, messages, max_tokens)
    seconds = time.perf_counter() - start
    choice = document["choices"][0]
    text = choice["message"]["content"] or ""
    usage = document["usage"]
    said = document["draft"]["counts"]
    emitted = usage["completion_tokens"] - 1
    return Turn(
        text=text,
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        repeated=SequenceMatcher(None, before, text, autojunk=False).ratio(),
        seconds=seconds,
        counts=Counts(
            emitted=emitted,
            passes=said["target_passes"] or emitted,  # a server that never drafts counts none
            drafted=said["drafted_tokens"],
            accepted=said["accepted_tokens"],
            copied=said.get("copied_tokens"),
            accepted_copied=said.get("accepted_copied_tokens"),
        ),
    )


def request(
    address: tuple[str, int], messages: Sequence[dict[str, str]], max_tokens: int
) -> dict[str, Any]:
    """Send a chat request, with the counts of drafts asked for; exit where it is refused."""
    body = {
        "model": "default_model",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "include_draft": True,
    }
    headers = {"Content-Type": "application/json"}
    with closing(HTTPConnection(*address, timeout=LONGEST_WAIT)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
    if response.status != 200:
        sys.exit(f"The server refused a request: {content.decode(errors='replace')}")
    return json.loads(content)


# --- what is printed and written ---


def row(name: str, counts: Counts, *more: str) -> str:
    """A line of a table, as ``header`` says."""
    copies = ["-" if n is None else n for n in (counts.copied, counts.accepted_copied)]
    figures = [counts.emitted, counts.passes, f"{counts.per_pass:.2f}"]
    figures += [counts.drafted, counts.accepted, *copies]
    return "| " + " | ".join([name, *map(str, figures), *more]) + " |"


def header(first: str, *more: str) -> str:
    """The two lines above the rows of a table."""
    columns = [first, "tokens", "passes", "tokens per pass", "drafted", "kept", "copied"]
    columns += ["copied and kept", *more]
    return "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns)


def turn_table(conversation: Conversation) -> str:
    """A table with a row for each turn."""
    lines = [f"\n## {conversation.kind}\n", header("turn", "like the last", "ended", "seconds")]
    for number, turn in enumerate(conversation.turns, start=1):
        more = (f"{turn.repeated:.2f}", turn.finish_reason, f"{turn.seconds:.1f}")
        lines.append(row(str(number), turn.counts, *more))
    return "\n".join(lines)


def summary(played: Sequence[Conversation]) -> str:
    """A table with a row for each conversation, and one for all edits: turns 2 and later."""
    lines = ["\n## From the second turn on\n", header("conversation")]
    names = [conversation.kind for conversation in played]
    for i, conversation in enumerate(played):
        again = ", again" if conversation.kind in names[:i] else ""
        lines.append(row(conversation.kind + again, total(conversation.turns[1:])))
    edited = [turn for c in played if c.kind != CHAT for turn in c.turns[1:]]
    if edited:
        lines.append(row(f"all but {CHAT}", total(edited)))
    return "\n".join(lines)


def write_json(path: Path, flags: Sequence[str], played: Sequence[Conversation]) -> None:
    """Write the counts and texts, and what they are of."""
    document = {
        "format": 1,
        "version": mlx_eagle.__version__,
        "flags": list(flags),
        "conversations": [asdict(conversation) for conversation in played],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


# --- the check ---


def check(played: Sequence[Conversation], max_tokens: int) -> None:
    """Compare each text with mlx-lm's greedy one for the same messages; exit where one differs."""
    mlx_eagle.load_fast_blas()
    from mlx_lm import generate  # not sooner: MLX takes the BLAS that is loaded before it

    from mlx_eagle.demo.pair import load_demo

    model, tokenizer, _ = load_demo("float32")
    expected: dict[str, str] = {}  # by what was said before: the second chat is the first again
    num_different = 0
    for conversation in played:
        for i, turn in enumerate(conversation.turns):
            said = conversation.messages[: 2 * i + 1]
            key = json.dumps(said)
            if key not in expected:
                prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True)
                most = longest(conversation.kind, max_tokens)
                expected[key] = generate(model, tokenizer, prompt, max_tokens=most)
            if turn.text != expected[key]:
                num_different += 1
                print(f"{conversation.kind}, turn {i + 1}: {turn.text!r} is {expected[key]!r}")
    num_texts = sum(len(conversation.turns) for conversation in played)
    print(f"\n{num_texts - num_different} of {num_texts} texts are mlx-lm's.")
    if num_different:
        sys.exit(1)


if __name__ == "__main__":
    main()
