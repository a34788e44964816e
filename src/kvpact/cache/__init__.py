"""The scheduler's process: it decides what is promised, loaded, saved and evicted."""

from kvpact._moved import moved_names

__getattr__ = moved_names(__name__, "kvpact.cache.cache", "PactCache")
