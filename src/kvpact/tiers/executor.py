"""Host threads that run a tier's blocking reads and writes for the scheduler's thread.

Owns the order (reads first), the bound on bytes waiting to be written, and the moment at which a buffer is free again.
Never touches an index or a lease: it reports the outcome of each operation on the scheduler's own thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from kvpact.errors import PactViolation, TierError
from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.threads import start_background
from kvpact.tiers.base import BlockBuffer, Tier
from kvpact.tiers.log_once import LogOnce
from kvpact.tiers.operations import NOTHING_OVERDUE as NOTHING_OVERDUE
from kvpact.tiers.operations import ControlDone as ControlDone
from kvpact.tiers.operations import Done as Done
from kvpact.tiers.operations import GetDone as GetDone
from kvpact.tiers.operations import Job, call_tier
from kvpact.tiers.operations import LookupDone as LookupDone
from kvpact.tiers.operations import OpId as OpId
from kvpact.tiers.operations import Overdue as Overdue
from kvpact.tiers.operations import PutDone as PutDone
from kvpact.tiers.operations import checked_answers as checked_answers
from kvpact.tiers.operations import checked_count as checked_count

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Shared:
    """State that the threads and their owner share. Threads refer only to this, so an unused executor is collected.

    The owner is the scheduler's thread. It takes none of these locks, because one of our threads may hold a lock while
    it waits milliseconds for the interpreter. What both sides use changes by atomic operations of the interpreter: the
    thread that pops a job from its deque owns the job.
    """

    gets: deque[Job] = field(default_factory=deque)
    puts: deque[Job] = field(default_factory=deque)
    wakes: SimpleQueue[None] = field(default_factory=SimpleQueue)
    """Each entry wakes one thread, which looks for a job; there may be more entries than jobs."""
    under_way: dict[OpId, Job] = field(default_factory=dict)
    done: deque[Done] = field(default_factory=deque)
    closing: bool = False
    accepted_bytes: int = 0
    """Bytes of all writes accepted so far, without cancelled ones; only the owner counts them."""
    writer: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that runs a write."""
    ended_bytes: int = 0
    """Bytes of accepted writes that have ended; the thread that runs them counts."""
    warned: LogOnce = field(default_factory=lambda: LogOnce(logger))


class TierExecutor:
    """Runs one tier's `lookup`, `get` and `put` on `threads` daemon threads.

    `poll` reports every accepted operation exactly once, and until then its buffers belong to the executor, also after
    `cancel` (H21). Writes run one after another in the order of their submission, so that a chain's head is held before
    its tail arrives; while one runs, the other threads read. At most `max_write_bytes` wait to be written.
    With `woken_by_owner` an operation begins at the next `flush` at the latest, because a thread that wakes up may
    take the core of its waker in the middle of the waker's work.
    """

    def __init__(self, tier: Tier, threads: int, max_write_bytes: int, *, woken_by_owner: bool = False) -> None:
        if threads < 1:
            raise ValueError(f"a tier's queue needs at least 1 thread, not {threads}")
        self.tier = tier
        self._woken_by_owner = woken_by_owner
        self._unflushed = 0
        """Jobs submitted since the last wake-up of threads."""
        self._max_write_bytes = max_write_bytes
        self._shared = _Shared()
        self._threads = self._start(threads)

    def _start(self, threads: int) -> list[threading.Thread]:
        names = [f"kvpact-{self.tier.name}-{number}" for number in range(threads)]
        return [start_background(name, partial(_work, self.tier, self._shared)) for name in names]

    def submit_lookup(self, op_id: OpId, keys: Sequence[BlockKey], *, before: Sequence[BlockKey] | None = None) -> None:
        """Look up which of `keys` the tier holds. Raises as `submit_get`; `before` is as there, and here empty."""
        self._submit(Job(op_id, keys, before=before, kind=LookupDone))

    def submit_get(
        self,
        op_id: OpId,
        keys: Sequence[BlockKey],
        buffers: Sequence[BlockBuffer],
        *,
        before: Sequence[BlockKey] | None = None,
    ) -> None:
        """Read block `keys[i]` into `buffers[i]`. Raises PactViolation if `op_id` is under way.

        If the blocks follow one another in a prompt, `before` has those before them, from its first one on.
        """
        self._submit(Job(op_id, keys, buffers, before))

    def submit_put(
        self,
        op_id: OpId,
        keys: Sequence[BlockKey],
        buffers: Sequence[BlockBuffer],
        nbytes: int,
        epoch: Epoch = FIRST_EPOCH,
        *,
        before: Sequence[BlockKey] | None = None,
    ) -> bool:
        """Write block `keys[i]` from `buffers[i]`, `nbytes` in all, as blocks of `epoch`; `before` as in `submit_get`.

        Returns False if the waiting bytes leave no room for it: then nothing was accepted, no completion follows, and
        the caller releases the blocks at once (H52). Raises PactViolation if `op_id` is under way.
        """
        if not self.has_room(nbytes):
            return False
        self._submit(Job(op_id, keys, buffers, before, nbytes, kind=PutDone, epoch=epoch))
        return True

    def submit_control(self, op_id: OpId, operation: Callable[[Tier], object]) -> None:
        """Call `operation(tier)` after the writes submitted before it. A thread is woken at once: no step may follow.

        Raises PactViolation if `op_id` is under way.
        """
        self._submit(Job(op_id, kind=ControlDone, control=operation))
        self.flush()

    def _submit(self, job: Job) -> None:
        shared = self._shared
        if job.op_id in shared.under_way:
            raise PactViolation(f"ticket {job.op_id!r} is under way already; a ticket names one read or write")
        if shared.closing:
            shared.done.append(job.done(True))
            return
        shared.under_way[job.op_id] = job
        shared.accepted_bytes += job.write_bytes
        (shared.puts if job.changes else shared.gets).append(job)
        self._unflushed += 1
        if not self._woken_by_owner:
            self.flush()

    def flush(self) -> None:
        """Wake threads for the operations submitted since the last call. Almost free if there are none."""
        for _ in range(min(self._unflushed, len(self._threads))):
            self._shared.wakes.put(None)
        self._unflushed = 0

    def progress(self, op_id: OpId) -> int:
        """Number of verified blocks, in a row from the first, of a read under way; for use when a deadline passes."""
        return job.arrived if (job := self._shared.under_way.get(op_id)) is not None else 0

    def cancel(self, op_id: OpId) -> bool:
        """Cancel a read or write, which is reported all the same; False if it has begun: then a read may end early."""
        shared = self._shared
        if (job := shared.under_way.get(op_id)) is None or job.kind is ControlDone:
            return False
        job.cancelled = True
        try:
            (shared.puts if job.changes else shared.gets).remove(job)
        except ValueError:  # a thread has it
            return False
        shared.accepted_bytes -= job.write_bytes
        _finish(shared, job)
        return True

    def cancel_waiting_reads(self) -> None:
        """Cancel all reads and look-ups that have not begun."""
        for job in list(self._shared.gets):
            self.cancel(job.op_id)

    def overdue(self, seconds: float) -> Overdue:
        """The operations without progress for more than `seconds`."""
        if not self._shared.under_way:
            return NOTHING_OVERDUE
        before = time.monotonic() - seconds
        late = [job for job in list(self._shared.under_way.values()) if job.moved < before]  # copied in one go
        reads = tuple(job.op_id for job in late if not job.changes)
        return Overdue(reads, writes=len(reads) < len(late), everything=len(late) >= len(self._threads))

    @property
    def has_completions(self) -> bool:
        """Whether `poll` would report anything."""
        return bool(self._shared.done)

    def poll(self) -> Iterator[Done]:
        """Each ended operation, once. Those that the caller does not consume stay for a later call. Never waits."""
        done = self._shared.done
        for _ in range(len(done)):
            yield done.popleft()

    @property
    def pending_write_bytes(self) -> int:
        """Bytes accepted and not yet written; at most `max_write_bytes`."""
        return self._shared.accepted_bytes - self._shared.ended_bytes

    def has_room(self, nbytes: int) -> bool:
        """Whether a write of `nbytes` would be accepted now."""
        return self.pending_write_bytes + nbytes <= self._max_write_bytes

    @property
    def under_way(self) -> int:
        """Number of operations accepted and not yet ended."""
        return len(self._shared.under_way)

    def close(self, timeout: float) -> bool:
        """Drop waiting reads, finish waiting writes within `timeout` seconds, then give up on them (H56).

        Returns whether all threads have ended. If not, one hangs in the tier: its buffers must not be reused, and its
        operation is reported if it ever ends. `poll` still reports the others. Idempotent.
        """
        shared = self._shared
        deadline = time.monotonic() + timeout
        shared.closing = True
        for job in list(shared.under_way.values()):
            job.cancelled = job.cancelled or not job.changes
        _drop_waiting(shared, shared.gets)
        for _ in self._threads:
            shared.wakes.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        _drop_waiting(shared, shared.puts)  # there is none if all threads have ended
        return ended


