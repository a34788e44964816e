"""Where kvpact uses internals of vLLM's scheduler: the free queue, block hashes, and what older releases do not offer.

Owns the block tables under releases before 0.30, which offer the block pool alone. Written for 0.28 to 0.33; if a
release moves any of this, only this module changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any, Protocol, overload

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.output import SchedulerOutput

from kvpact.identity.groups import GroupSet

_TRANSFER_RESULTS: Any = getattr(base, "KVConnectorTransferResults", None)

TAKES_FAILED_REQUESTS = _TRANSFER_RESULTS is not None
"""Whether a connector can report that a request's load failed as a whole: from 0.30 on. Earlier it reports blocks."""

COUNTS_HELD_BLOCKS = any(
    item.name == "num_common_prefix_blocks" and item.default_factory is MISSING for item in fields(SchedulerOutput)
)
"""Whether vLLM takes a block that is used as often as there are running requests for one that all of them share: up to
0.31. A block held through a context counts one use more (H94); this affects only cascade attention."""

TELLS_OF_SLEEP = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")
"""Whether vLLM tells a worker's connector that KV memory goes away, and when it is there again: from 0.33 on."""


def transfer_results(arrived: set[str], failed: set[str]) -> Any:
    """The report to vLLM on asynchronous loads: requests whose load is over, and those of them that got nothing."""
    return _TRANSFER_RESULTS(finished_recving=arrived, failed_recving=failed & arrived)


_block_id = attrgetter("block_id")


class BlockTables(Protocol):
    """The part of vLLM's KV cache manager that kvpact uses: a request's block ids, one sequence per group."""

    @property
    def num_kv_cache_groups(self) -> int:
        """The number of groups."""

    def get_block_ids(self, request_id: str) -> tuple[Sequence[int], ...]:
        """All blocks that a request holds; none for a request that it does not know."""


class StepBlockTables:
    """The requests' block tables, rebuilt from each step's output before the workers get it.

    Of several `groups`, blocks that the layers of a group do not read any more are shown as `null_block`: vLLM has
    given them back, or will, and tells nobody.
    """

    def __init__(self, groups: GroupSet | None = None, null_block: int = 0) -> None:
        self.num_kv_cache_groups = len(groups.groups) if groups is not None else 1
        self._groups, self._null_block = groups, null_block
        self._tables: dict[str, tuple[list[int], ...]] = {}

    def note_blocks(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """A waiting request got these blocks."""
        self._tables[request_id] = tuple(list(group) for group in block_ids)
        self.num_kv_cache_groups = len(block_ids)

    def note_step(self, scheduler_output: Any) -> None:
        """Take in a step. Call it for every step: a table is sent whole once, then only its additions."""
        for request_id in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self._tables.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self.note_blocks(new.req_id, new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if added is None:
                continue
            if request_id in cached.resumed_req_ids:
                self.note_blocks(request_id, added)
            else:
                for table, blocks in zip(self._tables[request_id], added, strict=True):
                    table.extend(blocks)
        if self._groups is not None:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._forget_unread(self._tables[request_id], self._groups, computed)

    def _forget_unread(self, tables: tuple[list[int], ...], groups: GroupSet, computed: int) -> None:
        for table, group in zip(tables, groups.groups, strict=True):
            unread = min(len(table), group.first_read(computed) // group.block_size)
            table[:unread] = [self._null_block] * unread

    def get_block_ids(self, request_id: str) -> tuple[Sequence[int], ...]:
        """See `BlockTables`."""
        return self._tables.get(request_id, ((),) * self.num_kv_cache_groups)


class LiveBlockIds(Sequence[int]):
    """The ids of some of vLLM's blocks, read when they are asked for: a look at a few of many costs no copy of all."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        found = self._blocks[place]
        return [*map(_block_id, found)] if isinstance(place, slice) else int(_block_id(found))

    def __iter__(self) -> Iterator[int]:
        return map(_block_id, self._blocks)


def live_block_ids(tables: BlockTables, request_id: str) -> Sequence[int]:
    """A request's blocks of the first group as they are now; what is read of them later is what they are then."""
    if isinstance(tables, StepBlockTables):
        return tables.get_block_ids(request_id)[0]
    manager: Any = tables
    return LiveBlockIds(manager.get_blocks(request_id).blocks[0])


def pool_and_tables(offered: Any, groups: GroupSet | None = None) -> tuple[Any, BlockTables]:
    """The block pool and the block tables in what vLLM offers: its KV cache manager, or its block pool alone."""
    if hasattr(offered, "block_pool"):
        return offered.block_pool, offered
    return offered, StepBlockTables(groups, offered.null_block.block_id if groups is not None else 0)


def has_statistics(offered: Any) -> bool:
    """Whether vLLM collects statistics for its metrics page, as its KV cache manager tells; a block pool does not."""
    return bool(getattr(offered, "log_stats", True))


def is_free(block: Any) -> bool:
    """Whether a block of the pool is in the free queue."""
    return bool(block.ref_cnt == 0 and not block.is_null)


def next_free(pool: Any, after: Any) -> Any:
    """The block of the free queue after `after` (None: the first), or None at the queue's end."""
    return next(pool.free_block_queue.iter_blocks_after(after), None)


def evict_first_of_all(pool: Any, blocks: Iterable[Any]) -> None:
    """Move free blocks to the head of the queue, in this order."""
    queue, moved = pool.free_block_queue, list(blocks)
    for block in moved:
        queue.remove(block)
    queue.prepend_n(moved)


def group_of(block_hash: Any) -> int:
    """The KV cache group in the hash under which vLLM published a block."""
    return int(get_group_id(block_hash))
