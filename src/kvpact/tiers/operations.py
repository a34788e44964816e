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
from kvpact.tiers.base import BlockBuffer, Entry, SupportsLocate, SupportsPrefix, Tier, chained, leading

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
        """How many, from the first on."""
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
    """Whether overdue operations occupy every thread, so that nothing else can begin."""


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
        """Whether it changes the tier's content; such jobs run one after another."""
        return self.kind is PutDone or self.kind is ControlDone

    def done(self, ok: bool) -> Done:
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        if self.kind is LookupDone or self.kind is GetDone or self.kind is PutDone:
            return self.kind(self.op_id, tuple(self.each) or (False,) * len(self.keys), ok, seconds)
        return ControlDone(self.op_id, ok and self.began is not None, seconds)


def call_tier(tier: Tier, job: Job) -> None:
    """Run the job, and note which of its blocks are held, have arrived or are stored. Raises what the tier raises."""
    if job.control is not None:
        job.control(tier)
        return

    def progress(arrived: int) -> bool:
        job.arrived, job.moved = checked_count(arrived, len(job.buffers)), time.monotonic()
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
        entries = [Entry(key, buffer, epoch=job.epoch) for key, buffer in zip(job.keys, job.buffers, strict=True)]
        job.each = checked_answers(tier.put(entries), len(job.keys))


def look_up(tier: Tier, keys: Sequence[BlockKey], *, follow: bool) -> Sequence[bool]:
    """Which of the blocks the tier holds; of those that `follow` one another from a prompt's first on, up to a hole."""
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
