"""Reads by one rank from the shared tiers, before a step begins.

Owns the rank's clients of the tiers, their threads, and the memory that tiers read into: never a slot, because a
cancelled read may go on writing. Each rank reads whole blocks, verified, and keeps its part of them. Waits, but never
beyond its deadline, because every request of the step waits too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise

from kvpact.config import KvpactConfig
from kvpact.contract import LoadJob, StoreRead
from kvpact.errors import ConfigError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.ranges import BlockRange
from kvpact.threads import start_background
from kvpact.tiers.awaited import open_tiers
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.executor import GetDone, TierExecutor
from kvpact.tiers.registry import TierContext, load_seal
from kvpact.wire import SharedTierConfig
from kvpact.worker.segment import Sharing

logger = logging.getLogger(__name__)

READ_BYTES = 16 << 20
"""Bytes of one read; reads not finished by the deadline are lost."""

LENT_BYTES = 256 << 20
"""Bytes that tiers read into, half of them one tier alone; a cancelled read keeps its memory until it ends."""

PAUSE_SECONDS = 2e-4
"""Seconds between two polls of the tiers' threads."""


@dataclass(eq=False, slots=True)
class Wanted:
    """Blocks that a step is to compute: those of `keys`, which count from a request's first block, from `start` on."""

    job_id: int
    keys: Sequence[BlockKey]
    start: int
    slots: Sequence[int]


@dataclass(eq=False, slots=True)
class _Source:
    """Shared tier, as this rank uses it; `position` is its number on the scheduler side."""

    position: int
    client: TierClient


@dataclass(eq=False, slots=True)
class _Walk:
    """Progress of one look-up: the next block, and the tier from which it is being read."""

    wanted: Wanted
    at: int
    tier: int = 0
    op_id: int = 0
    buffers: list[list[memoryview]] = field(default_factory=list)


