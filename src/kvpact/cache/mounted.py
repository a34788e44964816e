"""An engine's cache while its workers are up: their memory, the tiers, and the watches over weights and adapters.

The cache is kvpact's own, or another author's that the configuration names, of which only the contract is known. Owns
the order in which these start and end, and when tiers that open late come into use. Knows no engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from typing import NamedTuple

from kvpact import __version__
from kvpact.cache.announcements import Announcements
from kvpact.cache.budget import StepBudget
from kvpact.cache.cache import PactCache
from kvpact.cache.late_tiers import LateTiers, OpenTiers
from kvpact.cache.memory import EngineKV
from kvpact.cache.plan import Plan
from kvpact.cache.stats_file import StatsFile
from kvpact.cache.status import EngineStatus, add_neighbours, status_of
from kvpact.cache.status_socket import StatusSocket
from kvpact.cache.totals import found_in
from kvpact.cache.weights_watch import WeightsWatch
from kvpact.config import KvpactConfig, find_factory
from kvpact.contract import CacheSpec, ExternalCache, ExternalKVMatch, SupportsStepLookup
from kvpact.errors import ConfigError, reason_of
from kvpact.events.queue import EventQueue
from kvpact.hints.schema import SupportsHints
from kvpact.identity.adapter_digests import AdapterDigests
from kvpact.identity.base_weights import BaseWeights
from kvpact.identity.groups import GroupSet, one_group
from kvpact.identity.keys import Namespace
from kvpact.identity.loaded_adapters import LoadedAdapters
from kvpact.identity.tenants import Tenants
from kvpact.memory.arena import Arena, ArenaSegment, Standing
from kvpact.metrics import MEMORY, Metrics, Snapshot, StartVerdict, explain_misses
from kvpact.pool.meeting import Meeting
from kvpact.pool.neighbours import Neighbours
from kvpact.pool.own_memory import OwnMemory
from kvpact.ranges import BlockRange
from kvpact.tiers.base import RecordMac, Tier
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.urls import tier_labels
from kvpact.units import format_size
from kvpact.wire import SharedTierConfig, WorkerHandshake

logger = logging.getLogger(__name__)


class EngineIdentity(NamedTuple):
    """Identity of an engine: blocks of other models and adapters are not its own, and routers know it by its events."""

    known: Namespace
    """The namespace without the weights."""
    weights: BaseWeights | None
    """None without tiers."""
    adapters: AdapterDigests
    seal: RecordMac
    events: EventQueue | None = None
    """Announcements of its blocks to routers; None: nobody listens."""
    read_weights: Callable[[Callable[[], bool]], str] | None = None
    """Identity of the weights for other engines of this host: see `OwnMemory`; None: it meets none."""
    tenants: Tenants | None = None
    """Clients that have a share of memory; None: there are none."""


class MountedCache:
    """The cache of an engine from its workers' handshake on."""

    def __init__(
        self,
        config: KvpactConfig,
        hellos: Sequence[WorkerHandshake],
        identity: EngineIdentity,
        groups: GroupSet,
        *,
        metrics: Metrics,
        budget: StepBudget,
        replica: int = 0,
    ) -> None:
        """`hellos` in the ranks' order; `replica` is the number of this engine in a server of several.

        Raises ConfigError for settings that no cache can have, and if the weights cannot be identified.
        """
        known, weights, adapters, seal, _, read_weights, tenants = identity
        if tenants is not None and groups != one_group(groups.block_size):
            logger.warning("kvpact: the model has several KV cache groups, where tenants have no shares of memory yet")
        self.segments = [hello.segment for hello in hellos]
        self._may_have_counted = True
        """False while the counts are those last offered to `stats_file`."""
        self._is_given_up = False
        self._metrics = metrics
        self.queues: tuple[TierExecutor, ...] = ()
        self.reading: Sized = ()
        """Operations under way in tiers."""
        self.step_lookup: SupportsStepLookup | None = None
        self.hints: SupportsHints | None = None
        """The cache, if it acts on clients' hints."""
        self.store: SharedTierConfig | None = None
        """Where the workers look at a step's beginning; None if they do not."""
        self._config = config
        neighbours = Neighbours() if config.pool == "host" and read_weights is not None else None
        self._readers: list[TierExecutor] = []
        copies_per_block = max(hello.copies_per_block for hello in hellos)
        self._meeting: Meeting | None = None
        self._block_size = groups.block_size
        self._adapters = adapters
        arena, attached = attach_all(hellos)
        metrics.use_tiers(labels := tier_labels(config.tiers))
        for label, url in zip(labels, config.tiers, strict=True):
            metrics.set_info("tier_info", label, str(url))
        metrics.set_info("info", __version__, str(groups.block_size), str(arena.num_ranks))
        self._arena = arena
        self.last_save = 0
        """Job id of the last save ordered of the workers."""
        self._rank_slot_bytes = tuple(segment.rank_slot_bytes for segment in arena.segments)
        self._late_tiers = LateTiers(config, seal, known, arena.slot_bytes, weights) if weights is not None else None
        tiers = self._late_tiers.open() if self._late_tiers is not None else None
        self.own: PactCache | None = None
        """kvpact's own cache, the only kind with tiers; None if `cache` is another author's."""
        if config.cache is None:
            self.own = PactCache(
                config,
                EngineKV(
                    known.digest,
                    groups,
                    hellos[0].slot_classes,
                    copies_per_block,
                    identity.events,
                    neighbours,
                    self._read_others if copies_per_block else None,
                    tenants,
                ),
                arena=arena,
                tiers=tiers.queues if tiers is not None else (),
                clock=time.monotonic,
                metrics=metrics,
                budget=budget,
            )
            self.cache: ExternalCache = self.own
            self.reading = self.own.tiers.under_way
            if neighbours is not None and read_weights is not None:
                own = OwnMemory(self.own.index, arena, hellos, known.digest, read_weights)
                self._meeting = Meeting(own, neighbours)
        else:
            slots = arena.num_slots, arena.num_ranks, arena.rank_slot_bytes
            several = None if groups == one_group(groups.block_size) else groups
            spec = CacheSpec(groups.block_size, *slots, known.digest, time.monotonic, several)
            self.cache = _cache_of_another(config.cache, spec)
        if isinstance(self.cache, SupportsHints):
            self.hints = self.cache
        if tiers is not None:
            self._use(tiers)
        notices = [segment.notice for segment in attached]
        self.weights = WeightsWatch(notices, self.cache)
        adapters.bind(LoadedAdapters(notices), reported=all(hello.watches_weights for hello in hellos))
        self._stats_file = StatsFile(config.stats_file, replica) if config.stats_file else None
        self._status_socket: StatusSocket | None = None
        self._model = ""
        self._verdict = StartVerdict()
        self._remedies: dict[str, str] = {}
        is_plain = groups == one_group(groups.block_size)
        logger.info(
            "kvpact: %s of memory for %s, %s, namespace %s",
            format_size(config.memory),
            f"{arena.num_slots * groups.block_size:,} tokens" if is_plain else f"{len(groups.groups)} groups of layers",
            self._tiers_below(tiers),
            (tiers.namespace if tiers is not None else known).name,
        )

    def _read_others(self, tier: Tier) -> TierExecutor:
        """Threads that read other engines' memory, once there is one: a device cannot copy from there."""
        self._readers.append(TierExecutor(tier, self._config.io_threads, 1, woken_by_owner=True))
        return self._readers[-1]

    def _tiers_below(self, tiers: OpenTiers | None) -> str:
        """The tiers that are used, by their labels, for a log."""
        labels = tier_labels(self._config.tiers)
        return f"tiers below: {', '.join(labels[at] for at in tiers.numbers) if tiers and tiers.numbers else 'none'}"

    def _use(self, tiers: OpenTiers) -> None:
        """Use these tiers of kvpact's own cache from now on; the others of the configuration are not there."""
        self.queues = tiers.queues
        for number, label in enumerate(tier_labels(self._config.tiers)):
            if number not in tiers.numbers:
                self._metrics.set("tier_up", 0, label)
        if self._config.match_at == "step" and self.own is not None and tiers.queues:
            self.step_lookup = self.own
            shared = tuple((at, tiers.numbers[at]) for at in self.own.tiers.shared_tiers)
            namespace = tiers.namespace.describe()
            self.store = SharedTierConfig(namespace, self._block_size, self._rank_slot_bytes, shared)

    def use_late_tiers(self) -> None:
        """Use tiers that have opened since, if there are any; waits for nothing."""
        tiers = self._late_tiers.poll() if self._late_tiers is not None else None
        if tiers is not None and self.own is not None:
            self.own.open_tiers(tiers.queues)
            self._use(tiers)
            logger.info("kvpact: from now on %s, namespace %s", self._tiers_below(tiers), tiers.namespace.name)
        if self.own is not None:
            self.own.use_awaited_tiers()

    def give_up_saves(self) -> None:
        """See `ExternalCache`. Nor do ranks judge copies by blocks that another author's cache has released (H116)."""
        if self.own is None:
            self._arena.judge_from(self.last_save + 1)
        self.cache.give_up_saves()

    @property
    def copies_are_proven(self) -> bool:
        """True once a step may wait for a load; before, each load is checked while its request waits."""
        return self._arena.standing is Standing.PROVEN

    def apply_notices(self) -> None:
        """Act on the ranks' notices of weights, adapters and copies. Every hook begins with it."""
        self._may_have_counted = True
        if self._arena.standing is Standing.REFUTED:
            self._give_up_for_good()
            return
        for adapter in self._adapters.look() if self._adapters.uses else ():
            self.cache.distrust_adapter(adapter)
        self.weights.look()

    @property
    def serves(self) -> bool:
        """True if the cache may be used, as of the last notices."""
        return self.weights.serves and not self._is_given_up

    def _give_up_for_good(self) -> None:
        """A rank has found a wrong copy: nothing that is stored is promised to anybody, and no more is stored."""
        if not self._is_given_up:
            self._is_given_up = True
            self._metrics.add("refuted_copies")
            self._metrics.set("tier_up", 0, MEMORY)
            logger.error("kvpact: a rank has found a wrong copy; this engine goes on without a cache")
            self.weights.reset()
            if self._meeting is not None:
                self._meeting.end()
            if self.own is not None:
                self.own.writeback.refute_run()
        if self.own is not None:
            self.own.tiers.poll()  # their deletions go on, piece by piece
            self.own.tiers.end_step()

    @property
    def announcements(self) -> Announcements | None:
        """Announcements to routers; None if there are none."""
        return self.own.announcements if self.own is not None else None

    def found_in(self, match: ExternalKVMatch, num_tokens: int) -> list[tuple[str, int]]:
        """The tiers that had the first tokens of a match, by label and in order; none where the cache is another's."""
        if self.own is None or not isinstance(plan := match.query_result, Plan):
            return []
        start = plan.blocks.start * self._block_size
        return [*found_in(BlockRange(start, start + num_tokens), plan.sources, self._block_size)]

    def step_end(self, request_id: str) -> int:
        """See `PactCache.step_end`; 0 where the cache is another's."""
        return self.own.step_end(request_id) if self.own is not None else 0

    def observe(self) -> Snapshot:
        """All counts as they are now."""
        return self.own.observe() if self.own is not None else self._metrics.snapshot()

    def listen(self, model: str, verdict: StartVerdict) -> None:
        """Answer this user's `kvpact status` for the engine with this model, and meet other engines, until the end."""
        self._model = model
        self._verdict = verdict
        self._status_socket = StatusSocket(self._answer, self._meeting)

    def note(self, lacking: str, limit: str, remedy: str) -> None:
        """Add a limit that was found after the start to the verdict on it, and the remedy; it is advised where the
        series `lacking` counts much."""
        self._verdict = replace(self._verdict, notes=(*self._verdict.notes, limit))
        self._remedies = self._remedies | {lacking: remedy}

    def _status(self) -> EngineStatus:
        status = status_of(self.own, self._metrics, self._model, self._block_size, self._verdict)
        status.remedies = self._remedies
        return status

    def _answer(self) -> bytes:
        """Document for people who ask, on the socket's thread."""
        status = self._status()
        if self.own is not None:
            add_neighbours(status, self.own)
        return status.encoded()

    def reset(self) -> None:
        """The engine says that the weights may change."""
        self._may_have_counted = True
        self.weights.reset()

    def wake_tiers(self) -> None:
        """Let the tiers' threads begin what was submitted."""
        for queue in (*self.queues, *self._readers) if self.reading else self.queues:
            queue.flush()

    def poll_idle(self) -> bool:
        """Use late tiers, and at rest write the counts, if configured; returns True while the engine must keep stepping
        without requests."""
        self.use_late_tiers()
        pending = self.cache.has_pending_work
        if self.announcements is not None:
            pending |= len(self.announcements.queue) > 0
        if self._stats_file is not None and self._may_have_counted and not pending:
            self.observe()
            self._stats_file.offer(self._status())
            self._may_have_counted = False
        return pending

    def close(self) -> None:
        """Flush the tiers in bounded time, and log the counts."""
        if self._meeting is not None:
            self._meeting.close()
        if self._status_socket is not None:
            self._status_socket.close()
        self.use_late_tiers()
        if self._late_tiers is not None:
            self._late_tiers.close()
        logger.info("kvpact: %s", explain_misses(self.observe()))
        status = self._status()
        self.weights.close()
        self._adapters.bind(None)
        self.cache.shutdown()
        self._arena.close()
        if self._stats_file is not None:
            self._stats_file.close(status)


