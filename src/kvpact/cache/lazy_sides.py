"""What `"save": "lazy"` needs to know of side groups: which of the engine's blocks hold one that others may need.

Owns a memo with one entry for each such block, and the rows of the chain whose blocks are to be saved now. A block is
saved with the row on which it hangs, else that row would be of no use, and the row with the block that is evicted
before. If its row is stored already, it is saved at once. `side_saves.py` chooses the blocks, `lazy_offload.py` the
moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvpact.cache.request import RequestState
from kvpact.cache.sides import Sides, runs_of
from kvpact.contract import KVCacheBlockView, SchedulerContext
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import BlockTags, Tag
from kvpact.index.block_index import BlockIndex

CHAIN_KEYS_PER_STEP: Final = 8192
"""Rows of chains that one step reads at most to name what it saves, besides one whole chain: 0.1 us each."""


@dataclass(frozen=True, slots=True)
class OffloadRun:
    """Blocks to save now, from the engine's `block_ids`: those of the chain `keys` from `start` on.

    `keys` begins with the chain's first block, and may go on after the blocks that are saved.
    `leaving` are those that the engine evicts next; they stay so after the save.
    """

    request_id: str
    keys: Sequence[BlockKey]
    start: int
    block_ids: tuple[int, ...]
    leaving: frozenset[int] = frozenset()
    is_held: bool = field(default=False, kw_only=True)
    """Whether the engine's blocks are held already."""


@dataclass(frozen=True, slots=True)
class SideRun(OffloadRun):
    """Blocks of a side group to save now, from its block `start` on: `names`, which hang on the chain's `rows`.

    `keys` is the chain up to the last of them.
    """

    group: int = 0
    names: tuple[BlockKey, ...] = ()
    rows: tuple[int, ...] = ()


@dataclass(slots=True)
class SideContent:
    """What a block of the engine holds: a group's block `name`, which hangs on `row_key`, computed for a request.

    `block_hash` and `offered` as of `BlockContent`.
    """

    name: BlockKey
    row_key: BlockKey
    group: int
    block: int
    request_id: str
    tag: Tag
    block_hash: bytes | None
    offered: bool = False


