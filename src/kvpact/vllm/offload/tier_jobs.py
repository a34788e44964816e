"""The jobs that vLLM's offloading gives one tier, and the questions it asks, from submission to result.

Owns which rows of vLLM's host memory may still be read or written, and what is known of a shared store's content. A job
is reported once, when nothing touches its rows any more. Runs on the scheduler's thread and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any, Final

import numpy as np
from vllm.v1.kv_offload.tiering.base import JobResult

from kvpact.identity.epochs import Epoch
from kvpact.identity.keys import BlockKey
from kvpact.metrics import Metrics
from kvpact.tiers.client import TierClient
from kvpact.tiers.executor import GetDone, LookupDone, PutDone
from kvpact.tiers.known_keys import ASK_AGAIN_SECONDS, REFUTED_SECONDS, LRUKeySet

KNOWN_SHARE: Final = 2
MIN_KNOWN: Final = 1 << 16
"""Keys remembered per row of host memory as held, and as absent, and at least: more than one prompt has."""

AT_ONCE: Final = 64
"""Keys that an exclusive tier is asked for one by one in a step, at 10 us each; the rest is asked in one go."""


@dataclass(eq=False, slots=True)
class _Load:
    """A job that reads: into vLLM's `rows`, or first into `buffers` of our own that are copied there."""

    job: Any
    names: list[BlockKey]
    rows: list[memoryview]
    buffers: list[memoryview]
    deadline: float
    each: Sequence[bool] = ()
    """True for each block that has arrived in full."""
    is_given_up: bool = False

    @property
    def is_direct(self) -> bool:
        """True if the tier's thread writes to vLLM's rows."""
        return self.buffers is self.rows

    def copy(self) -> None:
        """Copy the blocks that have arrived into vLLM's rows."""
        for row, buffer, arrived in zip(self.rows, self.buffers, self.each, strict=True):
            if arrived:
                row[:] = buffer


@dataclass(eq=False, slots=True)
class _Store:
    """A job that writes, in pieces that fit in the tier's queue."""

    job: Any
    names: list[BlockKey]
    under_way: int = 0
    """Pieces that have not ended."""
    stored: list[Any] = field(default_factory=list)
    """Keys of the job that are stored."""


