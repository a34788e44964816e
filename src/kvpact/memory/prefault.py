"""When the arena's pages are taken from the machine, and how.

Owns the order (some at the start, then a window ahead of the slots in use; while the engine is idle, a window as large
as what has lately come into use) and the thread that does it. What nobody will use soon is not taken. The schedule
takes the time as an argument and touches no memory. Does not know the slots' content.
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
"""The size of a huge page where pages have 4 KiB; has no special meaning elsewhere."""

PIECE_BYTES: Final = 8 << 20
"""Bytes taken at a time: 1 ms in huge pages, 8 ms in small ones, 30 ms if the host must find the memory first. `close`
waits for at most one piece."""

START_SECONDS: Final = 1.0
"""CPU time for taking the first pages at normal priority, before the first step: 8 GiB in huge pages, 1 GiB in small
ones, half a GiB if the host must find the memory first. It delays the start by at most this; afterwards the thread
continues at low priority."""

AHEAD_BYTES: Final = 128 << 20
"""Bytes of a slot class taken ahead of the slots in use: a prompt of 4,096 tokens at 32 KiB per token."""

FIRST_BYTES: Final = 512 << 20
"""Bytes taken at the start, of all slot classes together: four such prompts. What the first prompts use is not taken
beside them, and an engine that nobody asks takes no more."""

MAX_AHEAD_BYTES: Final = 2 << 30
"""The most bytes of a slot class taken ahead of the slots in use, while the engine is idle."""

RATE_SECONDS: Final = 60.0
"""Seconds in which the engine ran: an idle engine takes as many bytes ahead as came into use in the last of them."""

REST_SECONDS: Final = 10.0
"""An engine is idle if its last step ended at least this long ago. Longer than the pause between the prompts of one
user, and than an engine's work after its first step: vLLM 0.32 on a CPU works on the first sample for 3.4 s."""

RESTING_PAUSE_SECONDS: Final = 0.05
"""Pause between two pieces while the engine is idle: 160 MB/s, a hundredth of a core in huge pages."""

MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; older kernels return EINVAL, and pages are then mapped at their first use."""

MADV_COLLAPSE: Final = 25
"""Linux 6.1: turn a range into huge pages now, whatever the setting for transparent huge pages."""


@dataclass(slots=True)
class _Window:
    """One slot class: the segment's bytes from `start` to `end`, whose slots are handed out from the low end."""

    start: int
    end: int
    first_end: int
    """All bytes from `start` to here are taken at the start."""
    taken: int
    """All bytes from `start` to here were taken, or tried."""
    wanted: int
    """All bytes from `start` to here are to be taken at once."""
    used: int
    """All bytes from `start` to here are, or were, in use."""
    used_before: int
    """Where `used` was when its growth was last noted."""
    growth: int = 0
    """Bytes that had come into use then since the time before, `RATE_SECONDS` earlier."""

    @property
    def rest_end(self) -> int:
        """All bytes from `start` to here are to be taken while the engine is idle."""
        ahead = max(AHEAD_BYTES, self.growth, self.used - self.used_before)
        return max(self.first_end, min(self.end, self.used + min(MAX_AHEAD_BYTES, ahead)))


