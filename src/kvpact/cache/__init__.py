"""The scheduler's process: it decides what is promised, loaded, saved and evicted."""
