"""Servers with and without an external KV cache beside each other: their answers first, then their seconds.

Owns the harness over HTTP (starting, asking, judging, counting) and the rows. Imports no engine.
"""
