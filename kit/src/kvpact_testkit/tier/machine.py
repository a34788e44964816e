"""Random histories of a tier, compared with a plain model: the set of stored keys.

Owns the steps and the model. Needs hypothesis, which shrinks a failing history to the shortest that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvpact_testkit.faults import Crash, Fault, Operation
from kvpact_testkit.results import require
from kvpact_testkit.sample_blocks import DOCUMENTS, LOOSE, Document, size_of
from kvpact_testkit.tier.context import Damage
from kvpact_testkit.tier.harness import TierHarness
from kvpact_testkit.tier.monitor import expect

ALL_KEYS = {key for wanted in (*DOCUMENTS, LOOSE) for key in wanted.keys}

LOOSE_DAMAGE = (Damage.FLIPPED, Damage.GARBAGE, Damage.SHORT)

SOME_LOOSE = st.lists(st.integers(0, len(LOOSE) - 1), min_size=1, max_size=4, unique=True)


class TierMachine(RuleBasedStateMachine):
    """One history. `stored` are the keys that must be held if there is room, and the only ones that may be.

    In an exclusive tier they are always whole prefixes. A shared tier may have holes, and blocks after them.
    """

    scene: ClassVar[TierHarness]
    directory: ClassVar[Path]
    capacity_blocks: ClassVar[int]
    lives: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        type(self).lives += 1
        self.scene.script.clear()
        self.scene.faults.reset()
        self.place = self.scene.other_place(f"{self.directory.name} {self.lives}", self.capacity_blocks)
        self.tier = self.scene.open(self.place)
        self.roomy = self.capacity_blocks >= len(ALL_KEYS)
        self.stored: set[bytes] = set()
        self.faulty = False

    def teardown(self) -> None:
        self.scene.faults.reset()
        self.tier.tier.close()

    def prefix(self, wanted: Document) -> int:
        return next((block for block, key in enumerate(wanted.keys) if key not in self.stored), len(wanted))

    def take_over(self, may_be_held: set[bytes]) -> None:
        """After an event that may have lost blocks: make the blocks held now the model, if all of them may be held."""
        self.scene.faults.disarm()
        with self.scene.script.paused():
            held = self.tier.prefixes(DOCUMENTS) | {LOOSE.keys[block] for block in self.tier.held_loose()}
        if not self.tier.tier.exclusive:  # only scan sees blocks after a hole, which may become reachable again
            held |= {header.key for header in self.tier.tier.scan()}
        unexpected = len(held - may_be_held)
        require(not unexpected, f"{unexpected} blocks are held that were deleted, or never stored")
        self.stored = held
        self.faulty = False

    @rule(wanted=st.sampled_from(DOCUMENTS), start=st.integers(0, 6), count=st.integers(1, 9))
    def put(self, wanted: Document, start: int, count: int) -> None:
        end = min(start + count, len(wanted))
        before = set(self.stored)
        chained = self.prefix(wanted) >= start
        try:
            stored = self.tier.put(wanted, start, end)
        except Crash:
            self.bury(before | set(wanted.keys[start:end]))
            return
        if not chained:
            expect("put behind blocks that are not held stores", stored, 0)
        elif self.roomy and not self.faulty:
            expect("put stores", stored, end - start)
        # A shared store may have stored some of the blocks after the one that it failed to store.
        taken = wanted.keys[start : start + stored if self.tier.tier.exclusive else end]
        if self.faulty or not self.roomy:
            self.take_over(before.union(taken) if chained else before)
        elif chained:
            self.stored.update(taken)

    @rule(wanted=st.sampled_from(DOCUMENTS), start=st.integers(0, 6), count=st.integers(1, 9))
    def get(self, wanted: Document, start: int, count: int) -> None:
        end = min(start + count, len(wanted))
        arrived = self.tier.get(wanted, start, end)
        if self.faulty:
            self.take_over(self.stored)
        else:
            row = next((block for block in range(start, end) if wanted.keys[block] not in self.stored), max(start, end))
            expect("blocks served", arrived, row - start)

    @rule(blocks=SOME_LOOSE)
    def put_each(self, blocks: list[int]) -> None:
        wanted = {LOOSE.keys[block] for block in blocks}
        before = set(self.stored)
        try:
            stored = self.tier.put_each(blocks)
        except Crash:
            self.bury(before | wanted)
            return
        if self.faulty or not self.roomy:
            self.take_over(before | wanted)
        else:
            expect("loose blocks stored", stored.count(True), len(blocks))
            self.stored |= wanted

    @rule(blocks=SOME_LOOSE)
    def get_each(self, blocks: list[int]) -> None:
        arrived = self.tier.get_each(blocks)
        if self.faulty:
            self.take_over(self.stored)
        else:
            right = [LOOSE.keys[block] in self.stored for block in blocks]
            require(arrived == right, f"of loose blocks {blocks} arrive {arrived}, not {right}")

    @rule(block=st.integers(0, len(LOOSE) - 1))
    def delete_loose(self, block: int) -> None:
        with self.dropping() as before:
            self.stored.discard(LOOSE.keys[block])
            dropped = self.tier.delete(LOOSE, block)
            if not self.faulty:
                expect("loose blocks dropped", dropped, len(before - self.stored))

    @rule(wanted=st.sampled_from(DOCUMENTS), block=st.integers(0, 6))
    def delete(self, wanted: Document, block: int) -> None:
        block = min(block, len(wanted) - 1)
        with self.dropping() as before:
            self.forget(wanted.keys[block])
            dropped = self.tier.delete(wanted, block)
            if not self.faulty:
                expect("blocks dropped", dropped, len(before - self.stored))

    @contextmanager
    def dropping(self) -> Iterator[set[bytes]]:
        """Within, stored blocks are dropped, or the process dies; yields the keys stored before.

        An exclusive tier drops them at once, whatever its store does; a shared store that fails keeps its blocks.
        """
        before = set(self.stored)
        try:
            yield before
        except Crash:
            self.bury(before)
            return
        if self.faulty and not self.tier.tier.exclusive:
            self.take_over(before)

    def forget(self, key: bytes) -> None:
        if not self.tier.tier.exclusive:
            self.stored.discard(key)
            return
        for wanted in DOCUMENTS:
            if key in wanted.keys:
                self.stored -= set(wanted.keys[wanted.keys.index(key) :])

    @rule()
    def clear(self) -> None:
        with self.dropping():
            self.stored.clear()
            self.tier.clear()

    @precondition(lambda self: self.scene.suite.reopens)
    @rule()
    def reopen(self) -> None:
        self.scene.faults.disarm()
        self.faulty = False
        self.tier = self.scene.reopen(self.tier)

    @precondition(lambda self: self.scene.suite.shows_store_calls and not self.faulty)
    @rule(
        operation=st.sampled_from([Operation.READ, Operation.WRITE]),
        after=st.integers(0, 12),
        times=st.sampled_from([1, 1000]),
    )
    def let_the_store_fail(self, operation: Operation, after: int, times: int) -> None:
        self.tier.say(f"{operation} {after} of the store will fail{' and all after it' if times > 1 else ''}")
        self.scene.faults.arm(operation, Fault.ERROR, after=after, times=times)
        self.faulty = True

    @precondition(lambda self: self.scene.suite.shows_store_calls and self.scene.suite.reopens and not self.faulty)
    @rule(after=st.integers(0, 12))
    def let_the_process_die(self, after: int) -> None:
        self.tier.say(f"the process will die at write {after} of the store")
        self.scene.faults.arm(Operation.WRITE, Fault.CRASH, after=after)
        self.faulty = True

    def bury(self, may_be_held: set[bytes]) -> None:
        self.tier = self.scene.bury(self.tier)
        self.take_over(may_be_held)

    @precondition(lambda self: not self.faulty and len(self.stored) > 1 and any(map(self.prefix, DOCUMENTS)))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from([wanted for wanted in DOCUMENTS if self.prefix(wanted)]), label="document")
        block = data.draw(st.integers(0, self.prefix(wanted) - 1), label="block")
        kinds = [how for how in Damage if self.may_happen(how)]
        how = data.draw(st.sampled_from(kinds), label="how")
        if self.scene.damage(self.tier, wanted, block, how):
            if how is Damage.HEADER:
                self.tier = self.scene.reopen(self.tier)
            self.tier.get(wanted)
            self.take_over(self.stored)

    def _loose_with_payload(self) -> list[int]:
        """The stored loose blocks whose payload can be damaged."""
        slot = self.place.slot_bytes
        return [block for block, key in enumerate(LOOSE.keys) if key in self.stored and 2 * size_of(key, slot) >= slot]

    @precondition(lambda self: not self.faulty and len(self.stored) > 1 and self._loose_with_payload())
    @rule(data=st.data())
    def damage_loose(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self._loose_with_payload()), label="loose block")
        if self.scene.damage(self.tier, LOOSE, block, data.draw(st.sampled_from(LOOSE_DAMAGE), label="how")):
            self.tier.get_each([block])
            self.take_over(self.stored)

    def may_happen(self, how: Damage) -> bool:
        """Whether the model knows what must be held then: a tier may detect a header's damage only on a restart."""
        return how is not Damage.HEADER or self.scene.suite.reopens

    @invariant()
    def what_is_held_is_what_was_stored(self) -> None:
        if self.faulty:
            return
        for wanted in DOCUMENTS:
            expect(f"lookup of {wanted.name}", self.tier.tier.lookup(wanted.keys), self.prefix(wanted))
        for block, held in enumerate(self.tier.tier.lookup_each(LOOSE.keys)):
            right = LOOSE.keys[block] in self.stored
            require(held == right, f"lookup_each says {held} of loose block {block}, which is {right}")
        self.tier.check_accounts(*DOCUMENTS)
        slot = self.place.slot_bytes
        nbytes, room = sum(size_of(key, slot) for key in self.stored), self.capacity_blocks * slot
        require(nbytes <= room, f"{len(self.stored)} blocks of {nbytes} bytes in all are held, with room for {room}")


def run_histories(scene: TierHarness, directory: Path, capacity_blocks: int, examples: int, steps: int) -> None:
    """Run `examples` histories of at most `steps` steps; `scene.script` is then the shortest failing one.

    Raises what that history raised.
    """
    members = {"scene": scene, "directory": directory, "capacity_blocks": capacity_blocks, "lives": 0}
    run_state_machine_as_test(
        type("Histories", (TierMachine,), members),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
