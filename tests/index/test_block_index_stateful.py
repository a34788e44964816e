"""The index against a slow model that keeps objects and searches them all, in random order of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

import hypothesis.strategies as st
from hypothesis import HealthCheck, event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stored_blocks import StoredBlock, restore

from kvpact.index.block_index import ROOT, BlockIndex, Pin, SlotState
from kvpact.index.column_file import ColumnFile
from kvpact.index.slot_space import PlainSlots

NUM_SLOTS = 7
paths = st.text("abc", min_size=1, max_size=5)
"""A block is named by its path: `ab` is the block that follows `a`."""
SIDES = "XY"
"""`abX` is a side block that hangs on `ab`."""


path_of = {ROOT: ""}
"""Key -> the path of its block."""


def key_of(path: str) -> bytes:
    key = sha256(path.encode()).digest() if path else ROOT
    path_of[key] = path
    return key


def parent_of(key: bytes) -> bytes:
    return key_of(path_of[key][:-1])


def chain(path: str) -> list[bytes]:
    return [key_of(path[: length + 1]) for length in range(len(path))]


@dataclass(eq=False)
class Block:
    """One block as the model sees it; stays an object of its own after it was dropped."""

    key: bytes
    parent: Block | None
    slot: int
    last_use: int
    filled: bool = False
    dropped: bool = False
    parts: bool = False
    writing: bool = True
    pins: list[Pin] = field(default_factory=list)

    @property
    def is_side(self) -> bool:
        return path_of[self.key][-1] in SIDES

    def lineage(self) -> list[Block]:
        return [self, *(self.parent.lineage() if self.parent else [])]

    @property
    def held(self) -> bool:
        return all(block.filled for block in self.lineage())

    @property
    def needed_by_itself(self) -> bool:
        return self.writing or bool(self.pins) or (not self.dropped and not self.held)


class Model:
    """Every rule of the index in its plainest form: O(n) or worse, nothing kept twice."""

    def __init__(self, num_slots: int, bare_ends_first: bool) -> None:
        self.blocks: list[Block] = []
        self.uses = 0
        self.usable = num_slots - 3
        self.parked: list[int] = []
        self.bare_ends_first = bare_ends_first

    def known(self) -> dict[bytes, Block]:
        return {block.key: block for block in self.blocks if not block.dropped}

    def needed(self) -> set[Block]:
        return {needed for block in self.blocks if block.needed_by_itself for needed in block.lineage()}

    def free(self) -> int:
        return self.usable - len(self.parked) - sum(block.slot < self.usable for block in self.blocks)

    def evictable(self, parent: bytes) -> set[Block]:
        protected = set(self.known()[parent].lineage()) if parent else set()
        return set(self.blocks) - self.needed() - protected

    def use(self, block: Block) -> None:
        self.uses += 1
        for used in [block] if block.is_side else block.lineage():
            used.last_use = self.uses

    def remove(self, block: Block) -> None:
        """A row learns of the uses of its side rows when they go."""
        self.blocks.remove(block)
        if block.is_side and not block.dropped:
            self.pass_on_use(block)

    def pass_on_use(self, block: Block) -> None:
        for used in block.lineage():
            used.last_use = max(used.last_use, block.last_use)

    def next_to(self, block: Block, *, sides: bool) -> list[Block]:
        return [one for one in self.blocks if one.parent is block and one.is_side == sides and not one.dropped]

    def outdate(self, block: Block) -> None:
        """Side blocks of a row after which the chain goes on one way, unless a match has ended there since it does."""
        if len(self.next_to(block, sides=False)) == 1:
            for side in self.next_to(block, sides=True):
                if not side.parts:
                    self.pass_on_use(side)
                    side.last_use = 0

    def lost_sides(self, row: Block | None) -> None:
        """Of a chain's end to which nothing is attached any more all goes first, up to the last row with something."""
        end = row if self.bare_ends_first else None
        while end is not None:
            after = self.next_to(end, sides=False)
            if self.next_to(end, sides=True) or len(after) > 1:
                return
            if not after:
                break
            end = after[0]
        while end is not None and not self.next_to(end, sides=True) and len(self.next_to(end, sides=False)) < 2:
            end.last_use = 0
            end = end.parent

    def collect(self) -> None:
        needed = self.needed()
        self.blocks = [block for block in self.blocks if not block.dropped or block in needed]

    def evict_for(self, count: int, parent: bytes) -> list[bytes] | None:
        if self.free() + len(self.evictable(parent)) < count:
            return None
        evicted = []
        while self.free() < count:
            inner = {other.parent for other in self.blocks if not other.is_side}
            leaves = [block for block in self.evictable(parent) if block not in inner]
            victim = min(leaves, key=lambda block: (block.last_use, block.slot))
            going = [*(side for side in self.blocks if side.is_side and side.parent is victim), victim]
            for block in going:
                self.remove(block)
                evicted.append(block.key)
            if any(block.is_side for block in going):
                self.lost_sides(victim.parent)
        return evicted

    def drop(self, key: bytes) -> set[bytes]:
        gone = {block for block in self.blocks if not block.dropped and path_of[block.key].startswith(path_of[key])}
        for block in sorted(gone, key=lambda block: -len(path_of[block.key])):
            for used in block.lineage():
                used.last_use = max(used.last_use, block.last_use)
            block.dropped = True
        if any(block.is_side for block in gone):
            for parent in {block.parent for block in gone} - gone:
                self.lost_sides(parent)
        self.collect()
        return {block.key for block in gone}


