"""Scenes whose caches meet in one process: each loads from the memory of the others, by descriptors of its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping

import numpy as np

from kvpact.contract import JobOutcome, LoadJob, SaveJob, StepWork
from kvpact.index.neighbour import Neighbour
from kvpact.index.row_locks import LockFile
from kvpact.memory.neighbour_slots import NeighbourSlots, decode_addresses
from kvpact.metrics import series
from kvpact.pool.neighbours import Neighbours, OtherEngine
from kvpact.tiers.backends import NEIGHBOURS
from kvpact.tiers.base import Tier
from kvpact.tiers.executor import TierExecutor
from scenes import BLOCK_SIZE, Scene, SceneRequest, done


class NeighbourScene(Scene):
    """A scene that can meet others. Its workers copy from any engine's slots that the step names.

    On a `device` they do not: a thread reads them into this engine's own slots.
    """

    def __init__(self, slots: int = 64, *, device: bool = False, **settings: object) -> None:
        self.neighbours = Neighbours()
        place = {"copies_per_block": 1, "reader": reader} if device else {}
        super().__init__(slots, neighbours=self.neighbours, **place, **settings)  # type: ignore[arg-type]
        self.locks = LockFile()
        self.index = self.cache.index
        columns = self.index.columns
        assert columns is not None
        columns.lend(self.locks)
        for segment in self.segments:
            segment.seal()
        self.met: dict[NeighbourScene, OtherEngine] = {}
        self.mapped: Mapping[int, list[NeighbourSlots]] = {}
        self.loaded_elsewhere = 0
        """Blocks that were copied from other engines' slots."""

    def meet(self, other: NeighbourScene, neighbours: int = 1) -> OtherEngine:
        """Find another scene's engine, as one of so many."""
        columns = other.index.columns
        assert columns is not None
        index = os.open(f"/proc/self/fd/{columns.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        table = Neighbour(index, other.locks.opened(), neighbours)
        addresses = tuple(segment.address() for segment in other.segments)
        engine = OtherEngine("other", table, addresses, None, len(other.kv), 0)
        self.neighbours.enter(engine, table.close, is_near=True)
        self.met[other] = engine
        return engine

    def leave(self, other: NeighbourScene) -> weakref.ref[OtherEngine]:
        """End the connection to another scene's engine."""
        engine = self.met.pop(other)
        self.neighbours.leave(engine)
        return weakref.ref(engine)

    def held(self, request: SceneRequest) -> int:
        """Blocks of a prompt in this engine's own memory."""
        keys = self.cache.requests.of(request).keys
        assert keys is not None
        return self.index.held_prefix(keys.extend(request.token_ids, len(request.token_ids) // BLOCK_SIZE))

    def leased_rows(self) -> int:
        """Rows of this engine that others lease."""
        return sum(self.locks.leased(range(row, row + 1)) is not None for row in range(self.index.num_slots))

    def execute(self, work: StepWork, rank: int) -> dict[int, JobOutcome]:
        """See `Scene`: other engines' slots are read through read-only mappings."""
        addresses = decode_addresses(work.extra)
        if addresses is not None:
            ranks = range(len(self.kv))
            classes = [segment.classes for segment in self.segments]
            self.mapped = {
                each.number: [NeighbourSlots.attach(each, at, classes[at]) for at in ranks] for each in addresses
            }
        outcomes: dict[int, JobOutcome] = {}
        jobs: list[LoadJob | SaveJob] = [*work.loads, *work.saves]
        for job in jobs:
            for slot, block_id in zip(job.slots, job.block_ids, strict=True):
                if isinstance(job, SaveJob):
                    np.frombuffer(self.segments[rank].slot_view(slot), np.uint8)[:] = self.kv[rank][block_id]
                elif job.neighbour:
                    self.kv[rank][block_id] = np.frombuffer(self.mapped[job.neighbour][rank].slot_view(slot), np.uint8)
                    self.loaded_elsewhere += not rank
                else:
                    self.kv[rank][block_id] = np.frombuffer(self.segments[rank].slot_view(slot), np.uint8)
            outcomes[job.job_id] = done(job)
        return outcomes

    @property
    def read_elsewhere(self) -> int:
        """Blocks that were read from other engines' memory into its own."""
        return int(self.cache.observe().get(series("read_blocks", NEIGHBOURS), 0))

    def used_from(self) -> dict[str, int]:
        """Used tokens by the place where they were found."""
        ledger = self.cache.ledger
        return dict(ledger.totals.used_from)

    def is_at_rest(self) -> bool:
        """True if nothing is leased here or by it, and the cache's accounts are exact."""
        self.cache.check()
        leased = self.locks.leased(range(self.index.num_slots))
        return leased is None and not any(engine.index.leased_rows for engine in self.met.values())


def reader(tier: Tier) -> TierExecutor:
    """Threads that read other engines' memory."""
    return TierExecutor(tier, 2, 1)


def neighbour_scenes(count: int, slots: int = 64, **settings: object) -> list[NeighbourScene]:
    """So many scenes, each of which has met all others."""
    scenes = [NeighbourScene(slots, **settings) for _ in range(count)]  # type: ignore[arg-type]
    for scene in scenes:
        for other in scenes:
            if other is not scene:
                scene.meet(other, count - 1)
    return scenes
