"""Commands under ``mlx.launch``: two processes with a part of the target each, as one would be."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from drafter_pairs import tiny_gemma3
from mlx_lm.utils import save_model
from ranks import first_of_ports
from serving import write_pair, write_tokenizer

LIMIT = 200  # seconds: on a busy machine a process needs 20 to start
PROMPT = ("--prompt", "hello", "--temp", "0", "--max-tokens", "24")

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(4 * LIMIT)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, str]:
    return write_pair(tmp_path_factory.mktemp("pair"))


def launched(words: Sequence[str], num_ranks: int = 2) -> list[str]:
    launch = str(Path(sys.executable).parent / "mlx.launch")
    port = str(first_of_ports(num_ranks))
    where = ["-n", str(num_ranks), "--backend", "ring", "-p", port, "--python", sys.executable]
    return [sys.executable, launch, *where, "--", "-m", *words]


def run(words: Sequence[str], typed: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(words, input=typed, capture_output=True, text=True, timeout=LIMIT)


def alone(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", *words]


def text_of(out: str) -> str:
    return out.split("==========\n")[1]


@pytest.mark.parametrize("num_draft_tokens", ["3", "auto"])
def test_two_ranks_write_the_text_of_one(pair, num_draft_tokens):
    files = ("--model", pair["target"], "--draft-model", f"{pair['head']}+lookup")
    words = ("mlx_eagle.generate", *files, *PROMPT, "--num-draft-tokens", num_draft_tokens)
    one = run(alone(words))
    two = run(launched(words))
    assert one.returncode == 0 and len(text_of(one.stdout)) > 5
    assert text_of(two.stdout) == text_of(one.stdout)
    assert two.stdout.count("==========") == 2  # of rank 0 alone


def test_a_chat_of_two_ranks_answers_as_one_does(pair):
    words = ("mlx_eagle.chat", "--model", pair["target"], "--draft-model", pair["head"])
    typed = "hello there\nagain\n/exit\n"
    one = run(alone((*words, "--max-tokens", "12")), typed)
    two = run(launched((*words, "--max-tokens", "12")), typed)
    assert len(one.stdout.split()) > 1 and two.stdout == one.stdout


def test_ctrl_c_ends_a_chat_and_all_its_ranks(pair):
    """Rank 0 says so on the terminal itself: mlx.launch passes nothing on by then."""
    words = launched(("mlx_eagle.chat", "--model", pair["target"], "--draft-model", "lookup"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    seen = b""
    try:
        os.write(terminal, b"hello\n/help\n")
        while b"Ctrl-C: leaves" not in seen:
            seen += os.read(terminal, 1024)
        os.write(terminal, b"\x03")
        with suppress(OSError):  # no process has the terminal any more
            while more := os.read(terminal, 1024):
                seen += more
        os.waitpid(pid, 0)  # mlx.launch ends after all that it has started
        pid = 0
    finally:
        os.close(terminal)
        if pid:
            os.kill(pid, signal.SIGKILL)
    assert b"\ninterrupted" in seen


def test_what_cannot_be_split_is_one_sentence_of_rank_0(pair, tmp_path):
    gemma = tiny_gemma3()
    write_tokenizer(tmp_path)
    save_model(tmp_path, gemma)
    config = {"model_type": "gemma3_text", **vars(gemma.args)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cases = {
        "between its layers: leave --pipeline out": ("--model", pair["target"], "--pipeline"),
        "cannot split a gemma3_text within": ("--model", str(tmp_path)),
        "start it with -n 3": (),
        "give the prompt itself": ("--model", pair["target"], "--prompt", "-"),
    }
    for sentence, flags in cases.items():
        done = run(launched(("mlx_eagle.generate", "--draft-model", "lookup", *PROMPT, *flags)))
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and sentence in errors[0], done.stderr
        assert "Traceback" not in done.stderr


def ask(port: int, number: int, **options) -> str:
    body = {"prompt": "ab" * number, "max_tokens": 24, "temperature": 0, **options}
    head = {"Content-Type": "application/json"}
    request = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), head)
    with urlopen(request, timeout=LIMIT) as reply:
        if options.get("stream"):
            reply.read(100)  # and the client leaves
            return ""
        return json.load(reply)["choices"][0]["text"]


@contextmanager
def serving(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen, int, list[int]]]:
    """A server: its process, its port, and the process ids of all its ranks by their number."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        ranks: dict[str, int] = {}
        try:
            found = next(filter(None, (re.search(r":(\d+)/v1", line) for line in process.stdout)))
            threading.Thread(target=process.stdout.read, daemon=True).start()
            children = Path(f"/proc/{process.pid}/task").glob("*/children")
            for child in " ".join(path.read_text() for path in children).split():
                settings = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
                ranks |= {s: int(child) for s in settings if s.startswith("MLX_RANK=")}
            yield process, int(found[1]), [pid for _, pid in sorted(ranks.items())]
        finally:
            for pid in (process.pid, *ranks.values()):
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)


def answers(port: int) -> dict:
    """Eight at a time, half of them with auto; a client that leaves; then some of other kinds."""
    found: dict = {}

    def one(number: int) -> None:
        lengths = {"num_draft_tokens": "auto"} if number % 2 else {}
        found[number] = ask(port, number, **lengths)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    ask(port, 9, stream=True, max_tokens=1000)
    for thread in threads:
        thread.join()
    found["cached"] = ask(port, 3)
    found["stopped"] = ask(port, 5, stop=["e", "r", "9"])
    found["sampled"] = ask(port, 5, temperature=1.0, seed=7)
    found["held"] = ask(port, 5, grammar={"regex": "[a-f]{9}"})
    return found


def ended(pids: Sequence[int]) -> bool:
    """Whether these processes end soon."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
def test_a_server_of_two_ranks_answers_as_one_does(pair):
    files = ("--model", pair["target"], "--draft-model", f"{pair['head']}+lookup")
    words = ("mlx_eagle.server", *files, "--port", "0", "--num-draft-tokens", "3")
    with serving(alone(words)) as (_, port, _):
        expected = answers(port)
    assert len(expected) == 12 and re.fullmatch("[a-f]{9}", expected["held"])
    with serving(launched(words)) as (process, port, ranks):
        assert len(ranks) == 2
        assert answers(port) == expected
        last: list[str] = []
        asking = threading.Thread(target=lambda: last.append(ask(port, 1)))
        asking.start()
        time.sleep(1)
        os.kill(ranks[0], signal.SIGTERM)
        asking.join()
        assert last == [expected[1]] and ended(ranks)
        process.wait(timeout=LIMIT)


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
def test_a_server_without_one_of_its_ranks_ends(pair):
    words = ("mlx_eagle.server", "--model", pair["target"], "--draft-model", "lookup")
    with serving(launched((*words, "--port", "0"))) as (process, _, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        assert ended(ranks)
        process.wait(timeout=LIMIT)
