"""Injected faults of a tier or its store, decided by a seed and kept in a history.

Owns the decisions, the waiting and the wrapper around a tier. Uses no clock: the same plan and the same operations give
the same faults, whatever the order in which threads run.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from random import Random
from typing import TypeAlias

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import (
    BlockBuffer,
    Entry,
    Progress,
    SupportsEvents,
    SupportsLocate,
    SupportsPrefix,
    SupportsScan,
    Tier,
    TierCapacity,
    TierCounts,
    TierHealth,
)

HISTORY = 10_000
"""Injected faults that are remembered."""


class Fault(StrEnum):
    """What goes wrong with one operation."""

    DELAY = "delay"
    """The operation pauses for some steps after part of its work."""
    HANG = "hang"
    """The operation pauses after part of its work until it is released."""
    ERROR = "error"
    """The operation raises OSError or TierError, before or after its work."""
    PARTIAL = "partial"
    """The operation handles fewer blocks than the caller asked for."""
    DAMAGE = "damage"
    """A block is found damaged: it is dropped with all that need it where that is known, and its buffer has garbage."""
    SILENT_DAMAGE = "silent damage"
    """A byte is flipped and not reported. No tier may do this; it shows that a check detects it."""
    CRASH = "crash"
    """The process dies during it: `Crash` is raised here and by every later operation, until `revive`."""


class Operation(StrEnum):
    """Operations that can fail: a tier's methods, and a read or write that a tier makes on its store."""

    LOOKUP = "lookup"
    GET = "get"
    PUT = "put"
    DELETE = "delete"
    CLEAR = "clear"
    READ = "read"
    WRITE = "write"


class Crash(BaseException):
    """The process died here. Not an Exception, so that no handler of store errors catches it."""


