"""Checks for authors of caches, tiers and connectors: the contract made executable."""
