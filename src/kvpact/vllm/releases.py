"""What older releases of vLLM do not offer a connector, gathered from what they do offer.

Owns the block tables under releases before 0.30, which hand out the block pool alone. Floor 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class BlockTables(Protocol):
    """As much of vLLM's KV cache manager as kvpact asks: the block ids of a request, one sequence a group."""

    def get_block_ids(self, request_id: str) -> tuple[Sequence[int], ...]:
        """All blocks of a request that runs in this step."""


class StepBlockTables:
    """The running requests' block tables as each step's output tells them, before the workers get it."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[list[int], ...]] = {}

    def take_step(self, scheduler_output: Any) -> None:
        """Take in a step. To be called for every one: a table is sent whole once, then by what is added to it."""
        for request_id in scheduler_output.finished_req_ids:
            self._tables.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(group) for group in new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if added is None:
                continue
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = tuple(list(group) for group in added)
            else:
                for table, blocks in zip(self._tables[request_id], added, strict=True):
                    table.extend(blocks)

    def get_block_ids(self, request_id: str) -> tuple[Sequence[int], ...]:
        """See `BlockTables`. Raises KeyError for a request that has not run."""
        return self._tables[request_id]
