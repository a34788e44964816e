"""Host threads that run a tier's blocking reads and writes for the scheduler's thread.

Owns the order (reads first), the bound on bytes waiting to be written, the one call of the tier that each operation
makes, and the moment at which a buffer is free again. Never touches an index or a lease: it reports the outcome of each
operation on the scheduler's own thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import TypeAlias

from kvpact.errors import PactViolation, TierError
from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.threads import start_background
from kvpact.tiers.base import BlockBuffer, Entry, SupportsLocate, SupportsPrefix, Tier, chained, leading
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

WRITE_BYTES = 128 << 20
"""Bytes of one write: each costs the scheduler's thread a wake-up, and nothing waits for its end."""

OpId: TypeAlias = Hashable
"""The caller's own id for one operation; unique among those under way."""


@dataclass(frozen=True, slots=True)
class BlocksDone:
    """An operation on blocks has ended; `each` says of every one whether it is held, has arrived, or is stored.

    `ok` is False if the store failed, which a miss alone does not show. `seconds` is the time in the tier, without the
    wait for a thread; 0 if the tier was not asked.
    """

    op_id: OpId
    each: tuple[bool, ...]
    ok: bool = field(default=True, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def in_a_row(self) -> int:
        """Number of leading blocks for which `each` is true."""
        return leading(self.each)


class LookupDone(BlocksDone):
    """A look-up has ended."""


class GetDone(BlocksDone):
    """A read has ended: nothing writes to any buffer."""


class PutDone(BlocksDone):
    """A write has ended or was given up: the buffers are the caller's again."""


@dataclass(frozen=True, slots=True)
class ControlDone:
    """A control operation has ended. `ok` is False if the tier refused it, raised, or was never asked."""

    op_id: OpId
    ok: bool = False
    seconds: float = field(default=0.0, compare=False)


Done: TypeAlias = LookupDone | GetDone | PutDone | ControlDone


@dataclass(frozen=True, slots=True)
class Overdue:
    """Overdue operations: reads and look-ups by id, and whether a write is overdue."""

    reads: tuple[OpId, ...] = ()
    writes: bool = False
    everything: bool = False
    """True if overdue operations occupy every thread, so that nothing else can begin."""


NOTHING_OVERDUE = Overdue()


@dataclass(eq=False, slots=True)
class Job:
    """One operation under way, which belongs to the thread that has taken it from its deque."""

    op_id: OpId
    keys: Sequence[BlockKey] = ()
    buffers: Sequence[BlockBuffer] = ()
    before: Sequence[BlockKey] | None = None
    """The prompt's blocks before them, if they follow one another; None if each stands for itself."""
    write_bytes: int = 0
    kind: type[Done] = GetDone
    control: Callable[[Tier], object] | None = None
    epoch: Epoch = FIRST_EPOCH
    depths: Sequence[int] = ()
    """The numbers in their prompts of blocks to be written that each stand for itself, where they are known."""
    each: Sequence[bool] = ()
    began: float | None = None
    moved: float = inf
    """Time of the last progress: the start of the operation, or the arrival of blocks."""
    arrived: int = 0
    """Blocks in a row from the first that a read has brought so far."""
    cancelled: bool = False

    @property
    def words(self) -> str:
        return {PutDone: "write", ControlDone: "control operation"}.get(self.kind, "read")

    @property
    def changes(self) -> bool:
        """True if it changes the tier's content; such jobs run one after another."""
        return self.kind is PutDone or self.kind is ControlDone

    def done(self, ok: bool) -> Done:
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        if self.kind is LookupDone or self.kind is GetDone or self.kind is PutDone:
            return self.kind(self.op_id, tuple(self.each) or (False,) * len(self.keys), ok, seconds)
        return ControlDone(self.op_id, ok and self.began is not None, seconds)


@dataclass(slots=True)
class _Shared:
    """State that the threads and their owner share. Threads refer only to this, so an unused executor is collected.

    The owner is the scheduler's thread. It takes none of these locks, because one of our threads may hold a lock while
    it waits milliseconds for the interpreter. What both sides use changes by atomic operations of the interpreter: the
    thread that pops a job from its deque owns the job.
    """

    tier: Tier
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

    def __init__(
        self, tier: Tier, threads: int, max_write_bytes: int, *, woken_by_owner: bool = False, label: str = ""
    ) -> None:
        if threads < 1:
            raise ValueError(f"a tier's queue needs at least 1 thread, not {threads}")
        self.tier = tier
        self.label = label or tier.name
        """Name in metrics and logs."""
        self._woken_by_owner = woken_by_owner
        self._unflushed = 0
        """Jobs submitted since the last wake-up of threads."""
        self._max_write_bytes = max_write_bytes
        self._shared = _Shared(tier)
        self._threads = self._start(threads)

    def _start(self, threads: int) -> list[threading.Thread]:
        names = [f"kvpact-{self.tier.name}-{number}" for number in range(threads)]
        return [start_background(name, partial(_work, self._shared)) for name in names]

    def use(self, tier: Tier) -> None:
        """Use this tier for operations that begin from now on."""
        self.tier = self._shared.tier = tier

    def submit(self, job: Job) -> bool:
        """Look up or read the job's `keys`, or write them from its `buffers`.

        Returns False if the waiting bytes leave no room for a write: then nothing was accepted, no completion follows,
        and the caller releases the blocks at once (H52). Raises PactViolation if its `op_id` is under way.
        """
        shared = self._shared
        if job.write_bytes > self.room:
            return False
        if job.op_id in shared.under_way:
            raise PactViolation(f"operation {job.op_id!r} is already running; each operation needs an id of its own")
        if shared.closing:
            shared.done.append(job.done(True))
            return True
        shared.under_way[job.op_id] = job
        shared.accepted_bytes += job.write_bytes
        (shared.puts if job.changes else shared.gets).append(job)
        self._unflushed += 1
        if not self._woken_by_owner:
            self.flush()
        return True

    def submit_control(self, op_id: OpId, operation: Callable[[Tier], object]) -> None:
        """Call `operation(tier)` after the writes submitted before it. A thread is woken at once: no step may follow.

        Raises PactViolation if `op_id` is under way.
        """
        self.submit(Job(op_id, kind=ControlDone, control=operation))
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
        """True if `poll` would report anything."""
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

    @property
    def room(self) -> int:
        """Bytes of writes that would be accepted now."""
        return max(0, self._max_write_bytes - self.pending_write_bytes)

    def most_per_write(self, block_bytes: int) -> int:
        """Most blocks of this size in one write: one waits while another runs, so half of what may wait.

        At least one, which has room where nothing waits: an engine with a smaller queue does not start.
        """
        return max(1, min(WRITE_BYTES, self._max_write_bytes // 2) // block_bytes)

    @property
    def under_way(self) -> int:
        """Number of operations accepted and not yet ended."""
        return len(self._shared.under_way)

    def close(self, timeout: float) -> bool:
        """Drop waiting reads, finish waiting writes within `timeout` seconds, then give up on them (H56).

        Returns whether all threads have ended. If not, one does not return from the tier: its buffers must not be
        reused, and its operation is reported if it ever ends. `poll` still reports the others. Idempotent.
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


def _work(shared: _Shared) -> None:
    while (job := _next_job(shared)) is not None:
        run_job(shared.tier, shared, job)
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


def call_tier(tier: Tier, job: Job) -> None:
    """Run the job, and record which of its blocks are held, arrived or stored. Passes on the tier's exceptions."""
    if job.control is not None:
        job.control(tier)
        return

    def progress(arrived: int) -> bool:
        job.arrived = checked_count(arrived, len(job.buffers))
        job.moved = time.monotonic()
        return not job.cancelled

    if job.kind is LookupDone:
        job.each = look_up(tier, job.keys, follow=job.before is not None)
        return
    if job.before is not None and isinstance(tier, SupportsLocate):
        tier.locate([*job.before, *job.keys])
    if job.kind is GetDone:
        job.each = checked_answers(tier.get(job.keys, job.buffers, progress), len(job.keys))
    elif job.before is not None:
        job.each = checked_answers(tier.put(chained(job.keys, job.buffers, job.before, job.epoch)), len(job.keys))
    else:
        depths = job.depths or [0] * len(job.keys)
        blocks = zip(job.keys, job.buffers, depths, strict=True)
        entries = [Entry(key, buffer, depth=depth, epoch=job.epoch) for key, buffer, depth in blocks]
        job.each = checked_answers(tier.put(entries), len(job.keys))


def look_up(tier: Tier, keys: Sequence[BlockKey], *, follow: bool) -> Sequence[bool]:
    """True for each block that the tier holds; up to a hole for those that `follow` one another in a prompt."""
    if follow and isinstance(tier, SupportsPrefix):
        held = checked_count(tier.leading(keys), len(keys))
        return [True] * held + [False] * (len(keys) - held)
    return checked_answers(tier.lookup(keys), len(keys))


def checked_count(blocks: int, most: int) -> int:
    """`blocks`, a tier's answer about `most` blocks. Raises TierError if it is impossible."""
    if not 0 <= blocks <= most:
        raise TierError(f"of {most} blocks it names {blocks}")
    return int(blocks)


def checked_answers(each: Sequence[bool], blocks: int) -> Sequence[bool]:
    """`each`, a tier's answer about each of some `blocks`. Raises TierError if it is impossible."""
    if len(each) != blocks:
        raise TierError(f"asked about {blocks} blocks it answers about {len(each)}")
    return each
