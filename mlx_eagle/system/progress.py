"""Progress of long work: a callback, and a bar in a terminal.

Bars are drawn on standard error, where that is a terminal, and gone when done. The code that
makes people wait draws nothing by itself: it calls a callback ``(done, total)``, as mlx-lm's
``prompt_progress_callback`` is.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

Progress = Callable[[int, int], None]
PATIENCE = 2.0  # seconds in which nobody wonders what happens


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


@contextmanager
def told_if_long(sentence: str) -> Iterator[None]:
    """A block that says on standard error what it does, once it takes longer than PATIENCE."""
    # tqdm writes above a bar that may be there by then.
    timer = threading.Timer(PATIENCE, tqdm.write, (sentence, sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def prompt_bar(step_size: int) -> Progress:
    """A ``prompt_progress_callback`` with a bar, if a prompt takes more than one step."""
    bar = Bar("Reading the prompt", "token", above=step_size)
    # The last token is read in the first round, after everything that is waited for here.
    return lambda done, total: bar(min(done, total - 1), total - 1)


def silent(done: int, total: int) -> None:
    """The progress callback of a caller who did not ask for one."""
