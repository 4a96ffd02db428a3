"""The pictures of the server's page and of the terminal: real runs of the demo pair.

    python docs/pictures.py

They are written to docs/pages/images. Needs the extra ``browser`` and a Chromium on PATH. Speeds
on the page are those of the machine, so nothing else should run on it; ``terminal`` behind the
name makes the picture of the terminal alone, which has none.
"""

import html
import os
import pty
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from mlx_eagle.bench.servers import running

IMAGES = Path(__file__).parent / "pages" / "images"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
QUESTION = (
    "A baker makes 12 trays of cookies with 8 cookies on each tray. "
    "How many cookies does she make?"
)
# Its answer cannot be copied from the first one.
ANOTHER = "Tom has 5 boxes with 6 pens in each box. How many pens does he have?"
LIMIT = 300_000.0  # milliseconds for an answer
DESK, PHONE = {"width": 1280, "height": 720}, {"width": 360, "height": 700}
MARK = re.compile(r"\x1b\[4;36m(.*?)\x1b\[24;39m")
STYLE = """body { margin: 0; padding: 1.2rem 1.4rem; background: #14171b; color: #e6e9ed;
  font: 15px/1.5 ui-monospace, Menlo, "DejaVu Sans Mono", monospace; white-space: pre-wrap; }
b { font-weight: 400; color: #35c5c5; text-decoration: underline; }"""


def draw_page(browser: Any, url: str) -> None:
    """A conversation and a race at a desk, and the conversation on a phone in the dark."""
    desk = browser.new_context(viewport=DESK).new_page()
    desk.goto(url)
    ask(desk, QUESTION)
    desk.locator(".answer .drafted.d2").first.hover()
    desk.screenshot(path=IMAGES / "page.png")
    desk.click("#tab-race")
    desk.fill("#race-question", QUESTION)
    desk.click("#race-start")
    desk.locator("#verdict", has_text=re.compile("Identical|Different")).wait_for(timeout=LIMIT)
    desk.screenshot(path=IMAGES / "race.png")
    phone = browser.new_context(viewport=PHONE, color_scheme="dark").new_page()
    phone.goto(url)
    ask(phone, ANOTHER)
    phone.screenshot(path=IMAGES / "page-small.png")


def ask(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.keyboard.press("Enter")
    page.locator("#again").wait_for(timeout=LIMIT)


def draw_terminal(browser: Any) -> None:
    """Drafted tokens as a terminal marks them; without a clock, so that no load shows in it."""
    said = bytearray()

    def read(descriptor: int) -> bytes:
        found = os.read(descriptor, 2**16)
        said.extend(found)
        return found

    os.environ["TERM"] = "xterm-256color"
    os.environ.pop("NO_COLOR", None)
    flags = ["--show-drafts", "--num-draft-tokens", "3", "--prompt", QUESTION, "--verbose", "F"]
    pty.spawn([sys.executable, "-m", "mlx_eagle.generate", *flags, "--max-tokens", "150"], read)
    text = said.decode().replace("\r\n", "\n")
    command = shlex.join(["mlx_eagle.generate", *flags[:-2]])
    shown = MARK.sub(r"<b>\1</b>", html.escape(f"$ {command}\n{text}", quote=False))
    page = browser.new_page(viewport={"width": 900, "height": 200})
    page.set_content(f"<style>{STYLE}</style>{shown.strip()}")
    page.screenshot(path=IMAGES / "terminal.png", full_page=True)


def main() -> None:
    path = next(filter(None, map(shutil.which, CHROMIUM)))
    with sync_playwright() as playwright:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which root cannot have
        # Make puts OpenBLAS in front of Python; a browser does not start with it.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        launch = playwright.chromium.launch
        browser = launch(executable_path=path, args=sandbox, env=environment)
        draw_terminal(browser)
        if sys.argv[1:] == ["terminal"]:
            return
        with running({"mlx_eagle.server": ["mlx_eagle.server.__main__"]}) as servers:
            host, port = servers["mlx_eagle.server"].address
            draw_page(browser, f"http://{host}:{port}/")
        browser.close()


if __name__ == "__main__":
    main()