class PageSchedule:
    """Decides which bytes of one segment are taken next, and when; from the low end of each slot class to its high end.

    `ends` are the bytes of the segment at which its slot classes end.
    """

    def __init__(self, ends: Sequence[int], now: float) -> None:
        self.size = ends[-1]
        self._windows = list[_Window]()
        for start, end in pairwise((0, *ends)):
            first = min(end, start + FIRST_BYTES // len(ends))
            self._windows.append(_Window(start, end, first, taken=start, wanted=first, used=start, used_before=start))
        self._start_seconds = START_SECONDS
        """Seconds left of it."""
        self._stepped = False
        """Whether a step has begun."""
        self._computing = False
        self._not_before = now + REST_SECONDS
        self._rated_at = now

    def use(self, end: int) -> bool:
        """Note that all bytes of a slot class below `end` are in use; returns whether bytes are to be taken at once."""
        window = next(window for window in self._windows if end <= window.end)
        window.used = max(window.used, end)
        window.wanted = max(window.wanted, min(window.end, end + AHEAD_BYTES))
        return self._is_behind

    @property
    def _is_behind(self) -> bool:
        return any(window.taken < window.wanted for window in self._windows)

    @property
    def taken(self) -> int:
        """Bytes that were taken, or tried."""
        return sum(window.taken - window.start for window in self._windows)

    @property
    def has_first(self) -> bool:
        """Whether the `FIRST_BYTES` were taken, or tried."""
        return all(window.taken >= window.first_end for window in self._windows)

    @property
    def starting(self) -> bool:
        """Whether no step has begun yet, and time at normal priority is left."""
        return self._start_seconds > 0 and not self._stepped

    def step_began(self) -> None:
        """A step has begun."""
        self._computing = self._stepped = True

    def step_ended(self, now: float) -> None:
        """The engine computes no more."""
        self._computing = False
        self._not_before = now + REST_SECONDS
        if now >= self._rated_at + RATE_SECONDS:
            self._rated_at = now
            for window in self._windows:
                window.growth, window.used_before = window.used - window.used_before, window.used

    def wait(self, now: float) -> float:
        """Seconds until the next piece may be taken, 0 for now; at most `REST_SECONDS`, after which the caller asks
        again."""
        if self._is_behind:
            return 0.0
        if self._computing or all(window.taken >= window.rest_end for window in self._windows):
            return REST_SECONDS
        return max(0.0, self._not_before - now)

    def take(self, now: float) -> tuple[int, int]:
        """The next piece as (start, bytes); it counts as taken from now on. Call only when `wait` says 0."""
        behind = (window for window in self._windows if window.taken < window.wanted)
        window = next(behind, None) or next(window for window in self._windows if window.taken < window.rest_end)
        start, window.taken = window.taken, min(window.end, window.taken + PIECE_BYTES)
        self._not_before = max(self._not_before, now + RESTING_PAUSE_SECONDS)
        return start, window.taken - start

    def took(self, seconds: float) -> None:
        """The last piece took this many seconds of CPU time."""
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

        `ends` are the bytes at which its slot classes end.
        """
        self._descriptor, self._address, self._size = descriptor, address, ends[-1]
        self.huge = True
        """Whether to try to get huge pages."""
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
        the copy into it; slots are handed out from the low end. What is taken while the engine computes slows it down,
        on other cores too, so that is no more than will be used soon. The thread gives way to others as soon as the
        start is over; see `give_way` for how much.
        """
        if self._thread is None:
            self._thread = start_background("kvpact-prefault", self._run)

    def wait_for_first(self, seconds: float) -> bool:
        """After `start`: wait until the `FIRST_BYTES` are taken, so that no prompt pays for them.

        Waits at most `seconds`; returns whether they are taken.
        """
        return self._has_first.wait(seconds)

    def use(self, end: int) -> None:
        """Note that a slot class is in use up to `end`, or soon will be: the bytes after it are taken next."""
        if self._schedule.use(end):
            self._wake.set()

    def step_began(self) -> None:
        """A step has begun: until it ends, only bytes that `use` asks for are taken."""
        self._schedule.step_began()

    def step_ended(self) -> None:
        """The engine computes no more."""
        self._schedule.step_ended(time.monotonic())

    def take_all(self) -> None:
        """Take everything now. Stops early, with a warning, if the machine runs out of memory."""
        self.take(0, self._size)

    def take(self, start: int, length: int) -> None:
        """`take_all` for so many bytes from `start` on, and those that share a huge page with them."""
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
        schedule, starting = self._schedule, True
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
                start, length = start + whole, length - whole
            if length:
                # posix_fallocate finds and clears the pages without the lock on the process's mappings; populating then
                # only maps them. Both release the interpreter's lock.
                os.posix_fallocate(self._descriptor, start, length)
                self._libc.madvise(self._address + start, length, MADV_POPULATE_WRITE)
        except OSError as error:
            logger.warning(
                "arena: no memory beyond %s (%s); set a smaller `memory`", format_size(start), error.strerror
            )
            return False
        return True

    def _collapse(self, start: int, length: int) -> bool:
        """Turn the range into huge pages: they take a tenth of the CPU time, here and when the other process maps them.

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