def answer_without_cache(metrics: Metrics, model: str, block_size: int, verdict: StartVerdict) -> StatusSocket:
    """Have an engine that has no cache answer the people of this user why."""
    return StatusSocket(lambda: status_of(None, metrics, model, block_size, verdict).encoded())


def attach_all(hellos: Sequence[WorkerHandshake]) -> tuple[Arena, Sequence[ArenaSegment]]:
    """The arena of these ranks, and the segment of each."""
    segments = [ArenaSegment.attach(hello.segment) for hello in hellos]
    with_slots = [segment for segment, hello in zip(segments, hellos, strict=True) if hello.slots_of is None]
    others = [segment for segment, hello in zip(segments, hellos, strict=True) if hello.slots_of is not None]
    return Arena(with_slots, others), segments


def _cache_of_another(name: str, spec: CacheSpec) -> ExternalCache:
    """Cache made by the class or function `name`. Raises ConfigError if there is none, or it makes no cache."""
    factory = find_factory(name)
    try:
        cache = factory(spec)
    except Exception as error:
        raise ConfigError(f'"cache": "{name}" makes no cache: {reason_of(error)}') from error
    if not isinstance(cache, ExternalCache):
        raise ConfigError(f'"cache": "{name}" made a {type(cache).__name__}; a kvpact.contract.ExternalCache is needed')
    return cache
