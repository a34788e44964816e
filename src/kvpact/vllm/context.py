"""vLLM's block pool, block tables and queues as a `SchedulerContext`, between a connector and vLLM's internals.

Owns which blocks are held through it and which requests it knows; returns views and ids, never vLLM's own structures.
For any connector, not only kvpact's: see `scheduler_context`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

from kvpact.block_refs import BlockRefs, cursor_lost, no_such_block, no_such_request, not_free
from kvpact.contract import KVCacheBlockView
from kvpact.identity.groups import GroupSet, LooseBlock
from kvpact.vllm.compat.group_tables import StateBlocks
from kvpact.vllm.compat.scheduler import (
    evict_first_of_all,
    group_of,
    has_name,
    is_free,
    live_block_ids,
    next_free,
)

NOT_ADMITTED = frozenset({"WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "PREEMPTED"})
"""vLLM's states of a request that the scheduler may still admit. One that waits for its load has been admitted."""


def scheduler_context(kv_cache_manager: Any, policy: str = "fcfs", groups: GroupSet | None = None) -> VllmContext:
    """The context over the KV cache manager that vLLM offers a connector's scheduler half (`bind_kv_cache_manager`).

    `policy` is `vllm_config.scheduler_config.policy`; `groups` are needed where there are several. The connector passes
    on two of its hooks, as the first thing in each of them: `on_new_request` and `build_connector_meta`.
    """
    return VllmContext(kv_cache_manager, policy, groups)


