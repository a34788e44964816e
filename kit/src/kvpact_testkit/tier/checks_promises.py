"""Checks of a tier's promises without faults: stored blocks, prefixes, deleting, closing, accounts.

Part of `TierConformance`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from kvpact_testkit.results import NotObservable, require
from kvpact_testkit.sample_blocks import BRANCH, DOCUMENT, content, document, first_difference
from kvpact_testkit.suite import Suite, protects
from kvpact_testkit.tier.context import TierOptions
from kvpact_testkit.tier.harness import FOREIGN, TierHarness
from kvpact_testkit.tier.monitor import MonitoredTier, expect, store


class PromiseChecks(TierOptions, Suite[TierHarness]):
    """Properties that hold while nothing fails."""

    @protects("T1", "H31")
    def test_blocks_come_back_as_they_were_stored(self, scene: TierHarness) -> None:
        """What `put` says is stored is served, byte for byte, from and into any number of ranks' pieces."""
        tier = scene.open()
        for pieces in (1, 2, 4):
            wanted = document(f"document of {pieces} ranks", 5)
            expect("put of a new document stores", tier.put(wanted, pieces=pieces), 5)
            expect("blocks held", tier.held(wanted), 5)
            for others in (1, 3):
                expect(f"blocks served into {others} pieces", tier.get(wanted, pieces=others), 5)

    @protects("T1")
    def test_memory_needs_no_alignment(self, scene: TierHarness) -> None:
        """Buffers may start at any byte."""
        tier = scene.open()
        size = scene.place.slot_bytes
        given = [[memoryview(bytearray(b"x" + content(key, size)))[1:]] for key in DOCUMENT.keys]
        expect("put from unaligned memory stores", tier.put(DOCUMENT, buffers=given), 8)
        taken = [[memoryview(bytearray(size + 1))[1:]] for _ in DOCUMENT.keys]
        expect("blocks served into unaligned memory", tier.get(DOCUMENT, buffers=taken), 8)

    @protects("T1")
    def test_a_part_may_be_stored_and_read(self, scene: TierHarness) -> None:
        """`start` and the number of buffers select the blocks; a call does not wait for others."""
        tier = scene.open()
        expect("put of blocks 0 to 2 stores", tier.put(DOCUMENT, 0, 3), 3)
        expect("put of blocks 3 to 4 stores", tier.put(DOCUMENT, 3, 5), 2)
        expect("blocks served from 2 to 3", tier.get(DOCUMENT, 2, 4), 2)
        expect("blocks served of the last 4, of which 1 is held", tier.get(DOCUMENT, 4, 8), 1)
        expect("blocks served of the last 3, none held", tier.get(DOCUMENT, 5, 8), 0)
        expect("nothing is served into no buffers", tier.get(DOCUMENT, 2, 2), 0)
        # `keys` may name further blocks after those to copy.
        expect("put of blocks 5 to 6", tier.tier.put(DOCUMENT.keys, 5, tier.filled(DOCUMENT.keys[5:7])), 2)
        expect("get of blocks 0 to 2", tier.tier.get(DOCUMENT.keys, 0, tier.empty(3)), 3)
        expect("blocks held", tier.held(DOCUMENT), 7)

    @protects("H20")
    def test_h20_only_the_unbroken_prefix_counts(self, scene: TierHarness) -> None:
        """A block after a missing one is not counted, by `lookup` or by `get`, whatever is stored."""
        tier = scene.open_with(DOCUMENT, end=2)
        tier.put(DOCUMENT, 4, 8)
        expect("lookup, with blocks 2 and 3 missing", tier.lookup(DOCUMENT), 2)
        expect("blocks served, with blocks 2 and 3 missing", tier.get(DOCUMENT), 2)
        nothing = document("never stored", 4)
        tier.put(nothing, 1, 4)
        expect("lookup, with block 0 missing", tier.lookup(nothing), 0)
        expect("blocks served, with block 0 missing", tier.get(nothing), 0)

    @protects("T2", "P8")
    def test_a_block_is_stored_only_behind_its_chain(self, scene: TierHarness) -> None:
        """`put` stores nothing if a block before `start` is not held, and none of its blocks appears later."""
        tier = scene.open()
        expect("put behind nothing stores", tier.put(DOCUMENT, 4, 8), 0)
        store(tier, DOCUMENT, end=4)
        expect("lookup, once the blocks before are stored", tier.held(DOCUMENT), 4)
        expect("put at last stores", tier.put(DOCUMENT, 4, 8), 4)
        expect("blocks held", tier.held(DOCUMENT), 8)

    @protects("T3")
    def test_what_is_held_is_not_written_again(self, scene: TierHarness) -> None:
        """`put` counts blocks that are held already, and does not change them."""
        tier = scene.open_with(DOCUMENT, end=5)
        # Buffers of blocks 2 to 4 hold something else, so that a write of them would be found.
        garbage = [*tier.empty(3), *tier.filled(DOCUMENT.keys[5:])]
        expect("put of blocks 2 to 7, of which 3 are held, counts", tier.put(DOCUMENT, 2, 8, buffers=garbage), 6)
        expect("blocks held", tier.held(DOCUMENT), 8)
        expect("put of what is all held counts", tier.put(DOCUMENT), 8)
        tier.check_accounts(DOCUMENT)

    @protects("P11")
    def test_progress_is_told_in_order_and_may_end_a_read(self, scene: TierHarness) -> None:
        """`on_progress` counts blocks that are in their buffers and sound; if it returns False the read ends."""
        tier = scene.open_with(DOCUMENT)
        told: list[int] = []

        def tell(blocks: int) -> bool:
            told.append(blocks)
            return True

        arrived = tier.get(DOCUMENT, on_progress=tell)
        expect("blocks served", arrived, 8)
        require(all(a <= b for a, b in pairwise(told)), f"progress went back: {told}")
        require(not told or told[-1] <= arrived, f"progress told of {told[-1:]} blocks, {arrived} arrived")
        buffers = tier.empty(8)
        wrong: list[str] = []

        def once(blocks: int) -> bool:
            for key, buffer in zip(DOCUMENT.keys[:blocks], buffers, strict=False):
                wrong.extend(filter(None, [first_difference(buffer, content(key, scene.place.slot_bytes))]))
            return False

        tier.get(DOCUMENT, buffers=buffers, on_progress=once)
        require(not wrong, f"progress told of a block that was not there: {wrong[:1]}")
        expect("blocks held after a read that was ended", tier.held(DOCUMENT), 8)

    @protects("T4", "P9")
    def test_deleting_takes_all_that_needs_it(self, scene: TierHarness) -> None:
        """Deleting a block deletes those after it, on every branch, and they do not return with it.

        In a shared store other engines may have stored more blocks after it, so there it may be deleted alone: the
        blocks after it cannot be reached until it is stored again.
        """
        tier = scene.open_with(DOCUMENT, BRANCH)
        deleted = tier.delete(DOCUMENT, 5)
        alone = deleted == 1 and not tier.tier.exclusive
        expect("deleted with block 5 of the document", deleted, 1 if alone else 3)
        self._require_held(tier, 5, 6)
        expect("deleted with block 2, which both need", tier.delete(DOCUMENT, 2), 1 if alone else 6)
        self._require_held(tier, 2, 2)
        expect("deleted once more", tier.delete(DOCUMENT, 2), 0)
        if alone:
            expect("put behind the deleted block stores", tier.put(DOCUMENT, 5, 8), 0)
        expect("put of block 2 alone stores", tier.put(DOCUMENT, 2, 3), 1)
        self._require_held(tier, *((5, 6) if alone else (3, 3)))
        tier.check_accounts(DOCUMENT, BRANCH)
        expect("deleted, of blocks that were never stored", tier.delete(document("never stored", 3), 0, 2), 0)

    def _require_held(self, tier: MonitoredTier, of_document: int, of_branch: int) -> None:
        expect("blocks of the document that can be reached", tier.held(DOCUMENT), of_document)
        expect("blocks of its branch that can be reached", tier.held(BRANCH), of_branch)

    @protects("T4", "H32")
    def test_clearing_is_for_good(self, scene: TierHarness) -> None:
        """After `clear` nothing is held, also after a restart, and the tier stores again."""
        tier = scene.open_with(DOCUMENT, BRANCH)
        tier.clear()
        expect("blocks held after clear", tier.held(DOCUMENT) + tier.held(BRANCH), 0)
        tier.check_accounts(DOCUMENT, BRANCH)
        if self.reopens:
            tier = scene.reopen(tier)
            expect("blocks held after clear and a restart", tier.held(DOCUMENT) + tier.held(BRANCH), 0)
        store(tier, DOCUMENT)
        expect("blocks held of what was stored after it", tier.held(DOCUMENT), 8)

    @protects("H23")
    def test_h23_namespaces_share_nothing(self, scene: TierHarness) -> None:
        """Another namespace cannot see, overwrite or clear anything of this one."""
        mine = scene.open(label="mine")
        store(mine, DOCUMENT)
        foreign = replace(scene.place, namespace=FOREIGN)
        theirs = scene.open_or_none(foreign, label="theirs")
        both_open = theirs is not None
        if theirs is None:
            mine.close()
            theirs = scene.open_or_none(foreign, label="theirs")
        if theirs is None:
            raise NotObservable("the tier does not open a second namespace at the same place")
        expect("blocks that another namespace sees", theirs.lookup(DOCUMENT), 0)
        expect("blocks that another namespace is served", theirs.tier.get(DOCUMENT.keys, 0, theirs.empty(8)), 0)
        others = [key[::-1] for key in DOCUMENT.keys]
        stored = theirs.put(DOCUMENT, buffers=theirs.filled(others))
        taken = theirs.empty(8)
        arrived = theirs.tier.get(DOCUMENT.keys, 0, taken)
        expect("blocks that the other namespace holds of its own", arrived, stored)
        for block in range(arrived):
            wrong = first_difference(taken[block], content(others[block], scene.place.slot_bytes))
            require(not wrong, f"block {block} of the other namespace is not what it stored: {wrong}")
        if both_open:
            expect("blocks held in the first namespace", mine.held(DOCUMENT), 8)
            theirs.clear()
            expect("blocks held after the other namespace was cleared", mine.held(DOCUMENT), 8)
        elif self.reopens:
            theirs.close()
            scene.open(label="mine").held(DOCUMENT)

    @protects("T6")
    def test_what_it_says_of_itself_is_true(self, scene: TierHarness) -> None:
        """`scan`, `capacity`, `counts` and `health` agree with what is served."""
        tier = scene.open()
        tier.check_accounts(DOCUMENT, BRANCH)
        store(tier, DOCUMENT, BRANCH)
        tier.check_accounts(DOCUMENT, BRANCH)
        tier.delete(DOCUMENT, 6)
        tier.check_accounts(DOCUMENT, BRANCH)
        counts = tier.tier.counts()
        require(counts.damaged == counts.failed_reads == 0, f"nothing was damaged or failed, and yet: {counts}")
        health = tier.tier.health()
        require(health.ok, f"all went well, and health() says: {health.reason}")

    @protects("T7")
    def test_a_closed_tier_answers_nothing(self, scene: TierHarness) -> None:
        """After `close`, which may be called twice, every method answers as if nothing were held, and none raises."""
        tier = scene.open_with(DOCUMENT)
        tier.close()
        tier.close()
        expect("lookup after close", tier.lookup(DOCUMENT), 0)
        expect("blocks served after close", tier.get(DOCUMENT), 0)
        expect("blocks stored after close", tier.put(document("late", 2)), 0)
        expect("blocks deleted after close", tier.delete(DOCUMENT, 0), 0)
        tier.clear()
        tier.tier.health(), tier.tier.counts(), tier.tier.capacity()
        expect("records scanned after close", len(list(tier.tier.scan())), 0)
        if self.reopens:
            expect("blocks held by the next tier", scene.open().held(DOCUMENT), 8)