def room_in_step(budget: int, store: SharedTierConfig, loads: Sequence[LoadJob]) -> int:
    """Number of blocks that a step may load besides the `loads` that it waits for already; the same on all ranks.

    `budget` is in bytes on each rank, and counts for that with the largest part of a block.
    """
    ordered = sum(len(job.slots) for job in loads if job.synchronous)
    return max(0, budget // max(store.rank_slot_bytes) - ordered)


def reader_for(
    config: KvpactConfig, sharing: Sharing, num_groups: int, keep: Callable[[int, memoryview], None]
) -> StepReader | FirstRanksReader | None:
    """Reader of shared tiers for a rank before a step; None if the configuration has no look-ups there.

    Raises ConfigError for several KV cache groups: a step's look-up has the keys of one.
    """
    if config.match_at != "step":
        return None
    if num_groups > 1:
        raise ConfigError(
            f'match_at="step" serves models with one KV cache group, and this one has {num_groups}: leave "match_at" '
            'out, which is "schedule"'
        )
    return StepReader(config, sharing.piece, keep) if sharing.stores else FirstRanksReader()


class StepReader:
    """Reads for one rank; `keep(slot, part)` stores its part of each block."""

    def __init__(self, config: KvpactConfig, rank: int, keep: Callable[[int, memoryview], None]) -> None:
        """`rank` counts those that have slots of their own."""
        self._config = config
        self._rank = rank
        self._keep = keep
        self._sources: list[_Source] = []
        self._opening: threading.Event | None = None
        self._bounds: list[tuple[int, int]] = []
        self._block_bytes = 0
        self._reads: list[StoreRead] = []
        """Reads of the running call of `read`."""
        self._tickets = count(1)
        self._walks: dict[int, _Walk] = {}
        self._crowded: list[_Walk] = []
        """Look-ups that wait until their tier has less to read."""

    def read(
        self, store: SharedTierConfig, wanted: Sequence[Wanted], most: int
    ) -> tuple[dict[int, int], tuple[StoreRead, ...]]:
        """Job id -> number of consecutive blocks from the start that are in their slots now; and the reads by tier.

        Takes at most `step_deadline`, and ends as soon as the first of `wanted` have `most` blocks together.
        """
        deadline = time.monotonic() + self._config.step_deadline
        if not self._open(store).wait(self._config.step_deadline):
            return {}, ()
        self._reads.clear()
        for source in self._sources:
            source.client.use_what_is_there()
        walks = [_Walk(one, one.start) for one in wanted]
        for walk in walks:
            self._go_on(walk)
        while self._poll() and not self._have(walks, most) and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
        late = time.monotonic() >= deadline
        for walk in [*self._walks.values()]:
            self._give_up(walk, late=late)
        self._crowded.clear()
        return {walk.wanted.job_id: walk.at - walk.wanted.start for walk in walks}, tuple(self._reads)

    def _go_on(self, walk: _Walk) -> None:
        """Ask the next tier, in the user's order, for the next blocks."""
        left = len(walk.wanted.keys) - walk.at
        now = time.monotonic()
        while left and walk.tier < len(self._sources):
            client = self._sources[walk.tier].client
            number = min(left, max(1, READ_BYTES // self._block_bytes), client.room)
            walk.buffers = self._new_buffers(number) if client.health.may_read else []
            walk.op_id = next(self._tickets)
            keys = walk.wanted.keys[walk.at : walk.at + number]
            before = walk.wanted.keys[: walk.at]
            if walk.buffers and client.submit_get(walk.op_id, keys, walk.buffers, before=before):
                self._walks[walk.op_id] = walk
                return
            if client.health.is_paused:
                client.probe(walk.wanted.keys, now, before=())
            if not number and any(other.tier == walk.tier for other in self._walks.values()):
                self._crowded.append(walk)
                return
            walk.tier += 1

    def _new_buffers(self, number: int) -> list[list[memoryview]]:
        memory = memoryview(bytearray(number * self._block_bytes))
        return [
            [memory[block + first : block + last] for first, last in self._bounds]
            for block in range(0, len(memory), self._block_bytes)
        ]

    def _poll(self) -> bool:
        """Take in ended reads; returns whether any are left."""
        for source in self._sources:
            for done in source.client.poll():
                assert isinstance(done, GetDone)
                assert isinstance(done.op_id, int)
                walk = self._walks.pop(done.op_id, None)
                if walk is not None:
                    asked = len(walk.buffers)
                    self._take(walk, source, done.in_a_row)
                    walk.tier += done.in_a_row < asked
                    ready = [walk, *self._crowded]
                    self._crowded = []
                    for one in ready:
                        self._go_on(one)
            source.client.check(time.monotonic())
        return bool(self._walks)

    def _have(self, walks: Sequence[_Walk], most: int) -> bool:
        """True if the first of these have `most` blocks together, and all but the last of them have no read left."""
        for walk in walks:
            most -= walk.at - walk.wanted.start
            if most <= 0 or walk in self._crowded or self._walks.get(walk.op_id) is walk:
                break
        return most <= 0

    def _give_up(self, walk: _Walk, *, late: bool) -> None:
        """Cancel the read of a look-up; blocks that have arrived count. `late`: because the deadline has passed."""
        source = self._sources[walk.tier]
        arrived = source.client.executor.progress(walk.op_id)
        self._take(walk, source, arrived)
        del self._walks[walk.op_id]
        # a tier from which blocks arrived works: the prompt was too long for one step
        source.client.give_up(walk.op_id, late=late and not arrived)

    def _take(self, walk: _Walk, source: _Source, arrived: int) -> None:
        """Store this rank's part of each verified block in its slot."""
        first = walk.at - walk.wanted.start
        for slot, buffer in zip(walk.wanted.slots[first:], walk.buffers[:arrived], strict=False):
            self._keep(slot, buffer[self._rank])
        if arrived:
            self._reads.append(StoreRead(walk.wanted.job_id, source.position, BlockRange(walk.at, arrived)))
        walk.at += arrived
        walk.buffers = []

    # Tiers

    def _open(self, store: SharedTierConfig) -> threading.Event:
        """Open the tiers once, on a thread of their own: an unreachable server must not block the engine."""
        if self._opening is None:
            self._opening = threading.Event()
            self._bounds = list(pairwise(accumulate(store.rank_slot_bytes, initial=0)))
            self._block_bytes = sum(store.rank_slot_bytes)
            start_background("kvpact-open-tiers", lambda: self._open_tiers(store))
        return self._opening

    def _open_tiers(self, store: SharedTierConfig) -> None:
        assert self._opening is not None
        try:
            seal = load_seal(self._config.record_key_file)
            place = TierContext(Namespace.parse(store.namespace), self._block_bytes, seal)
            lent = LentSlots(max(1, LENT_BYTES // self._block_bytes))
            timeout = self._config.step_deadline
            opened = open_tiers([self._config.tiers[number] for _, number in store.tiers], place, timeout)
            for (position, _), tier in zip(store.tiers, opened, strict=True):
                executor = TierExecutor(tier, self._config.io_threads, 1)
                client = TierClient(executor, lent, timeout=timeout, clock=time.monotonic, reads_find_out=True)
                self._sources.append(_Source(position, client))
        finally:
            self._opening.set()

    def close(self, timeout: float) -> None:
        """Stop the threads and close the tiers, within `timeout` seconds."""
        for source in self._sources:
            source.client.close(timeout / len(self._sources))


class FirstRanksReader:
    """Reads nothing for a rank whose slots another rank fills: it reports every block as found.

    The ranks agree on the smallest number, which is that of the reading rank, after it has read.
    """

    def read(
        self, store: SharedTierConfig, wanted: Sequence[Wanted], most: int
    ) -> tuple[dict[int, int], tuple[StoreRead, ...]]:
        """See `StepReader.read`. All wanted blocks count as found."""
        return {one.job_id: min(len(one.keys) - one.start, len(one.slots)) for one in wanted}, ()

    def close(self, timeout: float) -> None:
        """Do nothing: nothing is open."""
