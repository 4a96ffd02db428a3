"""Benchmark: plain against speculative decoding, and the limits of the speedup.

No other part of the package imports matplotlib.
"""
