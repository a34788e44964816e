"""What an author gives to the kit: a cache for the place that the kit describes, and what the cache shows of itself.

Owns the description of the place and the factories of kvpact's own caches. Runs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from kvpact.cache.cache import PactCache
from kvpact.cache.lazy_offload import MIN_WINDOW
from kvpact.cache.memory import EngineKV
from kvpact.cache.put_off import PIECE_BLOCKS
from kvpact.config import load_config
from kvpact.contract import ExternalCache, ExternalCacheWorker
from kvpact.errors import TierError
from kvpact.events.queue import EventQueue
from kvpact.identity.groups import GroupSet
from kvpact.identity.keys import Namespace
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.tiers.base import Tier
from kvpact.tiers.disk.superblock import PAGE_BYTES
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.engine import ReferenceCache
from kvpact_testkit.faults import Faults, FaultyTier
from kvpact_testkit.tier.dictionary_store import DictionaryStore, StoredBytes
from kvpact_testkit.tier.stepped_executor import SteppedExecutor

DISK_SLOTS = 64
"""Blocks that the disk of `pact_cache_with_disk` has room for."""

SHARED_RECORDS = 80
"""Records that the store of `pact_cache_with_shared` keeps."""

_SCENES_KEPT = 4
"""Scenes whose shared store is kept, so that they can restart their cache."""


@dataclass(slots=True)
class CacheContext:
    """What a cache is made for: the engine's sizes, the room it may take, and the kit's clock.

    `block_size` is in tokens, `slot_bytes` what one rank copies of one block, at most; the blocks of `groups` may be of
    other sizes. The cache gives its jobs slots below
    `num_slots` and keeps no more blocks than that in memory. Two caches made for one `directory` and one `weights` are
    the same engine before and after a restart; other weights, other content. Caches of one `shared_directory` are on
    engines that share a store, if the cache has such a thing.
    """

    block_size: int
    num_slots: int
    num_ranks: int
    groups: GroupSet
    slot_bytes: int
    clock: Callable[[], float]
    directory: Path
    shared_directory: Path
    weights: str = "weights-0"
    faults: Faults = field(default_factory=Faults)
    """Decides the faults of tiers made by `queue`."""
    write_queue_bytes: int = 1 << 30
    queues: list[SteppedExecutor] = field(default_factory=list)

    @property
    def num_groups(self) -> int:
        """How many KV cache groups the engine has."""
        return len(self.groups.groups)

    def queue(self, tier: Tier) -> TierExecutor:
        """An executor for a cache's tier that the kit can stall and make fail."""
        queue = SteppedExecutor(FaultyTier(tier, self.faults), self.write_queue_bytes, self.clock)
        self.queues.append(queue)
        return queue


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class CacheUnderTest:
    """A cache and what it shows of itself; only `cache` is needed, the rest is then judged by behaviour.

    `slot_views` give, for each rank, the memory of a slot; by default the kit brings its own. `workers` are the cache's
    own, one a rank, in place of the kit's. `held` names what is held for requests: each number is 0 at rest. `check`
    raises PactViolation if an invariant is broken. `counts` are totals that never fall: `promised_tokens`,
    `committed_tokens`, `loaded_tokens`, `used_tokens`, and others. `close` releases what the factory opened.
    """

    cache: ExternalCache
    slot_views: Sequence[Callable[[int], memoryview]] = ()
    workers: Sequence[ExternalCacheWorker] = ()
    held: Callable[[], Mapping[str, int]] = dict
    check: Callable[[], None] = _nothing
    counts: Callable[[], Mapping[str, float]] | None = None
    close: Callable[[], None] = _nothing


CacheFactory: TypeAlias = Callable[[CacheContext], ExternalCache | CacheUnderTest]


def made_for(factory: CacheFactory, place: CacheContext) -> CacheUnderTest:
    """What `factory` makes for `place`."""
    made = factory(place)
    return CacheUnderTest(made) if isinstance(made, ExternalCache) else made


def _named(groups: GroupSet) -> GroupSet:
    """The groups with digests, as layer names give them."""
    named: list[dict[str, Any]] = [{"digest": bytes([number + 1]) * 32} for number in range(len(groups.groups))]
    return GroupSet(tuple(replace(group, **named[i]) for i, group in enumerate(groups.groups)))


EVERYTHING = 1 << 20
"""A lazy cache's window, large enough for every free block."""


