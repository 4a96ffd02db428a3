"""The demo pair: a small target from PyPI, its head, and a comparison run on them."""
