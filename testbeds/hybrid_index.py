"""kvpact's own index in a replay of a hybrid model's blocks: classes of slots in extents, tails and branch points.

What `PolicyCache` models with one budget of bytes, with the memory that `ClassedSlots` divides among the classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_replay import ROW_TOKENS, Prompt, Shape
from kvpact.identity.groups import GroupKind, GroupSet
from kvpact.identity.keys import KEY_BYTES, BlockKey
from kvpact.index.block_index import ROOT, BlockIndex, Reservation
from kvpact.index.classed_slots import ClassedSlots
from kvpact.ranges import BlockRange


class IndexCache:
    """A `BlockIndex` of one class for each group; a slot holds a row's blocks of the group that a match needs."""

    def __init__(self, shape: Shape, budget: int) -> None:
        extent_bytes = max(shape.row_bytes) * min(range(1, 9), key=lambda most: lost(most, shape) + most / 256)
        places = [extent_bytes // size for size in shape.row_bytes]
        self.space = ClassedSlots(places, budget // extent_bytes)
        self.index = BlockIndex(self.space.num_rows, space=self.space, classes=len(places))
        self._shape = shape
        self._groups = GroupSet(shape.groups)

    def serve(self, prompt: Prompt) -> tuple[int, int, int]:
        """Match the prompt, then save it: rows of the match, bytes loaded, bytes saved."""
        tokens, rows = prompt
        keys = [key_of(0, row) for row in rows]
        most = (tokens - 1) // ROW_TOKENS
        chain = self.index.held_prefix(keys[:most])

        def first_missing(group: int, blocks: BlockRange) -> int | None:
            return next((row for row in blocks if not self.index.is_held(key_of(group, rows[row]))), None)

        match = self._groups.longest_match(chain * ROW_TOKENS, first_missing) // ROW_TOKENS
        loaded = match * self._shape.row_bytes[0]
        for number, blocks in self._needed(match).items():
            loaded += blocks.count * self._shape.row_bytes[number]
            for row in blocks:
                self.index.touch(key_of(number, rows[row]))
        whole = tokens // ROW_TOKENS
        saved = self._save_chain(keys[:whole])
        for row_count in (min(chain, whole), whole):
            for number, blocks in self._needed(row_count).items():
                computed = [rows[row] for row in blocks if row >= match and self._has_state(number, row, match, whole)]
                saved += self._save_sides(number, computed)
        return match, loaded, saved

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks."""
        space = self.space
        rows = (len(space.extents(number)) * places for number, places in enumerate(space.places))
        used = (all_rows - len(free) for all_rows, free in zip(rows, space.free, strict=True))
        return sum(count * size for count, size in zip(used, self._shape.row_bytes, strict=True))

    def check(self) -> None:
        """Raises if the index or its slots are not what their rules say."""
        self.index.check()
        self.space.check()

    def _needed(self, rows: int) -> dict[int, BlockRange]:
        """For each side group the rows whose blocks a match of so many rows needs."""
        groups = self._shape.groups
        return {number: groups[number].needed(rows * ROW_TOKENS) for number in range(1, len(groups))}

    def _has_state(self, number: int, row: int, match: int, whole: int) -> bool:
        """Whether the engine has this block: a state only at the end of a step of 16 rows, and of the prompt."""
        is_state = self._shape.groups[number].kind is GroupKind.STATE
        return not is_state or row + 1 == whole or (row + 1 - match) % 16 == 0

    def _save_chain(self, keys: Sequence[BlockKey]) -> int:
        """Save the rows that are not known, as many as there is room for, and touch the chain."""
        known = self.index.known_prefix(keys)
        parent = keys[known - 1] if known else ROOT
        room = min(len(keys) - known, self.index.reservable(parent, len(keys) - known))
        saved = self._complete(self.index.reserve(keys, known, known + room), room, 0)
        if known + room:
            self.index.touch(keys[known + room - 1])
        return saved

    def _save_sides(self, number: int, rows: Sequence[int]) -> int:
        """Save these rows' blocks of a side group that are not known, where their rows are."""
        new = [row for row in rows if key_of(number, row) not in self.index and key_of(0, row) in self.index]
        if not new:
            return 0
        parents = [key_of(0, row) for row in new]
        room = min(len(new), self.index.reservable(parents[-1], len(new), number))
        names, parents = [key_of(number, row) for row in new][:room], parents[:room]
        return self._complete(self.index.reserve_sides(names, parents, number), room, number)

    def _complete(self, reservation: Reservation | None, count: int, number: int) -> int:
        """The blocks are written; returns their bytes."""
        assert reservation is not None
        self.index.complete(reservation.slots)
        return count * self._shape.row_bytes[number]


def lost(slots: int, shape: Shape) -> float:
    """The largest part of an extent of so many of the largest slots that a class cannot use.

    A slot of a replay holds a row, 32 blocks of 16 tokens: extents of a real arena are finer by as much.
    """
    extent_bytes = slots * max(shape.row_bytes)
    return max(extent_bytes % size for size in shape.row_bytes) / extent_bytes


def key_of(number: int, row: int) -> BlockKey:
    """A block's name: its group, and the number of its row in the trace."""
    return bytes([number]) + row.to_bytes(KEY_BYTES - 1, "big")
