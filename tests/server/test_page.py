"""The page at ``/`` without a browser: what is sent, and what it is held to.

What it does is tried in ``test_page_in_a_browser.py``.
"""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from serving import ours

from mlx_eagle.server.handler import PAGE_FILES, SCRIPTS, page

KEY = "a-key"
ELSEWHERE = "https://openwebui.com"  # a link, which nothing is loaded from
ADDRESS = re.compile(r"""(?:https?:)?//[\w.-]+\.[a-z]+""")


class Reader(HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, document: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside = ""
        self.texts = {"style": "", "script": ""}
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.texts:
            self.texts[self.inside] += data


@pytest.fixture(scope="module")
def server(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["head"], "--max-tokens", "7")
    with ours(*flags, "--api-key", KEY) as asked:
        yield asked


def as_browsers_ask(url: str) -> Request:
    return Request(url, headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})


def settings_of(document: str) -> dict:
    (found,) = [a for tag, a in Reader(document).tags if a.get("name") == "mlx-eagle"]
    return json.loads(found["content"] or "")


def test_the_policy_lets_only_the_page_itself_run():
    document, headers = page({"model": "x"})
    read = Reader(document.decode())
    rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for kind in ("style", "script"):
        digest = hashlib.sha256(read.texts[kind].encode()).digest()
        assert rules[f"{kind}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"


def test_nothing_comes_from_elsewhere():
    """No address but names of XML and a link, nothing that a tag loads, no handler in a tag."""
    document = page({})[0].decode()
    found = set(ADDRESS.findall(document)) - {"http://www.w3.org"}
    assert found == {ELSEWHERE}
    for tag, attributes in Reader(document).tags:
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes)
        assert tag not in ("img", "iframe", "object", "embed", "base")
        address = attributes.get("href", "data:")
        assert "src" not in attributes
        assert address.startswith("data:") or (tag, address) == ("a", ELSEWHERE)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in document
    for word in ("setInterval", "WebSocket", "EventSource"):  # an idle page asks for nothing
        assert word not in document


def test_every_part_is_in_it():
    document = page({})[0].decode()
    assert not re.search(r"\{\{(style|script|settings)\}\}", document)
    names = {path.name for path in PAGE_FILES.iterdir()}
    assert names == {*SCRIPTS, "page.html", "page.css"}
    for name in names - {"page.html"}:
        assert (PAGE_FILES / name).read_text() in document


def test_settings_cannot_leave_their_attribute():
    name = '"><script>alert(1)</script>{{script}}{{style}}'
    document = page({"model": name})[0].decode()
    assert settings_of(document)["model"] == name
    assert document.count("<script>") == 1
    assert len([tag for tag, _ in Reader(document).tags if tag == "script"]) == 1


def test_every_id_that_the_scripts_use_is_there():
    read = Reader(page({})[0].decode())
    ids = [attributes["id"] for _, attributes in read.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'byId\("([\w-]+)"\)', read.texts["script"]))
    assert used <= {*ids} and len(used) > 15
    for tag, attributes in read.tags:
        for name in ("aria-controls", "aria-labelledby", "for", "list"):
            assert set((attributes.get(name) or "").split()) <= {*ids}, (tag, name)


def test_the_page_needs_no_key_and_names_nothing(server):
    with urlopen(as_browsers_ask(server.url.removesuffix("v1")), timeout=10) as response:
        document = response.read().decode()
        headers = response.headers
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"] == page({})[1]["Content-Security-Policy"]
    assert settings_of(document) == {
        "needs_key": True,
        "model": None,
        "draft_model": None,
        "temperature": 0.0,
        "max_tokens": 7,
        "num_draft_tokens": 3,
        "tree": None,
    }
    url = server.url.removesuffix("v1") + "?a=b"
    with urlopen(as_browsers_ask(url), timeout=10) as response:
        assert response.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_page_is_only_read(server, method):
    headers = {"Authorization": f"Bearer {KEY}"}
    request = Request(server.url.removesuffix("v1"), b"{}", headers, method=method)
    with pytest.raises(HTTPError) as error:
        urlopen(request, timeout=10)
    assert error.value.code == (501 if method == "PUT" else 404)


def test_without_a_key_the_model_is_named(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["head"])
    with (
        ours(*flags) as asked,
        urlopen(as_browsers_ask(asked.url.removesuffix("v1")), timeout=10) as response,
    ):
        settings = settings_of(response.read().decode())
    assert settings["model"] == pair["target"] and settings["needs_key"] is False
