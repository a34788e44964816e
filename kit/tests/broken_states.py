"""Caches and connectors that mistake one state of a request for another, for vLLM's scheduler with drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvpact.contract import CacheSpec, StepWork
from kvpact.identity.groups import GroupKind
from kvpact.identity.keys import BlockKey
from kvpact.ranges import BlockRange
from kvpact.vllm import PactConnector
from kvpact_testkit.engine.reference import ReferenceCache

COPY_SECONDS = 0.01
"""Seconds in which a step's saves are copied."""

Filled = list[dict[int, int]]


class NamesTheNextBoundary(ReferenceCache):
    """A state is kept under the count of the next boundary."""

    def _filled_blocks(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> Filled:
        filled = super()._filled_blocks(request_id, tables, computed)
        kinds = self._groups.groups
        return [
            {block + (kind.kind is GroupKind.STATE): state for block, state in blocks.items()}
            for kind, blocks in zip(kinds, filled, strict=True)
        ]

    def _note_filled(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> int:
        return super()._note_filled(request_id, tables, computed) + max(kind.block_size for kind in self._groups.groups)


class KeepsStatesOfDrafts(ReferenceCache):
    """Where a step's drafts cross a boundary, it takes the state that the step leaves behind it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._tables: dict[str, Sequence[Sequence[int]]] = {}

    def _filled_blocks(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> Filled:
        filled = super()._filled_blocks(request_id, tables, computed)
        self._tables.setdefault(request_id, ())
        for number, (group, table) in enumerate(zip(self._groups.groups, self._tables[request_id], strict=False)):
            if group.kind is GroupKind.STATE:
                end = computed // group.block_size
                if end and computed % group.block_size and end < len(table) and table[end]:
                    filled[number].setdefault(end - 1, table[end])
        return filled

    def end_step(self) -> StepWork:
        assert self._context is not None
        self._tables = {name: self._context.get_block_ids(name) for name in self._tables if name in self._keys}
        return super().end_step()


class AsksOneKind(ReferenceCache):
    """Asked is whether the groups of one kind have their blocks, not the others."""

    asked: GroupKind
    asks_all = False

    def _find(self, keys: list[BlockKey], computed: int, most: int) -> int:
        def first_missing(group: int, blocks: BlockRange) -> int | None:
            if self._groups.groups[group].kind is not self.asked and not self.asks_all:
                return None
            own = computed // self._groups.groups[group].block_size
            return next((i for i in blocks if i >= own and self._stored(self._name(keys, group, i)) is None), None)

        return self._groups.longest_match(most, first_missing)


class JoinsTails(AsksOneKind):
    """Behind a local prefix the tail of the attention is enough: whose state is at its end is not asked."""

    asked = GroupKind.FULL

    def _find(self, keys: list[BlockKey], computed: int, most: int) -> int:
        self.asks_all = not computed
        return super()._find(keys, computed, most)


class PromisesAStateAlone(AsksOneKind):
    """Where the state at the end is kept, the blocks of attention below it are not asked for."""

    asked = GroupKind.STATE


class SavesBeforeSampling(PactConnector):
    """A state is read when the forward pass has ended, before the step has put it into its block."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        super().wait_for_save()
        time.sleep(COPY_SECONDS)

    def wait_for_save(self) -> None:
        pass


def _made(kind: type[ReferenceCache]) -> Callable[[CacheSpec], ReferenceCache]:
    def make(spec: CacheSpec) -> ReferenceCache:
        return kind(spec.block_size, spec.num_slots, num_ranks=spec.num_ranks, groups=spec.groups)

    return make


names_the_next_boundary = _made(NamesTheNextBoundary)
keeps_states_of_drafts = _made(KeepsStatesOfDrafts)
joins_tails = _made(JoinsTails)
promises_a_state_alone = _made(PromisesAStateAlone)
right = _made(ReferenceCache)
