"""Copies between an accelerator's KV memory and host memory: what is asked of a device, and the engine over it."""
