"""No page of somebody else's asks: by its origin, or by the name under which it asks."""

import http.client
import json

import pytest
from serving import ours, parse

from mlx_eagle.server.access import read_access
from mlx_eagle.server.answer_stream import RequestError

USER = {"role": "user", "content": "Hello"}
TEXT = json.dumps({"prompt": "Once", "messages": [USER], "max_tokens": 2}).encode()
PATHS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/"),
    ("OPTIONS", "/v1/completions"),
)
APP = "https://app.example"


@pytest.fixture(scope="module")
def server(flags):
    with ours(*flags) as asked:
        yield asked


@pytest.fixture(scope="module")
def opened(flags):
    names = ("--allowed-origins", f"{APP}, null", "--allowed-hosts", "Behind.Example")
    with ours(*flags, *names) as asked:
        yield asked


def ask(asked, method: str, path: str, head: dict) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection(*asked.address, timeout=30)
    try:
        body = TEXT if method == "POST" else None
        connection.request(method, path, body, head)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def own(asked) -> str:
    return "{}:{}".format(*asked.address)


FOREIGN = {
    "another site": {"Origin": "https://evil.example"},
    "nobody's": {"Origin": "null"},
    "another port": {"Origin": "http://127.0.0.1:1"},
    "like ours": {"Origin": "http://127.0.0.1.evil.example"},
    "an image": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a name that means this machine": {"Host": "evil.example", "Origin": "http://evil.example"},
    "such a name without an origin": {"Host": "evil.example:8080"},
    "a name that begins like ours": {"Host": "localhost.evil.example"},
    "an address of the network": {"Host": "192.168.1.7"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_pages_of_others_get_nothing(server, name):
    before = server.server.metrics_text()
    for method, path in PATHS:
        status, head, content = ask(server, method, path, FOREIGN[name])
        assert status == 403 and "Access-Control-Allow-Origin" not in head
        message = json.loads(content)["error"]["message"]
        assert "--allowed-" in message and "mlx" not in message
    count = 'requests_total{outcome="answered"}'
    answered = [
        [line for line in text.splitlines() if count in line]
        for text in (before, server.server.metrics_text())
    ]
    assert answered[0] == answered[1] != []


def test_our_own_page_and_programs_are_answered(server):
    address = own(server)
    heads = [
        {},
        {"Origin": f"http://{address}"},
        {"Origin": f"https://{address}"},  # behind something that speaks TLS
        {"Host": "localhost:8080", "Origin": "http://LOCALHOST:8080"},
        {"Host": "[::1]:8080", "Origin": "http://[::1]:8080"},
        {"Host": "127.0.0.53"},
        {"Host": "eagle.localhost"},
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},  # a link to the page
        {"Sec-Fetch-Site": "none"},
    ]
    for head in heads:
        for method, path in PATHS:
            status, found, _ = ask(server, method, path, head)
            assert status == (204 if method == "OPTIONS" else 200), (head, path)
            assert "Access-Control-Allow-Origin" not in found


def test_flags_open_it(opened):
    for origin in (APP, "null"):
        for method, path in PATHS:
            status, head, _ = ask(opened, method, path, {"Origin": origin})
            assert status in (200, 204) and head["Access-Control-Allow-Origin"] == origin
            assert "Authorization" in head["Access-Control-Allow-Headers"]
            assert head["Vary"] == "Origin"
    assert ask(opened, "GET", "/health", {"Host": "behind.example:443"})[0] == 200
    assert ask(opened, "GET", "/health", {"Host": "other.example"})[0] == 403
    assert ask(opened, "GET", "/health", {"Origin": "https://evil.example"})[0] == 403


def test_what_the_flags_mean():
    closed = read_access(parse())
    assert not closed.origins and not closed.hosts and closed.is_local
    everybody = read_access(parse("--allowed-origins", "*", "--allowed-hosts", "*"))
    for head in FOREIGN.values():
        everybody.check_page({"Origin": None, "Host": None, "Sec-Fetch-Site": None,
                              "Sec-Fetch-Mode": None} | head)  # fmt: skip
    assert everybody.shared_with("https://evil.example") == "*"
    assert not read_access(parse("--host", "0.0.0.0", "--no-api-key")).is_local


def test_a_server_of_the_network_takes_any_host_and_its_own_page(flags):
    with ours(*flags, "--host", "0.0.0.0", "--no-api-key") as asked:
        head = {"Host": "box.lan:8080", "Origin": "http://box.lan:8080"}
        asked.address = ("127.0.0.1", asked.address[1])
        assert ask(asked, "GET", "/health", head)[0] == 200
        assert ask(asked, "GET", "/health", head | {"Origin": "http://evil.example"})[0] == 403


def test_a_server_of_the_network_takes_only_its_names_if_they_are_given():
    flags = ("--host", "0.0.0.0", "--no-api-key", "--allowed-hosts", "box.lan")
    access = read_access(parse(*flags))
    rest = {"Origin": None, "Sec-Fetch-Site": None, "Sec-Fetch-Mode": None}
    for host in ("box.lan:8080", "192.168.1.7:8080", "localhost"):
        access.check_page(rest | {"Host": host})
    with pytest.raises(RequestError, match="is no name of this machine"):
        access.check_page(rest | {"Host": "evil.example"})
