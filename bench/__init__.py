"""Measure plain against speculative decoding, and say what limits the speedup.

The only part of the package that imports matplotlib; nothing else imports it.
"""