def pact_cache(
    place: CacheContext,
    *,
    disk_slots: int = 0,
    shared: bool = False,
    lazy_window: int = MIN_WINDOW,
    piece_blocks: int = PIECE_BLOCKS,
    events: EventQueue | None = None,
    **settings: object,
) -> CacheUnderTest:
    """kvpact's own cache; with `disk_slots`, a disk tier below it, with `shared`, a shared one. Both outlive a restart.

    `settings` as a user's; `lazy_window` and `piece_blocks` as in its `Offloader` and `PutOff`; what it holds is
    announced in `events`.
    """
    slot_bytes = -(-place.slot_bytes // PAGE_BYTES) * PAGE_BYTES
    namespace = Namespace({"weights": place.weights, "block_size": str(place.block_size)})
    segments = [ArenaSegment.create(place.num_slots, slot_bytes) for _ in range(place.num_ranks)]
    tiers = []
    if disk_slots:
        block_bytes = place.num_ranks * slot_bytes
        capacity = 4 * PAGE_BYTES + disk_slots * (block_bytes + 512)
        with suppress(TierError):  # an engine serves without a tier that cannot be opened
            tiers = [place.queue(DiskTier.open(place.directory, namespace, block_bytes, capacity))]
    if shared:
        store = DictionaryStore(_records_at(place.shared_directory), place.faults)
        tiers.append(place.queue(SharedTier(store, namespace, place.num_ranks * slot_bytes)))
    # The scene's clock does not show whether a load is worth its time.
    defaults = {"plan_lifetime": 0.05, "prepare_deadline": 0.5, "load_deadline": 0.5, "recompute_if_faster": False}
    cache = PactCache(
        load_config({**defaults, **settings}, {}),
        EngineKV(namespace.digest, _named(place.groups), events=events),
        arena=Arena(segments),
        tiers=tiers,
        clock=place.clock,
    )
    cache.saves.lazy_window = lazy_window
    cache.saves.put_off.piece_blocks = piece_blocks

    def held() -> Mapping[str, int]:
        return {
            "plans": len(cache.ledger.open_plans()),
            "leases": cache.ledger.totals.leases_held,
            "pins": cache.index.pinned_count,
            "slots of dropped blocks": cache.index.waiting_slots,
        }

    def counts() -> Mapping[str, float]:
        return {name: value for name, value in cache.observe().items() if name.endswith("_tokens")}

    def close() -> None:
        for segment in segments:
            segment.close()

    return CacheUnderTest(
        cache,
        [segment.slot_view for segment in segments],
        held=held,
        check=cache.check,
        counts=counts,
        close=close,
    )


pact_cache_with_disk = partial(pact_cache, disk_slots=DISK_SLOTS)
"""`pact_cache` above a disk tier."""

pact_cache_with_shared = partial(pact_cache, shared=True)
"""`pact_cache` above a shared tier."""

pact_cache_with_all = partial(pact_cache, disk_slots=DISK_SLOTS, shared=True)
"""`pact_cache` above a disk tier and a shared one."""

lazy_pact_cache = partial(pact_cache, save="lazy", lazy_window=EVERYTHING)
"""`pact_cache` that saves blocks that the engine is about to evict: every free block counts as such."""


class _BoundedRecords(StoredBytes):
    """A store that evicts the oldest record even if others need it, as a store without prefixes does."""

    def __setitem__(self, name: str, record: bytes) -> None:
        super().__setitem__(name, record)
        while len(self) > SHARED_RECORDS:
            del self[next(iter(self))]


_records: OrderedDict[Path, StoredBytes] = OrderedDict()


def _records_at(directory: Path) -> StoredBytes:
    """The records of the store of a scene at `directory`; those of the last few scenes are kept."""
    records = _records.setdefault(directory, _BoundedRecords())
    while len(_records) > _SCENES_KEPT:
        _records.popitem(last=False)
    return records


def reference_cache(place: CacheContext, *, asynchronous: bool = True) -> CacheUnderTest:
    """The engine's own small cache, with which the kit is tested."""
    cache = ReferenceCache(
        place.block_size,
        place.num_slots,
        num_ranks=place.num_ranks,
        groups=place.groups,
        asynchronous=asynchronous,
    )

    def held() -> Mapping[str, int]:
        holds = sum(entry.holds for entry in cache.entries.values())
        return {"plans": len(cache.plans), "loads": len(cache.loading), "holds": holds}

    return CacheUnderTest(cache, held=held, check=cache.check)
