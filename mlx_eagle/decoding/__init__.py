"""Decoding: the loop, the rules that accept drafts, and how long a draft should be."""
