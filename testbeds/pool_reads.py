"""Reads from other engines' memory on a simulated device, each in two halves: in their midst, all that may happen.

Owns the truth about leases of reads under way. What an owner gives up meanwhile has other bytes from then on, as far as
the reader sees; so a reader that goes on with it serves a wrong block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from unittest import mock

from kvpact.index.block_index import BlockIndex
from kvpact.pool import neighbour_tier
from kvpact.tiers.vectored import VectoredCall, completely
from pool_caches import SLOT_BYTES, PoolEngine, play, request_of


class Readings:
    """Events in the midst of reads, as a seed says."""

    def __init__(self, engines: Sequence[PoolEngine], seed: int) -> None:
        self.engines = engines
        self.seen = Counter[str]()
        self.unleased = 0
        """Reads in whose midst nobody leased anything of their owner."""
        self._random = Random(seed)
        self._is_busy = False
        self._names = 0
        self._events: Sequence[tuple[int, Callable[[PoolEngine, Sequence[memoryview], int], None]]] = (
            (60, self._go_on), (6, self._fail), (6, self._reset), (8, self._drop), (6, self._leave), (12, self._cancel),
            (6, self._stall),
        )  # fmt: skip

    def play(self, seed: int, requests: int) -> None:
        """Serve requests at random engines; see `pool_caches.play`."""
        with mock.patch.object(neighbour_tier, "completely", self._read):
            play(self.engines, seed, requests)

    def _read(self, call: VectoredCall, descriptor: int, views: list[memoryview], offset: int) -> int:
        if self._is_busy:
            return completely(call, descriptor, views, offset)
        owner = next(one for one in self.engines if any(part.descriptor == descriptor for part in one.segments))
        half = len(views) // 2
        count = completely(call, descriptor, views[:half], offset)
        ((_, event),) = self._random.choices(self._events, [weight for weight, _ in self._events])
        self.seen[event.__name__[1:]] += 1
        with self._alone():
            event(owner, views, offset)
        self.unleased += not owner.is_leased
        if event == self._fail:
            return count
        count += completely(call, descriptor, views[half:], offset + count)
        if event == self._reset:
            garble(views)
        elif event == self._drop and views[0].nbytes == SLOT_BYTES:
            garble(views[:1])
        return count

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _go_on(self, owner: PoolEngine, views: Sequence[memoryview], offset: int) -> None:
        """The owner serves requests, and evicts for them."""
        for _ in range(self._random.randrange(3)):
            self._names += 1
            owner.engine.add_request(request_of(self._random, f"meanwhile {self._names}"))
        for _ in range(self._random.randrange(1, 12)):
            owner.engine.step()

    def _fail(self, owner: PoolEngine, views: Sequence[memoryview], offset: int) -> None:
        """The file ends, or cannot be read."""
        if self._random.random() < 0.5:
            raise OSError(5, "the simulated memory cannot be read")

    def _reset(self, owner: PoolEngine, views: Sequence[memoryview], offset: int) -> None:
        """The owner lets nobody use what was found there, and is met anew, sooner or later."""
        owner.index.reset_columns()
        self._leave(owner, views, offset)

    def _drop(self, owner: PoolEngine, views: Sequence[memoryview], offset: int) -> None:
        """The owner finds that the first block is wrong."""
        drop_at(owner.index, offset // SLOT_BYTES)

    def _leave(self, owner: PoolEngine, views: Sequence[memoryview], offset: int) -> None:
        """Connections to the owner end; some begin again."""
        for engine in self.engines:
            if owner in engine.met:
                engine.leave(owner)
                if self._random.random() < 0.7:
                    engine.meet(owner, len(self.engines) - 1)

    def _cancel(self, owner: PoolEngine, views: Sequence[memoryview], offset: int) -> None:
        """Each engine but the owner ends a request, or computes all of them anew."""
        for engine in self.engines:
            if engine is not owner:
                requests = [*engine.engine.scheduler.requests]
                if requests and self._random.random() < 0.5:
                    engine.engine.cancel(self._random.choice(requests))
                elif self._random.random() < 0.2:
                    engine.engine.reset_prefix_cache(reset_running_requests=True)

    def _stall(self, owner: PoolEngine, views: Sequence[memoryview], offset: int) -> None:
        """Reads that come next are late."""
        for engine in self.engines:
            if engine is not owner:
                for tier in engine.tiers:
                    tier.stalled_steps = self._random.choice((2, 20, 60))


def drop_at(index: BlockIndex, slot: int) -> None:
    """Have an index drop the block of a slot, if there is one."""
    key = index.key_at(slot)
    if key is not None:
        index.drop(key)


def garble(views: Sequence[memoryview]) -> None:
    """Other bytes, as of a block that is not what its key says."""
    for view in views:
        view[:] = bytes(each ^ 0x5A for each in view[:64]) + bytes(view[64:])
