"""Copies between a CUDA device and host memory: the driver, pinned memory, and the engine on streams and events."""
