"""Checks over threads, processes and lives: many users at once, restarts, crashes, and long random histories.

Part of `TierConformance`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random

from kvpact_testkit.background import Background
from kvpact_testkit.faults import Crash, Fault, Faults, Operation
from kvpact_testkit.results import NotObservable, observable_if, require
from kvpact_testkit.sample_blocks import BRANCH, DOCUMENT, DOCUMENTS, SEPARATE, Document, document
from kvpact_testkit.suite import Suite, protects
from kvpact_testkit.tier.context import StoreContext, TierOptions
from kvpact_testkit.tier.harness import TierHarness
from kvpact_testkit.tier.monitor import MonitoredTier, expect, store
from kvpact_testkit.trace import Trace

CRASH_POINTS = 60
"""Writes of one life at each of which the process dies in turn."""

ALL = range(len(DOCUMENT))
STEPS = 40
WRITERS_SECONDS = 60.0
"""Seconds that `STEPS` steps may take in concurrent threads or processes."""


class LifeChecks(TierOptions, Suite[TierHarness]):
    """Properties that hold over threads, processes and restarts."""

    machine_examples = 25
    """Random histories to run; raise it for a long run."""

    machine_steps = 20
    """Steps of one history."""

    @protects("H59", "T9", needs=TierHarness.require_reopening)
    def test_h59_a_restart_finds_what_was_stored(self, scene: TierHarness) -> None:
        """The next tier at the same place holds every block that `put` counted as stored."""
        tier = scene.open_with(*DOCUMENTS)
        tier.put(SEPARATE, (0, 1, 3, 4, 5))
        separate = (0, 1, 3, 5) if tier.deletes else (0, 1, 3, 4, 5)
        if tier.deletes:
            tier.delete(SEPARATE, 4)
        for _ in range(2):
            tier = scene.reopen(tier)
            for wanted in DOCUMENTS:
                expect(f"blocks of {wanted.name} held after a restart", tier.held(wanted), range(len(wanted)))
            expect("separate blocks held after a restart", tier.held(SEPARATE), separate)
            tier.check_accounts(*DOCUMENTS)
            tier.require_undamaged("after an orderly restart")

    @protects("H22", "H26", "H59", needs=TierHarness.require_reopening)
    def test_a_crash_at_any_write_loses_and_damages_nothing(self, scene: TierHarness) -> None:
        """The process dies at each of its writes in turn, and tears that write: earlier blocks are there, deleted ones
        are not, and every served block is correct."""
        scene.require_store_calls()
        for point in range(CRASH_POINTS):
            place = scene.other_place(f"crash {point}")
            scene.script.clear()
            tier = scene.open_with(DOCUMENT, place=place, end=4)
            life = _Life(held=set(DOCUMENT.keys[:4]))
            tier.say(f"the process will die at write {point} from here")
            scene.faults.arm(Operation.WRITE, Fault.CRASH, after=point)
            try:
                life.live(tier)
            except Crash:
                life.require_survives(scene.bury(tier))
            else:
                scene.faults.disarm()
                tier.close()
                return

    @protects("T11", needs=TierHarness.require_reopening)
    def test_what_was_refuted_is_given_to_nobody(self, scene: TierHarness) -> None:
        """An engine's copies were wrong, so what it wrote is: the next one gets none of it, and stores it again."""
        scene.require_clearing()
        tier = scene.open_with(DOCUMENT)
        tier.say("refute_run()")
        tier.tier.refute_run()
        for life in ("next", "second"):
            tier = scene.reopen(tier)
            expect(f"blocks that the {life} engine is given", tier.get(DOCUMENT), ())
        store(tier, DOCUMENT)
        expect("blocks held of what was stored after it", scene.reopen(tier).held(DOCUMENT), ALL)

    @protects("T8")
    def test_threads_may_use_it_at_once(self, scene: TierHarness) -> None:
        """Four threads store, read and delete the same documents: nothing raises, and every served block is sound."""
        tier = scene.open()
        threads = [Background(_work(tier, seed)) for seed in range(4)]
        for thread in threads:
            thread.result(WRITERS_SECONDS)
        tier.held_keys(DOCUMENTS)
        tier.check_accounts(*DOCUMENTS)
        tier.require_undamaged("by threads that work at once")

    @protects("T7", "T8")
    def test_closing_while_threads_work_harms_nothing(self, scene: TierHarness) -> None:
        """`close` during reads and writes: those end, nothing raises, and every served block is sound."""
        for seed in range(5):
            tier = scene.open_with(DOCUMENT, place=scene.other_place(f"closed {seed}"))
            threads = [Background(_work(tier, seed)) for seed in range(3)]
            threads[0].ended(0.002 * seed)
            Background(tier.close).result()
            for thread in threads:
                thread.result()
            expect("lookup after close", tier.lookup(DOCUMENT), ())
            if self.reopens:
                again = scene.open(tier.place)
                again.held_keys(DOCUMENTS)
                again.require_undamaged("after a close in the middle of work")
                again.close()

    @protects("T8", "H22")
    def test_a_place_opened_twice_is_refused_or_shared(self, scene: TierHarness) -> None:
        """A second tier at a place in use either gets a TierError, or both serve only sound blocks."""
        first = scene.open(label="first")
        store(first, DOCUMENT)
        second = scene.open_or_none(scene.place, label="second")
        if second is None:
            require(not self.several_writers, "the suite says `several_writers = True`, and the second one is refused")
            expect("blocks held by the one that has the place", first.held(DOCUMENT), ALL)
            return
        if self.several_writers:
            expect("blocks that the second one sees of the first one's", second.held(DOCUMENT), ALL)
            store(second, BRANCH)
            expect("blocks that the first one sees of the second one's", first.held(BRANCH), range(6))
        if second.deletes:
            second.delete(DOCUMENT, 5)
        second.put(document("other", 6))
        first.get(DOCUMENT)
        first.put(DOCUMENT)
        second.get(DOCUMENT)
        threads = [Background(_work(tier, seed)) for seed, tier in enumerate((first, second, first, second))]
        for thread in threads:
            thread.result(WRITERS_SECONDS)

    @protects("T8", "H22")
    def test_processes_may_use_it_at_once(self, scene: TierHarness) -> None:
        """Two more processes store, read and delete at the same place: nothing raises, every served block is sound."""
        observable_if(self.several_writers, "the suite says `several_writers = False`")
        tier = scene.open()
        with ProcessPoolExecutor(2, get_context("spawn")) as processes:
            working = [processes.submit(work_in_process, type(self), scene.place, seed) for seed in range(2)]
            _work(tier, 2)()
            for process in working:
                process.result(WRITERS_SECONDS)
        tier.require_undamaged("by processes that work at once")
        if tier.clears:
            tier.clear()
        store(tier, DOCUMENT)
        expect("blocks held at last", tier.held(DOCUMENT), ALL)

    @protects("T1", "T6")
    def test_any_history_agrees_with_a_plain_model(self, scene: TierHarness) -> None:
        """Random histories of all operations and faults, compared with a set of keys; a failing one is shrunk to the
        shortest."""
        self._random_histories(scene, "roomy", scene.place.capacity_blocks)

    @protects("H50", "T6")
    def test_any_history_of_a_full_tier_agrees_with_a_plain_model(self, scene: TierHarness) -> None:
        """Random histories are compared with a set of keys in a tier so small that nearly every write evicts."""
        observable_if(self.bounded, "the suite says `bounded = False`: the store's owner bounds it")
        self._random_histories(scene, "full", 5)

    def _random_histories(self, scene: TierHarness, name: str, capacity_blocks: int) -> None:
        try:
            from kvpact_testkit.tier.machine import run_histories
        except ImportError:
            raise NotObservable("hypothesis is not installed; pip install 'kvpact[testkit]'") from None
        directory: Path = scene.other_place(name).directory
        run_histories(scene, directory, capacity_blocks, self.machine_examples, self.machine_steps)


