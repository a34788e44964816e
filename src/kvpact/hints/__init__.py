"""Hints of clients about their requests."""
