"""Checks for authors of vLLM connectors."""