class _Life:
    """The blocks that must be held and those that may be, over a life that may end at any write."""

    def __init__(self, held: set[bytes]) -> None:
        self.must = set(held)
        self.may = set(held)

    def live(self, tier: MonitoredTier) -> None:
        """Call each method that writes."""
        self._put(tier, DOCUMENT)
        self._put(tier, BRANCH)
        if tier.deletes:
            self._delete(tier, DOCUMENT, 6)
        self._put(tier, document("alone", 7))
        if tier.clears:
            self.must.clear()
            tier.clear()
            self.may.clear()
        self._put(tier, BRANCH)

    def _put(self, tier: MonitoredTier, wanted: Document) -> None:
        self.may.update(wanted.keys)
        stored = {wanted.keys[block] for block in tier.put(wanted)}
        self.must |= stored
        self.may -= set(wanted.keys) - stored

    def _delete(self, tier: MonitoredTier, wanted: Document, block: int) -> None:
        self.must -= set(wanted.keys[block:])
        tier.delete(wanted, block)
        # Those after it are gone for certain only where chains are kept.
        self.may -= set(wanted.keys[block:] if tier.keeps_chains else wanted.keys[block : block + 1])

    def require_survives(self, tier: MonitoredTier) -> None:
        """The next process finds the stored blocks, and no others."""
        now = tier.held_keys(DOCUMENTS)
        lost = len(self.must - now)
        require(not lost, f"{lost} blocks that were stored before the process died are gone")
        back = len(now - self.may)
        require(not back, f"{back} blocks are held that were deleted, or never stored, before the process died")
        tier.check_accounts(*DOCUMENTS)
        store(tier, DOCUMENT)
        expect("blocks held once stored again", tier.held(DOCUMENT), ALL)
        tier.close()


def _work(tier: MonitoredTier, seed: int) -> Callable[[], None]:
    chance = Random(seed)

    def work() -> None:
        for _ in range(STEPS):
            wanted = chance.choice(DOCUMENTS)
            tier.put(wanted, range(chance.randint(1, len(wanted))))
            tier.get(wanted)
            if tier.deletes and chance.random() < 0.2:
                tier.delete(wanted, chance.randrange(len(wanted)))

    return work


def work_in_process(suite: type[TierOptions], place: StoreContext, seed: int) -> None:
    """The work of another process at `place`."""
    itself = suite()
    with itself.store_calls(Faults()):
        tier = itself.open_tier(place)
        try:
            _work(MonitoredTier(tier, place, itself, Trace(), f"process {seed}"), seed)()
        finally:
            tier.close()
