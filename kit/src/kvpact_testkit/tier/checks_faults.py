"""Checks of what a tier does when its store fails, hangs, or holds damage.

Part of `TierConformance`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import thread as executors
from functools import partial

from kvpact.tiers.base import BlockBuffer, SupportsPrefix, SupportsScan
from kvpact_testkit.background import Background
from kvpact_testkit.faults import Fault, Operation
from kvpact_testkit.results import Broken, NotObservable, observable_if, require
from kvpact_testkit.sample_blocks import BRANCH, DOCUMENT, SEPARATE, document
from kvpact_testkit.suite import Suite, protects
from kvpact_testkit.tier.buffers import give_back, require_untouched, told_buffers
from kvpact_testkit.tier.context import Damage, TierOptions
from kvpact_testkit.tier.harness import TierHarness
from kvpact_testkit.tier.monitor import MonitoredTier, expect, numbers, store

PROBE_S = 0.05
"""Real seconds for a probe of a busy tier; a tier that stays locked longer shows nothing."""

POINTS = 12
"""Reads or writes of one operation at each of which a fault is injected in turn."""

ALL = range(len(DOCUMENT))
REST = range(6, len(DOCUMENT))
STORED_SEPARATE = (0, 1, 3, 5)

REGISTERED_S = 0.05
"""Real seconds in which an executor registers a thread that it has just started."""


def _is_waited_for(thread: threading.Thread) -> bool:
    """Whether the interpreter waits for the thread at exit: it does for all threads of an executor, daemons or not."""
    return not thread.daemon or thread in getattr(executors, "_threads_queues", ())


def _read_or_write(tier: MonitoredTier, operation: Operation, buffers: Sequence[BlockBuffer]) -> Callable[[], object]:
    """A call that makes the store do `operation`: a read of the first 6 blocks, or a write of the blocks after them."""
    if operation is Operation.READ:
        return partial(tier.get, DOCUMENT, range(6), buffers=buffers)
    return partial(tier.put, DOCUMENT, REST)


class FaultChecks(TierOptions, Suite[TierHarness]):
    """Properties that hold while the store misbehaves."""

    @protects("H22", "T6")
    def test_h22_damage_is_a_miss_counted_and_dropped(self, scene: TierHarness) -> None:
        """Damaged bytes are never served: their block is a miss, dropped and counted, and costs no block before it."""
        self._damage(scene, lambda tier: tier)

    @protects("H22", needs=TierHarness.require_reopening)
    def test_h22_damage_while_nobody_looked_is_a_miss(self, scene: TierHarness) -> None:
        """Bytes damaged while the tier was closed are never served: their block is a miss, and dropped."""
        self._damage(scene, scene.reopen)

    def _damage(self, scene: TierHarness, then: Callable[[MonitoredTier], MonitoredTier]) -> None:
        possible = False
        for how in Damage:
            tier = scene.open(scene.other_place(how.name.lower()), label=how.name.lower())
            store(tier, DOCUMENT, BRANCH)
            before = tier.tier.counts().damaged
            if not scene.damage(tier, DOCUMENT, 4, how):
                tier.close()
                continue
            possible = True
            reopened = then(tier)
            before = before if reopened is tier else 0
            tier = reopened
            arrived = tier.get(DOCUMENT)
            if 4 not in arrived:  # otherwise the tier had the sound bytes elsewhere
                self._check_miss(tier, arrived)
                counted = tier.tier.counts().damaged - before
                require(counted > 0 or how is Damage.GONE or not tier.has_counts, "counts() tells of no damaged block")
            expect("blocks held of its branch, where nothing is damaged", tier.held(BRANCH), range(len(BRANCH)))
            store(tier, DOCUMENT)
            expect("blocks held, once stored again", tier.held(DOCUMENT), ALL)
            if 4 not in arrived:
                tier.check_accounts(DOCUMENT, BRANCH)
            tier.close()
        observable_if(possible, "the suite does not override `damage`")

    def _check_miss(self, tier: MonitoredTier, arrived: set[int]) -> None:
        """What a damaged block 4 costs: itself, and in a tier that keeps chains those after it."""
        sound = set(ALL) - {4}
        least = set(range(4)) if tier.keeps_chains else sound
        require(least <= arrived, f"blocks served, with block 4 damaged: {numbers(arrived)}, not {numbers(least)}")
        expect("blocks held, after a read found that block 4 is damaged", tier.held(DOCUMENT), least)

    @protects("T9", "H22")
    def test_h22_damage_of_a_block_without_a_parent_costs_no_other_one(self, scene: TierHarness) -> None:
        """The damaged one is not served, and dropped; those that were stored with it arrive."""
        possible = False
        for how in (Damage.FLIPPED, Damage.GARBAGE, Damage.TORN, Damage.SHORT):
            tier = scene.open(scene.other_place(f"separate {how.name.lower()}"), label=how.name.lower())
            tier.put(SEPARATE, STORED_SEPARATE)
            if scene.damage(tier, SEPARATE, 3, how):
                possible = True
                arrived = tier.get(SEPARATE, STORED_SEPARATE)
                if 3 not in arrived:  # otherwise the tier had the sound bytes elsewhere
                    expect("blocks served, with block 3 damaged", arrived, (0, 1, 5))
                    expect("blocks held after a read found the damage", tier.held(SEPARATE), (0, 1, 5))
                expect("blocks put again", tier.put(SEPARATE, (3,)), (3,))
                expect("blocks held, once stored again", tier.held(SEPARATE), STORED_SEPARATE)
            tier.close()
        observable_if(possible, "the suite does not override `damage`")

    @protects("H26", "P8")
    def test_h26_a_block_is_not_visible_before_the_tier_has_its_bytes(self, scene: TierHarness) -> None:
        """While `put` reads the buffers, `lookup` names only blocks whose bytes it has in full."""
        tier = scene.open_with(DOCUMENT, end=2)
        taken: set[int] = set()
        seen: list[str] = []
        probes: list[Background[None]] = []

        def look(block: int) -> None:
            visible = tier.tier.lookup(DOCUMENT.keys)
            if visible[block] and block not in taken:
                seen.append(f"lookup names block {block} before put has touched its buffer")
            elif visible[block] and block not in tier.get(DOCUMENT):
                seen.append(f"lookup names block {block} while put takes it, and get does not serve it")

        def tell(block: int) -> None:
            if all(probe.ended() for probe in probes):  # otherwise it waits for a lock that this put holds
                probes.append(Background(lambda: look(block)))
                probes[-1].ended(PROBE_S)
            taken.add(block)

        buffers = told_buffers(tier.filled(DOCUMENT.keys[2:]), tell, first=2)
        expect("put of the rest stores", tier.put(DOCUMENT, range(2, 8), buffers=buffers), range(2, 8))
        for probe in probes:
            probe.result()
        require(not seen, seen[0] if seen else "")
        expect("blocks held", tier.held(DOCUMENT), ALL)

    @protects("H26", "P8", needs=TierHarness.require_store_calls)
    def test_h26_what_is_visible_while_the_store_is_written_is_sound(self, scene: TierHarness) -> None:
        """`put` is stopped at each of its writes to the store; `get` serves all that `lookup` knows then."""
        tier = scene.open_with(DOCUMENT, end=2)

        def look() -> None:
            each = tier.tier.lookup(DOCUMENT.keys)
            visible, arrived = {block for block in ALL if each[block]}, tier.get(DOCUMENT)
            lost = visible - arrived
            require(not lost, f"lookup names blocks {numbers(visible)} during a put, get serves {numbers(arrived)}")

        scene.faults.arm(Operation.WRITE, Fault.HANG, times=1000)
        writing = Background(lambda: tier.put(DOCUMENT, range(2, 8)))
        looking: Background[None] | None = None
        while not writing.ended():
            if scene.faults.until_waiting(1, PROBE_S) and (looking is None or looking.ended()):
                if looking is not None:
                    looking.result()
                looking = Background(look)
                looking.ended(PROBE_S)
            scene.faults.release()
        if looking is not None:
            looking.result()
        expect("put that was stopped at each write stores", writing.result(), range(2, 8))
        expect("blocks held", tier.held(DOCUMENT), ALL)

    @protects("H26", "T5", needs=TierHarness.require_store_calls)
    def test_h26_a_failed_write_is_a_block_not_stored(self, scene: TierHarness) -> None:
        """Each write of a `put` fails in turn: no error is raised, nothing half-stored is visible, and the next `put`
        works."""
        for persistent in (False, True):
            for point in range(POINTS):
                tier = scene.open_with(DOCUMENT, place=scene.other_place(f"write {point} {persistent}"), end=2)
                scene.faults.arm(Operation.WRITE, Fault.ERROR, after=point, times=1000 if persistent else 1)
                injected = len(scene.faults.history)
                tier.say(f"write {point}{' and all after it' if persistent else ''} of the store will fail")
                stored = tier.put(DOCUMENT, range(2, 8))
                scene.faults.disarm()
                self._check_failed_put(tier, stored)
                store(tier, DOCUMENT)
                expect("blocks held once it works again", tier.held(DOCUMENT), ALL)
                require(tier.tier.health().ok, f"all works again, and health() says: {tier.tier.health().reason}")
                tier.check_accounts(DOCUMENT)
                if self.reopens:
                    expect("blocks held after a restart", scene.reopen(tier).held(DOCUMENT), ALL)
                else:
                    tier.close()
                if len(scene.faults.history) == injected:
                    break

    def _check_failed_put(self, tier: MonitoredTier, stored: set[int]) -> None:
        """What `put` says is stored is held; only a store that others share may have more, which is sound."""
        held = tier.held(DOCUMENT)
        least = stored | {0, 1}
        right = held == least if tier.tier.exclusive else held >= least
        said = f"blocks held after a put that failed in part: {numbers(held)}, not {numbers(least)}"
        require(right, said)

    @protects("T5", "H31", needs=TierHarness.require_store_calls)
    def test_a_failed_read_is_a_miss(self, scene: TierHarness) -> None:
        """Each read of a `get` fails in turn: no error is raised, arrived blocks are sound, and the tier works on."""
        tier = scene.open()
        for point in range(POINTS):
            store(tier, DOCUMENT)
            scene.faults.arm(Operation.READ, Fault.ERROR, after=point)
            injected = len(scene.faults.history)
            tier.say(f"read {point} of the store will fail")
            tier.get(DOCUMENT)
            scene.faults.disarm()
            tier.get(DOCUMENT)
            store(tier, DOCUMENT)
            expect("blocks held once it works again", tier.held(DOCUMENT), ALL)
            require(tier.tier.health().ok, f"all works again, and health() says: {tier.tier.health().reason}")
            if len(scene.faults.history) == injected:
                break
        counts = tier.tier.counts()
        counted = counts.failed_reads > 0 or point == 0 or not tier.has_counts
        require(counted, f"reads of the store failed, and counts() tells of none: {counts}")

    @protects("T5", needs=TierHarness.require_store_calls)
    def test_nothing_raises_when_the_store_fails_for_good(self, scene: TierHarness) -> None:
        """With a store that fails every call, every method answers, `health` says so, and `close` ends.

        Only `delete` and `clear` may raise TierError."""
        tier = scene.open_with(DOCUMENT)
        scene.let_all_fail(tier)
        before = len(scene.faults.history)
        tier.lookup(DOCUMENT)
        tier.get(DOCUMENT)
        tier.put(document("another", 4))
        if len(scene.faults.history) > before:
            require(not tier.tier.health().ok, "every call of the store failed, and health() says that all is well")
        if isinstance(tier.tier, SupportsScan):
            list(tier.tier.scan())
        if tier.deletes:
            tier.delete(DOCUMENT, 6)
        if tier.clears:
            tier.clear()
        tier.tier.capacity(), tier.tier.counts()
        Background(tier.close).result()

    @protects("H36", "H66", needs=TierHarness.require_store_calls)
    def test_h36_what_a_store_refuses_to_forget_is_no_success(self, scene: TierHarness) -> None:
        """`delete` or `clear` while the store fails: it raises TierError, or the blocks are gone once the store works.

        Repeated then it succeeds, also for the next process."""
        injected = len(scene.faults.history)
        names = [name for name, can in (("delete", self.deletes), ("clear", self.clears)) if can]
        observable_if(names, "the suite says `deletes = False` and `clears = False`")
        for name in names:
            left = 2 if name == "delete" else 0
            tier = scene.open(scene.other_place(name), label=name)
            store(tier, DOCUMENT)
            scene.let_all_fail(tier)
            self._forget(tier, left)
            scene.faults.disarm()
            tier.say("the store works again")
            if not tier.refused:
                tier = self._require_gone(scene, tier, left, f"{name} did not say that the store had failed")
            self._forget(tier, left)
            require(not tier.refused, f"the store works, and {name} is refused")
            self._require_gone(scene, tier, left, f"{name} was repeated when the store was back")
        observable_if(len(scene.faults.history) != injected, "neither delete nor clear makes a call of the store")

    def _forget(self, tier: MonitoredTier, left: int) -> None:
        if left:
            tier.delete(DOCUMENT, *range(left, len(DOCUMENT)))
        else:
            tier.clear()

    def _require_gone(self, scene: TierHarness, tier: MonitoredTier, left: int, after: str) -> MonitoredTier:
        """Raises Broken if a block from `left` on is held, now or after a restart; returns the restarted tier."""
        for when in ("", " after a restart"):
            held = tier.held(DOCUMENT)
            gone = held <= set(range(left))
            require(gone, f"blocks {numbers(held)} are held{when}, not {numbers(range(left))}: {after}")
            tier = scene.reopen(tier) if self.reopens else tier
        return tier

    @protects("H21")
    def test_h21_a_read_that_ended_early_writes_no_more(self, scene: TierHarness) -> None:
        """After `get` has ended early at its caller's wish, nothing writes to its buffers."""
        tier = scene.open_with(DOCUMENT)
        for _ in range(3):
            buffers = tier.empty(DOCUMENT.keys)
            tier.get(DOCUMENT, buffers=buffers, on_progress=lambda arrived: False)
            give_back(buffers)
            require_untouched(buffers)

    @protects("H21", "P11", needs=TierHarness.require_store_calls)
    def test_h21_a_read_that_was_given_up_writes_no_more(self, scene: TierHarness) -> None:
        """The store hangs in a read. If the tier gives up, the buffers are its caller's, and stay unchanged when the
        store continues."""
        tier = scene.open_with(DOCUMENT)
        for point in (0, 2):
            buffers = tier.empty(DOCUMENT.keys)
            scene.faults.arm(Operation.READ, Fault.HANG, after=point, times=1000)
            tier.say(f"the store hangs at read {point}")
            reading = Background(partial(tier.get, DOCUMENT, buffers=buffers))
            scene.faults.until_waiting(1, self.gives_up_after)
            given_up = reading.ended(self.gives_up_after)
            if given_up:
                give_back(buffers)
            scene.faults.disarm()
            scene.faults.release()
            tier.say("the store goes on")
            if not given_up:
                reading.result()
                give_back(buffers)
            require_untouched(buffers)
            tier.put(DOCUMENT)

    @protects("T7", "H21", "H56", needs=TierHarness.require_store_calls)
    def test_closing_does_not_wait_for_a_store_that_hangs(self, scene: TierHarness) -> None:
        """`close` ends although a read and a write hang; those end once the store continues, and do no harm."""
        for operation in (Operation.READ, Operation.WRITE):
            tier = scene.open_with(DOCUMENT, place=scene.other_place(f"hanging {operation}"), end=6)
            buffers = tier.empty(DOCUMENT.keys[:6])
            with scene.hanging(tier, operation, _read_or_write(tier, operation, buffers)) as hangs:
                Background(tier.close).result()
                expect("lookup after close", tier.lookup(DOCUMENT), ())
            if hangs and operation is Operation.READ:
                give_back(buffers)
                require_untouched(buffers)
            if self.reopens:
                held = scene.open(tier.place).held(DOCUMENT)
                require(held >= set(range(6)), f"after a restart blocks {numbers(held)} of 0 to 5 are held")

    @protects("H64", needs=TierHarness.require_store_calls)
    def test_h64_no_thread_of_a_tier_keeps_the_process_from_ending(self, scene: TierHarness) -> None:
        """A read or a write hangs: at exit the interpreter waits for none of the tier's threads."""
        for operation in (Operation.READ, Operation.WRITE):
            before = set(threading.enumerate())
            tier = scene.open_with(DOCUMENT, place=scene.other_place(f"hanging {operation}"), end=6)
            with scene.hanging(tier, operation, _read_or_write(tier, operation, tier.empty(DOCUMENT.keys[:6]))):
                time.sleep(REGISTERED_S)
                stays = [thread.name for thread in set(threading.enumerate()) - before if _is_waited_for(thread)]
            require(not stays, f"the process would not end before {', '.join(stays)}; start daemon threads yourself")

    @protects("P11", "H58", needs=TierHarness.require_store_calls)
    def test_h58_lookup_never_waits_for_the_store(self, scene: TierHarness) -> None:
        """In a tier of one engine alone, `lookup` and `leading` make no call of the store, which may hang."""
        tier = scene.open_with(DOCUMENT)
        if not tier.tier.exclusive:
            raise NotObservable("the tier is shared: its lookup may ask the store, and is not called by schedulers")
        before = scene.faults.calls.total()
        for wanted in (DOCUMENT, BRANCH, document("never stored", 40)):
            for _ in range(20):
                tier.tier.lookup(wanted.keys)
                if isinstance(tier.tier, SupportsPrefix):
                    tier.tier.leading(wanted.keys)
        expect("calls of the store in 60 lookups", scene.faults.calls.total() - before, 0)
        for operation in (Operation.READ, Operation.WRITE):
            reads = operation is Operation.READ
            call = partial(tier.get, DOCUMENT) if reads else partial(tier.put, document("slow", 4))
            with scene.hanging(tier, operation, call):
                looking = Background(lambda: tier.lookup(DOCUMENT))
                if not looking.ended(4 * self.gives_up_after):
                    raise Broken(f"lookup waits while a {operation} of the store hangs")
                expect("lookup while the store hangs", looking.result(), ALL)
