"""Where kvpact uses internals of vLLM's scheduler: the free queue, block tables, block hashes.

Written for 0.30 to 0.33; if a release moves any of this, only this module changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any, overload

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.sched.output import SchedulerOutput

COUNTS_HELD_BLOCKS = any(
    item.name == "num_common_prefix_blocks" and item.default_factory is MISSING for item in fields(SchedulerOutput)
)
"""True if vLLM takes a block that is used as often as there are running requests for one that all of them share: up to
0.31. A block held through a context counts one use more (H94); this affects only cascade attention."""

TELLS_OF_SLEEP = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")
"""True if vLLM tells a worker's connector that KV memory goes away, and when it is there again: from 0.33 on."""


def transfer_results(arrived: set[str], failed: set[str]) -> Any:
    """The report to vLLM on asynchronous loads: requests whose load is over, and those of them that got nothing."""
    return base.KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed & arrived)


_block_id = attrgetter("block_id")


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


def live_block_ids(manager: Any, request_id: str) -> Sequence[int]:
    """A request's blocks of the first group as they are now; what is read of them later is what they are then."""
    return LiveBlockIds(manager.get_blocks(request_id).blocks[0])


def is_free(block: Any) -> bool:
    """True if a block of the pool is in the free queue."""
    return bool(block.ref_cnt == 0 and not block.is_null)


def next_free(pool: Any, after: Any) -> Any:
    """The block of the free queue after `after` (None: the first), or None at the queue's end."""
    return next(pool.free_block_queue.iter_blocks_after(after), None)


def evict_first_of_all(pool: Any, blocks: Iterable[Any]) -> None:
    """Move free blocks to the head of the queue, in this order."""
    queue = pool.free_block_queue
    moved = list(blocks)
    for block in moved:
        queue.remove(block)
    queue.prepend_n(moved)


def has_name(block: Any, block_hash: Any) -> bool:
    """True if vLLM has published the block under this hash of tokens."""
    return block.block_hash is not None and bool(get_block_hash(block.block_hash) == block_hash)


def group_of(block_hash: Any) -> int:
    """The KV cache group in the hash under which vLLM published a block."""
    return int(get_group_id(block_hash))
