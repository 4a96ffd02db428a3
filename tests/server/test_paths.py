"""Addresses as clients put them together, and what is told of the model."""

import pytest
from serving import ask_json, ours

from mlx_eagle.server.handler import known_path
from mlx_eagle.server.routes import ROUTES

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(pair):
    with ours("--model", pair["target"], "--num-draft-tokens", "0") as asked:
        yield asked


@pytest.mark.parametrize("path, body", [
    ("/chat/completions", {"messages": USER}), ("/v1/chat/completions/", {"messages": USER}),
    ("/v1/v1/chat/completions", {"messages": USER}), ("//v1//completions", {"prompt": "a"}),
    ("/completions", {"prompt": "a"}), ("/responses", {"input": "a"}),
    ("/v1/v1/messages", {"messages": USER, "max_tokens": 2}),
    ("/messages/", {"messages": USER, "max_tokens": 2}),
])  # fmt: skip
def test_addresses_that_are_meant(server, path, body):
    assert (
        ask_json(server, path, {"max_tokens": 2} | body if "input" not in body else body)[0] == 200
    )


def test_paths_that_are_no_others():
    for path in ("/", "/health", "/v1/responses/resp_1", "/v1/other", "/api/chat", "/modelsx"):
        assert known_path(path, ROUTES) == path
    assert known_path("/models/a%2Fb", ROUTES) == "/v1/models/a%2Fb"


def test_the_model_as_every_api_has_it(server, pair):
    for path in ("/v1/models", "/models/"):
        _, found = ask_json(server, path, None, "GET")
        (model,) = found["data"]
        assert model["max_model_len"] == model["context_length"] == model["meta"]["n_ctx"] == 2000
        assert found["first_id"] == found["last_id"] == model["id"] and not found["has_more"]
    anthropic = pytest.importorskip("anthropic")
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(api_key="x", base_url=url, max_retries=0, timeout=30) as client:
        (own,) = client.models.list()
        assert own.type == "model" and own.display_name == pair["target"]
        assert client.models.retrieve(own.id).created_at.year >= 2024


def test_the_tokens_of_a_response_are_counted(server):
    body = {"input": "Hello", "instructions": "Be brief."}
    status, found = ask_json(server, "/v1/responses/input_tokens", body)
    _, answered = ask_json(server, "/v1/responses", body | {"max_output_tokens": 1})
    expected = {"object": "response.input_tokens"}
    expected |= {"input_tokens": answered["usage"]["input_tokens"]}
    assert status == 200 and found == expected
    counted = server.client.responses.input_tokens.count(model="x", **body)
    assert counted.input_tokens == found["input_tokens"]


def test_what_is_not_there_is_told_with_what_is(server):
    status, found = ask_json(server, "/v1/embeddings", {"input": "a"})
    message = found["error"]["message"]
    assert status == 404 and "/v1/embeddings" in message and "/v1/completions" in message
