"""Random histories of a tier, compared with a plain model: the set of stored keys.

Owns the steps and the model. Needs hypothesis, which shrinks a failing history to the shortest that fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvpact_testkit.faults import Crash, Fault, Operation
from kvpact_testkit.results import require
from kvpact_testkit.sample_blocks import DOCUMENTS, SEPARATE, Document
from kvpact_testkit.tier.context import Damage
from kvpact_testkit.tier.harness import TierHarness
from kvpact_testkit.tier.monitor import expect, numbers

SUBJECTS = (*DOCUMENTS, SEPARATE)
ALL_KEYS = {key for wanted in SUBJECTS for key in wanted.keys}

SEPARATE_DAMAGE = (Damage.FLIPPED, Damage.GARBAGE, Damage.SHORT)


@st.composite
def some_blocks(draw: st.DrawFn) -> tuple[Document, list[int]]:
    """A document and some of its blocks: one after another of a chain, any in any order of others."""
    wanted = draw(st.sampled_from(SUBJECTS))
    if not wanted.chained:
        return wanted, draw(st.lists(st.integers(0, len(wanted) - 1), min_size=1, max_size=4, unique=True))
    start = draw(st.integers(0, 6))
    return wanted, [*range(start, min(start + draw(st.integers(1, 9)), len(wanted)))]


class TierMachine(RuleBasedStateMachine):
    """One history. `stored` are the keys that must be held if there is room, and the only ones that may be.

    In a tier that keeps chains those of a chain are always a whole prefix.
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

    def of(self, wanted: Document, blocks: Iterable[int] | None = None) -> set[int]:
        """Which of the blocks, by default all, the model has stored."""
        return {
            block for block in (range(len(wanted)) if blocks is None else blocks) if wanted.keys[block] in self.stored
        }

    def take_over(self, may_be_held: set[bytes]) -> None:
        """After an event that may have lost blocks: make the blocks held now the model, if all of them may be held."""
        self.scene.faults.disarm()
        with self.scene.script.paused():
            held = self.tier.held_keys(SUBJECTS)
        unexpected = len(held - may_be_held)
        require(not unexpected, f"{unexpected} blocks are held that were deleted, or never stored")
        self.stored = held
        self.faulty = False

    @rule(some=some_blocks())
    def put(self, some: tuple[Document, list[int]]) -> None:
        wanted, blocks = some
        keys = {wanted.keys[block] for block in blocks}
        before = set(self.stored)
        orphans = wanted.chained and blocks and blocks[0] and wanted.keys[blocks[0] - 1] not in before
        try:
            stored = self.tier.put(wanted, blocks)
        except Crash:
            self.bury(before | keys)
            return
        if orphans and self.tier.keeps_chains:
            expect("put behind blocks that are not held stores", stored, ())
            keys = set()
        elif self.roomy and not self.faulty and not orphans:
            expect("put stores", stored, blocks)
        # A store that others share may have stored what it failed to answer about.
        taken = {wanted.keys[block] for block in stored} if self.tier.tier.exclusive else keys
        if self.faulty or not self.roomy or orphans:  # a tier that keeps no chains may take them, or not
            self.take_over(before | taken)
        else:
            self.stored |= taken

    @rule(some=some_blocks())
    def get(self, some: tuple[Document, list[int]]) -> None:
        arrived = self.tier.get(*some)
        if self.faulty:
            self.take_over(self.stored)
        elif some[1]:
            expect("blocks served", arrived, self.of(*some))

    @precondition(lambda self: self.scene.suite.deletes)
    @rule(wanted=st.sampled_from(SUBJECTS), block=st.integers(0, 6))
    def delete(self, wanted: Document, block: int) -> None:
        block = min(block, len(wanted) - 1)
        needing = self.needing(wanted.keys[block])
        with self.dropping() as before:
            self.stored -= needing if self.tier.keeps_chains else {wanted.keys[block]}
            dropped = self.tier.delete(wanted, block)
            if self.faulty or self.tier.keeps_chains or len(before & needing) <= 1:
                require(self.faulty or dropped == len(before - self.stored), self.said(dropped, before))
            else:  # it may know those that need the block, and drop them too
                self.take_over(self.stored)
                require(
                    before - self.stored <= needing and dropped == len(before - self.stored), self.said(dropped, before)
                )

    def said(self, dropped: int, before: set[bytes]) -> str:
        return f"blocks dropped: {dropped}, not {len(before - self.stored)}"

    def needing(self, key: bytes) -> set[bytes]:
        """The key, and those of all blocks after it in its chains."""
        rows = [wanted.keys[wanted.keys.index(key) :] for wanted in DOCUMENTS if key in wanted.keys]
        return {key}.union(*rows)

    @contextmanager
    def dropping(self) -> Iterator[set[bytes]]:
        """Within, stored blocks are dropped, or the process dies; yields the keys stored before.

        Only what the tier refuses to drop may be held afterwards.
        """
        before = set(self.stored)
        try:
            yield before
        except Crash:
            self.bury(before)
            return
        if self.faulty:
            self.take_over(before if self.tier.refused else self.stored)

    @precondition(lambda self: self.scene.suite.clears)
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

    def damageable(self, wanted: Document) -> list[int]:
        """The stored blocks whose payload can be damaged."""
        slot = self.place.slot_bytes
        return [block for block in sorted(self.of(wanted)) if 2 * self.tier.size(wanted.keys[block]) >= slot]

    @precondition(lambda self: not self.faulty and len(self.stored) > 1 and any(map(self.damageable, SUBJECTS)))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from([*filter(self.damageable, SUBJECTS)]), label="document")
        block = data.draw(st.sampled_from(self.damageable(wanted)), label="block")
        kinds = [how for how in (Damage if wanted.chained else SEPARATE_DAMAGE) if self.may_happen(how)]
        how = data.draw(st.sampled_from(kinds), label="how")
        if self.scene.damage(self.tier, wanted, block, how):
            if how is Damage.HEADER:
                self.tier = self.scene.reopen(self.tier)
            self.tier.get(wanted)
            before = self.of(wanted)
            self.take_over(self.stored)
            lost = before - self.of(wanted) - {block}
            costs = self.tier.keeps_chains and wanted.chained
            require(costs or not lost, f"with block {block} damaged, blocks {numbers(lost)} are gone too")

    def may_happen(self, how: Damage) -> bool:
        """Whether the model knows what must be held then: a tier may detect a header's damage only on a restart."""
        return how is not Damage.HEADER or self.scene.suite.reopens

    @invariant()
    def what_is_held_is_what_was_stored(self) -> None:
        if self.faulty:
            return
        with self.scene.script.paused():
            for wanted in SUBJECTS:
                held = self.tier.lookup(wanted)
                expect(f"lookup of {wanted.name}", held, self.of(wanted))
                if wanted.chained and self.tier.keeps_chains:
                    expect(f"blocks held of {wanted.name}, which need those before them", held, range(len(held)))
            self.tier.check_accounts(*DOCUMENTS)
        slot = self.place.slot_bytes
        nbytes, room = sum(map(self.tier.size, self.stored)), self.capacity_blocks * slot
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
