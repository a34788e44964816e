"""Host threads that run a tier's blocking reads and writes for the scheduler's thread.

Owns the order (reads first), the bound on bytes waiting to be written, and the moment at which a buffer is nobody's any
more. Never touches an index or a lease: it reports, on the scheduler's own thread, what became of each ticket. Floor 1.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvpact.blocks import BlockKey
from kvpact.errors import PactViolation
from kvpact.tiers.base import BlockBuffer, Tier

logger = logging.getLogger(__name__)

Ticket: TypeAlias = Hashable
"""The caller's own name for one read or write; unique among those under way."""


@dataclass(frozen=True, slots=True)
class LookupDone:
    """A look-up has ended: `held` blocks in a row from the first were there. `ok` and `seconds` as in `GetDone`."""

    ticket: Ticket
    held: int
    ok: bool = field(default=True, compare=False)
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class GetDone:
    """A read has ended: `arrived` blocks in a row are in their buffers, and nothing writes to any of them any more.

    `ok` is False if the store did not work, which a miss alone does not show. `seconds` were spent in the tier, without
    the wait for a thread; 0 if it was not asked.
    """

    ticket: Ticket
    arrived: int
    ok: bool = field(default=True, compare=False)
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class PutDone:
    """A write has ended or was given up: `stored` blocks in a row are held; the buffers are the caller's again."""

    ticket: Ticket
    stored: int
    ok: bool = field(default=True, compare=False)
    seconds: float = field(default=0.0, compare=False)


Done: TypeAlias = LookupDone | GetDone | PutDone


@dataclass(eq=False, slots=True)
class _Job:
    ticket: Ticket
    keys: Sequence[BlockKey]
    start: int
    buffers: Sequence[BlockBuffer]
    write_bytes: int = 0
    kind: type[Done] = GetDone
    errand: Callable[[Tier], object] | None = None
    began: float | None = None
    arrived: int = 0
    cancelled: bool = False

    @property
    def is_put(self) -> bool:
        return self.kind is PutDone

    def done(self, blocks: int, ok: bool) -> Done:
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        return self.kind(self.ticket, blocks, ok, seconds)


