"""Taking of the arena's pages from the machine, ahead of their use.

Owns the order (some at the start, then a window ahead of the slots in use; while the engine is idle, a window as large
as the bytes that have lately come into use) and the thread that takes them. Takes no page that will not be used soon.
The schedule gets the time as an argument and touches no memory. Does not read the slots' content.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvpact.threads import give_way, start_background
from kvpact.units import format_size

logger = logging.getLogger(__name__)

HUGE_BYTES: Final = 2 << 20
"""Bytes of a huge page where pages have 4 KiB; has no special meaning elsewhere."""

THREAD: Final = "kvpact-prefault"
"""Name of the thread that takes pages; the kernel shows 15 characters."""

PIECE_BYTES: Final = 8 << 20
"""Bytes taken at a time: 1 ms in huge pages, 8 ms in small ones, 30 ms if the host must find the memory first. `close`
waits for at most one piece."""

START_SECONDS: Final = 1.0
"""Seconds of CPU time for taking the first pages at normal priority, before the first step: 8 GiB in huge pages, 1 GiB
in small ones, half a GiB if the host must find the memory first. They delay the start by at most this; afterwards the
thread continues at low priority."""

AHEAD_BYTES: Final = 128 << 20
"""Bytes of a slot class taken ahead of the slots in use: a prompt of 4,096 tokens at 32 KiB per token."""

FIRST_BYTES: Final = 512 << 20
"""Bytes taken at the start, of all slot classes together: four such prompts. The first prompts find their pages taken,
and an engine without requests takes no more."""

MAX_AHEAD_BYTES: Final = 2 << 30
"""Most bytes of a slot class taken ahead of the slots in use, while the engine is idle."""

RATE_SECONDS: Final = 60.0
"""Seconds of an interval: an idle engine takes as many bytes ahead as came into use in the last one with steps."""

REST_SECONDS: Final = 10.0
"""Seconds since its last step after which an engine is idle. Longer than the pause between the prompts of one user, and
than an engine's work after its first step: vLLM 0.32 on a CPU works on the first sample for 3.4 s."""

RESTING_PAUSE_SECONDS: Final = 0.05
"""Seconds between two pieces while the engine is idle: 160 MB/s, a hundredth of a core in huge pages."""

MADV_POPULATE_WRITE: Final = 23
"""Advice of Linux 5.14; older kernels return EINVAL, and map pages at their first use."""

MADV_COLLAPSE: Final = 25
"""Advice of Linux 6.1: turn a range into huge pages now, whatever the setting for transparent huge pages."""


@dataclass(slots=True)
class _Window:
    """Bytes `start` to `end` of the segment, of one slot class, whose slots are handed out from the low end."""

    start: int
    end: int
    first_end: int
    """End of the bytes taken at the engine's start."""
    taken: int
    """End of the bytes that were taken, or tried."""
    wanted: int
    """End of the bytes to take at once."""
    used: int
    """End of the bytes that are, or were, in use."""
    used_before: int
    """Value of `used` when its growth was last recorded."""
    growth: int = 0
    """Bytes that came into use in the `RATE_SECONDS` before that."""

    @property
    def rest_end(self) -> int:
        """End of the bytes to take while the engine is idle."""
        ahead = max(AHEAD_BYTES, self.growth, self.used - self.used_before)
        return max(self.first_end, min(self.end, self.used + min(MAX_AHEAD_BYTES, ahead)))


