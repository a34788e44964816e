"""Checks for authors of caches."""
