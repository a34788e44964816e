"""What "save": "lazy" needs to know: what each of the engine's blocks holds, and which of them are evicted next.

Owns a memo with one entry for each block of the engine's pool, and a cursor on the engine's free queue. Names chains of
blocks that are about to be lost; `offload.py` saves them. The engine tells nobody when it gives a block away, so an
entry counts only while the engine publishes the block under the hash that it had when the entry was made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvpact.contract import KVCacheBlockView, SchedulerContext
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, BlockIndex

MIN_WINDOW: Final = 16
"""Blocks from the head of the free queue that are looked after at least."""

WINDOW_STEPS: Final = 2
"""A block is saved when it may be given away within so many steps that take as many blocks as the hungriest one of
late: a save is ordered in one step, and done by the end of the next."""

PEAK_ALLOC_DECAY: Final = 0.98
"""What is left of the hungriest step's blocks after another step."""

VIEWS_PER_STEP: Final = 128
"""Blocks of the free queue that are looked at in one step: a view costs about 1 us (P11)."""

SAVES_PER_STEP: Final = 96
"""Blocks that one step orders to be saved: each costs about 6 us (P11)."""

CLIMB_PER_STEP: Final = 1024
"""Blocks of a chain that are gone through in one step on the way to what is stored of it."""


@dataclass(slots=True)
class BlockContent:
    """What a block of the engine holds: block `key` behind `parent`, computed for a request.

    `block_hash` is the engine's name for it, None until the engine publishes it. `offered`: since it was last used it
    was stored already, or could not be; it is not saved twice in a row, or two chains push each other out for ever.
    """

    key: BlockKey
    parent: BlockKey
    request_id: str
    block_hash: bytes | None
    offered: bool = False


@dataclass(frozen=True, slots=True)
class OffloadRun:
    """Blocks to save now: `keys[start:]` of the whole chain `keys`, from the engine's `block_ids`.

    `leaving` are those that are evicted next, and should be once they are saved.
    """

    request_id: str
    keys: tuple[BlockKey, ...]
    start: int
    block_ids: tuple[int, ...]
    leaving: frozenset[int] = frozenset()


