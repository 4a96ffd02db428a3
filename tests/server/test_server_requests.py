"""The server's edges: bad requests, names, flags, signals; and that it goes on serving."""

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys

import mlx_lm.server
import openai
import pytest
from serving import NUM_CHARACTERS, ours

from mlx_eagle.server import __main__ as command
from mlx_eagle.server.listener import BODY_BYTES as MAX_BODY

VOCAB = NUM_CHARACTERS + 2
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def server(pair):
    with ours("--model", pair["target"], "--draft-model", pair["model"]) as asked:
        asked.good = asked.complete(prompt="Once").choices
        yield asked


def post(asked, path: str, raw: bytes, length: str | None = None) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(*asked.address, timeout=20)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(len(raw)) if length is None else length)
    connection.endheaders(raw)
    response = connection.getresponse()
    document = json.loads(response.read())
    connection.close()
    return response.status, document


def refused(answer: tuple[int, dict], status: int, sentence: str, code: str = "") -> None:
    found, document = answer
    message = document["error"]["message"]
    assert (found, document["error"]["code"]) == (status, code or status), message
    assert sentence in message and message.endswith(".") and "\n" not in message


BODIES = {
    "nothing": (TEXT, b"", "is not JSON"),
    "not json": (TEXT, b'{"prompt": "a"', "is not JSON"),
    "not text": (TEXT, b'{"prompt": "\xff"}', "not valid UTF-8"),
    "half a character": (TEXT, b'{"prompt": "\\ud800"}', "not valid UTF-8"),
    "deep": (TEXT, b"[" * 200_000, "nested too deeply"),
    "a list": (TEXT, b"[1]", "give a JSON object"),
    "digits": (TEXT, b'{"seed": ' + b"9" * 5000 + b"}", "holds a number of thousands of digits."),
    "infinite": (
        TEXT,
        b'{"prompt": "a", "temperature": 1e999}',
        "is inf: give 0, or 1e-20 to 100",
    ),
    "not a number": (
        TEXT,
        b'{"prompt": "a", "temperature": NaN}',
        "is nan: give 0, or 1e-20 to 100",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_requests(server, name):
    path, raw, sentence = BODIES[name]
    refused(post(server, path, raw), 400, sentence)
    assert server.complete(prompt="Once").choices == server.good


FIELDS = {
    "no prompt": ({}, "the request has no prompt"),
    "prompt": ({"prompt": {"a": 1}}, "prompt is an object: give a string, tokens, or a list"),
    "no prompts": ({"prompt": []}, "prompt is a list: give a string, tokens, or a list"),
    "prompts": ({"prompt": ["a", 5]}, "a prompt is something else than a string or a list"),
    "negative token": ({"prompt": [[1, -2]]}, "a prompt has a token below 0"),
    "unknown token": ({"prompt": [1, VOCAB]}, f"has token {VOCAB}, but this model has {VOCAB}"),
    "many prompts": ({"prompt": ["a"] * 65}, "asks for 65 answers: ask for at most 64"),
    "many answers": ({"prompt": ["a"] * 9, "n": 8}, "asks for 72 answers"),
    "best of": ({"best_of": 3}, "best_of is not supported: leave it out"),
    "logprobs": ({"logprobs": 21}, "logprobs is 21: give 0 to 20"),
    "logprobs and echo": ({"logprobs": 1, "echo": True}, "echo and logprobs together"),
    "suffix": ({"suffix": "a"}, "suffix is not supported"),
    "empty prompt": ({"prompt": ""}, "the prompt is empty"),
    "long prompt": ({"prompt": "a" * 2000}, "has 2000 tokens, but this model takes texts of 2000"),
    "negative draft": ({"num_draft_tokens": -1}, "num_draft_tokens is -1: give 0 to 64"),
    "endless draft": ({"num_draft_tokens": 10**9}, "give 0 to 64"),
    "draft": ({"num_draft_tokens": "3"}, "num_draft_tokens is '3': give a number or 'auto'"),
    "half a draft": ({"num_draft_tokens": 1.5}, "num_draft_tokens is 1.5: give a whole number"),
    "temperature": ({"temperature": -1}, "temperature is -1: give 0, or 1e-20 to 100"),
    "boolean": ({"max_tokens": True}, "max_tokens is a boolean"),
    "no tokens": ({"max_tokens": 0}, "give 1 to 2147483647"),
    "negative tokens": ({"max_tokens": -5}, "give 1 to 2147483647"),
    "tokens": ({"max_tokens": "5"}, "max_tokens is a string: give a number"),
    "tools": ({"tools": ["f"]}, "a tool is a string: give an object"),
    "a tool": ({"tools": [{"type": "function", "function": {}}]}, "a tool has no name"),
    "seed": ({"seed": -5}, "seed is -5"),
    "top_k": ({"top_k": VOCAB, "temperature": 1}, f"give less than {VOCAB}"),
    "xtc": ({"xtc_threshold": 0.9, "xtc_probability": 1.0}, "xtc_threshold is 0.9: give 0 to 0.5"),
    "bias": ({"logit_bias": {str(VOCAB): 1}}, f"this model has {VOCAB}."),
    "bias of words": ({"logit_bias": {"word": 1}}, "give token ids"),
    "bias of lists": ({"logit_bias": {"1": []}}, "logit_bias of 1 is a list"),
    "stop": ({"stop": 5}, "stop is something else"),
    "empty stop": ({"stop": ["a", ""]}, "stop is something else"),
    "stream": ({"stream": "yes"}, "stream is a string: give a boolean"),
    "stream options": ({"stream_options": {"include_usage": 1}}, "include_usage is a number"),
    "adapters": ({"adapters": "folder"}, "adapters is not supported: leave it out"),
}
MESSAGES = {
    "no messages": (None, "the request has no messages"),
    "a string": ("Hello", "messages is a string"),
    "none": ([], "give a list of at least one message"),
    "many": ([USER] * 20_001, "there are 20001 messages: give at most 20000"),
    "strings": (["Hello"], "an object with a role"),
    "no role": ([{"content": "Hello"}], "an object with a role"),
    "content": ([{"role": "user", "content": 5}], "content is a number"),
    "image": ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "images"),
    "part": ([{"role": "user", "content": [{"type": "text"}]}], "part is null"),
    "tool call": ([USER, {"role": "assistant", "tool_calls": ["f"]}], "a tool call is a string"),
    "arguments": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
        "the arguments of a tool call are not JSON",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_make_no_sense(server, name, stream):
    fields, sentence = FIELDS[name]
    prompt = {} if name == "no prompt" else {"prompt": "a"}
    raw = json.dumps({**prompt, "stream": stream, **fields}).encode()
    code = "context_length_exceeded" if name == "long prompt" else ""
    refused(post(server, TEXT, raw), 400, sentence, code)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_that_make_no_sense(server, name):
    messages, sentence = MESSAGES[name]
    refused(post(server, CHAT, json.dumps({"messages": messages}).encode()), 400, sentence)


def test_the_server_goes_on_after_all_of_these(server):
    assert server.complete(prompt="Once").choices == server.good


def test_lengths_and_paths_that_are_wrong(server):
    refused(post(server, TEXT, b"{}", length="-2"), 400, "give a number of bytes")
    refused(post(server, TEXT, b"{}", length="two"), 400, "give a number of bytes")
    refused(post(server, TEXT, b"{}", length=str(MAX_BODY + 1)), 413, "send at most")
    refused(post(server, "/v1/embeddings", b"{}"), 404, "nothing is at /v1/embeddings")
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(f"POST {TEXT} HTTP/1.0\r\n\r\n".encode())
        assert b" 411 " in connection.recv(100)
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(f"POST {TEXT} HTTP/1.0\r\nContent-Length: 99\r\n\r\n{{".encode())
    assert server.complete(prompt="Once").choices == server.good


def test_bodies_whose_length_is_in_doubt(server):
    """What stands before the server may count otherwise than the server."""
    headers = ("Transfer-Encoding: chunked", "Content-Length: 5")
    for header in headers:
        with socket.create_connection(server.address, timeout=20) as connection:
            head = f"POST {TEXT} HTTP/1.1\r\nContent-Length: 2\r\n{header}\r\n\r\n"
            connection.sendall(f"{head}{{}}".encode())
            assert b" 400 " in connection.recv(100)


def test_what_clients_send_is_not_repeated_at_length(server):
    long = "x" * 30_000
    for path, body in ((f"/v1/{long}", {}), (TEXT, {"prompt": "a", "draft_model": long})):
        status, document = post(server, path, json.dumps(body).encode())
        assert status == 404 and len(document["error"]["message"]) < 300
    status, document = post(server, TEXT, json.dumps({"prompt": "a", "model": long}).encode())
    assert status == 200 and len(document["model"]) < 300
    for line in (f"GET /{long} HTTP/1.0", f"GET /v1/models/{long} HTTP/1.0", f"{long} / HTTP/1.0"):
        with socket.create_connection(server.address, timeout=20) as connection:
            connection.sendall(f"{line}\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        assert b"x" * 20 in answer and len(answer) < 1000


def test_names_of_models(server, pair):
    (model,) = server.client.models.list()
    assert model.id == pair["target"]
    assert server.client.models.retrieve(model.id).id == model.id
    for name in (model.id, "default_model"):
        got = server.complete(prompt="Once", model=name, draft_model=pair["model"])
        assert got.choices == server.good
    got = server.complete(prompt="Once", model="gpt-4")
    assert got.choices == server.good and got.model == model.id
    with pytest.raises(openai.NotFoundError, match="leave draft_model out"):
        server.complete(prompt="Once", draft_model="another")
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        server.client.models.retrieve("gpt-4")


def test_another_name_is_refused_where_that_is_wanted(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["model"], "--strict-model")
    with ours(*flags) as asked:
        assert asked.complete(prompt="Once", model=pair["target"]).model == pair["target"]
        with pytest.raises(openai.NotFoundError, match=r"gpt-4 is not served here, but .* is"):
            asked.complete(prompt="Once", model="gpt-4")


def test_health(server):
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b'{"status": "ok"}')
    connection.close()


def test_usage_is_mlx_lms_without_the_flag(server):
    usage = server.complete(prompt="Once").to_dict()["usage"]
    assert "tau" not in usage and "drafted_tokens" not in usage


def test_flags_are_those_of_mlx_lm_server(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server", "--help"])
    with pytest.raises(SystemExit):
        mlx_lm.server.main()
    wanted = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    found = set(re.findall(r"--[a-z-]+", command.build_parser().format_help()))
    assert wanted <= found
    assert found - wanted >= {"--usage-stats", "--quantize-draft"}


MISTAKES = {
    "negative draft": (("--num-draft-tokens", "-1"), "give 0 (plain decoding) or more"),
    "no concurrency": (("--decode-concurrency", "0"), "--decode-concurrency is 0"),
    "template": (("--chat-template", "x"), "need --model"),
    "pipeline": (("--pipeline",), "start the command with mlx.launch"),
    "temperature": (("--temp", "-1"), "give 0 (greedy) or more"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_flags_that_make_no_sense(name):
    flags, sentence = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        command.check_arguments(command.build_parser().parse_args(flags))


@pytest.fixture
def start():
    """Start the command with some flags, at a free port; none outlives the test."""
    started = []

    def command(*flags: str) -> subprocess.Popen:
        line = [sys.executable, "-m", "mlx_eagle.server", "--port", "0", *flags]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield command
    for process in started:
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.exhaustive
def test_names_of_files_that_are_wrong(pair, server, start, tmp_path):
    port = str(server.address[1])
    damaged = shutil.copytree(pair["target"], tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-300])
    pairs = {
        "is cut off: .*download it": start("--model", str(damaged), "--draft-model", "lookup"),
        "could not be reached|neither a folder": start(
            "--model", "no/such", "--draft-model", "lookup"
        ),
        "a/b/c/d does not exist": start("--model", "no/such", "--draft-model", "a/b/c/d"),
        f"cannot listen at 127.0.0.1, port {port}": start(
            "--model", pair["target"], "--draft-model", "lookup", "--port", port
        ),
    }
    for sentence, process in pairs.items():
        _, err = process.communicate(timeout=60)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert process.returncode == 2, err
        assert len(errors) == 1 and re.search(sentence, errors[0]), err
        assert "Traceback" not in err


def ask(url: str, **body) -> http.client.HTTPResponse:
    host, port = re.fullmatch(r"http://(.+):(\d+)/v1", url).groups()
    connection = http.client.HTTPConnection(
        host.replace("0.0.0.0", "127.0.0.1"), int(port), timeout=60
    )
    connection.request("POST", TEXT, json.dumps({"prompt": "Once", "stream": True} | body))
    return connection.getresponse()


@pytest.mark.exhaustive
def test_signals(pair, start):
    """SIGTERM lets answers be finished; a second one does not; loopback unless told otherwise."""
    flags = ("--model", pair["target"], "--draft-model", pair["model"], "--max-tokens", "1000")
    flags += ("--num-draft-tokens", "3")
    endless = {"logit_bias": {str(VOCAB - 1): -100}}
    first, second = start(*flags), start(*flags, "--host", "0.0.0.0", "--no-api-key")
    url = first.stdout.readline().split()[-1]
    assert url.startswith("http://127.0.0.1:")
    response = ask(url, **endless, max_tokens=200)
    assert response.readline().startswith(b": keepalive")
    first.send_signal(signal.SIGTERM)
    assert response.read().endswith(b"data: [DONE]\n\n")
    out, err = first.communicate(timeout=20)
    assert first.returncode == 0, err
    assert "Waiting for 1 request to finish; press Ctrl-C again" in out and "Traceback" not in err

    url = second.stdout.readline().split()[-1]
    assert second.stdout.readline().startswith("Note: whoever reaches 0.0.0.0 can use it")
    response = ask(url, **endless)
    assert response.readline().startswith(b": keepalive")
    second.send_signal(signal.SIGINT)
    assert any(line.startswith("Waiting for 1 request") for line in second.stdout)
    second.send_signal(signal.SIGTERM)
    _, err = second.communicate(timeout=20)
    assert second.returncode == 0 and "Traceback" not in err
