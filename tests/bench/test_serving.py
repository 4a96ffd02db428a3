"""The benchmark of the server: arithmetic, processes, and the whole command on the tiny pair."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from serving import ours, theirs, write_pair

from mlx_eagle.bench import __main__ as command
from mlx_eagle.bench import flags as bench_flags
from mlx_eagle.bench import questions, servers, serving
from mlx_eagle.bench.configurations import PLAIN, make_configurations

STUB = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = body["messages"][0]["content"].split()
        if words[0] == "refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": "no such tree"}}).encode())
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b": a comment\\n\\n")
        for word in words:
            if word == "die":
                print("out of memory", flush=True)
                os._exit(3)
            time.sleep(0.02)
            self.say({"choices": [{"delta": {"content": word}}]})
        self.say({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]})
        usage = {"completion_tokens": len(words) + 1, "mean_acceptance_length": 1.5}
        self.say({"usage": usage, "choices": []})
        self.wfile.write(b"data: [DONE]\\n\\n")

    def say(self, chunk):
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")

def main():
    if "--broken" in sys.argv:
        sys.exit("there is no such model")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path, monkeypatch) -> str:
    """The name of a module that serves without a model."""
    (tmp_path / "stub_server.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stub_server"


def bodies(*texts: str) -> list[dict]:
    return [servers.chat_body(text, 8) for text in texts]


def has_ended(process_id: int) -> bool:
    """Whether it has within some seconds."""
    for _ in range(100):
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


# --- arithmetic ---------------------------------------------------------------------------


def random_stream(dice: random.Random) -> tuple[list[tuple[float, str]], servers.Answer]:
    """Pieces with their moments, some without text, and what a client makes of them."""
    now = 0.0
    pieces = []
    for _ in range(dice.randrange(1, 9)):
        now += dice.choice([0.0, 0.01, dice.random()])
        text = dice.choice(["", "a", "bc"])
        pieces.append((now, text))
    now += 0.01
    stream = [(at, {"choices": [{"delta": {"content": text}}]}) for at, text in pieces]
    stream.append((now, {"choices": [{"delta": {}, "finish_reason": "length"}]}))
    pieces.append((now, ""))
    stream.append((now + 1, {"choices": [], "usage": {"completion_tokens": len(pieces)}}))
    return pieces, servers.read_answer(stream)


def test_waits_are_those_of_a_naive_reading():
    dice = random.Random(5)
    all_pieces, answers = zip(*(random_stream(dice) for _ in range(200)), strict=True)
    per_token = []
    pauses = []
    firsts = []
    for pieces, answer in zip(all_pieces, answers, strict=True):
        assert answer.text == "".join(text for _, text in pieces)
        told = [moment for moment, text in pieces if text]
        firsts.append(told[0] if told else pieces[-1][0])
        if told and len(pieces) > 1:
            per_token.append((pieces[-1][0] - told[0]) / (len(pieces) - 1))
        longest = None
        for i in range(1, len(told)):
            gap = told[i] - told[i - 1]
            longest = gap if longest is None or gap > longest else longest
        if longest is not None:
            pauses.append(longest)
    found = serving.load_figures([servers.Load(list(answers), 4.0)])
    num_tokens = sum(map(len, all_pieces))
    assert found["tps"] == num_tokens / 4.0 and found["output_tokens"] == num_tokens
    for name, values in (
        ("seconds_per_token", per_token), ("longest_pause", pauses), ("ttft", firsts)
    ):  # fmt: skip
        assert found[name] == {"median": median(values), "worst": max(values)}, name


def test_acceptance_is_tokens_over_passes():
    answers = [
        servers.Answer("", n, mean_acceptance_length=tau) for n, tau in ((9, 2.0), (4, 1.0))
    ]
    assert serving.acceptance_length(answers) == pytest.approx((8 + 3) / (4 + 3))
    assert serving.acceptance_length([servers.Answer("", 9)]) is None


# --- processes ----------------------------------------------------------------------------


def test_clients_share_the_requests_and_servers_end_with_the_block(stub):
    with servers.running({"one": [stub], "two": [stub]}) as up:
        ids = [server.process.pid for server in up.values()]
        load = servers.run_load(up["one"], bodies(*["a b c"] * 5, "d"), 3)
        assert [answer.text for answer in load.answers] == ["abc"] * 5 + ["d"]
        assert [answer.output_tokens for answer in load.answers] == [4] * 5 + [2]
        assert load.tps == pytest.approx(22 / load.seconds)
        # Two of them one after the other take three sleeps each.
        assert load.seconds >= 0.12 and load.answers[0].longest_pause > 0
        assert all(answer.mean_acceptance_length == 1.5 for answer in load.answers)
    assert all(map(has_ended, ids))


@pytest.mark.parametrize("ending", ["Ctrl-C", "SIGTERM", "error"])
def test_no_process_is_left_behind(stub, ending):
    ids = []
    expected = ZeroDivisionError if ending == "error" else KeyboardInterrupt
    with pytest.raises(expected), servers.running({"one": [stub]}) as up:
        ids.append(up["one"].process.pid)
        if ending == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        raise expected
    assert all(map(has_ended, ids)) and ids


def test_a_server_ends_with_the_process_that_started_it(stub):
    """However that went: its end of the pipe is closed in any case."""
    line = [sys.executable, "-P", servers.__file__, stub, "--port", "0"]
    with subprocess.Popen(line, stdin=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.stdin.close()
        assert process.wait(10) == 0


def test_a_server_that_does_not_start_is_one_sentence(stub):
    sentence = r"one ended with code 1 \(there is no such model\)"
    with pytest.raises(ValueError, match=sentence), servers.running({"one": [stub, "--broken"]}):
        pass


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("a die b", r"one ended with code 3 \(out of memory\): start it by itself"),
        ("refuse", r"the server refused a request \(no such tree\)\."),
    ],
)
def test_a_server_that_fails_is_one_sentence(stub, text, sentence):
    with servers.running({"one": [stub]}) as up, pytest.raises(ValueError, match=sentence):
        servers.run_load(up["one"], bodies("a", text, "b"), 2)


# --- the command --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, str]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def in_this_process(commands):
    """Both servers as the command line has them, without processes of their own."""
    plain, drafted = commands.values()
    target = plain[plain.index("--model") + 1]
    with theirs(target) as one, ours(*drafted[1:]) as other:
        yield {
            name: SimpleNamespace(address=asked.address, check=lambda: None)
            for name, asked in zip(commands, (one, other), strict=True)
        }


def flags(pair: dict[str, str], folder: Path, *more: str) -> list[str]:
    prompts = folder / "mine.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("so?", "Who is it?")))
    found = ["--serve", "1,2", "--model", pair["target"], "--draft-model", pair["head"]]
    found += ["--prompts", str(prompts), "--max-tokens", "5", "--repeats", "1"]
    return [*found, "--out", str(folder / "out"), *more]


def check_results(folder: Path, labels: list[str], num_loads: int) -> None:
    document = json.loads((folder / "results.json").read_text())
    rows = document["serving"]
    assert [(row["clients"], row["configuration"]) for row in rows] == [
        (num, label) for num in (1, 2) for label in labels
    ]
    for row in rows:
        assert row["num_prompts"] == 2 and row["differing"] == [], "the texts are mlx-lm's"
        assert row["speedup"] > 0 and row["mean_acceptance_length"] >= 1
        assert row["plain"]["output_tokens"] == row["speculative"]["output_tokens"] > 3
        assert row["speculative"]["ttft"]["worst"] >= row["speculative"]["ttft"]["median"] > 0
    lines = list(csv.DictReader((folder / "results.csv").open()))
    assert len(lines) == num_loads * 2 and {line["role"] for line in lines} == {
        "plain", "speculative"
    }  # fmt: skip
    report = (folder / "report.md").read_text()
    assert report.count("\n| 1 | ") == report.count("\n| 2 | ") == 2 * len(labels)
    assert "2 of 2" in report and "| clients | 1, 2 |" in report
    assert (folder / "plots" / "serving.png").is_file()
    assert "](plots/serving.svg)" in report


@pytest.mark.exhaustive
def test_the_whole_command(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serving, "running", in_this_process)
    more = ["--num-draft-tokens", "2", "--order", "mirror", "--json"]
    command.main(flags(pair, tmp_path, *more))
    out, err = capsys.readouterr()
    check_results(tmp_path / "out", ["k=2"], 2 * 4)
    assert json.loads(out.splitlines()[-1])["serving"][0]["clients"] == 1
    assert "2 clients, k=2: " in out and "bench: 8 of 8 runs" in err


@pytest.mark.exhaustive
def test_the_whole_command_with_processes(pair, tmp_path, capsys):
    command.main(flags(pair, tmp_path, "--num-draft-tokens", "2,auto", "--tree", "2x2:3"))
    check_results(tmp_path / "out", ["k=2", "auto", "tree 2x2:3"], 2 * 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--tree", "20x20:300", "--num-draft-tokens", "1"], "refused a request ("),
        (["--draft-model", "."], "mlx_eagle.server ended with code 2 (error: "),
        (["--draft-model", "/no/such/head"], "/no/such/head does not exist"),
    ],
)
def test_what_the_server_cannot_do_is_one_sentence(pair, tmp_path, capsys, more, sentence):
    with pytest.raises(SystemExit) as stop:
        command.main(flags(pair, tmp_path, *more))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in err and "Traceback" not in err


@pytest.mark.parametrize(
    "more, sentence",
    [
        ("--serve 0", "--serve holds '0': give numbers of clients"),
        ("--serve 1,x", "--serve holds 'x'"),
        ("--serve 2,2", "give every value once"),
        ("--serve --limit 2 --prompts gsm8k", "--serve holds 8, but 2 prompts are taken"),
        ("--serve --batch 2", "--batch does not go with --serve"),
        ("--serve --context 64", "--context does not go with --serve"),
        ("--serve --temp 0.5", "--temp is 0.5: with --serve all is greedy"),
        ("--serve --order weave", "--order weave does not go with --serve"),
    ],
)
def test_mistakes_cost_one_sentence(more, sentence, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        command.main([*more.split(), "--out", str(tmp_path)])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert sentence in err and err.count("\n") == 1 and err.startswith("error: ")


def test_both_servers_serve_as_many_requests_as_there_are_clients():
    args = bench_flags.build_parser().parse_args(["--draft-model", "auto"])
    commands = serving.server_commands(args, "/demo", bench_flags.Settings(clients=(1, 8, 2)))
    for line in commands.values():
        for flag in ("--decode-concurrency", "--prompt-concurrency"):
            assert line[line.index(flag) + 1] == "8"
    assert commands[serving.PLAIN_SERVER][1:3] == ["--model", "/demo"]
    assert commands[serving.OUR_SERVER][1:4] == ["--usage-stats", "--draft-model", "auto"]


@pytest.mark.parametrize("way", ["plain", "chain", "tree"])
def test_a_request_says_how_to_draft(monkeypatch, way):
    monkeypatch.setattr(serving, "run_load", lambda server, bodies, num_clients: (server, bodies))
    chain, tree = make_configurations(bench_flags.Settings(sizes=(2,), trees=("3/2+1",)))
    fields = {"plain": {}, "chain": {"num_draft_tokens": 2}, "tree": {"tree": "3/2+1"}}[way]
    configuration = {"plain": PLAIN, "chain": chain, "tree": tree}[way]
    up = {serving.PLAIN_SERVER: "theirs", serving.OUR_SERVER: "ours"}
    asked = [questions.Question("a", "1", "so?")]
    server, (body,) = serving.load(up, 1, asked, 9, configuration)
    assert server == ("theirs" if way == "plain" else "ours")
    assert body == servers.chat_body("so?", 9, **fields)


def test_some_clients_with_nothing_to_ask_are_refused():
    asked = [questions.Question("a", str(i), "so?") for i in range(3)]
    with pytest.raises(ValueError, match="--serve holds 4, but 3 prompts are taken"):
        bench_flags.check_questions(bench_flags.Settings(clients=(4,)), asked)
