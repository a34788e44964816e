"""Where vLLM's releases differ."""