class IndexMachine(RuleBasedStateMachine):
    num_slots = NUM_SLOTS
    blocks_a_letter = 1

    @initialize(bare_ends_first=st.booleans())
    def start(self, bare_ends_first: bool) -> None:
        self.model = Model(self.num_slots, bare_ends_first)
        self.index = self.new_index()

    def new_index(self) -> BlockIndex:
        space = PlainSlots(self.num_slots, self.model.usable)
        bare_ends_first = self.model.bare_ends_first
        return BlockIndex(self.num_slots, space=space, bare_ends_first=bare_ends_first, columns=ColumnFile(space))

    @rule()
    def reset_columns(self) -> None:
        self.index.reset_columns()

    def writers(self) -> list[Block]:
        return [block for block in self.model.blocks if block.writing]

    @rule(count=st.integers(0, NUM_SLOTS + 1))
    def use_slots(self, count: int) -> None:
        count *= self.num_slots // NUM_SLOTS
        self.index.use_slots(count)
        self.model.usable = max(self.model.usable, min(count, self.num_slots))

    @rule(count=st.integers(1, NUM_SLOTS))
    def park(self, count: int) -> None:
        space = self.index.space
        assert isinstance(space, PlainSlots)
        count = min(count * self.num_slots // NUM_SLOTS, self.model.free())
        rows = [*space.park(count)]
        assert (len(rows), rows) == (count, sorted(rows))
        self.model.parked += rows
        assert [*space.parked] == self.model.parked

    @precondition(lambda self: self.model.parked)
    @rule(count=st.integers(1, NUM_SLOTS))
    def unpark(self, count: int) -> None:
        space = self.index.space
        assert isinstance(space, PlainSlots)
        count = min(count * self.num_slots // NUM_SLOTS, len(self.model.parked))
        space.unpark(count)
        del self.model.parked[-count:]

    @precondition(lambda self: not self.model.parked)
    @rule(count=st.integers(1, NUM_SLOTS))
    def withdraw_slots(self, count: int) -> None:
        slots = {key: block.slot for key, block in self.model.known().items()}
        count *= self.num_slots // NUM_SLOTS
        self.model.usable = min(self.model.usable, count)
        beyond = sorted(key for key, slot in slots.items() if slot >= self.model.usable)
        removed = self.index.withdraw_slots(count)
        assert sorted(removed) == sorted((key, slots[key]) for first in beyond for key in self.model.drop(first))

    @rule(path=paths)
    def save(self, path: str) -> None:
        self.reserve(path)
        if self.writers():
            self.complete_all()

    @rule(path=paths)
    def reserve(self, path: str) -> None:
        keys = chain("".join(letter * self.blocks_a_letter for letter in path))
        start, end = self.index.known_prefix(keys), len(keys)
        parent = keys[start - 1] if start else ROOT
        expected = self.model.evict_for(end - start, parent)
        reservation = self.index.reserve(keys, start, end)
        if expected is None:
            assert reservation is None
            event("no room")
            return
        assert reservation is not None
        event(f"evicted {len(expected)}")
        assert reservation.evicted == len(expected)
        assert len(reservation.slots) == end - start
        for key, slot in zip(keys[start:end], reservation.slots, strict=True):
            assert slot not in {block.slot for block in self.model.blocks}
            assert slot not in self.model.parked
            assert slot < self.model.usable
            block = Block(key, self.model.known().get(parent_of(key)), slot, 0)
            self.model.blocks.append(block)
            self.model.use(block)

    @precondition(lambda self: self.model.known())
    @rule(path=paths)
    def reserve_sides(self, path: str) -> None:
        """Of all known blocks of a chain, one side block of each kind that is not there yet."""
        known = self.model.known()
        parents = [key for key in chain(path) if key in known]
        wanted = [
            key_of(path_of[key] + side) for key in parents for side in SIDES if key_of(path_of[key] + side) not in known
        ][:3]
        if wanted:
            self.add_sides(wanted)

    def add_sides(self, wanted: list[bytes]) -> None:
        deepest = parent_of(wanted[-1])
        expected = self.model.evict_for(len(wanted), deepest)
        reservation = self.index.reserve_sides(wanted, [parent_of(key) for key in wanted])
        if expected is None:
            assert reservation is None
            return
        assert reservation is not None
        event(f"side blocks, evicted {len(expected)}")
        assert reservation.evicted == len(expected)
        for key, slot in zip(wanted, reservation.slots, strict=True):
            block = Block(key, self.model.known()[parent_of(key)], slot, 0)
            self.model.blocks.append(block)
            self.model.use(block)

    @rule(path=st.text("ab", min_size=2, max_size=3), other=st.text("ab", min_size=1, max_size=2), lost=st.booleans())
    def conversation(self, path: str, other: str, lost: bool) -> None:
        """Turns of a request with states, whose last side block replaces the earlier one; then new blocks, one by one.

        So each of these shows which block goes next; if the last side block is `lost`, the rows before it do.
        """
        for turn in (path[:-1], path):
            self.save(turn)
            side = key_of(turn + SIDES[0])
            if key_of(turn) in self.model.known() and side not in self.model.known():
                self.add_sides([side])
                self.complete(self.writers())
        self.outdate_before(self.model.known().get(key_of(path)), len(path))
        if lost:
            self.drop(path + SIDES[0])
        for letters in (other, "c", "ca", "cb"):
            if key_of(letters) not in self.model.known():
                self.save(letters)

    @precondition(lambda self: self.writers())
    @rule()
    def complete_all(self) -> None:
        self.complete(self.writers())

    @precondition(lambda self: self.writers())
    @rule(data=st.data())
    def complete_some(self, data: st.DataObject) -> None:
        self.complete(data.draw(st.lists(st.sampled_from(self.writers()), min_size=1, unique=True)))

    def complete(self, done: list[Block]) -> None:
        before = {block.key for block in self.model.known().values() if block.held}
        became_held = self.index.complete([block.slot for block in done])
        for block in done:
            block.writing = False
            block.filled = not block.dropped
        self.model.collect()
        assert set(became_held) == {block.key for block in self.model.known().values() if block.held} - before
        assert len(became_held) == len(set(became_held))
        for position, key in enumerate(became_held):
            assert parent_of(key) in before | set(became_held[:position]) | {ROOT}

    @precondition(lambda self: self.writers())
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        failed = data.draw(st.lists(st.sampled_from(self.writers()), min_size=1, unique=True))
        slots = {key: block.slot for key, block in self.model.known().items()}
        expected: set[bytes] = set()
        for block in failed:
            if not block.dropped:
                expected |= self.model.drop(block.key)
            block.writing = False
        self.model.collect()
        removed = self.index.abandon([block.slot for block in failed])
        assert len(removed) == len(expected)
        assert set(removed) == {(key, slots[key]) for key in expected}

    @precondition(lambda self: self.model.known())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.model.known().values(), key=lambda block: block.key)))
        block.pins.append(self.index.pin(block.key))

    @precondition(lambda self: self.index.pinned_count)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for block in self.model.blocks if block.pins]))
        self.index.unpin(block.pins.pop())
        self.model.collect()

    @precondition(lambda self: self.model.known())
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.model.known().values(), key=lambda block: block.key)))
        self.index.touch(block.key)
        self.model.use(block)

    @precondition(lambda self: self.model.known())
    @rule(data=st.data())
    def pin_each(self, data: st.DataObject) -> None:
        """As a match uses side blocks: those after which the chain went on already are no longer outdated."""
        known = sorted(self.model.known().values(), key=lambda block: block.key)
        blocks = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        for block, pin in zip(blocks, self.index.pin_each([block.key for block in blocks]), strict=True):
            block.pins.append(pin)
            self.model.use(block)
            assert block.parent is not None or not block.is_side
            block.parts |= block.is_side and bool(self.model.next_to(block.lineage()[1], sides=False))

    @precondition(lambda self: any(block.is_side for block in self.model.blocks))
    @rule(data=st.data(), count=st.integers(1, NUM_SLOTS))
    def outdate(self, data: st.DataObject, count: int) -> None:
        known = sorted(self.model.known().values(), key=lambda block: block.key)
        blocks: list[Block | None] = [block for block in known if not block.is_side]
        self.outdate_before(data.draw(st.sampled_from(blocks or [None])), count)

    def outdate_before(self, block: Block | None, count: int) -> None:
        rows = block.lineage()[1 : 1 + count] if block is not None else []
        self.index.outdate(block.key if block is not None else key_of("c"), len(rows))
        for row in rows:
            self.model.outdate(row)
        event(f"outdated {sum(side.last_use == 0 for side in self.model.blocks if side.is_side)}")

    @rule(path=st.one_of(st.just(""), paths, paths, paths, paths, paths))
    def drop(self, path: str) -> None:
        """Dropping the root is `clear`."""
        slots = {key: block.slot for key, block in self.model.known().items()}
        removed = self.index.drop(key_of(path)) if path else self.index.clear()
        assert sorted(removed) == sorted((key, slots[key]) for key in self.model.drop(key_of(path)))
        order = [key for key, _ in removed]
        assert all(parent_of(key) not in order[:position] for position, key in enumerate(order)), "parents go last"

    @rule()
    def restart(self) -> None:
        """What a slab does: only held blocks are in its table, and neither pins nor writers survive."""
        for side in self.model.known().values():
            if side.is_side:
                for block in side.lineage():
                    block.last_use = max(block.last_use, side.last_use)
        held = [block for block in self.model.known().values() if block.held and not block.is_side]
        table = [StoredBlock(block.key, parent_of(block.key), block.slot, block.last_use) for block in held]
        self.model.parked.clear()
        self.index = self.new_index()
        assert restore(self.index, table) == set()
        self.model.blocks = held
        ranked = sorted(held, key=lambda block: (block.last_use, -block.slot))
        for rank, block in enumerate(ranked, 1):
            block.pins, block.writing, block.last_use = [], False, rank

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.index.check()
        known = self.model.known()
        assert len(self.index) == len(known)
        assert self.index.held_count == sum(block.held for block in known.values())
        assert self.index.pinned_count == sum(len(block.pins) for block in self.model.blocks)
        assert self.index.free_slots == self.model.free()
        waiting = [block for block in self.model.blocks if block.dropped and block.slot < self.model.usable]
        assert self.index.waiting_slots == len(waiting)
        for key, block in known.items():
            assert self.index.slot(key) == block.slot
            assert self.index.key_at(block.slot) == key
            chain_slots = [each.slot for each in block.lineage()][::-1]
            for count in {1, len(chain_slots)} if not block.is_side else ():
                assert [*self.index.slots_to(block.slot, count)] == chain_slots[-count:]
            expected = SlotState.HELD if block.held else SlotState.SAVED if block.filled else SlotState.RESERVED
            assert self.index.state(block.slot) == expected
        for block in self.model.blocks:
            if block.dropped:
                assert self.index.key_at(block.slot) is None
                assert self.index.state(block.slot) == (SlotState.CANCELLED if block.writing else SlotState.DOOMED)
        for parent in [ROOT, *known]:
            assert self.index.reservable(parent) == self.model.free() + len(self.model.evictable(parent))
        for key, block in known.items():
            assert self.index.is_side(block.slot) == block.is_side
            assert self.index.is_held(key) == block.held
        for path in {path_of[key] + "a" for key in [*(key for key in known if not known[key].is_side), ROOT]}:
            keys = chain(path)
            assert self.index.held_prefix(keys) == sum(key in known and known[key].held for key in keys)
            assert self.index.known_prefix(keys) == sum(key in known for key in keys)


class LongChains(IndexMachine):
    """Chains of tens of blocks, which go in runs of neighbouring slots, whole or in part."""

    num_slots = 10 * NUM_SLOTS
    blocks_a_letter = 9


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestLongChains = LongChains.TestCase
TestLongChains.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
