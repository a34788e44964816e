"""Blocks moved in groups on two threads: one verifies what it has while the other reads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


def on_two_threads(work: Callable[[int, int], bool], groups: Iterable[tuple[int, int]]) -> None:
    """Call `work` for each group in order, on this thread and a second one, until it returns False; wait for both.

    The second thread lasts for one batch and is a daemon, so one that hangs cannot delay the process's end.
    """
    waiting = deque(groups)

    def lane() -> None:
        while True:
            try:
                group = waiting.popleft()
            except IndexError:
                return
            if not work(*group):
                waiting.clear()

    helper = threading.Thread(target=lane, name="kvpact-disk-lane", daemon=True) if len(waiting) > 1 else None
    if helper is not None:
        try:
            helper.start()
        except RuntimeError:  # the interpreter is shutting down, and this is the last flush
            helper = None
    try:
        lane()
    finally:
        waiting.clear()
        if helper is not None:
            helper.join()
