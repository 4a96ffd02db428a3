"""Ends of commands: exit codes, and a user's mistake in one sentence."""

import os
import sys
from collections.abc import Callable

from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

USER_ERRORS = (ValueError, OSError, HfHubHTTPError, LocalEntryNotFoundError)
"""Errors that a user's mistake raises, here and in the libraries that load models."""
INTERRUPTED = 130  # exit codes as a shell has them: 128 and the number of the signal
PIPE_CLOSED = 141


def run_command(command: Callable[[], None], interrupted: str = "interrupted") -> None:
    """Run a command so that a user's mistake costs them one sentence, not a traceback.

    ``interrupted`` is what Ctrl-C leaves on standard error. A reader of standard output that
    went away, as ``| head`` does, ends the command without a word.
    """
    try:
        command()
        sys.stdout.flush()  # here, where a reader that is gone can still be handled
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # What Python writes when it ends goes nowhere instead of complaining once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    except USER_ERRORS as err:
        sentence = " ".join(str(err).split())
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)