Chances: TypeAlias = Mapping[Operation, Mapping[Fault, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """For each operation, the chance (0 to 1) of each fault. Without chances only armed faults happen."""

    seed: int = 0
    chances: Chances = field(default_factory=dict)
    delay_steps: int = 3
    """Calls of `Faults.step` that a delayed operation waits for."""
    hang_seconds: float | None = None
    """Real seconds after which a hanging or delayed operation continues unreleased; None: never."""


@dataclass(frozen=True, slots=True)
class Injected:
    """One injected fault, as scripts show it."""

    operation: Operation
    occurrence: int
    """Which operation of this kind it was, from 0."""
    fault: Fault

    def __str__(self) -> str:
        return f"{self.operation} number {self.occurrence}: {self.fault}"


@dataclass(slots=True)
class _Armed:
    operation: Operation
    fault: Fault
    after: int
    times: int


class Faults:
    """Decides for each announced operation which fault it meets. Thread-safe."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = plan or FaultPlan()
        self.history: deque[Injected] = deque(maxlen=HISTORY)
        """Injected faults, oldest first."""
        self.calls: Counter[Operation] = Counter()
        """Operations announced so far, by kind."""
        self.crashed = False
        self._armed: list[_Armed] = []
        self._seen: Counter[tuple[Operation, bytes]] = Counter()
        self._condition = threading.Condition()
        self._steps = 0
        self._releases = 0
        self._waiting = 0

    def arm(self, operation: Operation, fault: Fault, *, after: int = 0, times: int = 1) -> None:
        """Inject `fault` into `times` operations of this kind, after `after` of them have succeeded."""
        with self._condition:
            self._armed.append(_Armed(operation, fault, after, times))

    def disarm(self) -> None:
        """Drop the armed faults that have not happened yet."""
        with self._condition:
            self._armed.clear()

    def revive(self) -> None:
        """After a crash: the next process starts. Armed faults are dropped."""
        with self._condition:
            self.crashed = False
            self._armed.clear()

    def reset(self) -> None:
        """Return to the initial state: nothing armed, injected or counted; waiting operations continue."""
        with self._condition:
            self.crashed = False
            self._armed.clear()
            self.history.clear()
            self.calls.clear()
            self._seen.clear()
            self._steps = 0
        self.release()

    def step(self, steps: int = 1) -> None:
        """Let `steps` steps pass for delayed operations."""
        with self._condition:
            self._steps += steps
            self._condition.notify_all()

    def release(self) -> None:
        """Every operation that hangs or is delayed now continues."""
        with self._condition:
            self._releases += 1
            self._condition.notify_all()

    @property
    def waiting(self) -> int:
        """Operations that hang or are delayed now."""
        return self._waiting

    def until_waiting(self, count: int, timeout: float) -> bool:
        """Wait until `count` operations hang or are delayed; False if they do not within `timeout` real seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: self._waiting >= count, timeout)

    def meet(self, operation: Operation, name: bytes = b"") -> tuple[Fault | None, Random]:
        """Announce an operation on `name`: returns its fault, if any, and a random source for the fault's details.

        Raises Crash if the process has died already.
        """
        with self._condition:
            if self.crashed:
                raise Crash(f"a {operation} after the process died")
            occurrence = self.calls[operation]
            self.calls[operation] += 1
            # Seeded by the operation's subject, not by its time, so that the order of threads changes no fault.
            chance = choices(self.plan.seed, str(operation), name, self._seen[operation, name])
            self._seen[operation, name] += 1
            fault = self._take_armed(operation) or _drawn(self.plan.chances.get(operation, {}), chance)
            if fault is not None:
                self.history.append(Injected(operation, occurrence, fault))
            self.crashed = fault is Fault.CRASH
            return fault, chance

    def wait(self, fault: Fault) -> None:
        """Carry out a DELAY or HANG on this thread; return at once for other faults."""
        if fault not in (Fault.DELAY, Fault.HANG):
            return
        with self._condition:
            due = self._steps + self.plan.delay_steps
            releases = self._releases
            self._waiting += 1
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._releases > releases or (fault is Fault.DELAY and self._steps >= due),
                self.plan.hang_seconds,
            )
            self._waiting -= 1

    def before_read(self, name: bytes = b"") -> None:
        """A tier is about to read from its store: waits, or raises OSError or Crash."""
        self._store_call(Operation.READ, name)

    def before_write(self, name: bytes = b"", torn: Callable[[float], object] | None = None) -> None:
        """A tier is about to write to its store: waits, or raises OSError or Crash.

        If the process dies at this write, `torn(fraction)` is called first: it writes that part of the bytes.
        """
        self._store_call(Operation.WRITE, name, torn)

    def _store_call(self, operation: Operation, name: bytes, torn: Callable[[float], object] | None = None) -> None:
        fault, chance = self.meet(operation, name)
        if fault is Fault.CRASH:
            if torn is not None:
                torn(chance.choice((0.0, 0.3, 0.7, 1.0)))
            raise Crash(f"the process died at this {operation}")
        if fault is Fault.ERROR:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault is not None:
            self.wait(fault)

    def _take_armed(self, operation: Operation) -> Fault | None:
        for armed in self._armed:
            if armed.operation is operation:
                if armed.after:
                    armed.after -= 1
                    continue
                armed.times -= 1
                if not armed.times:
                    self._armed.remove(armed)
                return armed.fault
        return None