@dataclass(eq=False)
class LazyOffload:
    """The memo and the cursor of one engine. `min_window` blocks at the head of the queue are always looked after."""

    context: SchedulerContext
    index: BlockIndex
    min_window: int = MIN_WINDOW
    dirty: bool = field(default=False, init=False)
    """Whether the engine's blocks may have moved since the last walk through the window found nothing to do."""
    _entries: dict[int, BlockContent] = field(default_factory=dict, init=False)
    """Block id -> what it holds; at most one entry for each block of the pool (P12)."""
    _places: dict[BlockKey, int] = field(default_factory=dict, init=False)
    """Key -> the block that was last seen to hold it; at most as many."""
    _unpublished: dict[str, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    """Request -> (place, block id) of its blocks that the engine has not published yet."""
    _peak_alloc_rate: float = field(default=0.0, init=False)
    _held: int = field(default=0, init=False)
    _cursor: int | None = field(default=None, init=False)
    _passed: int = field(default=0, init=False)
    """Blocks between the head of the queue and the cursor, the cursor too."""
    _resume_key: BlockKey | None = field(default=None, init=False)
    """The end of a chain that was too long for one step."""

    # What the engine computes

    def note(self, request_id: str, keys: Sequence[BlockKey], start: int, end: int, block_ids: Sequence[int]) -> None:
        """After this step, `keys[start:end]` of a request are in its blocks of these places."""
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
                self._places.setdefault(key, block_id)  # the engine may have another block of it, and publish that one
            else:
                self._places[key] = block_id
        if unpublished:
            self._unpublished.setdefault(request_id, []).extend(unpublished)
        self.dirty = True

    def _confirm(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The request still holds `block_ids`: what the engine publishes them as is what it computed."""
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
        """The request lost its blocks; what was not published of them is not known any more."""
        for _, block_id in self._unpublished.pop(request_id, ()):
            entry = self._entries.get(block_id)
            if entry is not None and entry.request_id == request_id and entry.block_hash is None:
                self._drop(block_id)
        self.dirty = True

    def request_finished(self, request_id: str) -> None:
        """The request ended; its blocks are still its own in this moment."""
        if request_id in self._unpublished:
            try:
                (block_ids, *_) = self.context.blocks_of(request_id)
            except PactViolation:
                block_ids = ()
            self._confirm(request_id, block_ids)
            self.rewind(request_id)
        self.dirty = True

    def invalidate_blocks(self, block_ids: Sequence[int]) -> None:
        """Somebody computes into these blocks of whom nothing is known: no entry speaks of them any more."""
        if self._entries:
            for block_id in block_ids:
                self._drop(block_id)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """What the engine has of these blocks is not to be saved, nor what stands behind them."""
        for key in keys:
            block_id = self._places.get(key)
            if block_id is not None:
                self._drop(block_id)

    def clear(self) -> None:
        """Nothing that the engine holds is worth saving any more."""
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

        Go through all of them. Whoever saves one says so with `saving`, before the next is asked for, and with `saved`
        when its blocks are given back. Bounded work, whatever is in the queue (P11).
        """
        self._peak_alloc_rate = max(float(taken_blocks), self._peak_alloc_rate * PEAK_ALLOC_DECAY)
        self.dirty |= taken_blocks > 0
        if not self.dirty and self._resume_key is None:
            return
        window = max(self.min_window, int(WINDOW_STEPS * self._peak_alloc_rate))
        ahead, at_end = self._look_ahead(max(0, window - self._held))
        # What is held cannot be taken by the engine: of a short queue, half at least is left to it.
        most = max(1, (self._passed + len(ahead)) // 2) if at_end else window
        room = min(SAVES_PER_STEP, most - self._held)
        ends = [entry.key for view in ahead if (entry := self._due(view)) is not None]
        if self._resume_key is not None:
            ends.insert(0, self._resume_key)
            self._resume_key = None
        leaving = {view.block_id: view.block_hash for view in ahead}
        taken: set[int] = set()
        for key in ends:
            if room <= 0 or self._resume_key is not None:
                break
            chain = self._chain_to(key, room, leaving)
            if chain is None:
                continue
            held = self._held
            yield chain
            if self._held == held:
                self._resume_key = None  # nobody has room for it
            else:
                taken.update(chain.block_ids)
                room -= len(chain.block_ids)
            for block_id in chain.block_ids:
                self._entries[block_id].offered = True
        self._advance([view.block_id for view in ahead if view.block_id not in taken], window, at_end)
        self.dirty = bool(taken) or room <= 0 or self._cursor is not None or self._resume_key is not None

    def _due(self, view: KVCacheBlockView) -> BlockContent | None:
        """What a block of the free queue holds, if that is known and not stored."""
        entry = self._entries.get(view.block_id)
        if entry is None or entry.offered or entry.block_hash is None:
            return None
        if entry.key in self.index:
            entry.offered = True  # if the index drops it from now on, it did so for what was used later
            return None
        if view.block_hash != entry.block_hash:
            self._drop(view.block_id)
            return None
        self._places[entry.key] = view.block_id
        return entry

    def saving(self, blocks: int) -> None:
        """So many blocks are held until they are saved."""
        self._held += blocks

    def saved(self, blocks: int) -> None:
        """So many blocks are given back."""
        self._held -= blocks
        self.dirty = True

    def _look_ahead(self, window: int) -> tuple[list[KVCacheBlockView], bool]:
        """The next blocks behind the cursor that are within the window, and whether the queue ended with them."""
        if self._passed >= window:
            self._restart()
        most = min(VIEWS_PER_STEP, window - self._passed)
        try:
            ahead = [*islice(self.context.iter_free_blocks(self._cursor), most)]
        except PactViolation:  # the cursor was taken out of the queue: what stood before it is to be seen again
            self._restart()
            ahead = [*islice(self.context.iter_free_blocks(), most)]
        return ahead, len(ahead) < most

    def _advance(self, stay: Sequence[int], window: int, at_end: bool) -> None:
        """The next step goes on behind the last block that stays in the queue, or from the head if all was seen.

        A cursor that left the queue and came back stands at its end: the pass ends there, and the next one begins at
        the head. So whatever happens to the queue costs one pass at most.
        """
        self._passed += len(stay)
        if at_end or not stay or self._passed >= window - self._held:
            self._restart()
        else:
            self._cursor = stay[-1]

    def _restart(self) -> None:
        self._cursor, self._passed = None, 0

    def _chain_to(self, key: BlockKey, room: int, leaving: Mapping[int, bytes | None]) -> OffloadRun | None:
        """What is to be saved so that `key` will be stored, at most `room` blocks of it, the first ones first.

        None if a block between `key` and what is stored is lost, or if the way there is too long for one step.
        """
        missing: list[int] = []
        parent = key
        while parent != ROOT and parent not in self.index:
            block_id = self._places.get(parent)
            if block_id is None:
                for behind in missing:  # nothing behind a block that is gone can be served
                    self._drop(behind)
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
        """What a block of the engine is known to hold."""
        return self._entries.get(block_id)

    @property
    def known_requests(self) -> Collection[str]:
        """Requests with blocks that the engine has not published yet."""
        return self._unpublished.keys()

    def __len__(self) -> int:
        """Blocks of the engine of which something is known."""
        return len(self._entries)

    def check(self) -> None:
        """Verify the memo; raises PactViolation."""
        for key, block_id in self._places.items():
            entry = self._entries.get(block_id)
            if entry is None or entry.key != key:
                raise PactViolation(f"the memo says that block {block_id} holds {key.hex()[:16]}, and does not know it")
        if self._held < 0:
            raise PactViolation(f"{self._held} blocks are being saved lazily")
