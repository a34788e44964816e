"""The engine's blocks as a `SchedulerContext` that does nothing: nothing is evicted, no block is free, nobody waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpact.contract import KVCacheBlockView

NULL = 0
"""The engine's block that stands for none."""


class InertBlocks:
    """Block tables by request, one for each KV cache group, which the owner writes into `tables`."""

    def __init__(self) -> None:
        self.tables: dict[str, Sequence[Sequence[int]]] = {}

    def get_block(self, block_id: int) -> KVCacheBlockView:
        return KVCacheBlockView(block_id, 1, block_id == NULL, None, 0)

    def touch(self, block_ids: Sequence[int]) -> None:
        pass

    def free_blocks(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        pass

    def iter_free_blocks(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        return iter(())

    def get_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        return self.tables[request_id]

    def waiting_requests(self) -> Sequence[str]:
        return ()
