"""This engine's memory, as it is offered to the others of its host.

Owns the lock file, and the descriptors that each neighbour gets: all read-only, and each opened for it alone, because a
description that is shared would share its locks, and one that can be written could stop every claim (H130).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvpact.errors import PactViolation
from kvpact.index.block_index import BlockIndex
from kvpact.index.column_file import ColumnFile
from kvpact.index.row_locks import LockFile
from kvpact.memory.arena import Arena, ArenaSegment, SegmentAddress
from kvpact.memory.numa import preferred_node
from kvpact.wire import MeetingOffer, MeetingQuestion, WorkerHandshake


def form_of(segments: Sequence[ArenaSegment | SegmentAddress]) -> list[tuple[int, ...]]:
    """For each segment, bytes of a slot of each class."""
    return [tuple(one.slot_bytes for one in segment.classes) for segment in segments]


class OwnMemory:
    """Memory of one engine. Its ranks have all mapped it, as nobody can once it is lent."""

    def __init__(
        self,
        index: BlockIndex,
        arena: Arena,
        hellos: Sequence[WorkerHandshake],
        namespace: bytes,
        weights: Callable[[Callable[[], bool]], str],
    ) -> None:
        """`hellos` in the ranks' order. `weights` gives their identity, or raises KvpactError or OSError; it may read
        them, which it leaves off once its argument is true."""
        self.weights = weights
        self._index = index
        self._segments = arena.segments
        self._slots = arena.num_slots
        stored = [hello.rank if hello.slots_of is None else hello.slots_of for hello in hellos]
        places = {rank: place for place, rank in enumerate(sorted({*stored}))}
        self.segment_of = [places[rank] for rank in stored]
        """For each rank, the place among the segments of the one with its slots."""
        self.form = form_of(arena.segments)
        """Form of its segments."""
        ranks = zip((self.form[place] for place in self.segment_of), hellos, strict=True)
        self._question = MeetingQuestion(
            "", namespace, tuple((form, hello.slot_classes, hello.slots_of) for form, hello in ranks)
        )
        self.num_bytes = sum(len(segment.memory) for segment in arena.segments)
        """Bytes of its slots, over all ranks."""
        self.node = preferred_node(arena.segments[0].mapped_at)
        """Memory node of its slots, if one was asked for."""
        self._locks: LockFile | None = None

    def question(self, name: str) -> MeetingQuestion:
        """Question to another engine, of this one, whose socket has that name."""
        return replace(self._question, name=name)

    def fits(self, asked: MeetingQuestion) -> bool:
        """True if blocks of the engine that asks are this one's byte by byte, provided that the weights are equal."""
        return asked == self.question(asked.name)

    def offer(self, weights: str, neighbours: int) -> MeetingOffer:
        """Yes to one of so many `neighbours`."""
        addresses = tuple(segment.address() for segment in self._segments)
        return MeetingOffer(weights, addresses, self._slots, self.num_bytes, self.node, neighbours)

    def lend(self) -> None:
        """Seal the memory and let others lease its rows: before the first of them can. Raises OSError."""
        if self._locks is None:
            locks = LockFile()  # first: what is sealed cannot be sealed again
            for segment in self._segments:
                segment.seal()
            self._columns.lend(locks)
            self._locks = locks

    def open_each(self, opened: ExitStack) -> list[int]:
        """Descriptors of a `MeetingOffer` for one neighbour, until `opened` closes them. Raises OSError."""
        if self._locks is None:
            raise PactViolation("memory is offered that was not lent")
        columns = self._columns  # a reset meanwhile closes it only when nothing refers to it
        found = []
        for descriptor in (columns.descriptor, self._locks.descriptor, *(one.descriptor for one in self._segments)):
            found.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
            opened.callback(os.close, found[-1])
        return found

    def reset(self) -> bool:
        """Refuse everything that others have found, and go on in a new table; False if nobody can have found any.

        For the scheduler's thread. Raises OSError, and everything is refused until a later call succeeds.
        """
        if self._locks is None:
            return False
        try:
            self._index.reset_columns()
        except OSError:
            self.refuse()
            raise
        return True

    def refuse(self) -> None:
        """Let no other engine use what it finds here."""
        self._columns.refuse()

    @property
    def _columns(self) -> ColumnFile:
        columns = self._index.columns
        if columns is None:
            raise PactViolation("the index has no columns that others can read")
        return columns
