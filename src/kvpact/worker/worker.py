"""Worker side of the connector: one rank's KV memory, its arena segment, and the copies between them.

Owns the rank's memory segment and transfer threads. Decides nothing: it copies as the scheduler side orders, and
`kvpact.worker.rank_jobs` keeps the outcomes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvpact.config import KvpactConfig
from kvpact.contract import (
    ExternalCacheWorker,
    JobOutcome,
    LoadJob,
    SaveJob,
    StepWork,
    StoreRead,
    WorkerReport,
    load_id,
)
from kvpact.events.timeline import Timeline
from kvpact.identity.loaded_adapters import LoadedAdaptersWriter
from kvpact.identity.notices import NoticeWriter
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.neighbour_slots import decode_addresses
from kvpact.wire import AdapterUsed, StepMessage, WorkerHandshake
from kvpact.worker.copy import DeviceOpener, transfer_engine_for
from kvpact.worker.kv_memory import KVMemory
from kvpact.worker.neighbours import MappedNeighbours
from kvpact.worker.paged import PagedKV
from kvpact.worker.rank_jobs import EndedLoads, RankJobs
from kvpact.worker.segment import Sharing, open_segment
from kvpact.worker.step_reader import Wanted, reader_for, room_in_step
from kvpact.worker.timed import follow_loads
from kvpact.worker.transfer import RankTransfers


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Place of a worker: its rank among all that hold a part of each slot, and its number of KV blocks."""

    rank: int
    world_size: int
    num_blocks: int
    groups: tuple[tuple[str, ...], ...] = ()
    """Layer names of each KV cache group, in the engine's numbering; empty for a single one with all layers."""
    sharing: Sharing | None = None
    """Ranks that hold the same bytes in every block; None if there are none."""


