"""Blocks that are to be saved: rows that a step computed, not named yet, and named runs.

Owns no state, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpact.cache.needs.runs import Run
from kvpact.identity.keys import BlockKeys
from kvpact.identity.tags import Tag


@dataclass(eq=False, slots=True)
class Owed:
    """A named run that is to be saved for a request. `leaving` are blocks that the engine evicts next; they stay so
    after the save. `is_held`: whether the engine's blocks are held already."""

    request_id: str
    run: Run
    leaving: frozenset[int] = frozenset()
    is_held: bool = False

    def part(self, count: int) -> Owed:
        """The first `count` blocks."""
        run = self.run.part(0, count)
        return Owed(self.request_id, run, self.leaving.intersection(run.block_ids))

    @property
    def in_turn(self) -> tuple[Sequence[int], Sequence[int]]:
        """The engine's blocks that stay and those that leave, each with the last one first."""
        turned = self.run.block_ids[::-1]
        leaving = self.leaving
        if not leaving:
            return turned, ()
        return [each for each in turned if each not in leaving], [each for each in turned if each in leaving]


@dataclass(slots=True)
class Computed:
    """Rows [start, end) that the engine has computed for a request, not named yet, with loose blocks attached to them.

    `ids` are the engine's blocks of rows from `first` on, none if rows have no bytes; `loose` has group, block and the
    engine's block of the others. The content of rows from `garbage_from` on is unknown, and all of it if it is not
    `trusted`. `is_held`: whether the engine's blocks are held.
    """

    request_id: str
    names: BlockKeys
    token_ids: Sequence[int]
    """All of the request; `names` makes the keys of them."""
    tag: Tag
    """Tag of the blocks."""
    start: int
    end: int
    first: int
    ids: Sequence[int]
    loose: Sequence[tuple[int, int, int]] = ()
    prompt: int = 0
    """Tokens of the request's prompt."""
    sound: int = 0
    """Rows that are known to have the tag."""
    is_held: bool = False
    hashes: Sequence[bytes | None] = ()
    """The engine's names of the loose blocks as they were; a block with another name by now holds something else."""
    owner: int = 0
    """Tenant to whom the blocks belong in memory; see `Run.owner`."""

    @property
    def loose_ids(self) -> list[int]:
        """The engine's blocks that are attached to rows."""
        return [block_id for _, _, block_id in self.loose]
