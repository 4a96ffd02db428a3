"""A server in a process of its own, which ends with the process that started it.

Run as a script: the module whose ``main`` is the server, then its flags. Standard input is a pipe
that nobody writes to; it ends when the other process closes it or is gone, however it went.
"""

import importlib
import os
import sys
import threading


def end_with_parent() -> None:
    """Wait for the end of standard input, and then leave without ado."""
    # Not through sys.stdin, whose lock the interpreter would miss when it ends by itself.
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> None:
    """Serve."""
    module, *flags = sys.argv[1:]
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv = [module, *flags]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
