"""What "save": "lazy" needs to know: what each of the engine's blocks holds, and which of them are evicted next.

Owns a memo with one entry for each block of the engine's pool, and a cursor on the engine's free queue. Names chains of
blocks that are about to be lost; `offload.py` saves them. The engine does not say when it reuses a block, so an entry
counts only while the engine publishes the block under the hash that it had when the entry was made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvpact.cache.lazy_sides import LazySides, OffloadRun
from kvpact.contract import KVCacheBlockView, SchedulerContext
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, BlockIndex

MIN_WINDOW: Final = 16
"""Blocks at the head of the free queue that are watched at least."""

WINDOW_STEPS: Final = 2
"""A block is saved once it could be evicted within this many steps at the recent peak allocation rate. A save takes two
steps."""

PEAK_ALLOC_DECAY: Final = 0.98
"""The factor by which the peak allocation rate falls with each step."""

VIEWS_PER_STEP: Final = 128
"""Blocks of the free queue that one step reads at most: each costs about 1 us (P11)."""

SAVES_PER_STEP: Final = 96
"""Blocks that one step orders to be saved at most: each costs about 6 us (P11)."""

CLIMB_PER_STEP: Final = 1024
"""Blocks of a chain that one step follows at most to find the stored part."""


@dataclass(slots=True)
class BlockContent:
    """What a block of the engine holds: block `key` after `parent`, computed for a request.

    `block_hash` is the engine's name for it, None until the engine publishes it. `offered`: since its last use it was
    stored, or could not be. It is not saved twice in a row, or two chains would evict each other for ever.
    """

    key: BlockKey
    parent: BlockKey
    request_id: str
    block_hash: bytes | None
    offered: bool = False


@dataclass(eq=False)
class LazyOffload:
    """The memo and the cursor of one engine. At least `min_window` blocks at the head of the queue are watched."""

    context: SchedulerContext
    index: BlockIndex
    min_window: int = MIN_WINDOW
    sides: LazySides | None = None
    """The side groups' blocks; None if the model has none."""
    dirty: bool = field(default=False, init=False)
    """Whether the engine's blocks may have moved since a walk through the window last found nothing to do."""
    _entries: dict[int, BlockContent] = field(default_factory=dict, init=False)
    """Block id -> what it holds; at most one entry for each block of the pool (P12)."""
    _places: dict[BlockKey, int] = field(default_factory=dict, init=False)
    """Key -> the block that was last seen to hold it; at most one for each entry."""
    _unpublished: dict[str, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    """Request -> (position, block id) of its blocks that the engine has not published yet."""
    _peak_alloc_rate: float = field(default=0.0, init=False)
    _held: int = field(default=0, init=False)
    _cursor: int | None = field(default=None, init=False)
    _passed: int = field(default=0, init=False)
    """Blocks from the head of the queue to the cursor, both included."""
    _resume_key: BlockKey | None = field(default=None, init=False)
    """Where the next step continues with a chain that was too long for one."""

    # What the engine computes

    def note(self, request_id: str, keys: Sequence[BlockKey], start: int, end: int, block_ids: Sequence[int]) -> None:
        """After this step, a request's blocks from `start` to `end` hold `keys[start:end]`."""
        self._confirm(request_id, block_ids)
        unpublished = []
        for place in range(start, end):
            block_id, key = block_ids[place], keys[place]
            entry = self._entries.get(block_id)
            if entry is not None and entry.key == key and entry.block_hash is not None:
                entry.offered = False
                continue
            self._drop(block_id)
            block_hash = self.context.get_block(block_id).block_hash
            parent = keys[place - 1] if place else ROOT
            self._entries[block_id] = BlockContent(key, parent, request_id, block_hash)
            if block_hash is None:
                unpublished.append((place, block_id))
                self._places.setdefault(key, block_id)  # the engine may publish another block of the same content
            else:
                self._places[key] = block_id
        if unpublished:
            self._unpublished.setdefault(request_id, []).extend(unpublished)
        self.dirty = True

    def _confirm(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The request still holds `block_ids`: their hashes are those of what it computed."""
        waiting = self._unpublished.pop(request_id, ())
        still = []
        for place, block_id in waiting:
            entry = self._entries.get(block_id)
            moved = place >= len(block_ids) or block_ids[place] != block_id
            if moved or entry is None or entry.request_id != request_id:
                continue
            entry.block_hash = self.context.get_block(block_id).block_hash
            if entry.block_hash is None:
                still.append((place, block_id))
            else:
                self._places[entry.key] = block_id
        if still:
            self._unpublished[request_id] = still

    def rewind(self, request_id: str) -> None:
        """The request lost its blocks: forget those that were not published."""
        if self.sides is not None:
            self.sides.rewind(request_id)
        for _, block_id in self._unpublished.pop(request_id, ()):
            entry = self._entries.get(block_id)
            if entry is not None and entry.request_id == request_id and entry.block_hash is None:
                self._drop(block_id)
        self.dirty = True

    def request_finished(self, request_id: str) -> None:
        """The request ends; it still holds its blocks during this call."""
        if request_id in self.known_requests:
            try:
                tables = self.context.get_block_ids(request_id)
            except PactViolation:
                tables = ()
            chain = self.sides.sides.groups.chain if self.sides is not None else 0
            self._confirm(request_id, tables[chain] if tables and chain is not None else ())
            if self.sides is not None and tables:
                self.sides.confirm(request_id, tables)
            self.rewind(request_id)
        self.dirty = True

    def invalidate_blocks(self, block_ids: Sequence[int]) -> None:
        """Something unknown is computed into these blocks: forget them."""
        for block_id in block_ids if self._entries or self.sides is not None else ():
            self._drop(block_id)
            if self.sides is not None:
                self.sides.drop(block_id)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Do not save the engine's blocks of these keys, nor blocks after them."""
        for key in keys:
            block_id = self._places.get(key)
            if block_id is not None:
                self._drop(block_id)
        if self.sides is not None:
            self.sides.forget(keys)

    def clear(self) -> None:
        """Forget all that the engine holds."""
        if self.sides is not None:
            self.sides.clear()
        self._entries.clear()
        self._places.clear()
        self._unpublished.clear()
        self._resume_key = None
        self._restart()

    def _drop(self, block_id: int) -> None:
        entry = self._entries.pop(block_id, None)
        if entry is not None and self._places.get(entry.key) == block_id:
            del self._places[entry.key]

    # What is about to be lost

    def due(self, taken_blocks: int) -> Iterator[OffloadRun]:
        """The chains to save in this step, in which the engine took `taken_blocks` from its free queue.

        The caller takes all of them. It calls `saving` for each one that it saves, before it takes the next, and
        `saved` once the blocks are released. The work is bounded, whatever is in the queue (P11).
        """
        self._peak_alloc_rate = max(float(taken_blocks), self._peak_alloc_rate * PEAK_ALLOC_DECAY)
        self.dirty |= taken_blocks > 0 or (self.sides is not None and self.sides.has_waiting)
        if not self.dirty and self._resume_key is None:
            return
        window = max(self.min_window, int(WINDOW_STEPS * self._peak_alloc_rate))
        ahead, at_end = self._look_ahead(max(0, window - self._held))
        # The engine cannot take what is held: at least half of a short queue is left to it.
        most = max(1, (self._passed + len(ahead)) // 2) if at_end else window
        room = min(SAVES_PER_STEP, most - self._held)
        ends = [key for view in ahead for key in self._due(view)]
        if self._resume_key is not None:
            ends.insert(0, self._resume_key)
            self._resume_key = None
        leaving = {view.block_id: view.block_hash for view in ahead}
        taken: set[int] = set()
        until = self._held + room
        yield from self._side_runs(until, leaving, taken)
        for key in ends:
            if self._held >= until or self._resume_key is not None:
                break
            chain = self._chain_to(key, until - self._held, leaving)
            if chain is not None:
                yield from self._save_chain(chain, taken)
            if self.sides is not None and self._resume_key is None:
                self.sides.note_handled(key)
        yield from self._side_runs(until, leaving, taken)
        self._advance([view.block_id for view in ahead if view.block_id not in taken], window, at_end)
        waits = self._resume_key is not None or (self.sides is not None and self.sides.has_waiting)
        self.dirty = bool(taken) or self._held >= until or self._cursor is not None or waits

    def _save_chain(self, chain: OffloadRun, taken: set[int]) -> Iterator[OffloadRun]:
        """Offer a run to the caller; what it saves is `taken` from the free queue."""
        held = self._held
        yield chain
        if self._held == held:
            self._resume_key = None  # there is no room for it
        else:
            taken.update(chain.block_ids)
            if self.sides is not None:
                self.sides.note_saved_rows(chain.keys[chain.start : chain.start + self._held - held])
        for block_id in chain.block_ids:
            self._entries[block_id].offered = True

    def _side_runs(self, until: int, leaving: Mapping[int, bytes | None], taken: set[int]) -> Iterator[OffloadRun]:
        """Offer the caller runs of side groups' blocks that wait, until `until` blocks are held; note what it takes."""
        for run in self.sides.take(until - self._held, leaving) if self.sides is not None else ():
            held = self._held
            yield run
            if self._held > held:
                taken.update(run.block_ids)
            elif self.sides is not None:
                self.sides.refuse(run)

    def _due(self, view: KVCacheBlockView) -> Iterator[BlockKey]:
        """The rows of chains that must be stored so that what a block of the free queue holds is."""
        if (entry := self._due_content(view)) is not None:
            yield entry.key
        if self.sides is not None and (row_key := self.sides.due_row(view)) is not None:
            yield row_key

    def _due_content(self, view: KVCacheBlockView) -> BlockContent | None:
        """The content of a block of the free queue, if it is known and not stored."""
        entry = self._entries.get(view.block_id)
        if entry is None or entry.offered or entry.block_hash is None:
            return None
        if entry.key in self.index:
            entry.offered = True  # if the index drops it later, it does so for blocks used more recently
            return None
        if view.block_hash != entry.block_hash:
            self._drop(view.block_id)
            return None
        self._places[entry.key] = view.block_id
        return entry

    def saving(self, blocks: int) -> None:
        """`blocks` blocks are held until they are saved."""
        self._held += blocks

    def saved(self, blocks: int) -> None:
        """`blocks` blocks are released."""
        self._held -= blocks
        self.dirty = True

    def _look_ahead(self, window: int) -> tuple[list[KVCacheBlockView], bool]:
        """The next blocks after the cursor within the window, and whether the queue ends with them."""
        if self._passed >= window:
            self._restart()
        most = min(VIEWS_PER_STEP, window - self._passed)
        try:
            ahead = [*islice(self.context.iter_free_blocks(self._cursor), most)]
        except PactViolation:  # the cursor left the queue: begin again at the head
            self._restart()
            ahead = [*islice(self.context.iter_free_blocks(), most)]
        return ahead, len(ahead) < most

    def _advance(self, stay: Sequence[int], window: int, at_end: bool) -> None:
        """The next step continues after the last block that stays in the queue, or at the head if all were seen.

        A cursor that left the queue and came back is at its end: the pass ends there, and the next one begins at the
        head. Whatever happens to the queue costs at most one pass.
        """
        self._passed += len(stay)
        if at_end or not stay or self._passed >= window - self._held:
            self._restart()
        else:
            self._cursor = stay[-1]

    def _restart(self) -> None:
        self._cursor, self._passed = None, 0

    def _chain_to(self, key: BlockKey, room: int, leaving: Mapping[int, bytes | None]) -> OffloadRun | None:
        """The blocks to save so that `key` will be stored: at most `room`, the first ones first.

        None if a block between the stored part and `key` is lost, or if that piece is too long for one step.
        """
        missing: list[int] = []
        parent = key
        while parent != ROOT and parent not in self.index:
            block_id = self._places.get(parent)
            if block_id is None:
                for later in missing:  # no block after a lost one can be served
                    self._drop(later)
                return None
            if len(missing) == CLIMB_PER_STEP:
                self._resume_key = parent
                return None
            missing.append(block_id)
            parent = self._entries[block_id].parent
        if len(missing) > room:
            self._resume_key = key
        known = self.index.chain(parent)
        new: list[BlockKey] = []
        for block_id in missing[: -room - 1 : -1]:
            entry = self._entries[block_id]
            seen = leaving[block_id] if block_id in leaving else self.context.get_block(block_id).block_hash
            if entry.block_hash is None or entry.block_hash != seen:
                self._drop(block_id)
                break
            new.append(entry.key)
        if not new:
            return None
        block_ids = tuple(reversed(missing[-len(new) :]))
        owner = self._entries[block_ids[-1]].request_id
        return OffloadRun(owner, (*known, *new), len(known), block_ids, frozenset(block_ids).intersection(leaving))

    def content_of(self, block_id: int) -> BlockContent | None:
        """What a block of the engine is known to hold; None if that is unknown."""
        return self._entries.get(block_id)

    @property
    def known_requests(self) -> Collection[str]:
        """Requests with blocks that the engine has not published yet."""
        sides = self.sides.known_requests if self.sides is not None else ()
        return {*self._unpublished, *sides}

    def __len__(self) -> int:
        """Number of the engine's blocks whose content as a part of a chain is known."""
        return len(self._entries)

    def check(self) -> None:
        """Verify the memo; raises PactViolation."""
        if self.sides is not None:
            self.sides.check()
        for key, block_id in self._places.items():
            entry = self._entries.get(block_id)
            if entry is None or entry.key != key:
                raise PactViolation(f"the memo says that block {block_id} holds {key.hex()[:16]}, and does not know it")
        if self._held < 0:
            raise PactViolation(f"{self._held} blocks are being saved lazily")
