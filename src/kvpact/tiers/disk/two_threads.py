"""Blocks moved in groups on two threads: one verifies what it has while the other reads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

GROUP_BYTES: Final = 16 << 20
"""Size of a group. On two cores with ten busy threads, groups of 8, 16 and 32 MiB reached 0.80, 0.89 and 0.86 of the
speed of one plain read of 128 MiB."""


def groups_of(count: int, block_bytes: int) -> list[tuple[int, int]]:
    """`count` blocks as ranges (first, end) of about `GROUP_BYTES` each."""
    step = max(1, GROUP_BYTES // max(1, block_bytes))
    return [(first, min(first + step, count)) for first in range(0, count, step)]


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