class TierJobs:
    """Jobs of one tier. `stored` gets the keys of each write that has ended, as vLLM names them.

    A store that others write to is read into memory of our own, so that a blocked read holds up no request: at its
    deadline it is over, with what has arrived in a row. A direct read is asked to end then, and waited for.
    """

    def __init__(
        self,
        client: TierClient,
        memory: memoryview,
        row_bytes: int,
        patience: float,
        metrics: Metrics,
        stored: Callable[[Sequence[Any]], None],
    ) -> None:
        """`memory` is vLLM's, of rows of `row_bytes`; a request waits for at most `patience` seconds."""
        self.client = client
        self._memory = memory
        self._row_bytes = row_bytes
        self._patience = patience
        self._metrics = metrics
        self._stored = stored
        self._at_once = AT_ONCE
        self._answers = _Answers(max(MIN_KNOWN, KNOWN_SHARE * (len(memory) // row_bytes)))
        self._loads: dict[Any, _Load] = {}
        self._copies: list[tuple[Future[None], _Load]] = []
        self._stores: dict[tuple[Any, int], _Store] = {}
        """(job, the first block of a piece under way) -> its job."""
        self._results: list[JobResult] = []
        self._copier = ThreadPoolExecutor(1, "kvpact-offload-copy")

    @property
    def pending(self) -> bool:
        """True if any job has not ended or was not reported."""
        return bool(self.uses_memory or self._results or self._answers.pending)

    @property
    def uses_memory(self) -> bool:
        """True if a row of vLLM's may still be read or written."""
        return bool(self._loads or self._copies or self._stores)

    # Questions

    def holds(self, name: BlockKey, since: float, now: float) -> bool | None:
        """True if a block can be loaded, for a request that waits `since` then; None while the store is asked."""
        client = self.client
        answers = self._answers
        if answers.refuted.added_since(name, now - REFUTED_SECONDS):
            return False
        believed_since = now - ASK_AGAIN_SECONDS if client.shared else since
        if client.health.may_read and answers.held.added_since(name, believed_since):
            return True
        if client.health.is_paused:
            client.probe((name,), now)
            return False
        if answers.absent.added_since(name, since) or now >= since + self._patience:
            return False
        if not client.shared and self._at_once:
            self._at_once -= 1
            return client.has(name, now)
        answers.wanted[name] = None
        return None

    def begin(self, now: float) -> None:
        """The step ends: ask in one go for all that it wanted, and let the tier's threads begin."""
        client = self.client
        answers = self._answers
        self._at_once = AT_ONCE
        if names := answers.next_question():
            op_id = ("lookup", names[0], now)
            if not client.shared:
                answers.note(names, client.have(names, now), now)
            elif client.submit_lookup(op_id, names):
                answers.asking[op_id] = names
        self.client.executor.flush()

    # Jobs

    def load(self, job: Any, names: list[BlockKey], now: float) -> None:
        """Read these blocks into the job's rows."""
        rows = self._rows(job)
        buffers = rows
        if self.client.shared:
            buffers = [np.empty(self._row_bytes, np.uint8).data for _ in rows]
        load = _Load(job, names, rows, buffers, now + self._patience)
        if self.client.submit_get(job.job_id, names, [[buffer] for buffer in buffers]):
            self._loads[job.job_id] = load
        else:
            self._report_load(load, now)

    def store(self, job: Any, names: list[BlockKey], depths: Sequence[int], epoch: Epoch, now: float) -> None:
        """Write the job's rows; rows beyond `write_queue` are dropped, so that a slow store pins no host memory."""
        buffers = [[row] for row in self._rows(job)]
        store = _Store(job, names)
        most = self.client.executor.most_per_write(self._row_bytes)
        for start in range(0, len(buffers), most):
            op_id = job.job_id, start
            piece = slice(start, start + most)
            nbytes = len(buffers[piece]) * self._row_bytes
            if not self.client.submit_put(op_id, names[piece], buffers[piece], nbytes, epoch, depths=depths[piece]):
                self._count("dropped_writes", len(names) - start)
                break
            self._stores[op_id] = store
            store.under_way += 1
        if not store.under_way:
            self._results.append(_result(job, [], self._row_bytes, now))

    def poll(self, now: float) -> list[JobResult]:
        """The jobs that have ended since the last call."""
        if self.client.use_what_is_there():
            self._answers.forget_all()
        self.client.check(now)
        for done in self.client.poll():
            if isinstance(done, LookupDone):
                self._answers.note(self._answers.asking.pop(done.op_id), done.each, now)
            elif isinstance(done, PutDone):
                self._end_piece(done.op_id, done, now)
            elif isinstance(done, GetDone) and (load := self._loads.pop(done.op_id, None)) is not None:
                self._end_load(load, done.each, now)
        for load in [load for load in self._loads.values() if load.deadline <= now and not load.is_given_up]:
            self._give_up(load, now, late=True)
        for copied in [copied for copied in self._copies if copied[0].done()]:
            self._copies.remove(copied)
            self._report_load(copied[1], now)
        results = self._results
        self._results = []
        return results

    def give_up(self, now: float) -> None:
        """End all jobs as soon as that is possible: what has not begun never does."""
        for load in [*self._loads.values()]:
            self._give_up(load, now, late=False)
        for op_id in self._stores:
            self.client.executor.cancel(op_id)

    def close(self, timeout: float) -> bool:
        """Flush the queue within `timeout` seconds, and close the tier; returns True if no job uses memory any more."""
        is_over = self.client.close(timeout)
        self._copier.shutdown()
        return is_over

    def _rows(self, job: Any) -> list[memoryview]:
        starts = [int(chunk) * self._row_bytes for chunk in job.chunk_ids]
        return [self._memory[start : start + self._row_bytes] for start in starts]

    def _give_up(self, load: _Load, now: float, *, late: bool) -> None:
        load.is_given_up = True
        arrived = self.client.executor.progress(load.job.job_id)
        self.client.give_up(load.job.job_id, late=late)
        if not load.is_direct:
            del self._loads[load.job.job_id]
            self._end_load(load, [at < arrived for at in range(len(load.rows))], now)

    def _end_load(self, load: _Load, each: Sequence[bool], now: float) -> None:
        load.each = each
        if load.is_direct or not any(each):
            self._report_load(load, now)
        else:
            self._copies.append((self._copier.submit(load.copy), load))

    def _report_load(self, load: _Load, now: float) -> None:
        """A block that did not come is a miss for a while, else vLLM would promote it for ever."""
        each = load.each or [False] * len(load.names)
        came = [key for key, arrived in zip(load.job.keys, each, strict=True) if arrived]
        self._answers.refute([name for name, arrived in zip(load.names, each, strict=True) if not arrived], now)
        self._count("read_blocks", len(came))
        self._count("read_bytes", len(came) * self._row_bytes)
        self._results.append(_result(load.job, came, self._row_bytes, now))

    def _end_piece(self, op_id: Any, done: PutDone, now: float) -> None:
        store = self._stores.pop(op_id)
        start = op_id[1]
        stored = [*compress(islice(store.job.keys, start, None), done.each)]
        self._answers.forget([*compress(store.names[start:], done.each)])
        self._count("written_blocks", len(stored))
        self._count("written_bytes", len(stored) * self._row_bytes)
        self._count("dropped_writes", len(done.each) - len(stored))
        self._stored(stored)
        store.stored += stored
        store.under_way -= 1
        if not store.under_way:
            self._results.append(_result(store.job, store.stored, self._row_bytes, now))

    def _count(self, name: str, amount: int) -> None:
        self._metrics.add(name, amount, self.client.name)


@dataclass(eq=False)
class _Answers:
    """The tier's answers about blocks, at most the `most` newest of each kind, and its open questions."""

    most: int
    wanted: dict[BlockKey, None] = field(default_factory=dict)
    """Blocks that the running step waits for, in its order."""
    asking: dict[Any, list[BlockKey]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """The tier is another one now."""
        self.held = LRUKeySet(self.most)
        self.absent = LRUKeySet(self.most)
        self.refuted = LRUKeySet(self.most)

    @property
    def pending(self) -> bool:
        return bool(self.wanted or self.asking)

    def next_question(self) -> list[BlockKey]:
        """Blocks that are wanted and not asked for yet."""
        under_way = {name for names in self.asking.values() for name in names}
        names = [name for name in self.wanted if name not in under_way]
        self.wanted.clear()
        return names

    def note(self, names: Sequence[BlockKey], each: Sequence[bool], now: float) -> None:
        for name, is_held in zip(names, each, strict=True):
            (self.held if is_held else self.absent).add((name,), now)
            if not is_held:
                self.held.discard((name,))

    def refute(self, names: Sequence[BlockKey], now: float) -> None:
        self.held.discard(names)
        self.refuted.add(names, now)

    def forget(self, names: Sequence[BlockKey]) -> None:
        """Forget earlier negative lookups for blocks just stored."""
        self.absent.discard(names)
        self.refuted.discard(names)


def _result(job: Any, done: list[Any], row_bytes: int, now: float) -> JobResult:
    """`done` are those of the job's keys that are where they should be."""
    return JobResult(
        job.job_id,
        success=len(done) == len(job.keys),
        successful_keys=tuple(done),
        transfer_time=now - job.submit_time,
        transfer_bytes=len(done) * row_bytes,
    )
