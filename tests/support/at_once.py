"""Several functions run at the same time, with a limit on every wait."""

import threading
from collections.abc import Callable

LIMIT = 60  # seconds that a test waits for its threads


def in_threads(*works: Callable[[], object]) -> list[object]:
    """The results of functions that are run at the same time, each in a thread of its own."""
    results: list[object] = [None] * len(works)
    together = threading.Barrier(len(works))

    def run(index: int) -> None:
        try:
            together.wait(LIMIT)
            results[index] = works[index]()
        except Exception as err:  # shown by the test, which compares the results
            results[index] = err

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread has not ended"
    return results