class CacheWorker(ExternalCacheWorker):
    """Worker side of one rank."""

    def __init__(self, config: KvpactConfig, place: RankInfo, openers: Mapping[str, DeviceOpener]) -> None:
        """`openers`: by device type, see `transfer_engine_for`. Raises ConfigError like `reader_for`."""
        self._config = config
        self._openers = openers
        self.place = place
        self._sharing = sharing = place.sharing or Sharing(place.rank, place.world_size)
        self._segment: ArenaSegment | None = None
        self._neighbours: MappedNeighbours | None = None
        """Memory of other engines of this host; None before `register_kv_caches`."""
        self.memory: KVMemory | None = None
        """KV memory of the engine; None before `register_kv_caches`."""
        self.synchronous: tuple[LoadJob, ...] = ()
        """Synchronous loads of the running step."""
        self._reader = reader_for(config, sharing, len(place.groups), self._keep)
        self._reads: tuple[StoreRead, ...] = ()
        """Reads from shared tiers since the last report."""
        self.has_step_hook = False
        """True if the engine's worker calls `find_hits` before each step."""
        self.notices: NoticeWriter | None = None
        """Writer of this rank's reports on its weights; None before `register_kv_caches`."""
        self.adapters: LoadedAdaptersWriter | None = None
        """Writer of this rank's reports on its loaded adapters."""
        self._adapters_used: tuple[AdapterUsed, ...] = ()
        """Adapters that the running step must use."""
        self.watches_weights = False
        """True if the engine's worker reports changes of its weights in `notices`."""
        self._block_size = 0
        self._found: dict[str, tuple[LoadJob, int]] = {}
        """Request -> load of all blocks found for the step, and the token at which the first one begins."""
        self._step_loads: tuple[LoadJob, ...] = ()
        """Loads found by this side, of blocks that this step does not compute."""
        self._withheld: list[SaveJob] = []
        """Saves that fail as soon as no load copies from their slots into their blocks."""
        self.jobs = RankJobs(stores=sharing.stores, whole_requests=len(place.groups) > 1)
        """Jobs, and their outcomes until the engine knows them."""

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Set up the arena segment for these layers. Raises ConfigError if it does not fit, or they are not paged."""
        assert self.memory is None, "set up once; see `KVMemory.resume`"
        paged = PagedKV.from_tensors(dict(kv_caches), self.place.num_blocks, self.place.groups)
        self._segment = open_segment(self._config, paged.layouts, self._sharing)
        self._neighbours = MappedNeighbours(self.place.rank, self._segment)
        self.notices = NoticeWriter(self._segment.notice)
        self.adapters = LoadedAdaptersWriter(self._segment.notice)
        engine = transfer_engine_for(self._config, paged, self._segment, self.place.rank, self._openers)
        transfers = RankTransfers(
            engine,
            paged.layer_index,
            self.place.rank,
            time.monotonic,
            layerwise=self._config.layerwise,
            timeout=self._config.load_deadline,
            cache_groups=paged.cache_groups,
        )
        self.memory = KVMemory(kv_caches, paged, transfers, self.jobs)
        if self._config.timeline is not None:
            follow_loads(Timeline(self._config.timeline), transfers)

    @property
    def transfers(self) -> RankTransfers | None:
        """Copies of this rank; None before `register_kv_caches`."""
        return self.memory.transfers if self.memory is not None else None

    def suspend(self) -> None:
        """End all copies before the engine's KV memory goes away; see `KVMemory.suspend`."""
        if self.memory is not None:
            self.memory.suspend(self._config.shutdown_timeout, time.monotonic, time.sleep)

    def hello(self) -> WorkerHandshake | None:
        """Handshake for the scheduler side to map this rank's segment; None before `register_kv_caches`."""
        if self._segment is None or self.memory is None:
            return None
        sizes = self.memory.group_bytes
        return WorkerHandshake(
            self.place.rank, self._segment.address(), self.has_step_hook, self.watches_weights, group_bytes=sizes,
            slot_classes=self._sharing.classes_in(self._segment, sizes), slots_of=self._sharing.slots_of,
            copies_per_block=self.memory.transfers.engine.copies_per_block,
        )  # fmt: skip

    # Before the step

    def find_hits(self, message: StepMessage) -> dict[str, int]:
        """Read blocks of the step from shared tiers into slots; request -> tokens supplied after the engine's own."""
        self._found = {}
        store = message.store
        if (
            self._reader is None
            or store is None
            or not message.work.lookups
            or self._is_barred(message)
            or self.jobs.left
        ):
            return {}
        room = room_in_step(self._sharing.step_budget(self._config), store, message.work.loads)
        saves = {job.job_id: job for job in message.work.saves}
        asked = [(lookup, saves[lookup.job_id]) for lookup in message.work.lookups]
        wanted = [
            Wanted(save.job_id, lookup.keys[: save.start_block + room], save.start_block, save.slots)
            for lookup, save in asked
        ]
        found, reads = self._reader.read(store, wanted, room) if room else ({}, ())
        self._reads += reads
        hits: dict[str, int] = {}
        for lookup, save in asked:
            blocks = min(found.get(save.job_id, 0), room)
            if blocks >= self._config.min_match_blocks:
                room -= blocks
                slots = save.slots[:blocks]
                block_ids = save.block_ids[:blocks]
                number = load_id(save.job_id)
                load = LoadJob(number, lookup.request_id, save.start_block, slots, block_ids, synchronous=True)
                self._found[lookup.request_id] = (load, lookup.computed_tokens)
                hits[lookup.request_id] = load.blocks.end * store.block_size - lookup.computed_tokens
        self._block_size = store.block_size
        return hits

    def apply_hits(self, hits: Mapping[str, int]) -> None:
        """Keep of the found tokens those that the step does not compute, to load them before the forward pass."""
        loads = []
        for request_id, tokens in hits.items():
            load, computed = self._found[request_id]
            blocks = -(-(computed + tokens) // self._block_size) - load.start_block
            load = replace(load, slots=load.slots[:blocks], block_ids=load.block_ids[:blocks])
            loads.append(load)
            self.jobs.note_filled(load_id(load.job_id), load.blocks)
        self._step_loads = tuple(loads)

    def _keep(self, slot: int, part: memoryview) -> None:
        """Copy this rank's part of a block read from a tier into its slot."""
        assert self._segment is not None
        self._segment.slot_view(slot)[:] = part

    def _lost_step_loads(self) -> set[int]:
        """Ids of the step's own loads of which blocks are missing; the engine hears of them with the others."""
        self._take_in_ended()
        loads = self._step_loads
        self._step_loads = ()
        return {load.job_id for load in loads if not self._has_arrived(load)}

    def _has_arrived(self, load: LoadJob) -> bool:
        ended = self.jobs.outcome(load.job_id)
        return self._is_ordered(load) if ended is None else not ended.failed.ranges

    # The step

    def step_began(self) -> None:
        """Note that the engine computes from now on, until `poll`."""
        if self._segment is not None:
            self._segment.pages.step_began()

    def _is_barred(self, message: StepMessage) -> bool:
        """True if the step's loads and saves were ordered for other weights, or for KV memory that is away."""
        return (self.memory is not None and not self.memory.is_there) or (
            bool(message.changes)
            and self.notices is not None
            and (message.changes[self.place.rank] != self.notices.changes)
        )

    def _usable_work(self, message: StepMessage) -> StepWork:
        """Work of a step that may be carried out."""
        return replace(message.work, loads=(), saves=()) if self._is_barred(message) else message.work

    def begin_step(self, message: StepMessage) -> None:
        """Before the forward pass: begin loads, and report those that cannot be carried out."""
        try:
            self._adapters_used = message.adapters
            self.jobs.report_broken(message.broken)
            if self._is_barred(message):
                self._give_up((*message.work.loads, *message.work.saves))
            self.start_loads(self._usable_work(message))
            self._go_on_without(message.work.overdue)
            if self.transfers is not None:
                work = message.work
                self.transfers.submit(work.max_copies, work.max_load_bytes, computes=message.computes)
        except Exception:
            self._give_up((*message.work.loads, *self._step_loads))
            raise

    def end_forward(self, message: StepMessage) -> None:
        """After the forward pass: begin saves."""
        work = self._usable_work(message)
        try:
            with self.giving_up_loads():
                self.start_saves(work)
        except Exception:
            self._give_up(work.saves)
            raise

    @contextmanager
    def giving_up_loads(self) -> Iterator[None]:
        """Context that reports the step's synchronous loads as failed if an exception leaves it."""
        try:
            yield
        except Exception:
            self._give_up(self.synchronous)
            raise

    def start_loads(self, work: StepWork) -> None:
        """See `ExternalCacheWorker`. Includes loads that were found at the step's beginning."""
        if self._segment is not None:
            jobs: list[LoadJob | SaveJob] = [job for job in work.loads if not job.neighbour]
            jobs += work.saves
            self._segment.use([slot for job in jobs for slot in job.slots])
            addresses = decode_addresses(work.extra)
            if self._neighbours is not None and self.transfers is not None:
                if addresses is not None:
                    self.transfers.engine.use_neighbours(self._neighbours.use(addresses))
                elif self._neighbours.lacks_some and any(job.neighbour for job in work.loads):
                    self.transfers.engine.use_neighbours(self._neighbours.use_again())
        work = replace(work, loads=(*work.loads, *self._step_loads))
        self.synchronous = tuple(job for job in work.loads if job.synchronous)
        self.jobs.order(work.loads)
        if work.loads and self.transfers is not None:
            self.transfers.start_loads(work.loads)
        self.jobs.recall(work.recalls)
        for query in work.inquiries:
            self.jobs.answer(query)

    def _go_on_without(self, overdue: Collection[int]) -> None:
        """Have the engine wait no longer for those of these loads that have not ended by now."""
        if self.transfers is None:
            return
        self.transfers.leave(overdue)
        self._take_in_ended()
        for job_id in overdue:
            self.jobs.leave_overdue(job_id)

    def _check_adapters(self) -> None:
        """After the step: report blocks as invalid whose adapter was replaced, so that its tokens are computed anew."""
        adapters_used = self._adapters_used
        self._adapters_used = ()
        for used in adapters_used:
            if self.adapters is not None and self.adapters.stamp(used.number) not in (None, used.stamp):
                self.jobs.report_invalid(used.block_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `ExternalCacheWorker`. Costs nothing without synchronous loads."""
        if self.synchronous and self.transfers is not None:
            self.transfers.wait_for_layer(layer_name)

    def wait_for_loads(self) -> None:
        """Order the engine's computation from now on behind all of the step's synchronous loads."""
        if self.synchronous and self.transfers is not None:
            self.transfers.wait_for_loads()

    def start_saves(self, work: StepWork) -> None:
        """See `ExternalCacheWorker`. Orders the next computation behind all synchronous loads of the step."""
        if self.transfers is None:
            return
        not_asked_for = self.transfers.not_asked_for()
        self.wait_for_loads()
        for load in self.synchronous:
            if load.job_id in not_asked_for:
                self.jobs.leave_synchronous(load)
        lost = self._lost_step_loads() if self._step_loads else ()
        self.jobs.order(work.saves)
        self._withheld += [job for job in work.saves if load_id(job.job_id) in lost]
        saves = [self.jobs.unfilled(job) for job in work.saves if load_id(job.job_id) not in lost]
        for job in saves:
            if not job.slots:
                self.jobs.end(job.job_id, JobOutcome())
        if copied := [job for job in saves if job.slots]:
            self.transfers.start_saves(copied)

    def _give_up(self, jobs: Iterable[LoadJob | SaveJob]) -> None:
        """Report these jobs as failed, whatever is copied: a hook raised before they were sure to be done.

        A job that is being copied is reported when the copy ends: until then it writes to its blocks or its slots.
        """
        for job in jobs:
            if isinstance(job, SaveJob) and self._is_filled(job):
                self.jobs.order((job,))
                self._withheld.append(job)
            elif self.transfers is None or not self.transfers.is_open(job.job_id):
                self.jobs.fail(job)
            elif isinstance(job, LoadJob) and job.synchronous:
                self.jobs.leave_synchronous(job)
            else:
                self.jobs.recall((job.job_id,))

    def poll(self) -> EndedLoads:
        """After the model, perhaps before its draft model: take in ended jobs; returns loads for the engine."""
        self._check_adapters()
        if self._segment is not None:
            self._segment.pages.step_ended()
        self.wait_for_loads()
        self._take_in_ended()
        for job in self.synchronous:
            if not self._is_ordered(job):
                self.jobs.leave_synchronous(job)
        return self.jobs.ended_loads()

    def _is_ordered(self, load: LoadJob) -> bool:
        return self.transfers is not None and self.transfers.is_ordered(load.job_id)

    def give_up_step(self) -> EndedLoads:
        """After an exception in `poll`: fail the step's synchronous loads, too."""
        self._give_up(self.synchronous)
        return self.jobs.ended_loads()

    def _is_filled(self, save: SaveJob) -> bool:
        """True while a load copies from the slots of a save into its blocks."""
        return self.transfers is not None and self.transfers.is_open(load_id(save.job_id))

    def _take_in_ended(self) -> None:
        if self.memory is not None:
            self.memory.poll()
        for save in [save for save in self._withheld if not self._is_filled(save)]:
            self._withheld.remove(save)
            self.jobs.fail(save)

    def report(self) -> WorkerReport:
        """See `ExternalCacheWorker`. Only rank 0 reports what was read from stores."""
        reads = self._reads if self.place.rank == 0 else ()
        self._reads = ()
        return WorkerReport({self.place.rank: self.jobs.report()}, reads)

    def shutdown(self) -> None:
        """See `ExternalCacheWorker`. Waits at most `shutdown_timeout` seconds for readers, and as long for copies."""
        if self._reader is not None:
            self._reader.close(self._config.shutdown_timeout)
        if self.transfers is not None:
            self.transfers.shutdown(self._config.shutdown_timeout)
        for writer in (self.notices, self.adapters):
            if writer is not None:
                writer.close()
        self.notices = self.adapters = None
        if self._segment is not None:
            self._segment.close()