class FaultyTier(Tier):
    """A tier with `faults`. It keeps a tier's promises except for SILENT_DAMAGE and raised errors.

    It has those of the optional members `leading`, `put_start`, `locate`, `scan` and `events` that `tier` has.
    """

    def __init__(self, tier: Tier, faults: Faults) -> None:
        self.tier = tier
        self.faults = faults
        self.name = tier.name
        self.exclusive = tier.exclusive
        if isinstance(tier, SupportsPrefix):
            self.leading = partial(self._leading, tier)
            self.put_start = tier.put_start
        if isinstance(tier, SupportsLocate):
            self.locate = tier.locate
        if isinstance(tier, SupportsScan):
            self.scan = tier.scan
        if isinstance(tier, SupportsEvents):
            self.events = tier.events

    @property
    def others_evict(self) -> bool:
        return self.tier.others_evict

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        fault, chance = self._begin(Operation.LOOKUP, keys)
        held = self.tier.lookup(keys)
        return [there and chance.random() < 0.5 for there in held] if fault is Fault.PARTIAL else held

    def _leading(self, tier: SupportsPrefix, keys: Sequence[BlockKey]) -> int:
        fault, chance = self._begin(Operation.LOOKUP, keys)
        held = tier.leading(keys)
        return chance.randint(0, held) if fault is Fault.PARTIAL else held

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        def get(count: int) -> list[bool]:
            return [*self.tier.get(keys[:count], buffers[:count], on_progress), *[False] * (len(keys) - count)]

        fault, chance, count = self._halfway(Operation.GET, keys, get)
        arrived = get(count if fault is Fault.PARTIAL else len(keys))
        if fault is Fault.SILENT_DAMAGE and any(arrived):
            there = [buffer for buffer, has_arrived in zip(buffers, arrived, strict=True) if has_arrived]
            _flip(there[min(count, len(there) - 1)], chance)
        elif fault is Fault.DAMAGE and any(arrived[count : count + 1]):
            for piece in buffers[count]:
                piece[:] = chance.randbytes(piece.nbytes)
            self.tier.delete([keys[count]])
            arrived[count] = False
        return arrived

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        def put(count: int) -> list[bool]:
            return [*self.tier.put(entries[:count]), *[False] * (len(entries) - count)]

        fault, chance, count = self._halfway(Operation.PUT, [entry.key for entry in entries], put)
        if fault is Fault.SILENT_DAMAGE and entries:
            copied = [memoryview(bytearray(piece)) for piece in entries[count].buffer]
            _flip(copied, chance)
            entries = [*entries[:count], replace(entries[count], buffer=copied), *entries[count + 1 :]]
        return put(count if fault is Fault.PARTIAL else len(entries))

    def delete(self, keys: Iterable[BlockKey]) -> int:
        doomed = list(keys)
        self._begin(Operation.DELETE, doomed)
        return self.tier.delete(doomed)

    def clear(self) -> None:
        self._begin(Operation.CLEAR, ())
        self.tier.clear()

    def capacity(self) -> TierCapacity:
        return self.tier.capacity()

    def counts(self) -> TierCounts:
        return self.tier.counts()

    def health(self) -> TierHealth:
        return self.tier.health()

    def close(self) -> None:
        self.tier.close()

    def _begin(self, operation: Operation, keys: Sequence[BlockKey]) -> tuple[Fault | None, Random]:
        """`Faults.meet`, for operations that do not move blocks."""
        fault, chance = self.faults.meet(operation, _name(keys))
        self._suffer(fault, chance)
        return fault, chance

    def _halfway(
        self, operation: Operation, keys: Sequence[BlockKey], move: Callable[[int], object]
    ) -> tuple[Fault | None, Random, int]:
        """`Faults.meet`, for operations that `move` blocks: a fault that stops or pauses one does so after some blocks.

        Also returns how many blocks succeed: all of them without a fault.
        """
        fault, chance = self.faults.meet(operation, _name(keys))
        count = chance.randint(0, max(0, len(keys) - 1)) if fault is not None else len(keys)
        if fault in (Fault.DELAY, Fault.HANG, Fault.ERROR, Fault.CRASH):
            move(count)
            self._suffer(fault, chance)
        return fault, chance, count

    def _suffer(self, fault: Fault | None, chance: Random) -> None:
        """Raise or wait, if the fault requires it."""
        if fault in (Fault.ERROR, Fault.CRASH):
            _fail(fault, chance)
        if fault is not None:
            self.faults.wait(fault)


def choices(seed: int, *parts: object) -> Random:
    """A random source that depends on its arguments alone, and is equal in every process."""
    return Random(int.from_bytes(blake2b(repr((seed, *parts)).encode(), digest_size=8).digest(), "little"))


def _drawn(chances: Mapping[Fault, float], chance: Random) -> Fault | None:
    draw = chance.random()
    for fault, share in chances.items():
        if draw < share:
            return fault
        draw -= share
    return None


def _name(keys: Sequence[BlockKey]) -> bytes:
    return keys[0] if keys else b""


def _fail(fault: Fault, chance: Random) -> None:
    if fault is Fault.CRASH:
        raise Crash("the process died in this operation")
    if chance.random() < 0.5:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    raise TierError("the store was made to fail")


def _flip(buffer: BlockBuffer, chance: Random) -> None:
    piece = chance.choice([piece for piece in buffer if piece.nbytes] or [memoryview(bytearray(1))])
    piece[chance.randrange(piece.nbytes)] ^= 1 << chance.randrange(8)
