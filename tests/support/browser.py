"""The page in a headless Chromium, and a server that says what a test tells it to say."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mlx_eagle.server.handler import PAGE_TYPE, page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ON_MACS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
SETTINGS = {
    "needs_key": False,
    "model": "scripted",
    "temperature": 0.0,
    "max_tokens": 512,
    "num_draft_tokens": "auto",
    "tree": None,
}
COUNTS: dict[str, Any] = {
    "drafted_tokens": 0,
    "accepted_tokens": 0,
    "rounds": 0,
    "target_passes": 0,
    "emitted_tokens": 0,
    "batched_tokens": 0,
    "mean_acceptance_length": 1.0,
    "drafted_by_position": [],
    "accepted_by_position": [],
    "acceptance_by_position": [],
    "draft_lengths": [],
}
DIE = object()  # in a script: the connection ends here


def find_chromium() -> str | None:
    """The path of a Chromium on this machine."""
    return next(filter(None, map(shutil.which, [*NAMES, ON_MACS])), None)


@contextmanager
def running_browser(path: str) -> Iterator[Any]:
    """A headless Chromium, driven by playwright."""
    from playwright.sync_api import sync_playwright  # here: `make test` has neither of the two

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has no sandbox there
    # Make puts OpenBLAS in front of Python; a browser may not start with it.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with sync_playwright() as playwright:
        launch = playwright.chromium.launch
        browser = launch(executable_path=path, args=arguments, env=environment)
        try:
            yield browser
        finally:
            browser.close()


def longest_task(browser: Any, page: Any, act: Callable[[], None]) -> float:
    """The longest time in ms in which a page can do nothing else during ``act``.

    That of the processor, not of the clock: others may use it too.
    """
    categories = ["toplevel", "disabled-by-default-devtools.timeline"]
    browser.start_tracing(page=page, categories=categories)
    act()
    events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [event for event in events if (event["pid"], event["tid"]) in threads]
    return max(event["tdur"] / 1000 for event in tasks if "tdur" in event)


LINES = """async (num_lines) => {
  const box = document.body.appendChild(document.createElement("ul"));
  for (let i = 0; i < num_lines; i++) {
    box.appendChild(document.createElement("li")).textContent = `line ${i}`;
  }
  const height = box.offsetHeight;
  box.remove();
  return height;
}"""


def time_of_lines(browser: Any, page: Any, num_lines: int) -> float:
    """What a list of so many short lines, laid out in one go, takes the processor in ms."""
    return longest_task(browser, page, lambda: page.evaluate(LINES, num_lines))


class Tab:
    """A page of a browser, and all that it asked for and complained of."""

    def __init__(self, browser: Any, url: str, **options: Any):
        self.url = url
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def unfold(self, *names: str) -> None:
        """Open what is folded: settings, strip."""
        for name in names:
            self.page.locator(f"#{name}").evaluate("e => { e.open = true; }")

    def ask(self, question: str) -> None:
        """Type a question and send it."""
        self.page.fill("#question", question)
        self.page.keyboard.press("Enter")

    def wait(self) -> str:
        """Wait for the end of the answer; its text."""
        self.page.locator("#again").wait_for()
        return self.page.locator(".answer .text").last.inner_text()

    def said(self, text: str) -> None:
        """Wait until the conversation has a text."""
        self.page.locator("#log").get_by_text(text).wait_for()

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def figure(self, name: str, column: int = 0) -> str:
        """A figure of the strip; column 1 is about all answers."""
        row = self.page.locator("#figures tr", has=self.page.get_by_text(name, exact=True))
        return row.locator("td").nth(column).text_content() or ""

    def stored(self) -> list[dict[str, Any]]:
        """The conversation as the browser keeps it."""
        text = self.page.evaluate(
            """() => localStorage.getItem("mlx-eagle.conversation."
            + JSON.parse(localStorage.getItem("mlx-eagle.current")))"""
        )
        return json.loads(text or "[]")

    def close(self) -> None:
        self.context.close()


class Script:
    """What a scripted server answers, request by request; ``asked`` are the bodies it got.

    A script is a list of texts, dicts (whole chunks), events to wait for, and DIE.
    """

    def __init__(self) -> None:
        self.scripts: list[list[Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.has_left = threading.Event()
        self.url, self.finish = "", "stop"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["Content-Length"])
        self.asked.append(json.loads(handler.rfile.read(length)))
        handler.send_response(200)
        handler.send_header("Content-type", "text/event-stream")
        handler.end_headers()
        for index, said in enumerate(self.scripts.pop(0)):
            if said is DIE:
                return
            if isinstance(said, threading.Event):
                said.wait(30)
                continue
            chunk = said if isinstance(said, dict) else chunk_of(said, index)
            try:
                handler.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            except ConnectionError:
                self.has_left.set()
                return
        last = chunk_of("", 10**6, self.finish)
        last["draft"] = {"tokens": [], "drafting_events": [], "counts": COUNTS}
        handler.wfile.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())


def chunk_of(text: str, index: int, finish_reason: str | None = None) -> dict[str, Any]:
    """A chunk of one token; every second one was drafted."""
    token = {"index": index, "id": index, "depth": index % 2, "length": 1, "text": text}
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], "draft": {"tokens": [token], "drafting_events": []}}


@contextmanager
def scripted_server() -> Iterator[Script]:
    """The page, with a server behind it that follows scripts."""
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            document, headers = page(SETTINGS)
            self.send_response(200)
            for name, value in (headers | {"Content-type": PAGE_TYPE}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(document)

        def do_POST(self) -> None:
            script.answer(self)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    script.url = "http://{}:{}/".format(*server.server_address[:2])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)
