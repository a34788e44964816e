"""kvpact: an external KV cache for LLM serving engines, with an explicit plan, commit and abort contract."""

__version__ = "0.1.0"
