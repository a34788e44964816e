"""Checks for authors of tiers."""
