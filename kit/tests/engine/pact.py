"""kvpact's own cache under the embedded engine: real arena segments, simulated ranks, the engine's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.config import load_config
from kvpact.identity.groups import GroupSet
from kvpact.identity.keys import Namespace
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.memory.extents import Extents
from kvpact.tiers.executor import TierExecutor
from kvpact_testkit.engine import Engine, EngineConfig, EngineQuirks, JobBehavior, SimulatedWorker
from kvpact_testkit.engine.engine import StepClock
from kvpact_testkit.engine.simulated_worker import Job

SLOT_BYTES = 4096


def group_set(config: EngineConfig) -> GroupSet:
    """The engine's groups as the cache is told of them."""
    return GroupSet(tuple(replace(group, digest=bytes([number]) * 32) for number, group in enumerate(config.groups)))


def pact_engine(
    config: EngineConfig,
    quirks: EngineQuirks | None = None,
    *,
    num_slots: int = 64,
    conduct: Callable[[int, Job], JobBehavior] | None = None,
    tiers: Sequence[TierExecutor] = (),
    classes: Sequence[int] = (),
    **settings: object,
) -> Engine:
    """An engine with a `PactCache` over `num_slots` slots and one `SimulatedWorker` a rank.

    `classes`: per group, the class of its slots; by default all are of one.
    """
    if classes:  # every group could do with the same slots; they are of several sizes all the same
        sizes = tuple(SLOT_BYTES * (number + 1) for number in range(max(classes) + 1))
        extents = Extents(num_slots // 8, 8 * SLOT_BYTES, sizes)
        segments = [ArenaSegment.create_extents(extents, 1) for _ in range(config.num_ranks)]
    else:
        segments = [ArenaSegment.create(num_slots, SLOT_BYTES) for _ in range(config.num_ranks)]
    clock = StepClock()
    cache = PactCache(
        load_config({"plan_lifetime": 0.05, **settings}, {}),
        EngineKV(Namespace({"model": "oracle"}).digest, group_set(config), classes),
        arena=Arena(segments),
        tiers=tiers,
        clock=clock,
    )
    workers = [SimulatedWorker(rank, segment.slot_view, conduct) for rank, segment in enumerate(segments)]
    return Engine(config, quirks, cache, workers, clock)
