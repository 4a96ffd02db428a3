"""Marks of drafted text in a terminal.

The codes are ECMA-48's "select graphic rendition"; https://no-color.org explains ``NO_COLOR``.
"""

import os
from dataclasses import dataclass
from typing import TextIO

UNDERLINE = "4"
COLOUR = "36"  # cyan, which can be read on light and dark backgrounds
END = "\x1b[24;39m"


@dataclass
class Marker:
    """Marks the pieces of one text, in order.

    ``codes`` are those of a marked piece; without any the text stays as it is.
    """

    codes: tuple[str, ...] = ()
    _is_begun: bool = False  # a letter has begun with a drafted token that has no text of its own

    @classmethod
    def of(cls, stream: TextIO, is_wanted: bool = True) -> "Marker":
        """Colour and underline for a terminal, without colour where ``NO_COLOR`` is set."""
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
