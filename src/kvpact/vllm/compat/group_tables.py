"""Blocks of state-space layers whose state can be kept: the one at a block's end, once a step has left it there.

vLLM offers these blocks by name (`boundary_state_offloads`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvpact.identity.groups import GroupKind, GroupSet


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
    def saving(self, scheduler_output: Any) -> Iterator[None]:
        """Within, only the states that this step leaves at the end of blocks are shown; none without a step (None)."""
        if self._sizes:
            self._kept = self._find(scheduler_output)
        try:
            yield
        finally:
            self._kept = None

    def _find(self, scheduler_output: Any) -> dict[str, dict[int, dict[int, int]]]:
        found: dict[str, dict[int, dict[int, int]]] = {}
        offered = scheduler_output.kv_connector_block_state if scheduler_output is not None else None
        for request_id, states in (offered.boundary_state_offloads if offered is not None else {}).items():
            for number, block, tokens in states:
                size = self._sizes[number]
                if tokens and tokens % size == 0:
                    found.setdefault(request_id, {}).setdefault(number, {})[tokens // size - 1] = block
        return found
