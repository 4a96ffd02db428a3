"""Demo pair: a small target from PyPI, its head, and a command that compares speeds on it."""
