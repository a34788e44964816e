"""Saves that later steps order, with the engine's blocks held: pieces of long prompts, which exceed a step's bound, and
loose blocks whose row has no key yet.

Owns how many rows the running step may still order saves of; `jobs.py` has what waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvpact.cache.jobs import PutOffSave, TransferJobs
from kvpact.cache.needs.owed import Computed
from kvpact.cache.saves import Saves
from kvpact.errors import PactViolation
from kvpact.metrics import MEMORY

PIECE_BLOCKS = 512
"""Most rows one step orders saves for; the rest wait. 512 rows cost the scheduler about 0.7 ms in all."""

QUIET_BLOCKS = 32
"""A step that saves at most so many rows makes room for later ones, of `PIECE_BLOCKS` at most."""

CATCH_UP_STEPS = 8
"""A longer backlog is spread over so many steps: each orders its part of it."""


@dataclass(eq=False)
class PutOff:
    """Saves that later steps order."""

    saves: Saves
    jobs: TransferJobs = field(init=False)
    piece_blocks: int = PIECE_BLOCKS
    _left: int = field(default=PIECE_BLOCKS, init=False)
    """Number of rows that the running step may still save."""
    _seen: set[str] = field(default_factory=set, init=False)
    """Requests with unnamed blocks that this step computes."""

    def __post_init__(self) -> None:
        self.jobs = self.saves.jobs

    def rows_left(self, first: int, full: int, computed: Computed) -> int:
        """Number of a request's rows [first, full) that later steps save; those that are stored do not count."""
        if full - first <= self._left and not self.jobs.put_off:
            self._left -= full - first
            return 0
        new = full - max(first, min(full, self.saves.memory.index.known_prefix(computed.names.keys)))
        now = 0 if self.jobs.put_off else min(new, self._left)
        self._left -= now
        return new - now

    def put_off(self, computed: Computed) -> None:
        """Have later steps save these rows of a request, and what is attached to them; hold the engine's blocks."""
        context = self.saves.context
        assert context is not None
        pieces = deque[Computed]()
        for start in range(computed.start, computed.end, self.piece_blocks):
            end = min(start + self.piece_blocks, computed.end)
            ids = tuple(computed.ids[start - computed.first : end - computed.first])
            there = self.saves.groups.attached_to(computed.loose, start, end)
            piece = replace(computed, start=start, end=end, first=start, ids=ids, loose=there, is_held=True)
            pieces.append(piece)
            for held in filter(None, (ids[::-1], piece.loose_ids)):
                context.touch(held)
        self.jobs.put_off.append(PutOffSave(computed.request_id, computed.names, computed.tag, pieces))

    def hold(self, computed: Computed) -> None:
        """Hold the one loose block of a row until that has a key, in place of an earlier one of its group."""
        context = self.saves.context
        assert context is not None
        ((group, _, block_id),) = computed.loose
        context.touch((block_id,))
        of_request = self.jobs.unnamed.setdefault(computed.request_id, {})
        if group in of_request:
            self._drop(of_request.pop(group).pieces[0])
        held = replace(computed, is_held=True, hashes=(context.get_block(block_id).block_hash,))
        of_request[group] = PutOffSave(computed.request_id, computed.names, computed.tag, deque((held,)))
        self._seen.add(computed.request_id)

    def named(self, request_id: str, rows: int) -> list[PutOffSave]:
        """Held blocks of a request's first `rows` rows, which have keys now; the caller calls `end_hold` for each."""
        of_request = self.jobs.unnamed.get(request_id)
        if of_request is None:
            return []
        self._seen.add(request_id)
        groups = [group for group, waiting in of_request.items() if waiting.pieces[0].end <= rows]
        found = [of_request.pop(group) for group in groups]
        if not of_request:
            del self.jobs.unnamed[request_id]
        return found

    def still_holds(self, waiting: PutOffSave) -> bool:
        """True if a held block has the content that it had: its tag, and the engine's name for it, are the same."""
        context = self.saves.context
        (piece,) = waiting.pieces
        return (
            context is not None
            and waiting.trusted
            and piece.end <= waiting.garbage_from
            and all(self.saves.tags.has(block_id, waiting.tag) for block_id in piece.loose_ids)
            and [context.get_block(block_id).block_hash for block_id in piece.loose_ids] == [*piece.hashes]
        )

    def end_hold(self, waiting: PutOffSave, *, is_saved: bool) -> None:
        """Release a block that `named` returned; a save of it has its own hold."""
        (piece,) = waiting.pieces
        if is_saved:
            self._let_go(piece, ())
        else:
            self._drop(piece)

    def forget(self, request_id: str) -> None:
        """Drop a request's blocks without a name: it ends, or begins again."""
        for waiting in self.jobs.unnamed.pop(request_id, {}).values():
            self._drop(waiting.pieces[0])

    def forget_all(self) -> None:
        """Drop all blocks without a name."""
        for request_id in [*self.jobs.unnamed]:
            self.forget(request_id)

    def _forget_preempted(self) -> None:
        """Drop the blocks of requests that are not computed any more: the engine needs the room."""
        unseen = self.jobs.unnamed.keys() - self._seen
        if unseen:
            for request_id in unseen.intersection(self.saves.groups.waiting_requests()):
                self.forget(request_id)
        self._seen.clear()

    def order(self, now: float) -> None:
        """End the step: order saves that earlier steps have put off, the oldest first, as far as the step may."""
        if self.jobs.unnamed:
            self._forget_preempted()
        waiting = self.jobs.put_off
        if not waiting:
            if self.piece_blocks - self._left <= QUIET_BLOCKS:
                evicted = self.saves.memory.index.evict_ahead(self.piece_blocks)
                self.saves.tiers.metrics.add("evicted_blocks", evicted, MEMORY)
            self._left = self.piece_blocks
            return
        while waiting and self._left > 0:
            try:
                self._order_piece(waiting[0], now)
            finally:
                if not waiting[0].pieces:
                    waiting.popleft()
        left = sum(piece.end - piece.start for each in waiting for piece in each.pieces)
        self._left = max(self.piece_blocks, left // CATCH_UP_STEPS)

    def _order_piece(self, waiting: PutOffSave, now: float) -> None:
        """Order the next piece; if it cannot be saved as a whole, drop what is left."""
        piece = waiting.pieces.popleft()
        saved = 0
        end = piece.start
        self._left -= piece.end - piece.start
        try:
            if waiting.trusted and piece.start < waiting.garbage_from:
                rows = min(piece.end, waiting.garbage_from)
                same = self.saves.tags.same_prefix(piece.ids, 0, piece.tag) if piece.ids else rows - piece.start
                piece.sound = min(rows, piece.start + same)
                end, saved = self.saves.save(piece, {}, now)
        finally:
            self._let_go(piece, () if saved and saved == len(piece.ids) else piece.ids)
            self._count_dropped(piece, end)
            while waiting.pieces and end < piece.end:
                self._drop(waiting.pieces.popleft())

    def _let_go(self, piece: Computed, ids: Sequence[int]) -> None:
        """Release blocks attached to a piece's rows, as each save holds its own, and these blocks of rows."""
        assert self.saves.context is not None
        for held in filter(None, (piece.loose_ids, ids[::-1])):
            self.saves.context.free_blocks(held)

    def give_up(self) -> None:
        """Drop all saves that are put off, and release the engine's blocks."""
        self.forget_all()
        while self.jobs.put_off:
            for piece in self.jobs.put_off.popleft().pieces:
                self._drop(piece)

    def _drop(self, piece: Computed) -> None:
        self._count_dropped(piece, piece.start)
        self._let_go(piece, piece.ids)

    def _count_dropped(self, piece: Computed, start: int) -> None:
        """Count the blocks of a piece that are not saved: its rows from `start` on, and what is attached to them."""
        attached = self.saves.groups.attached_to(piece.loose, start, piece.end)
        self.saves.tiers.metrics.add("dropped_blocks", len(piece.ids[start - piece.start :]) + len(attached))

    def check(self) -> None:
        """Verify the saves that are put off; raises PactViolation."""
        if not all(waiting.pieces for waiting in self.jobs.put_off):
            raise PactViolation("a save without blocks is put off")
