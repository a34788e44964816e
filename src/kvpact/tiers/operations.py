"""The operations of a tier that run on its executor's threads: what each is told, and what is reported of its end.

Owns the one call of the tier that an operation makes. Starts no thread and takes no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from kvpact.errors import TierError
from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Progress, Tier, leading

OpId: TypeAlias = Hashable
"""The caller's own id for one operation; unique among those under way."""


@dataclass(frozen=True, slots=True)
class LookupDone:
    """A look-up has ended: the first `held` blocks were there. `ok`, `seconds` and `each` as in `GetDone`."""

    op_id: OpId
    held: int
    ok: bool = field(default=True, compare=False)
    seconds: float = field(default=0.0, compare=False)
    each: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class GetDone:
    """A read has ended: the first `arrived` blocks are in their buffers, and nothing writes to any buffer.

    `ok` is False if the store failed, which a miss alone does not show. `seconds` is the time in the tier, without the
    wait for a thread; 0 if the tier was not asked. `each` says of every loose block whether it is there, and is empty
    for a chain.
    """

    op_id: OpId
    arrived: int
    ok: bool = field(default=True, compare=False)
    seconds: float = field(default=0.0, compare=False)
    each: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class PutDone:
    """A write has ended or was given up: the first `stored` blocks are held; the buffers are the caller's again."""

    op_id: OpId
    stored: int
    ok: bool = field(default=True, compare=False)
    seconds: float = field(default=0.0, compare=False)
    each: tuple[bool, ...] = ()


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
    """Whether overdue operations occupy every thread, so that nothing else can begin."""


NOTHING_OVERDUE = Overdue()


@dataclass(eq=False, slots=True)
class Job:
    """One operation under way, which belongs to the thread that has taken it from its deque."""

    op_id: OpId
    keys: Sequence[BlockKey]
    start: int
    buffers: Sequence[BlockBuffer]
    write_bytes: int = 0
    kind: type[Done] = GetDone
    control: Callable[[Tier], object] | None = None
    epoch: Epoch = FIRST_EPOCH
    loose: bool = False
    each: tuple[bool, ...] = ()
    began: float | None = None
    moved: float = inf
    """Time of the last progress: the start of the operation, or the arrival of blocks."""
    arrived: int = 0
    cancelled: bool = False

    @property
    def words(self) -> str:
        return {PutDone: "write", ControlDone: "control operation"}.get(self.kind, "read")

    @property
    def changes(self) -> bool:
        """Whether it changes the tier's content; such jobs run one after another."""
        return self.kind is PutDone or self.kind is ControlDone

    @property
    def loose_keys(self) -> Sequence[BlockKey]:
        """The loose blocks that it is about."""
        return self.keys if self.kind is LookupDone else self.keys[self.start : self.start + len(self.buffers)]

    def done(self, blocks: int, ok: bool) -> Done:
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        if self.kind is LookupDone or self.kind is GetDone or self.kind is PutDone:
            each = self.each or (False,) * len(self.loose_keys) if self.loose else ()
            return self.kind(self.op_id, blocks, ok, seconds, each)
        return ControlDone(self.op_id, ok and self.began is not None, seconds)


def call_tier(tier: Tier, job: Job) -> int:
    """Run the job; returns the number of blocks that were held, arrived or stored, of loose ones in a row."""
    if job.control is not None:
        job.control(tier)
        return 0

    def progress(arrived: int) -> bool:
        job.arrived, job.moved = checked_answer(arrived, len(job.buffers)), time.monotonic()
        return not job.cancelled

    if job.loose:
        job.each = _checked_answers(_call_tier_loose(tier, job, progress), len(job.loose_keys))
        return leading(job.each)
    if job.kind is LookupDone:
        return checked_answer(tier.lookup(job.keys), len(job.keys))
    keys = job.keys[: job.start + len(job.buffers)]
    if job.kind is PutDone:
        return checked_answer(tier.put(keys, job.start, job.buffers, job.epoch), len(job.buffers))
    return checked_answer(tier.get(keys, job.start, job.buffers, progress), len(job.buffers))


def _call_tier_loose(tier: Tier, job: Job, progress: Progress) -> Sequence[bool]:
    if job.kind is LookupDone:
        return tier.lookup_each(job.loose_keys)
    if job.kind is PutDone:
        return tier.put_each(job.loose_keys, job.buffers, job.epoch)
    return tier.get_each(job.loose_keys, job.buffers, progress)


def checked_answer(blocks: int, most: int) -> int:
    """`blocks`, a tier's answer about `most` blocks. Raises TierError if it is impossible."""
    if not 0 <= blocks <= most:
        raise TierError(f"of {most} blocks it names {blocks}")
    return int(blocks)


def _checked_answers(each: Sequence[bool], blocks: int) -> tuple[bool, ...]:
    """`each`, a tier's answer about each of some loose `blocks`. Raises TierError if it is impossible."""
    if len(each) != blocks:
        raise TierError(f"asked about {blocks} loose blocks it answers about {len(each)}")
    return tuple(map(bool, each))
