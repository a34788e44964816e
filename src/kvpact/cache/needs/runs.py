"""Runs of blocks, linked or loose: how a place answers for one, what keeps it, and what reports about it mean.

Owns no state, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import NamedTuple, Protocol

from kvpact.identity.keys import BlockKey
from kvpact.ranges import BlockRange, RangeSet

NO_BLOCK: BlockKey = b""
"""The parent of a chain's first block."""

NAMES = -1
"""The group of a chain that is no group's: its rows have keys and no bytes."""


class Keys(Protocol):
    """A set of keys."""

    def __contains__(self, key: BlockKey) -> bool: ...


class Holder(Hashable, Protocol):
    """Another engine of this host, in whose slots blocks are."""

    @property
    def name(self) -> str:
        """Name of the engine, for people."""

    @property
    def number(self) -> int:
        """Number of the engine, as this one's ranks know it."""

    @property
    def is_refused(self) -> bool:
        """True once nobody may use its blocks any more."""

    def refute(self, keys: Sequence[BlockKey]) -> None:
        """Ask for these blocks no more there: they failed to load."""


class Has(NamedTuple):
    """Answers of one place: `count` of a chain, by the number of its first blocks; `each` of a loose block, by key."""

    count: Callable[[Sequence[BlockKey]], int]
    each: Callable[[BlockKey], bool]


class Supply(NamedTuple):
    """Supply of one place: a chain's rows up to `end`, and `each` loose block of which it says so."""

    end: int
    each: Callable[[BlockKey], bool]


NOTHING = Has(lambda keys: 0, lambda key: False)
"""Answers of a place that has nothing, or cannot be asked."""


