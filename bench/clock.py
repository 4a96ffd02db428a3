"""How long a generation took that was made in turns."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class TurnClock:
    """The tokens of some turns and the seconds that they took; see ``runner.Take``."""

    num_tokens: int = 0
    seconds: float = 0.0
    _was_plain: bool = False
    _left_over: float = 0.0  # of the turn before: from its last token until the device was done

    def add(self, start: float, times: Sequence[float], done: float, is_plain: bool) -> None:
        """A turn: its start, when each token came, and when the device was done."""
        last = times[-1] if times else start
        if is_plain and self._was_plain:
            self.num_tokens += len(times) - 1
            self.seconds += last - times[0]
        else:
            self.num_tokens += len(times)
            self.seconds += self._left_over + last - start
        self._was_plain, self._left_over = is_plain, done - last
