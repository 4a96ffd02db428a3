"""Errors that nobody foresaw: a client is told in the shape of its API, and the server goes on."""

import http.client
import json
from dataclasses import replace

import pytest
from serving import ask_json, ours

from mlx_eagle.server.client_session import ClientSession
from mlx_eagle.server.routes import DOCUMENTS, ROUTES

USER = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/tokenize": {"content": "Hello"},
}


@pytest.fixture(scope="module")
def server(pair):
    with ours("--model", pair["target"], "--num-draft-tokens", "0") as asked:
        yield asked


def fail(*args: object, **more: object) -> None:
    raise KeyError("some field")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("place", ["check", "answer"])
def test_an_error_in_a_route(server, path, place, monkeypatch, caplog):
    body = BODIES[path]
    with monkeypatch.context() as patch:
        patch.setitem(ROUTES, path, replace(ROUTES[path], **{place: fail}))
        status, document = ask_json(server, path, body)
    message = document["error"]["message"]
    assert status == 500 and message.endswith("its log says why.") and "some field" not in message
    assert document["error"]["type"] == ("api_error" if "messages" in path else "server_error")
    (record,) = [each for each in caplog.records if each.exc_info]
    assert isinstance(record.exc_info[1], KeyError)
    assert ask_json(server, path, body)[0] == 200


def test_an_error_in_a_get(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(DOCUMENTS, "/props", fail)
        assert ask_json(server, "/props", None, "GET")[0] == 500
    assert ask_json(server, "/props", None, "GET")[0] == 200


@pytest.mark.parametrize("path", list(BODIES)[:4])
def test_an_error_within_a_stream(server, path, monkeypatch):
    pieces = ClientSession.pieces

    def broken(self, *args, **more):
        yield from list(pieces(self, *args, **more))[:1]
        fail()

    monkeypatch.setattr(ClientSession, "pieces", broken)
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    connection.request("POST", path, json.dumps(BODIES[path] | {"stream": True}))
    text = connection.getresponse().read().decode()
    connection.close()
    last = json.loads(text.strip().rpartition("data: ")[2])
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert error["message"].endswith("its log says why.")


NAMESPACES = {
    "no name": (
        {"tools": [{"type": "function", "name": "f"}]},
        "a namespace of tools has no name",
    ),
    "a tool without": ({"name": "space", "tools": [{"type": "function"}]}, "space has no name"),
}


@pytest.mark.parametrize("name", NAMESPACES)
def test_namespaces_and_tools_without_names(server, name):
    space, sentence = NAMESPACES[name]
    body = {"input": "Hello", "tools": [{"type": "namespace"} | space]}
    status, document = ask_json(server, "/v1/responses", body)
    assert status == 400 and sentence in document["error"]["message"]