@dataclass(eq=False, slots=True)
class Run:
    """Blocks in a row of one KV cache group, from the group's block `start` on.

    `chain` begins with the chain's first row and may go on after the run; `rows` has for each block its place there:
    its own, if the run is linked, or that of the row to which it is attached. `slots` are memory's blocks and
    `block_ids` the engine's, once they are known.
    """

    group: int
    start: int
    keys: Sequence[BlockKey]
    chain: Sequence[BlockKey]
    rows: Sequence[int]
    slot_class: int = 0
    is_linked: bool = True
    slots: Sequence[int] = ()
    block_ids: Sequence[int] = ()
    request_id: str = ""
    """Request whose blocks these are; "" if that is not known."""
    replaces: int = 0
    """Number of rows before the last of `rows` to which loose blocks are attached that a request which goes on after
    the run needs no longer."""
    holder: Holder | None = None
    """Engine in whose memory `slots` are; None: in this one's."""
    owner: int = 0
    """Tenant to whom the blocks belong in memory, as `Tenants` numbers them; 0 for others."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def needed(self) -> BlockKey:
        """The row that must be known before the run is stored, with all before it; `NO_BLOCK` if none must be."""
        if self.is_linked:
            return self.chain[self.start - 1] if self.start else NO_BLOCK
        return self.chain[self.rows[-1]]

    @property
    def parents(self) -> Sequence[BlockKey]:
        """For each block the row before it, or to which it is attached."""
        if self.is_linked:
            return [self.needed, *self.keys[:-1]]
        return [self.chain[row] for row in self.rows]

    @property
    def names(self) -> Sequence[BlockKey]:
        """Keys in a question to a place: a linked run's chain up to its end, or the blocks' own."""
        return self.chain[: self.start + len(self.keys)] if self.is_linked else self.keys

    @property
    def kept_by(self) -> Sequence[BlockKey]:
        """The keys whose pins keep the run."""
        end = self.start + len(self.keys)
        return self.chain[max(0, end - 1) : end] if self.is_linked else self.keys

    def part(self, first: int, last: int) -> Run:
        """The blocks [first, last) of the run, counted from its start."""
        return Run(
            self.group,
            self.start + first,
            self.keys[first:last],
            self.chain,
            self.rows[first:last],
            self.slot_class,
            self.is_linked,
            self.slots[first:last],
            self.block_ids[first:last],
            self.request_id,
            self.replaces,
            self.holder,
            self.owner,
        )

    @property
    def before(self) -> Sequence[BlockKey] | None:
        """The chain before a linked run; None if its blocks stand for themselves."""
        return self.chain[: self.start] if self.is_linked else None

    # Places

    def held(self, has: Has) -> Run:
        """The part that a place has: of a linked run its chain from the first block on, but what is new of it."""
        if not self.is_linked:
            return loose([*filter(has.each, self.keys)])
        names = self.names
        count = has.count(names)
        return self if count == len(names) else linked(names[:count], min(self.start, count), self.request_id)

    def first_held(self, has: Has) -> int:
        """Number of its first blocks that a place has."""
        if self.is_linked:
            return max(0, has.count(self.names) - self.start)
        return next((at for at, key in enumerate(self.keys) if not has.each(key)), len(self.keys))

    def lacked(self, has: Has) -> Run:
        """The part that a place lacks: of a linked run all from the first block on that it has not."""
        if not self.is_linked:
            return loose([key for key in self.keys if not has.each(key)])
        names = self.names
        return linked(names, has.count(names), self.request_id)

    def unknown(self, count: int, is_known: Callable[[BlockKey], bool]) -> Run:
        """The part that memory does not know: it knows `count` rows of the chain, and says it of each loose block."""
        if self.is_linked:
            return self.part(min(max(0, count - self.start), len(self.keys)), len(self.keys))
        return self._picked([at for at, key in enumerate(self.keys) if not is_known(key)])

    def _picked(self, places: Sequence[int]) -> Run:
        """Return these of the loose blocks, without a common start."""
        keys = [self.keys[at] for at in places]
        rows = [self.rows[at] for at in places]
        return Run(self.group, self.start, keys, self.chain, rows, self.slot_class, is_linked=False)

    def split(self, places: Sequence[Supply]) -> Iterator[tuple[int, Run]]:
        """Parts of the run, each with the number of the place that supplies it: for each block the first that can.

        A linked run ends at the first block that none can supply; a place may come twice.
        """
        if not self.is_linked:
            rest: Sequence[int] = range(len(self.keys))
            for at, place in enumerate(places):
                there = {one for one in rest if place.each(self.keys[one])}
                if there:
                    yield at, self._picked(sorted(there))
                    rest = [one for one in rest if one not in there]
            return
        row = self.start
        end = self.start + len(self.keys)
        while row < end:
            number = next((number for number, place in enumerate(places) if place.end > row), None)
            if number is None:
                return
            stop = min(places[number].end, end)
            yield number, self.part(row - self.start, stop - self.start)
            row = stop

    def share(self, of_rows: Callable[[int], int], room: int) -> int:
        """Slots of the `room` that a read may take: of a chain's rows what `of_rows` leaves them."""
        return of_rows(room) if self.is_linked else room

    def unknown_parts(self, is_known: Callable[[BlockKey], bool]) -> tuple[list[Run], Sequence[BlockKey]]:
        """The pieces that memory does not know, and the keys of the loose blocks that it knows."""
        if self.is_linked:
            return [self], ()
        known = [is_known(key) for key in self.keys]
        there = runs_of([at for at, is_one in enumerate(known) if not is_one])
        return [self.part(first, last) for first, last in there], [*compress(self.keys, known)]

    def stored(self, count: int) -> Run:
        """The part that memory may have, if so many blocks were saved: of a linked run the first ones."""
        return self.part(0, count) if self.is_linked else self

    def fits(self, room: int, most: int) -> int:
        """The blocks that one read brings into so much room: `most` of a chain, and loose ones all or none."""
        return min(room, most) if self.is_linked else len(self.keys) if room >= len(self.keys) else 0

    def lost_any(self, key_at: Callable[[int], BlockKey | None]) -> bool:
        """True if their place has dropped blocks since it gave them `slots`. A chain that loses any loses its last
        one."""
        if self.holder is not None:
            return self.holder.is_refused
        return any(key_at(slot) is None for slot in (self.slots[-1:] if self.is_linked else self.slots))

    # Reports

    def lost(self, failed: RangeSet, match: BlockRange) -> RangeSet:
        """The blocks of `match` that the engine computes, if these blocks of the run failed to load."""
        return failed if self.is_linked or not failed.ranges else RangeSet.of(match)

    def spoilt(self, lost_from: int) -> Sequence[int]:
        """The engine's blocks of the run that hold garbage, if the match is lost from this row on."""
        return self.block_ids[max(0, lost_from - self.start) :] if self.is_linked else self.block_ids

    def failure(self, failed: RangeSet, match: BlockRange) -> Failure | None:
        """The consequences of blocks that failed to load; None if none did."""
        hull = failed.hull()
        if hull is None:
            return None
        if self.is_linked:
            lost = self.keys[hull.start - self.start :]
            return Failure(lost, lost[:1], hull.start)
        keys = [key for block, key in enumerate(self.keys, self.start) if block in failed]
        return Failure(keys, keys, match.start)

    def good(self, done: RangeSet, garbage_from: int) -> list[bool]:
        """The saved blocks that hold what their keys say, if ranks have copied those `done`, and the content of the
        chain's rows from `garbage_from` on is unknown."""
        if self.is_linked:
            count = max(0, min(done.prefix_from(self.start), garbage_from - self.start))
            return [True] * count + [False] * (len(self.keys) - count)
        copied = set(done.blocks())
        return [block in copied and row < garbage_from for block, row in enumerate(self.rows, self.start)]

    def places(self) -> Iterable[tuple[int, Sequence[int]]]:
        """The engine's blocks, in pieces of which each begins at a row of the chain."""
        if self.is_linked:
            return ((self.start, self.block_ids),)
        return [(row, (block_id,)) for row, block_id in zip(self.rows, self.block_ids, strict=True)]


class Failure(NamedTuple):
    """Consequences of a failed load: the `keys` that no place may serve, of which `tops` have all others after them,
    and the row from which on the engine's blocks hold what was computed from garbage."""

    keys: Sequence[BlockKey]
    tops: Sequence[BlockKey]
    row: int


def linked(chain: Sequence[BlockKey], start: int = 0, request_id: str = "") -> Run:
    """The whole of a chain from block `start` on, as far as its keys go."""
    keys = chain[start:] if start else chain
    return Run(0, start, keys, chain, range(start, len(chain)), request_id=request_id)


def loose(keys: Sequence[BlockKey]) -> Run:
    """Blocks that memory has, each for itself, whatever they are attached to."""
    return Run(NAMES, 0, keys, (), (), is_linked=False)


def either(*places: Has) -> Has:
    """One of these places at least."""
    each = [place.each for place in places]
    return Has(lambda keys: max(place.count(keys) for place in places), lambda key: any(has(key) for has in each))


def known_by(answers: Callable[[BlockKey], bool | None], otherwise: bool = False) -> Callable[[BlockKey], bool]:
    """Answers about loose blocks; `otherwise` counts for a block of which nothing is known."""
    return lambda key: otherwise if (known := answers(key)) is None else known


def excepting(answers: Callable[[BlockKey], bool], others: Keys) -> Callable[[BlockKey], bool]:
    """Answers about loose blocks but these `others`."""
    return lambda key: key not in others and answers(key)


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of ascending numbers, half-open."""
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        ascending = [number for _, number in run]
        runs.append((ascending[0], ascending[-1] + 1))
    return runs
