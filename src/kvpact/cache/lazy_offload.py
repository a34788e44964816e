"""Memo of the content of the engine's blocks, and of the next ones to be evicted, for `"save": "lazy"`.

Owns a memo with one entry for each block of the engine's pool, and a cursor on the engine's free queue. Names blocks
that are about to be lost; `saves.py` saves them. A loose block is saved with the row to which it is attached, see
`needs/attached.py`. The engine does not say when it reuses a block, so an entry counts only while the engine publishes
the block under the hash that it had when the entry was made.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvpact.cache.needs.attached import Attached, BlockContent
from kvpact.cache.needs.engine_groups import EngineGroups, Tables
from kvpact.cache.needs.owed import Owed
from kvpact.cache.needs.runs import Run
from kvpact.cache.request import RequestState
from kvpact.contract import KVCacheBlockView, SchedulerContext
from kvpact.errors import NAME_CHARS, PactViolation, kept_id
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import BlockTags, Tag
from kvpact.index.block_index import ROOT, BlockIndex

MIN_WINDOW: Final = 16
"""Blocks at the head of the free queue that are watched at least."""

WINDOW_STEPS: Final = 2
"""A block is saved once it could be evicted within this many steps at the recent peak allocation rate. A save takes two
steps."""

PEAK_ALLOC_DECAY: Final = 0.98
"""Factor of the peak allocation rate from one step to the next."""

VIEWS_PER_STEP: Final = 128
"""Blocks of the free queue that one step reads at most: each costs about 1 us (P11)."""

SAVES_PER_STEP: Final = 96
"""Blocks that one step orders to be saved at most: each costs about 6 us (P11)."""

CLIMB_PER_STEP: Final = 1024
"""Blocks of a chain that one step follows at most to find the stored part."""


@dataclass(eq=False)
class QueueCursor:
    """The place in the engine's free queue up to which its blocks were read."""

    context: SchedulerContext
    block: int | None = field(default=None, init=False)
    """The last block that was read and stayed; None at the head."""
    passed: int = field(default=0, init=False)
    """Blocks from the head of the queue to the cursor, both included."""

    def look_ahead(self, window: int) -> tuple[list[KVCacheBlockView], bool]:
        """The next blocks after the cursor within the window, and whether the queue ends with them."""
        if self.passed >= window:
            self.restart()
        most = min(VIEWS_PER_STEP, window - self.passed)
        try:
            ahead = [*islice(self.context.iter_free_blocks(self.block), most)]
        except PactViolation:  # the cursor left the queue: begin again at the head
            self.restart()
            ahead = [*islice(self.context.iter_free_blocks(), most)]
        return ahead, len(ahead) < most

    def advance(self, stay: Sequence[int], window: int, *, is_over: bool) -> None:
        """The next step continues after the last of the blocks that stay in the queue, or at the head.

        At the head if the pass `is_over`, or reached the end of the window. Where no block stays, the cursor does. A
        cursor that left the queue and came back is at its end: the pass ends there, and the next one begins at the
        head. Whatever happens to the queue costs at most one pass.
        """
        self.passed += len(stay)
        if is_over or self.passed >= window:
            self.restart()
        elif stay:
            self.block = stay[-1]

    def restart(self) -> None:
        """Begin again at the head."""
        self.block = None
        self.passed = 0


