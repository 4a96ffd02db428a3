"""The commands in the terminal: flags, generate, chat and the memory report."""