class VllmContext:
    """A `SchedulerContext` on vLLM 0.30 to 0.33. docs/scheduler-context.md lists what is approximate."""

    def __init__(self, kv_cache_manager: Any, policy: str, groups: GroupSet | None = None) -> None:
        self._manager = kv_cache_manager
        block_pool = kv_cache_manager.block_pool
        null_block = block_pool.null_block.block_id if groups is not None else 0
        self._states = StateBlocks(groups, null_block, self._is_named)
        self._pool = block_pool
        self.hash_block_size = int(block_pool.hash_block_size)
        self._by_priority = policy == "priority"
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._holds = BlockRefs(block_pool.null_block.block_id)
        self._touched: list[tuple[int, ...]] = []
        """Blocks touched here in this step, in order, which so may have left the free queue."""
        self._step = 0

    # What the connector passes on

    def on_new_request(self, request: Any) -> None:
        """vLLM accepted a request."""
        self._requests.pop(request.request_id, None)  # a new one of an old name is the last to have arrived
        self._requests[request.request_id] = request

    def update_state_after_alloc(self, request: Any, blocks: Any) -> None:
        """Nothing: connectors written for vLLM before 0.30 pass this hook on."""

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """vLLM's step is decided: walks begun in it end here, because vLLM does not announce when it moves a block."""
        self._step += 1
        self._touched.clear()

    # Blocks

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """See `SchedulerContext`. The group of an unpublished block is -1 where there are several."""
        return self._view(self._block(block_id))

    def touch(self, block_ids: Sequence[int]) -> None:
        """See `SchedulerContext`; all of `block_ids` or, on an error, none. The null block: PactViolation."""
        blocks = self._blocks(block_ids)
        self._holds.take(block_ids)
        self._touched.append(tuple(block_ids))
        self._pool.touch(blocks)

    def free_blocks(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """See `SchedulerContext`; all of `block_ids` or, on an error, none."""
        self._holds.give_back(block_ids)
        blocks = self._blocks(block_ids)
        self._pool.free_blocks(blocks)
        if evict_first:
            evict_first_of_all(self._pool, {block.block_id: block for block in blocks if is_free(block)}.values())

    def evict_published(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of the engine's prefix cache: their content does not match their hash."""
        self._pool.evict_blocks(set(block_ids))

    @property
    def touched_blocks(self) -> int:
        """The number of blocks held through this context now."""
        return self._holds.total

    def saving(self, scheduler_output: Any) -> AbstractContextManager[None]:
        """Within, `offered_states` and `get_block_ids` have the states that the step leaves at ends of blocks alone.

        `scheduler_output` is None between steps, which leave no such states.
        """
        return self._states.saving(scheduler_output)

    @property
    def requests_with_states(self) -> Collection[str]:
        """The requests with offered states in this step."""
        return self._states.requests

    def _is_named(self, request_id: str, block_id: int, num_tokens: int) -> bool:
        request = self._requests.get(request_id)
        last = num_tokens // self.hash_block_size - 1
        hashes = request.block_hashes[last : last + 1] if request is not None else []
        return any(has_name(self._block(block_id), block_hash) for block_hash in hashes)

    def offered_states(self, request_id: str) -> Sequence[LooseBlock]:
        """The states that the step leaves at ends of blocks; none outside of `saving`."""
        return self._states.offered(request_id)

    # Queues

    def iter_free_blocks(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        """See `SchedulerContext`. Blocks may come and go while iterating, except the last one returned.

        If that one left the queue, even if it is back, the next iteration raises PactViolation, and so it does in a
        later step of the scheduler: begin again, after any block that is free then.
        """
        start = None
        if after_block is not None:
            start = self._block(after_block)
            if not is_free(start):
                raise not_free(after_block)
        return self._walk(start)

    def _walk(self, cursor: Any) -> Iterator[KVCacheBlockView]:
        step = self._step
        touched = len(self._touched)
        while True:
            if cursor is not None and (
                step != self._step
                or not is_free(cursor)
                or any(cursor.block_id in block_ids for block_ids in self._touched[touched:])
            ):
                raise cursor_lost(cursor.block_id)
            cursor = next_free(self._pool, cursor)
            if cursor is None:
                return
            touched = len(self._touched)
            yield self._view(cursor)

    def get_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """See `SchedulerContext`; empty sequences for a request without blocks. PactViolation for an unknown
        request."""
        tables = self._states.shown(request_id, self._manager.get_block_ids(request_id))
        self._require_alive(request_id, any(tables))
        return tables or ((),) * self._manager.num_kv_cache_groups

    def chain_of(self, request_id: str) -> Sequence[int]:
        """`get_block_ids(request_id)[0]`, each part read when it is asked for; not for later than this hook."""
        if self._manager.num_kv_cache_groups > 1:
            return self.get_block_ids(request_id)[0]
        block_ids = live_block_ids(self._manager, request_id)
        self._require_alive(request_id, bool(block_ids))
        return block_ids

    def _require_alive(self, request_id: str, has_blocks: bool) -> None:
        if has_blocks:
            return
        request = self._requests.get(request_id)
        if request is None or request.is_finished():
            raise no_such_request(request_id)

    def waiting_requests(self) -> Sequence[str]:
        """See `SchedulerContext`. In order of arrival, preempted ones first, unless vLLM's policy is by priority."""
        waiting = [request for request in self._requests.values() if request.status.name in NOT_ADMITTED]
        if self._by_priority:
            waiting.sort()
        else:
            waiting.sort(key=lambda request: request.status.name != "PREEMPTED")
        return tuple(request.request_id for request in waiting)

    # vLLM's own structures

    def _block(self, block_id: int) -> Any:
        if not 0 <= block_id < len(self._pool.blocks):
            raise no_such_block(block_id, len(self._pool.blocks))
        return self._pool.blocks[block_id]

    def _blocks(self, block_ids: Sequence[int]) -> list[Any]:
        """vLLM's blocks; PactViolation, and nothing else happens, if one does not exist."""
        blocks = self._pool.blocks
        if len(block_ids) and min(block_ids) >= 0 and max(block_ids) < len(blocks):
            return [*map(blocks.__getitem__, block_ids)]
        return [self._block(block_id) for block_id in block_ids]

    def _view(self, block: Any) -> KVCacheBlockView:
        block_hash = block.block_hash
        if block_hash is not None:
            return KVCacheBlockView(
                block.block_id, block.ref_cnt, block.is_null, bytes(block_hash), group_of(block_hash)
            )
        group = 0 if self._manager.num_kv_cache_groups == 1 else -1
        return KVCacheBlockView(block.block_id, block.ref_cnt, block.is_null, None, group)
