"""The scheduler's block pool and queues as connectors see them (`contract.SchedulerContext`).

Counts the references that connectors take by `touch` apart from those of requests, so that misuse raises an error and
a leak has an owner. Never hands out the engine's own structures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvpact.block_refs import BlockRefs, no_such_request
from kvpact.contract import KVCacheBlockView
from kvpact.identity.groups import LooseBlock
from kvpact_testkit.engine.block_pool import NULL_BLOCK
from kvpact_testkit.engine.output import SchedulerOutput
from kvpact_testkit.engine.scheduler import Scheduler


class EngineContext:
    """One cache's view of one engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv.pool
        self._holds = BlockRefs(NULL_BLOCK)

    @property
    def held(self) -> Mapping[int, int]:
        """Block id -> references taken through this context."""
        return self._holds.counts

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """See `SchedulerContext`."""
        return self._pool.view(block_id)

    def touch(self, block_ids: Sequence[int]) -> None:
        """See `SchedulerContext`; all of `block_ids` or, on an error, none. The null block holds nothing:
        PactViolation."""
        for block_id in block_ids:
            self._pool.require(block_id)
        self._holds.take(block_ids)
        for block_id in block_ids:
            self._pool.touch(block_id)

    def free_blocks(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """See `SchedulerContext`; all of `block_ids` or, on an error, none."""
        self._holds.give_back(block_ids)
        self._pool.free(block_ids, evict_first=evict_first)

    def iter_free_blocks(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        """See `SchedulerContext`, and `BlockPool.iter_free` for what may change while iterating."""
        return self._pool.iter_free(after_block)

    def get_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """See `SchedulerContext`; empty sequences for a request that holds none. PactViolation for an unknown one."""
        request = self._scheduler.requests.get(request_id)
        if request is None:
            load = self._scheduler.loads.get(request_id)
            if load is None:
                raise no_such_request(request_id)
            request = load.request
        return tuple(tuple(blocks) for blocks in request.block_ids) or ((),) * len(self._scheduler.config.groups)

    def waiting_requests(self) -> Sequence[str]:
        """See `SchedulerContext`."""
        return tuple(request.request_id for request in self._scheduler.waiting)


class OfferingContext(EngineContext):
    """The view of an engine with drafts, whose tables do not say which block has the state at its end."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._offered: dict[str, list[LooseBlock]] = {}

    @property
    def requests_with_states(self) -> Collection[str]:
        """Requests of which the step leaves states in their blocks."""
        return self._offered.keys()

    def begin_step(self, output: SchedulerOutput) -> None:
        """Offer the states at ends of blocks: of drafts, once the step that verified them has ended."""
        counts = self._scheduler.counts
        for request, start, count in zip(output.requests, output.starts, output.counts, strict=True):
            num_tokens = min(start + count, len(request.token_ids))
            if states := self._scheduler.kv.offered(request, num_tokens):
                self._offered[request.request_id] = states
                counts.offered_states += len(states)
                sizes = [self._scheduler.config.groups[number].block_size for number, _, _ in states]
                counts.states_in_drafts += sum(num_tokens % size > 0 for size in sizes)

    def end_step(self) -> None:
        """Offer nothing more."""
        self._offered = {}

    def offered_states(self, request_id: str) -> Sequence[LooseBlock]:
        """See `OffersStates`; none between two steps."""
        return self._offered.get(request_id, ())
