"""Blocks of state-space layers whose state can be kept: the one at a block's end, once a step has left it there.

vLLM offers these blocks by name (`boundary_state_offloads`), and may have given one to another request meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvpact.identity.groups import GroupKind, GroupSet, LooseBlock


class StateBlocks:
    """A request's block tables as a cache may save from them, and the states that it may save.

    vLLM writes a request's running state in place, moves scratch blocks, and leaves out blocks: its tables do not say
    which block has the state at its end. Other groups than those of states are shown as they are.
    """

    def __init__(self, groups: GroupSet | None, null_block: int, is_named: Callable[[str, int, int], bool]) -> None:
        """`is_named` (request, block, tokens): True if vLLM's block has the name of the request's first tokens."""
        members = enumerate(groups.groups) if groups is not None else ()
        self._sizes = {number: group.block_size for number, group in members if group.kind is GroupKind.STATE}
        self._null_block = null_block
        self._is_named = is_named
        self._offered: dict[str, list[LooseBlock]] | None = None
        """While saving: request -> group, block of the group, vLLM's block."""

    def shown(self, request_id: str, tables: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """The tables of a request; while saving, of states those that are offered, and null blocks."""
        shown = [tuple(table) for table in tables]
        for number in self._sizes if self._offered is not None and shown else ():
            blocks = {place: block for group, place, block in self.offered(request_id) if group == number}
            shown[number] = tuple(blocks.get(place, self._null_block) for place in range(len(shown[number])))
        return tuple(shown)

    @property
    def requests(self) -> Collection[str]:
        """Requests with offered states."""
        return self._offered or ()

    def offered(self, request_id: str) -> Sequence[LooseBlock]:
        """The states of a request that the step leaves at ends of blocks: group, its block, vLLM's block."""
        return (self._offered or {}).get(request_id, ())

    @contextmanager
    def saving(self, scheduler_output: Any) -> Iterator[None]:
        """Within, the states that this step leaves at the end of blocks are offered; none without a step (None)."""
        if self._sizes:
            self._offered = self._find(scheduler_output)
        try:
            yield
        finally:
            self._offered = None

    def _find(self, scheduler_output: Any) -> dict[str, list[LooseBlock]]:
        found: dict[str, list[LooseBlock]] = {}
        offered = scheduler_output.kv_connector_block_state if scheduler_output is not None else None
        for request_id, states in (offered.boundary_state_offloads if offered is not None else {}).items():
            for number, block, tokens in states:
                size = self._sizes[number]
                if tokens and tokens % size == 0 and self._is_named(request_id, block, tokens):
                    found.setdefault(request_id, []).append((number, tokens // size - 1, block))
        return found
