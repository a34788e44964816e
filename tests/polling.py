"""A condition that comes true on another thread, or in another process: asked again until it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(condition: Callable[[], Found], seconds: float = 60.0, what: str = "", every: float = 0.005) -> Found:
    """Return the first true answer of `condition`, asked `every` so many seconds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what or condition}"
        time.sleep(every)
    return found
