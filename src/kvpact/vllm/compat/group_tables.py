"""Which blocks of state-space layers hold a state that can be kept: the one at a block's end, once a step has left it.

Owns what each release shows of that: from 0.29 on vLLM offers these blocks by name (`boundary_state_offloads`); before,
a state lies at a block's end only when a step ends there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpact.identity.groups import GroupKind, GroupSet
from kvpact.vllm.compat.scheduler import BlockTables


class StateBlocks:
    """A request's block tables as a cache may save from them. Other groups than those of states are shown as they are.

    vLLM writes a request's running state in place, moves scratch blocks, and leaves out blocks: a block of the table is
    the state at that block's end only where a step stopped there.
    """

    def __init__(self, groups: GroupSet | None, null_block: int) -> None:
        members = enumerate(groups.groups) if groups is not None else ()
        self._sizes = {number: group.block_size for number, group in members if group.kind is GroupKind.STATE}
        self._null_block = null_block
        self._kept: dict[str, dict[int, dict[int, int]]] | None = None
        """While saving: request -> group -> place in the table -> block."""

    def shown(self, request_id: str, tables: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """The tables of a request."""
        shown = tuple(tuple(table) for table in tables)
        if self._kept is None or not self._sizes:
            return shown
        kept = self._kept.get(request_id, {})
        return tuple(
            tuple(kept.get(number, {}).get(place, self._null_block) for place in range(len(table)))
            if number in self._sizes
            else table
            for number, table in enumerate(shown)
        )

    @contextmanager
    def saving(self, scheduler_output: Any, computed: Mapping[str, int], tables: BlockTables) -> Iterator[None]:
        """Within, only the states that this step leaves at the end of blocks are shown."""
        if self._sizes:
            self._kept = self._find(scheduler_output, computed, tables)
        try:
            yield
        finally:
            self._kept = None

    def _find(
        self, scheduler_output: Any, computed: Mapping[str, int], tables: BlockTables
    ) -> dict[str, dict[int, dict[int, int]]]:
        found: dict[str, dict[int, dict[int, int]]] = {}
        for request_id, number, block, tokens in self._states(scheduler_output, computed, tables):
            size = self._sizes[number]
            if tokens and tokens % size == 0:
                found.setdefault(request_id, {}).setdefault(number, {})[tokens // size - 1] = block
        return found

    def _states(
        self, scheduler_output: Any, computed: Mapping[str, int], tables: BlockTables
    ) -> Iterator[tuple[str, int, int, int]]:
        """Request, group, block, and the tokens whose state the block holds after the step."""
        offered = getattr(scheduler_output, "kv_connector_block_state", None)
        if offered is not None:
            for request_id, states in offered.boundary_state_offloads.items():
                yield from ((request_id, number, block, tokens) for number, block, tokens in states)
            return
        for request_id, tokens in computed.items():
            held = tables.get_block_ids(request_id)
            for number, size in self._sizes.items():
                place = tokens // size - 1
                if 0 <= place < len(held[number]):
                    yield request_id, number, held[number][place], tokens


__all__ = ["StateBlocks"]
