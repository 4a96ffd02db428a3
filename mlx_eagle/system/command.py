"""What the commands have in common: a mistake of the user's costs one sentence."""

import sys
from collections.abc import Callable

from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

USER_ERRORS = (ValueError, OSError, HfHubHTTPError, LocalEntryNotFoundError)
"""What a user's mistake raises, here and in the libraries that load models."""


def run_command(command: Callable[[], None]) -> None:
    """Run a command so that a user's mistake costs them one sentence, not a traceback."""
    try:
        command()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except USER_ERRORS as err:
        sentence = " ".join(str(err).split())
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)
