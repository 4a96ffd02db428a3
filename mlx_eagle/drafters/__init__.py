"""Drafters: what proposes tokens, each behind the one interface in ``base.py``."""
