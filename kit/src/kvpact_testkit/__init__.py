"""Checks for authors of caches, tiers and connectors: the contract made executable."""

__version__ = "0.1.0"
