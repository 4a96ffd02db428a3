"""Progress of a benchmark: a bar in a terminal, a line now and then in a file or a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_eagle.system.progress import open_bar

NUM_LINES = 20  # where standard error is no terminal


@contextmanager
def counting(total: int) -> Iterator[Callable[[], None]]:
    """Inside, a call says that one more of ``total`` runs is done; on standard error."""
    if sys.stderr.isatty():
        with open_bar(total, "bench", "run") as bar:
            yield lambda: bar.update()
        return
    start, done = time.perf_counter(), 0

    def count() -> None:
        nonlocal done
        done += 1
        # The i-th line is due once i in NUM_LINES of the runs are done.
        if done * NUM_LINES // total > (done - 1) * NUM_LINES // total:
            seconds = time.perf_counter() - start
            print(f"bench: {done} of {total} runs, {seconds:.0f} s", file=sys.stderr, flush=True)

    yield count