class PageSchedule:
    """Order and times of taking one segment's bytes, from the low end of each slot class to its high end.

    `ends` are the offsets in the segment at which its slot classes end, in bytes.
    """

    def __init__(self, ends: Sequence[int], now: float) -> None:
        self.size = ends[-1]
        self._windows = list[_Window]()
        for start, end in pairwise((0, *ends)):
            first = min(end, start + FIRST_BYTES // len(ends))
            self._windows.append(_Window(start, end, first, taken=start, wanted=first, used=start, used_before=start))
        self._start_seconds = START_SECONDS
        """Seconds left of `START_SECONDS`."""
        self._stepped = False
        """True once a step has begun."""
        self._computing = False
        self._not_before = now + REST_SECONDS
        self._rated_at = now

    def use(self, end: int) -> bool:
        """Note that all bytes of a slot class below `end` are in use; returns whether any must be taken at once."""
        window = next(window for window in self._windows if end <= window.end)
        window.used = max(window.used, end)
        window.wanted = max(window.wanted, min(window.end, end + AHEAD_BYTES))
        return self._is_behind

    @property
    def _is_behind(self) -> bool:
        return any(window.taken < window.wanted for window in self._windows)

    @property
    def taken(self) -> int:
        """Number of bytes that were taken, or tried."""
        return sum(window.taken - window.start for window in self._windows)

    @property
    def has_first(self) -> bool:
        """True once the `FIRST_BYTES` were taken, or tried."""
        return all(window.taken >= window.first_end for window in self._windows)

    @property
    def starting(self) -> bool:
        """True while no step has begun, and time at normal priority is left."""
        return self._start_seconds > 0 and not self._stepped

    def step_began(self) -> None:
        """Note that a step has begun."""
        self._computing = self._stepped = True

    def step_ended(self, now: float) -> None:
        """Note that the engine computes no more."""
        self._computing = False
        self._not_before = now + REST_SECONDS
        if now >= self._rated_at + RATE_SECONDS:
            self._rated_at = now
            for window in self._windows:
                window.growth = window.used - window.used_before
                window.used_before = window.used

    def wait(self, now: float) -> float:
        """Seconds until the next piece may be taken, 0 for now; at most `REST_SECONDS`, after which the caller must ask
        again."""
        if self._is_behind:
            return 0.0
        if self._computing or all(window.taken >= window.rest_end for window in self._windows):
            return REST_SECONDS
        return max(0.0, self._not_before - now)

    def take(self, now: float) -> tuple[int, int]:
        """Next piece as (start, bytes); it counts as taken from now on. Call only when `wait` returns 0."""
        behind = (window for window in self._windows if window.taken < window.wanted)
        window = next(behind, None) or next(window for window in self._windows if window.taken < window.rest_end)
        start = window.taken
        window.taken = min(window.end, start + PIECE_BYTES)
        self._not_before = max(self._not_before, now + RESTING_PAUSE_SECONDS)
        return start, window.taken - start

    def took(self, seconds: float) -> None:
        """Note that the last piece took this many seconds of CPU time."""
        self._start_seconds -= seconds

    def check(self) -> None:
        """Verify the invariants, for tests. Raises AssertionError."""
        for window in self._windows:
            assert window.start <= window.taken <= window.end
            assert window.first_end <= window.wanted <= window.end


class PageTaker:
    """Takes the pages of one mapping of a memfd, in huge pages where the kernel can."""

    def __init__(self, descriptor: int, address: int, ends: Sequence[int]) -> None:
        """The file behind `descriptor` is mapped at `address`, aligned to `HUGE_BYTES`, from its start on.

        `ends` are the offsets at which its slot classes end, in bytes.
        """
        self._descriptor = descriptor
        self._address = address
        self._size = ends[-1]
        self.huge = True
        """True while huge pages are worth trying."""
        self._closing = False
        self._wake = threading.Event()
        self._has_first = threading.Event()
        self._thread: threading.Thread | None = None
        self._schedule = PageSchedule(ends, time.monotonic())
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def start(self) -> None:
        """Start taking pages in a background thread, until all are taken or `close` is called.

        A window ahead of the slots in use at once, a larger one at rest. The first touch of a page costs up to 70 times
        the copy into it; slots are handed out from the low end. Taking pages slows down a computing engine, on other
        cores too, so no more are taken then than will be used soon. The thread lowers its priority as soon as the start
        is over; see `give_way`.
        """
        if self._thread is None:
            self._thread = start_background(THREAD, self._run)

    def wait_for_first(self, seconds: float) -> bool:
        """Wait, after `start`, until the `FIRST_BYTES` are taken, so that no prompt pays for them.

        Waits at most `seconds`; returns whether they are taken.
        """
        return self._has_first.wait(seconds)

    def use(self, end: int) -> None:
        """Note that a slot class is in use up to `end`, or soon will be, so that the bytes after it are taken next."""
        if self._schedule.use(end):
            self._wake.set()

    def step_began(self) -> None:
        """Note that a step has begun: until it ends, only bytes that `use` needs are taken."""
        self._schedule.step_began()

    def step_ended(self) -> None:
        """Note that the engine computes no more."""
        self._schedule.step_ended(time.monotonic())

    def take_all(self) -> None:
        """Take all bytes now. Stops early, with a warning, if the machine runs out of memory."""
        self.take(0, self._size)

    def take(self, start: int, length: int) -> None:
        """Take `length` bytes from `start` on, like `take_all`, and those in the same huge pages."""
        end = min(self._size, -(-(start + length) // HUGE_BYTES) * HUGE_BYTES)
        for piece in range(start // HUGE_BYTES * HUGE_BYTES, end, PIECE_BYTES):
            if not self._take(piece, min(PIECE_BYTES, end - piece)):
                return

    def close(self) -> None:
        """End the thread, after at most one more piece. Idempotent."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._take_all_in_time()
        finally:
            self._has_first.set()

    def _take_all_in_time(self) -> None:
        schedule = self._schedule
        starting = True
        while schedule.taken < schedule.size:
            seconds = schedule.wait(time.monotonic())
            if seconds:
                self._wake.wait(seconds)
                self._wake.clear()
            if self._closing:
                return
            if starting and not schedule.starting:
                starting = False
                give_way()
            if not seconds:
                began = time.thread_time()
                if not self._take(*schedule.take(time.monotonic())):
                    return
                schedule.took(time.thread_time() - began)
                if schedule.has_first:
                    self._has_first.set()

    def _take(self, start: int, length: int) -> bool:
        """Take and map these bytes; returns False, with a warning, if the machine has no memory left."""
        try:
            whole = length // HUGE_BYTES * HUGE_BYTES
            if whole and self.huge and self._collapse(start, whole):
                start += whole
                length -= whole
            if length:
                # posix_fallocate finds and clears the pages without the lock on the process's mappings; populating then
                # only maps them. Both release the interpreter's lock.
                os.posix_fallocate(self._descriptor, start, length)
                self._libc.madvise(self._address + start, length, MADV_POPULATE_WRITE)
        except OSError as error:
            logger.warning(
                "arena: no memory left beyond %s (%s); set a smaller `memory`",
                format_size(start),
                error.strerror,
            )
            return False
        return True

    def _collapse(self, start: int, length: int) -> bool:
        """Turn the range into huge pages: a tenth of the CPU time, here and when the other process maps them.

        The kernel makes a huge page only where there is a page already, so the first page of each is taken before.
        Raises OSError if there is no memory for that.
        """
        for huge in range(start, start + length, HUGE_BYTES):
            os.posix_fallocate(self._descriptor, huge, 1)
        if not self._libc.madvise(self._address + start, length, MADV_COLLAPSE):
            return True
        # Busy: a page is in use at this moment. Otherwise the kernel has no huge pages, or memory is fragmented, and
        # each further call would search for whole ones again.
        self.huge = ctypes.get_errno() in (errno.EAGAIN, errno.EBUSY)
        return False