@dataclass(slots=True)
class _Shared:
    """What the threads and their owner share. Threads hold only this, so a forgotten queue can be collected."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    gets: deque[_Job] = field(default_factory=deque)
    puts: deque[_Job] = field(default_factory=deque)
    under_way: dict[Ticket, _Job] = field(default_factory=dict)
    done: deque[Done] = field(default_factory=deque)
    writing: bool = False
    write_bytes: int = 0
    closing: bool = False
    said: set[str] = field(default_factory=set)


class TierQueue:
    """Runs one tier's `lookup`, `get` and `put` on `threads` daemon threads.

    Every ticket that was accepted is reported by `poll` exactly once, and until then its buffers belong to the queue,
    also after `cancel` (H21). Writes run one after another, in the order in which they came, so that a chain's head is
    held before its tail arrives; while one runs, the other threads read. At most `max_write_bytes` wait to be written.
    """

    def __init__(self, tier: Tier, threads: int, max_write_bytes: int) -> None:
        if threads < 1:
            raise ValueError(f"a tier's queue needs at least 1 thread, not {threads}")
        self.tier = tier
        self._max_write_bytes = max_write_bytes
        self._shared = _Shared()
        self._threads = [
            threading.Thread(target=_work, args=(tier, self._shared), name=f"kvpact-{tier.name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit_lookup(self, ticket: Ticket, keys: Sequence[BlockKey]) -> None:
        """Find out how many of `keys` the tier holds. Raises PactViolation if the ticket is under way."""
        self._submit(_Job(ticket, keys, 0, (), kind=LookupDone))

    def submit_get(self, ticket: Ticket, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer]) -> None:
        """Read block `start + i` of `keys` into `buffers[i]`. Raises PactViolation if the ticket is under way."""
        self._submit(_Job(ticket, keys, start, buffers))

    def submit_put(
        self, ticket: Ticket, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], nbytes: int
    ) -> bool:
        """Write block `start + i` from `buffers[i]`, `nbytes` in all.

        False if the bytes waiting leave no room for it: then nothing was accepted, no completion follows, and the
        caller releases what it holds for it at once (H52). Raises PactViolation if the ticket is under way.
        """
        if self._shared.write_bytes + nbytes > self._max_write_bytes:
            return False
        self._submit(_Job(ticket, keys, start, buffers, nbytes, kind=PutDone))
        return True

    def submit_errand(self, errand: Callable[[Tier], object]) -> None:
        """Call `errand(tier)` after the writes that were submitted before it; nothing is reported."""
        self._submit(_Job(object(), (), 0, (), kind=PutDone, errand=errand))

    def _submit(self, job: _Job) -> None:
        shared = self._shared
        with shared.condition:
            if job.ticket in shared.under_way:
                raise PactViolation(f"ticket {job.ticket!r} is under way already; a ticket names one read or write")
            if shared.closing:
                if job.errand is None:
                    shared.done.append(job.done(0, True))
                return
            shared.under_way[job.ticket] = job
            shared.write_bytes += job.write_bytes
            (shared.puts if job.is_put else shared.gets).append(job)
            shared.condition.notify()

    def progress(self, ticket: Ticket) -> int:
        """How many blocks of a read under way are in their buffers, verified; for use when a deadline passes."""
        job = self._shared.under_way.get(ticket)
        return job.arrived if job is not None else 0

    def cancel(self, ticket: Ticket) -> None:
        """The read or look-up is wanted no more. It ends early, or is never begun, and is reported like any other."""
        shared = self._shared
        with shared.condition:
            job = shared.under_way.get(ticket)
            if job is None or job.is_put:
                return
            job.cancelled = True
            if job in shared.gets:
                shared.gets.remove(job)
                _finish(shared, job, 0)

    def running_longer_than(self, seconds: float) -> list[Ticket]:
        """Reads and look-ups that the tier itself has been busy with for more than so many seconds."""
        before = time.monotonic() - seconds
        # Without the condition, which a thread may hold while it waits for the interpreter: `list` copies in one go.
        jobs = list(self._shared.under_way.values())
        return [job.ticket for job in jobs if not job.is_put and job.began is not None and job.began < before]

    def poll(self) -> list[Done]:
        """What has ended since the last call. Never waits."""
        done = self._shared.done
        return [done.popleft() for _ in range(len(done))]

    @property
    def pending_write_bytes(self) -> int:
        """Bytes accepted and not yet written; at most `max_write_bytes`."""
        return self._shared.write_bytes

    @property
    def under_way(self) -> int:
        """Tickets accepted and not yet ended."""
        return len(self._shared.under_way)

    def close(self, timeout: float) -> bool:
        """Drop waiting reads, finish waiting writes within `timeout` seconds, then give up on them (H56).

        True if all threads have ended. If not, one is stuck in the tier: its buffers must not be reused, and its ticket
        is reported if it ever ends. `poll` still tells what became of the others. Idempotent.
        """
        shared = self._shared
        deadline = time.monotonic() + timeout
        with shared.condition:
            shared.closing = True
            for job in shared.under_way.values():
                job.cancelled = job.cancelled or not job.is_put
            _drop_waiting(shared, shared.gets)
            shared.condition.notify_all()
            shared.condition.wait_for(lambda: not shared.under_way, timeout)
            _drop_waiting(shared, shared.puts)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _drop_waiting(shared: _Shared, waiting: deque[_Job]) -> None:
    while waiting:
        _finish(shared, waiting.popleft(), 0)


def _finish(shared: _Shared, job: _Job, blocks: int, ok: bool = True) -> None:
    """Report a job's end, exactly once. The condition must be held."""
    del shared.under_way[job.ticket]
    shared.write_bytes -= job.write_bytes
    if job.errand is None:
        shared.done.append(job.done(blocks, ok))
    shared.condition.notify_all()


def _next_job(shared: _Shared) -> _Job | None:
    """The next thing to do: a read if there is one, else the oldest write if none runs. None when closing."""
    with shared.condition:
        while True:
            if shared.gets:
                return shared.gets.popleft()
            if shared.puts and not shared.writing:
                shared.writing = True
                return shared.puts.popleft()
            if shared.closing:
                return None
            shared.condition.wait()


def _work(tier: Tier, shared: _Shared) -> None:
    while (job := _next_job(shared)) is not None:
        blocks, ok = 0, False
        job.began = time.monotonic()
        try:
            blocks = _run(tier, job)
            health = tier.health()
            ok = health.ok if job.is_put else health.readable
        except Exception as error:  # a tier's defect costs this ticket, never the thread or the engine
            kind = f"{'write' if job.is_put else 'read'} that raised {type(error).__name__}"
            if kind not in shared.said:
                shared.said.add(kind)
                logger.exception("tier %s: a %s failed; further ones are not logged", tier.name, kind)
        with shared.condition:
            shared.writing = shared.writing and not job.is_put
            _finish(shared, job, blocks, ok)


def _run(tier: Tier, job: _Job) -> int:
    if job.errand is not None:
        job.errand(tier)
        return 0
    if job.is_put:
        return tier.put(job.keys, job.start, job.buffers)
    if job.kind is LookupDone:
        return tier.lookup(job.keys)

    def progress(arrived: int) -> bool:
        job.arrived = arrived
        return not job.cancelled

    return tier.get(job.keys, job.start, job.buffers, progress)