def _drop_waiting(shared: _Shared, waiting: deque[Job]) -> None:
    while (job := _take(waiting)) is not None:
        shared.accepted_bytes -= job.write_bytes
        _finish(shared, job)


def _take(waiting: deque[Job]) -> Job | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _finish(shared: _Shared, job: Job, ok: bool = True) -> None:
    """Report the end of a job that the calling thread owns."""
    del shared.under_way[job.op_id]
    shared.done.append(job.done(ok))


def _next_job(shared: _Shared) -> Job | None:
    """The next job: a read if there is one, else the oldest write if none runs. None when closing."""
    while True:
        if (job := _take(shared.gets)) is not None:
            return job
        if shared.puts and shared.writer.acquire(blocking=False):
            if (job := _take(shared.puts)) is not None:
                return job
            shared.writer.release()
        if shared.closing and not shared.puts:
            shared.wakes.put(None)  # for the next thread
            return None
        shared.wakes.get()


def _work(tier: Tier, shared: _Shared) -> None:
    while (job := _next_job(shared)) is not None:
        run_job(tier, shared, job)
        if job.changes:
            shared.writer.release()
            shared.wakes.put(None)  # a write may have waited for its turn


def run_job(tier: Tier, shared: _Shared, job: Job) -> None:
    """Carry out a job that the caller has taken from its deque, and report its end."""
    ok = False
    job.began = job.moved = time.monotonic()
    try:
        call_tier(tier, job)
        ok = job.control is not None or (tier.health().ok if job.changes else tier.health().readable)
    except Exception as error:  # a tier's defect costs this operation, never the thread or the engine
        _log_once(tier, shared, job, error)
    if job.changes:
        shared.ended_bytes += job.write_bytes
    _finish(shared, job, ok)


def _log_once(tier: Tier, shared: _Shared, job: Job, error: Exception) -> None:
    """Log why a job failed: one line for a TierError, with the traceback for an error that no tier should raise."""
    if isinstance(error, TierError):
        text = "tier %s: a %s was refused: %s; further ones are not logged"
        shared.warned.log(f"{job.words} refused", logging.WARNING, text, tier.name, job.words, error)
    else:
        kind = f"{job.words} that raised {type(error).__name__}"
        text = "tier %s: a %s failed; further ones are not logged"
        shared.warned.log(kind, logging.ERROR, text, tier.name, kind, error=error)