@dataclass(eq=False)
class LazySides:
    """The memo of one engine's side groups."""

    context: SchedulerContext
    index: BlockIndex
    sides: Sides
    tags: BlockTags
    _entries: dict[int, SideContent] = field(default_factory=dict, init=False)
    """Block id -> what it holds; at most one entry for each block of the pool (P12)."""
    _rows: dict[BlockKey, dict[BlockKey, int]] = field(default_factory=dict, init=False)
    """Row of the chain -> name -> the block that was last seen to hold it; at most one for each entry."""
    _unpublished: dict[str, list[int]] = field(default_factory=dict, init=False)
    """Request -> its blocks that the engine has not published yet."""
    _waiting: dict[BlockKey, None] = field(default_factory=dict, init=False)
    """Rows whose blocks are to be saved now, each with an entry, in order of arrival."""

    # What the engine computes

    def note(
        self, request_id: str, state: RequestState, number: int, blocks: Iterable[int], table: Sequence[int]
    ) -> None:
        """After this step the request's `blocks` of a group, which others may need, are in the engine's `table`."""
        for block in blocks:
            block_id, name = table[block], self.sides.key(state, number, block)
            entry, block_hash = self._entries.get(block_id), self.context.get_block(block_id).block_hash
            if name is None:
                continue
            if entry is None or entry.name != name or block_hash is None or entry.block_hash != block_hash:
                self.drop(block_id)
                row_key = self.sides.parent(state, number, block)
                entry = SideContent(name, row_key, number, block, request_id, state.tag, block_hash)
                self._entries[block_id] = entry
                self._rows.setdefault(row_key, {}).setdefault(name, block_id)
            entry.tag = state.tag
            if block_hash is None:
                self._unpublished.setdefault(request_id, []).append(block_id)
            else:
                self._publish(block_id, entry)

    def _publish(self, block_id: int, entry: SideContent) -> None:
        """The engine will serve the block. If its row is stored already, the block is saved at once."""
        self._rows.setdefault(entry.row_key, {})[entry.name] = block_id
        entry.offered = False
        if self.sides.groups.chain is not None and entry.row_key in self.index and entry.name not in self.index:
            self._waiting[entry.row_key] = None

    def confirm(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """The request still holds `tables`: their hashes are those of what it computed."""
        still = []
        for block_id in self._unpublished.pop(request_id, ()):
            entry = self._entries.get(block_id)
            if entry is None or entry.request_id != request_id or entry.block_hash is not None:
                continue
            table = tables[entry.group]
            if entry.block >= len(table) or table[entry.block] != block_id:
                self.drop(block_id)
                continue
            entry.block_hash = self.context.get_block(block_id).block_hash
            if entry.block_hash is None:
                still.append(block_id)
            else:
                self._publish(block_id, entry)
        if still:
            self._unpublished[request_id] = still

    def rewind(self, request_id: str) -> None:
        """The request lost its blocks: forget those that were not published."""
        for block_id in self._unpublished.pop(request_id, ()):
            entry = self._entries.get(block_id)
            if entry is not None and entry.request_id == request_id and entry.block_hash is None:
                self.drop(block_id)

    def forget(self, rows: Iterable[BlockKey]) -> None:
        """Do not save what hangs on these rows."""
        for row_key in rows:
            for block_id in [*self._rows.get(row_key, {}).values()]:
                self.drop(block_id)

    def drop(self, block_id: int) -> None:
        """Forget what the engine's block holds."""
        entry = self._entries.pop(block_id, None)
        blocks = self._rows.get(entry.row_key) if entry is not None else None
        if entry is not None and blocks is not None and blocks.get(entry.name) == block_id:
            del blocks[entry.name]
            if not blocks:
                del self._rows[entry.row_key]
                self._waiting.pop(entry.row_key, None)

    def clear(self) -> None:
        """Forget all that the engine holds."""
        for kept in (self._entries, self._rows, self._unpublished, self._waiting):
            kept.clear()

    # What is about to be lost

    def due_row(self, view: KVCacheBlockView) -> BlockKey | None:
        """The row that must be stored so that a block of the free queue can be; None if it holds nothing to save."""
        entry = self._entries.get(view.block_id)
        if entry is None or entry.offered or entry.block_hash is None:
            return None
        if entry.name in self.index:
            entry.offered = True
            return None
        if view.block_hash != entry.block_hash:
            self.drop(view.block_id)
            return None
        self._rows.setdefault(entry.row_key, {})[entry.name] = view.block_id
        return entry.row_key

    def note_saved_rows(self, rows: Iterable[BlockKey]) -> None:
        """Have what hangs on these rows of the chain saved too, now that the rows are being saved."""
        self._waiting.update((row_key, None) for row_key in rows if row_key in self._rows)

    def note_handled(self, row_key: BlockKey) -> None:
        """All that could be done to store a row is done: what hangs on it is saved now, or not offered again."""
        if row_key in self.index:
            self.note_saved_rows([row_key])
        else:
            for block_id in self._rows.get(row_key, {}).values():
                self._entries[block_id].offered = True

    def refuse(self, run: SideRun) -> None:
        """There is no room for a run: the rows on which it hangs wait no longer."""
        for row in run.rows:
            self._waiting.pop(run.keys[row], None)

    def take(self, room: int, leaving: Mapping[int, bytes | None]) -> list[SideRun]:
        """Runs of at most `room` blocks that wait to be saved; each is offered once.

        `leaving` has the hashes of those that the engine evicts next.
        """
        found, left = [], room
        for row_key in [*islice(self._waiting, max(0, room))]:
            if left <= 0:
                break
            blocks = self._to_save(row_key, leaving)
            if len(blocks) <= left:
                self._waiting.pop(row_key, None)
            found += blocks[:left]
            left -= len(blocks)
        return self._runs(found, leaving)

    def _to_save(self, row_key: BlockKey, leaving: Mapping[int, bytes | None]) -> list[int]:
        """The blocks that hang on a row, and still hold what they did when they were noted, if the row is known."""
        blocks = []
        for name, block_id in [*self._rows.get(row_key, {}).items()]:
            entry = self._entries[block_id]
            entry.offered = True
            if row_key not in self.index or name in self.index or entry.block_hash is None:
                continue
            seen = leaving[block_id] if block_id in leaving else self.context.get_block(block_id).block_hash
            if entry.block_hash == seen and self.tags.same_prefix([block_id], 0, entry.tag):
                blocks.append(block_id)
            else:
                self.drop(block_id)
        return blocks

    def _runs(self, found: Sequence[int], leaving: Mapping[int, bytes | None]) -> list[SideRun]:
        """Return blocks as runs, each of one chain and one group. Blocks whose chains take too long to read wait."""
        groups, walked = self.sides.groups, 0
        chains: list[tuple[BlockKey, ...]] = []
        parts: dict[tuple[int, int], dict[int, int]] = {}
        entries = {block_id: self._entries[block_id] for block_id in found}
        rows = {block_id: groups.row_of(entry.group, entry.block) for block_id, entry in entries.items()}
        for block_id in sorted(rows, key=rows.__getitem__, reverse=True):
            entry, row = entries[block_id], rows[block_id]
            at = next((n for n, keys in enumerate(chains) if len(keys) > row and keys[row] == entry.row_key), None)
            if at is None:
                if walked > CHAIN_KEYS_PER_STEP:
                    self._waiting[entry.row_key] = None
                    continue
                at = len(chains)
                chains.append(tuple(self.index.chain(entry.row_key)))
                walked += row
            parts.setdefault((at, entry.group), {})[entry.block] = block_id
        runs = []
        for (at, number), blocks in parts.items():
            for start, end in runs_of(sorted(blocks)):
                ids = tuple(blocks[block] for block in range(start, end))
                names = tuple(entries[block_id].name for block_id in ids)
                below = tuple(rows[block_id] for block_id in ids)
                chain, owner = chains[at][: below[-1] + 1], entries[ids[-1]].request_id
                runs.append(
                    SideRun(owner, chain, start, ids, frozenset(ids).intersection(leaving), number, names, below)
                )
        return runs

    @property
    def known_requests(self) -> Collection[str]:
        """Requests with blocks that the engine has not published yet."""
        return self._unpublished.keys()

    @property
    def has_waiting(self) -> bool:
        """Whether blocks are to be saved now."""
        return bool(self._waiting)

    def __len__(self) -> int:
        """Number of the engine's blocks whose content is known."""
        return len(self._entries)

    def check(self) -> None:
        """Verify the memo; raises PactViolation."""
        for row_key, blocks in self._rows.items():
            for name, block_id in blocks.items():
                entry = self._entries.get(block_id)
                if entry is None or (entry.row_key, entry.name) != (row_key, name):
                    raise PactViolation(f"the memo says that block {block_id} holds {name.hex()[:16]}, without knowing")
        if gone := self._waiting.keys() - self._rows.keys():
            raise PactViolation(f"{len(gone)} rows wait that nothing hangs on")
