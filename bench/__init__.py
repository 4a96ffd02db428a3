"""Measure plain against speculative decoding, and say what limits the speedup."""
