"""Loose blocks that the engine holds, by the row to which they are attached, and rows whose loose blocks await a save.

Owns both. A loose block is saved with its row, else the row would be of no use, and the row with the block that is
evicted before; if the row is stored already, the block is saved at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.owed import Owed
from kvpact.cache.needs.runs import Keys, runs_of
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import Tag

CHAIN_KEYS_PER_STEP: Final = 8192
"""Rows of chains that one step reads at most to name what it saves, besides one whole chain: 0.1 us each."""


@dataclass(slots=True)
class BlockContent:
    """Content of a block of the engine: a group's `block`, named `key`, computed for a request.

    `parent` is the key of the row before it, or of that to which it is attached. `block_hash` is the engine's name for
    it, None until the engine publishes it. `offered`: since its last use it was stored, or could not be. It is not
    saved twice in a row, or two chains would evict each other for ever. `owner`: see `Run.owner`.
    """

    key: BlockKey
    parent: BlockKey
    group: int
    block: int
    request_id: str
    tag: Tag
    block_hash: bytes | None
    offered: bool = False
    owner: int = 0


@dataclass(eq=False)
class Attached:
    """The loose ones of the blocks in `contents`, by their keys' `places`; `known` are the blocks that memory knows."""

    groups: EngineGroups
    contents: Mapping[int, BlockContent]
    places: Mapping[BlockKey, int]
    known: Keys
    waiting: dict[BlockKey, None] = field(default_factory=dict, init=False)
    """Rows whose loose blocks are to be saved now, in order of arrival."""
    _of_row: dict[BlockKey, dict[BlockKey, None]] = field(default_factory=dict, init=False)
    """Row of a chain -> the keys with a place that are attached to it."""

    def _is_loose(self, content: BlockContent) -> bool:
        return content.group != self.groups.groups.chain

    def put(self, content: BlockContent) -> None:
        """A block has a place."""
        if self._is_loose(content):
            self._of_row.setdefault(content.parent, {})[content.key] = None

    def drop(self, content: BlockContent) -> None:
        """A block has no place any more."""
        attached = self._of_row.get(content.parent)
        if attached is not None and self._is_loose(content):
            attached.pop(content.key, None)
            if not attached:
                del self._of_row[content.parent]
                self.waiting.pop(content.parent, None)

    def clear(self) -> None:
        """No block has a place."""
        self._of_row.clear()
        self.waiting.clear()

    def of(self, row: BlockKey) -> Sequence[BlockKey]:
        """The loose blocks that are attached to a row."""
        return [*self._of_row.get(row, ())]

    def row_of(self, content: BlockContent) -> BlockKey:
        """The row that must be stored so that a block is."""
        return content.parent if self._is_loose(content) else content.key

    def publish(self, content: BlockContent) -> None:
        """The engine will serve a block: if it is attached to a row that memory knows, it is to be saved now."""
        has_rows = self.groups.groups.chain is not None and self._is_loose(content)
        if has_rows and content.parent in self.known and content.key not in self.known:
            self.waiting[content.parent] = None

    def wait_for(self, rows: Iterable[BlockKey]) -> None:
        """Note that rows are stored: what is attached to them is to be saved now."""
        self.waiting.update((row, None) for row in rows if row in self._of_row)

    def refuse(self, owed: Owed) -> None:
        """There is no room for a run: its rows wait no longer."""
        for row in owed.run.parents:
            self.waiting.pop(row, None)

    def take(
        self,
        room: int,
        leaving: Mapping[int, bytes | None],
        still_holds: Callable[[int, BlockContent], bool],
        chain_of: Callable[[BlockKey], Sequence[BlockKey]],
    ) -> list[Owed]:
        """Runs of at most `room` blocks attached to rows that wait; each is offered once."""
        found = list[int]()
        left = room
        for row in [*islice(self.waiting, max(0, room))]:
            if left <= 0:
                break
            blocks = self._to_save(row, still_holds)
            if len(blocks) <= left:
                self.waiting.pop(row, None)
            found += blocks[:left]
            left -= len(blocks)
        return self._runs(found, leaving, chain_of) if found else []

    def _to_save(self, row: BlockKey, still_holds: Callable[[int, BlockContent], bool]) -> list[int]:
        """The blocks attached to a row that still hold what they did when they were noted, if the row is known."""
        blocks = []
        for key in self.of(row):
            block_id = self.places[key]
            content = self.contents[block_id]
            content.offered = True
            if row not in self.known or key in self.known or content.block_hash is None:
                continue
            if still_holds(block_id, content):
                blocks.append(block_id)
        return blocks

    def _runs(
        self,
        found: Sequence[int],
        leaving: Mapping[int, bytes | None],
        chain_of: Callable[[BlockKey], Sequence[BlockKey]],
    ) -> list[Owed]:
        """Return blocks as runs, each of one chain and one group; those whose chains take too long to read wait."""
        groups = self.groups.groups
        walked = 0
        chains: list[Sequence[BlockKey]] = []
        parts: dict[tuple[int, int], dict[int, int]] = {}
        contents = {block_id: self.contents[block_id] for block_id in found}
        rows = {block_id: groups.row_of(content.group, content.block) for block_id, content in contents.items()}
        for block_id in sorted(rows, key=rows.__getitem__, reverse=True):
            content = contents[block_id]
            row = rows[block_id]
            at = next((n for n, keys in enumerate(chains) if len(keys) > row and keys[row] == content.parent), None)
            if at is None:
                if walked > CHAIN_KEYS_PER_STEP:
                    self.waiting[content.parent] = None
                    continue
                at = len(chains)
                chains.append(chain_of(content.parent))
                walked += row
            parts.setdefault((at, content.group), {})[content.block] = block_id
        runs = []
        for (at, number), blocks in parts.items():
            for start, end in runs_of(sorted(blocks)):
                named = {block: (contents[blocks[block]].key, blocks[block]) for block in range(start, end)}
                run = self.groups.loose_run(number, named, chains[at])
                owner = contents[blocks[end - 1]].request_id
                runs.append(Owed(owner, run, frozenset(run.block_ids).intersection(leaving)))
        return runs

    def check(self) -> None:
        """Verify that each loose block with a place is known by its row; raises PactViolation."""
        loose = {key for key, block_id in self.places.items() if self._is_loose(self.contents[block_id])}
        if loose != {key for keys in self._of_row.values() for key in keys} or not all(self._of_row.values()):
            raise PactViolation("the memo does not know what is attached to which row")
        if gone := self.waiting.keys() - self._of_row.keys():
            raise PactViolation(f"{len(gone)} rows wait to which nothing is attached")