@dataclass(eq=False)
class LazyOffload:
    """The memo and the cursor of one engine. Watches `min_window` blocks or more."""

    context: SchedulerContext
    index: BlockIndex
    groups: EngineGroups
    tags: BlockTags
    min_window: int = MIN_WINDOW
    dirty: bool = field(default=False, init=False)
    """True if the next step may find something to save."""
    _entries: dict[int, BlockContent] = field(default_factory=dict, init=False)
    """Block id -> its content; at most one entry for each block of the pool (P12)."""
    _places: dict[BlockKey, int] = field(default_factory=dict, init=False)
    """Key -> the block that was last seen to hold it; at most one for each entry."""
    _attached: Attached = field(init=False)
    """The loose ones of these blocks."""
    _unpublished: dict[str, list[int]] = field(default_factory=dict, init=False)
    """Request -> its blocks that the engine has not published yet."""
    _held: int = field(default=0, init=False)
    """Blocks held until they are saved."""
    _peak_alloc_rate: float = field(default=0.0, init=False)
    _cursor: QueueCursor = field(init=False)
    _resume_key: BlockKey | None = field(default=None, init=False)
    """Where the next step continues with a chain that was too long for one."""
    _resume_for: BlockKey = field(default=ROOT, init=False)
    """The due row that this chain leads to."""
    refused: int = field(default=0, init=False)
    """Blocks given up so far: one before them in their chain is lost, or was offered to the caller and not saved."""

    def __post_init__(self) -> None:
        self._attached = Attached(self.groups, self._entries, self._places, self.index)
        self._cursor = QueueCursor(self.context)

    # What the engine computes

    def note(self, request_id: str, run: Run, tag: Tag) -> None:
        """After this step the engine's blocks hold what `run` says, computed for a request with this tag."""
        unpublished = []
        of_run = zip(run.keys, run.parents, run.block_ids, strict=True)
        for block, (key, parent, block_id) in enumerate(of_run, run.start):
            entry = self._entries.get(block_id)
            if entry is None or entry.key != key or entry.block_hash is None:
                self._drop(block_id)
                block_hash = self.context.get_block(block_id).block_hash
                entry = BlockContent(key, parent, run.group, block, request_id, tag, block_hash, owner=run.owner)
                self._entries[block_id] = entry
                if key not in self._places:  # else the engine may publish another block of the same content
                    self._put(entry, block_id)
            entry.tag = tag
            if entry.block_hash is None:
                unpublished.append(block_id)
            else:
                self._publish(block_id, entry)
        if unpublished:
            self._unpublished.setdefault(request_id, []).extend(unpublished)
        self.dirty = True

    def _put(self, entry: BlockContent, block_id: int) -> None:
        """The block is where its content is to be found."""
        self._places[entry.key] = block_id
        self._attached.put(entry)

    def _publish(self, block_id: int, entry: BlockContent) -> None:
        """The engine will serve the block."""
        self._put(entry, block_id)
        entry.offered = False
        if len(entry.request_id) > NAME_CHARS:
            entry.request_id = kept_id(entry.request_id)  # the block outlives the request
        self._attached.publish(entry)

    def confirm(self, request_id: str, tables: Tables) -> None:
        """The request still holds `tables`: their hashes are those of what it computed."""
        still = []
        for block_id in self._unpublished.pop(request_id, ()):
            entry = self._entries.get(block_id)
            if entry is None or entry.request_id != request_id or entry.block_hash is not None:
                continue
            table = tables[entry.group] if tables else ()
            if entry.block >= len(table) or table[entry.block] != block_id:
                self._drop(block_id)
                continue
            entry.block_hash = self.context.get_block(block_id).block_hash
            if entry.block_hash is None:
                still.append(block_id)
            else:
                self._publish(block_id, entry)
        if still:
            self._unpublished[request_id] = still

    def note_probe(self, request_id: str, state: RequestState) -> None:
        """The engine probes for a request: if it was preempted, it gets other blocks."""
        if state.offloaded_blocks:
            state.note_offloaded(0)
            self.rewind(request_id)

    def rewind(self, request_id: str) -> None:
        """The request lost its blocks: forget those that were not published."""
        for block_id in self._unpublished.pop(request_id, ()):
            entry = self._entries.get(block_id)
            if entry is not None and entry.request_id == request_id and entry.block_hash is None:
                self._drop(block_id)
        self.dirty = True

    def request_finished(self, request_id: str) -> None:
        """The request ends; it still holds its blocks during this call."""
        if request_id in self._unpublished:
            try:
                tables: Tables = self.context.get_block_ids(request_id)
            except PactViolation:
                tables = ()
            self.confirm(request_id, tables)
            self.rewind(request_id)
        self.dirty = True

    def invalidate_blocks(self, block_ids: Iterable[int]) -> None:
        """Something unknown is computed into these blocks: forget them."""
        for block_id in block_ids if self._entries else ():
            self._drop(block_id)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Do not save the engine's blocks of these keys, nor what is attached to them, nor blocks after them."""
        for key in keys:
            for each in (key, *self._attached.of(key)):
                if (block_id := self._places.get(each)) is not None:
                    self._drop(block_id)

    def clear(self) -> None:
        """Forget all that the engine holds."""
        for kept in (self._entries, self._places, self._attached, self._unpublished):
            kept.clear()
        self._resume_key = None
        self._cursor.restart()

    def _drop(self, block_id: int) -> None:
        entry = self._entries.pop(block_id, None)
        if entry is None or self._places.get(entry.key) != block_id:
            return
        del self._places[entry.key]
        self._attached.drop(entry)

    # What is about to be lost

    def due(self, taken_blocks: int) -> Iterator[Owed]:
        """The runs to save in this step, in which the engine took `taken_blocks` from its free queue.

        The caller takes all of them. It calls `saving` for each one that it saves, before it takes the next, and
        `saved` once the blocks are released. The work is bounded, whatever is in the queue (P11).
        """
        self._peak_alloc_rate = max(float(taken_blocks), self._peak_alloc_rate * PEAK_ALLOC_DECAY)
        self.dirty |= taken_blocks > 0 or bool(self._attached.waiting)
        if not self.dirty and self._resume_key is None:
            return
        window = max(self.min_window, int(WINDOW_STEPS * self._peak_alloc_rate))
        ahead, at_end = self._cursor.look_ahead(max(0, window - self._held))
        # The engine cannot take what is held: at least half of a short queue is left to it.
        most = max(1, (self._cursor.passed + len(ahead)) // 2) if at_end else window
        room = min(SAVES_PER_STEP, most - self._held)
        leaving = {view.block_id: view.block_hash for view in ahead}
        taken: set[int] = set()
        until = self._held + room
        yield from self._save_attached(until, leaving, taken)
        handled = 0  # the cursor passes no row that later steps must save
        goes_on = self._resume_key is None or (yield from self._save_row(self._resume_for, until, leaving, taken))
        while goes_on and handled < len(ahead):
            row = self._due_row(ahead[handled])
            goes_on = row is None or (yield from self._save_row(row, until, leaving, taken))
            handled += goes_on
        yield from self._save_attached(until, leaving, taken)
        stay = [view.block_id for view in ahead[:handled] if view.block_id not in taken]
        self._cursor.advance(stay, window - self._held, is_over=handled == len(ahead) and (at_end or not stay))
        waits = self._resume_key is not None or bool(self._attached.waiting)
        self.dirty = bool(taken) or self._held >= until or self._cursor.block is not None or waits

    def _save_row(
        self, row: BlockKey, until: int, leaving: Mapping[int, bytes | None], taken: set[int]
    ) -> Generator[Owed, None, bool]:
        """Offer the caller the rows to save so that a due row will be stored; False if a later step must go on."""
        if self._held >= until:
            return False
        start = row if self._resume_key is None else self._resume_key
        self._resume_key = None
        owed = self._chain_to(start, until - self._held, leaving)
        if owed is not None:
            saved = yield from self._offer(owed, taken)
            if not saved:
                self._resume_key = None  # there is no room for it
            self._attached.wait_for(owed.run.keys[:saved])
            for block_id in owed.run.block_ids:
                self._entries[block_id].offered = True
        if start != row and self._resume_key is None and start in self.index:
            self._resume_key = row
        self._resume_for = row
        if self._resume_key is None:
            self._note_handled(row)
        return self._resume_key is None

    def _offer(self, owed: Owed, taken: set[int]) -> Generator[Owed, None, int]:
        """Offer the caller a run; what it saves is `taken` from the free queue. Returns the number of saved blocks."""
        held = self._held
        yield owed
        saved = self._held - held
        if saved:
            taken.update(owed.run.block_ids)
        return saved

    def _save_attached(self, until: int, leaving: Mapping[int, bytes | None], taken: set[int]) -> Iterator[Owed]:
        """Offer the caller blocks attached to waiting rows, until `until` blocks are held; note those that it takes."""

        def still_holds(block_id: int, entry: BlockContent) -> bool:
            if self._holds(block_id, entry, leaving):
                return True
            self._drop(block_id)
            return False

        for owed in self._attached.take(until - self._held, leaving, still_holds, self.index.chain):
            if not (yield from self._offer(owed, taken)):
                self._attached.refuse(owed)

    def _due_row(self, view: KVCacheBlockView) -> BlockKey | None:
        """The row that must be stored so that what a block of the free queue holds is; None if nothing is to save."""
        entry = self._entries.get(view.block_id)
        if entry is None or entry.offered or entry.block_hash is None:
            return None
        if entry.key in self.index:
            entry.offered = True  # if the index drops it later, it does so for blocks used more recently
            return None
        if view.block_hash != entry.block_hash:
            self._drop(view.block_id)
            return None
        self._put(entry, view.block_id)
        return self._attached.row_of(entry)

    def _note_handled(self, row: BlockKey) -> None:
        """All that could be done to store a row is done: what is attached to it is saved now, or it is refused.

        Then neither it nor the blocks before and on it are offered again until they are used.
        """
        if row in self.index:
            self._attached.wait_for((row,))
            return
        for key in self._attached.of(row):
            self._refuse(self._places[key])
        for _ in range(CLIMB_PER_STEP):
            block_id = self._places.get(row)
            if block_id is None or row in self.index or not self._refuse(block_id):
                break
            row = self._entries[block_id].parent

    def _refuse(self, block_id: int) -> bool:
        """Give up a block until it is used again; False if it was offered already."""
        entry = self._entries[block_id]
        if entry.offered:
            return False
        entry.offered = True
        self.refused += 1
        return True

    def _holds(self, block_id: int, entry: BlockContent, leaving: Mapping[int, bytes | None]) -> bool:
        """True if the engine's block still has this content; `leaving` has the hashes of those it evicts next."""
        seen = leaving[block_id] if block_id in leaving else self.context.get_block(block_id).block_hash
        return entry.block_hash is not None and entry.block_hash == seen and self.tags.has(block_id, entry.tag)

    def saving(self, blocks: int) -> None:
        """`blocks` blocks are held until they are saved."""
        self._held += blocks

    def saved(self, blocks: int) -> None:
        """`blocks` blocks are released."""
        self._held -= blocks
        self.dirty = True

    def _chain_to(self, row: BlockKey, room: int, leaving: Mapping[int, bytes | None]) -> Owed | None:
        """The rows to save so that `row` will be stored: at most `room`, the first ones first.

        None if a row between the stored part and `row` is lost, or if that piece is too long for one step.
        """
        missing: list[int] = []
        parent = row
        while parent != ROOT and parent not in self.index:
            block_id = self._places.get(parent)
            if block_id is None:
                for later in missing:  # no block after a lost one can be served
                    self._drop(later)
                self.refused += len(missing)
                return None
            if len(missing) == CLIMB_PER_STEP:
                self._resume_key = parent
                return None
            missing.append(block_id)
            parent = self._entries[block_id].parent
        if len(missing) > room:
            self._resume_key = row
        known = self.index.chain(parent)
        new: list[BlockKey] = []
        for block_id in missing[: -room - 1 : -1]:
            entry = self._entries[block_id]
            if not self._holds(block_id, entry, leaving):
                self._drop(block_id)
                break
            new.append(entry.key)
        if not new:
            return None
        ids = tuple(reversed(missing[-len(new) :]))
        start = len(known)
        request_id = self._entries[ids[-1]].request_id
        departing = frozenset(ids).intersection(leaving)
        rows = range(start, start + len(new))
        first = self._entries[ids[0]]
        run = Run(
            first.group,
            start,
            new,
            [*known, *new],
            rows,
            self.groups.class_of(first.group),
            block_ids=ids,
            request_id=request_id,
            owner=first.owner,
        )
        return Owed(request_id, run, departing)

    def content_of(self, block_id: int) -> BlockContent | None:
        """Content of a block of the engine; None if it is unknown."""
        return self._entries.get(block_id)

    @property
    def known_requests(self) -> Collection[str]:
        """Requests with blocks that the engine has not published yet."""
        return self._unpublished.keys()

    def __len__(self) -> int:
        """Number of the engine's blocks whose content is known."""
        return len(self._entries)

    def check(self) -> None:
        """Verify the memo; raises PactViolation."""
        for key, block_id in self._places.items():
            entry = self._entries.get(block_id)
            if entry is None or entry.key != key:
                raise PactViolation(f"the memo says that block {block_id} holds {key.hex()[:16]}, and does not know it")
        self._attached.check()
        if self._held < 0:
            raise PactViolation(f"{self._held} blocks are being saved lazily")
