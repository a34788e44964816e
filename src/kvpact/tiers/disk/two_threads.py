"""Blocks moved in groups on two threads: one verifies what it has while the other reads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvpact.tiers.base import BlockBuffer, Progress, payload_digest
from kvpact.tiers.record import bytes_of

GROUP_BYTES: Final = 16 << 20
"""Size of a group. On two cores with ten busy threads, groups of 8, 16 and 32 MiB reached 0.80, 0.89 and 0.86 of the
speed of one plain read of 128 MiB."""

UNREADABLE: Final = "cannot be read in full"
"""Why a block is unusable whose bytes did not come."""

MISPLACED: Final = "is at another place of its chain"
"""Why a block is unusable whose record names another block before it."""


def groups_of(count: int, block_bytes: int) -> list[tuple[int, int]]:
    """`count` blocks as ranges (first, end) of about `GROUP_BYTES` each."""
    step = max(1, GROUP_BYTES // max(1, block_bytes))
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def read_verified(
    read: Callable[[Sequence[int], Sequence[BlockBuffer]], int],
    slots: Sequence[int],
    digests: Sequence[bytes],
    buffers: Sequence[BlockBuffer],
    on_progress: Progress | None,
) -> tuple[int, str]:
    """Read and verify; return the number of leading blocks that arrived, and why the next is unusable, or "".

    `read` returns the number of leading slots that it has read into their buffers.
    """
    groups = groups_of(len(slots), max(map(bytes_of, buffers), default=0))
    found: dict[int, tuple[int, str]] = {}
    caller = threading.current_thread()

    def read_group(first: int, end: int) -> bool:
        count = read(slots[first:end], buffers[first:end])
        found[first] = _sound(digests[first:end], buffers[first:end], count)
        wanted = on_progress is None or threading.current_thread() is not caller or on_progress(arrived()[0])
        return wanted and not found[first][1]

    def arrived() -> tuple[int, str]:
        for first, end in groups:
            sound, reason = found.get(first, (0, ""))
            if first + sound < end:
                return first + sound, reason
        return len(slots), ""

    on_two_threads(read_group, groups)
    result = arrived()
    if on_progress is not None:
        on_progress(result[0])
    return result


def _sound(digests: Sequence[bytes], buffers: Sequence[BlockBuffer], count: int) -> tuple[int, str]:
    """`read_verified` for one group of which `count` blocks were read."""
    for index, (digest, buffer) in enumerate(zip(digests[:count], buffers, strict=False)):
        if payload_digest(buffer) != digest:
            return index, "payload does not match its checksum"
    return count, "" if count == len(digests) else UNREADABLE


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
