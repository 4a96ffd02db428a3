"""Terminal output of commands: progress bars, and text with its drafted parts marked.

Bars are drawn on standard error, where that is a terminal, and gone when done. The code that
makes people wait draws nothing by itself: it calls a callback ``(done, total)``, as mlx-lm's
``prompt_progress_callback`` is.

The codes of marks are ECMA-48's "select graphic rendition"; https://no-color.org explains
``NO_COLOR``.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

Progress = Callable[[int, int], None]
UNDERLINE, COLOUR = "4", "36"  # cyan, which can be read on light and dark backgrounds
END = "\x1b[24;39m"


def open_bar(total: int, what: str, unit: str) -> tqdm:
    """A bar of ``total`` units; nothing is drawn where standard error is no terminal."""
    return tqdm(total=total, desc=what, unit=unit, leave=False, disable=None)


class Bar:
    """A progress callback with a bar of its own, until ``done`` is ``total`` or it is closed.

    ``above``: no bar for a ``total`` that is not greater, for what is over in a moment.
    """

    def __init__(self, what: str, unit: str, above: int = 0):
        self._what = what
        self._unit = unit
        self._above = above
        self._bar: tqdm | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None and self._above < total and done < total:
            self._bar = open_bar(total, self._what, self._unit)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prompt_bar(step_size: int) -> Progress:
    """For ``prompt_progress_callback``: a bar where a prompt takes more than one step."""
    bar = Bar("Reading the prompt", "token", above=step_size)
    # The last token is read in the first round, after everything that is waited for here.
    return lambda done, total: bar(min(done, total - 1), total - 1)


def silent(done: int, total: int) -> None:
    """The progress callback of a caller who did not ask for one."""


@dataclass
class Marker:
    """Marks the pieces of one text, in order.

    ``codes`` are those of a marked piece; without any the text stays as it is.
    """

    codes: tuple[str, ...] = ()
    _is_begun: bool = False  # a letter has begun with a drafted token that has no text of its own

    @classmethod
    def of(cls, stream: TextIO, is_wanted: bool = True) -> "Marker":
        """For a terminal colour and underline, without colour where ``NO_COLOR`` is set."""
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        if not (is_wanted and is_terminal):
            return cls()
        return cls((UNDERLINE,) if os.environ.get("NO_COLOR") else (UNDERLINE, COLOUR))

    def __call__(self, text: str, is_drafted: bool) -> str:
        """The next piece. A letter of several tokens is marked if one of them was drafted."""
        is_drafted = is_drafted or self._is_begun
        self._is_begun = is_drafted and not text
        return self._marked(text) if is_drafted and self.codes else text

    @property
    def legend(self) -> str:
        """A line that says what the marks mean; empty where there are none."""
        if not self.codes:
            return ""
        how = "underlined" if self.codes == (UNDERLINE,) else "coloured and underlined"
        return f"Drafted tokens are {self._marked(how)}; the others are the target's own.\n"

    def _marked(self, text: str) -> str:
        begin = f"\x1b[{';'.join(self.codes)}m"
        # Line by line: some terminals underline the rest of a line that ends within a mark.
        return "\n".join(f"{begin}{line}{END}" if line else "" for line in text.split("\n"))
