"""Checks of a tier's promises without faults: stored blocks, holes, deleting, closing, accounts.

Part of `TierConformance`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from kvpact.tiers.base import SupportsPrefix, SupportsScan
from kvpact_testkit.results import NotObservable, observable_if, require
from kvpact_testkit.sample_blocks import (
    BRANCH,
    DOCUMENT,
    SEPARATE,
    content,
    document,
    empty_buffers,
    filled_buffers,
    first_difference,
    size_of,
)
from kvpact_testkit.suite import Suite, protects
from kvpact_testkit.tier.context import TierOptions
from kvpact_testkit.tier.harness import FOREIGN, TierHarness
from kvpact_testkit.tier.monitor import MonitoredTier, expect, numbers, store

ALL = range(len(DOCUMENT))


class PromiseChecks(TierOptions, Suite[TierHarness]):
    """Properties that hold while nothing fails."""

    @protects("T1", "H31")
    def test_blocks_come_back_as_they_were_stored(self, scene: TierHarness) -> None:
        """What `put` says is stored is served, byte for byte, from and into any number of ranks' pieces."""
        tier = scene.open()
        for pieces in (1, 2, 4):
            wanted = document(f"document of {pieces} ranks", 5)
            expect("put of a new document stores", tier.put(wanted, pieces=pieces), range(5))
            expect("blocks held", tier.held(wanted), range(5))
            for others in (1, 3):
                expect(f"blocks served into {others} pieces", tier.get(wanted, pieces=others), range(5))

    @protects("T1")
    def test_memory_needs_no_alignment(self, scene: TierHarness) -> None:
        """Buffers may start at any byte."""
        tier = scene.open()
        size = scene.place.slot_bytes
        given = [[memoryview(bytearray(b"x" + content(key, size)))[1:]] for key in DOCUMENT.keys]
        expect("put from unaligned memory stores", tier.put(DOCUMENT, buffers=given), ALL)
        taken = [[memoryview(bytearray(size + 1))[1:]] for _ in DOCUMENT.keys]
        expect("blocks served into unaligned memory", tier.get(DOCUMENT, buffers=taken), ALL)

    @protects("T1")
    def test_a_part_may_be_stored_and_read(self, scene: TierHarness) -> None:
        """A call handles the blocks that it names, and waits for no others."""
        tier = scene.open()
        expect("put of blocks 0 to 2 stores", tier.put(DOCUMENT, range(3)), range(3))
        expect("put of blocks 3 to 4 stores", tier.put(DOCUMENT, range(3, 5)), (3, 4))
        expect("blocks served of 2 to 3", tier.get(DOCUMENT, (2, 3)), (2, 3))
        expect("blocks served of the last 4, of which 1 is held", tier.get(DOCUMENT, range(4, 8)), (4,))
        expect("blocks served of the last 3, none held", tier.get(DOCUMENT, range(5, 8)), ())
        expect("blocks served of none", tier.get(DOCUMENT, ()), ())
        expect("blocks stored of none", tier.put(DOCUMENT, ()), ())
        expect("blocks held", tier.held(DOCUMENT), range(5))

    @protects("T2", "H20")
    def test_h20_a_hole_costs_only_itself(self, scene: TierHarness) -> None:
        """`lookup` and `get` say of each block whether it is held, in any order, whatever others are missing."""
        tier = scene.open()
        expect("put of blocks 1, 3 and 5 stores", tier.put(SEPARATE, (1, 3, 5)), (1, 3, 5))
        store(tier, DOCUMENT, end=2)
        for blocks in ((0, 3, 5), (0,), (3,), (5, 2, 1), (0, 2, 4)):
            right = {1, 3, 5}.intersection(blocks)
            expect(f"lookup of blocks {blocks}, of which 1, 3 and 5 are held", tier.lookup(SEPARATE, blocks), right)
            expect(f"get of blocks {blocks}, of which 1, 3 and 5 are held", tier.get(SEPARATE, blocks), right)
        expect(
            "lookup of blocks 2, 1 and 0 of a chain, of which 0 and 1 are held",
            tier.lookup(DOCUMENT, (2, 1, 0)),
            (0, 1),
        )
        expect("get of blocks 2, 1 and 0 of a chain, of which 0 and 1 are held", tier.get(DOCUMENT, (2, 1, 0)), (0, 1))
        expect("blocks held, with holes before and between them", tier.held(SEPARATE), (1, 3, 5))

    @protects("T2", "H20")
    def test_h20_leading_counts_the_unbroken_prefix_only(self, scene: TierHarness) -> None:
        """`leading` counts no block after a missing one, and from `put_start` on all can be stored."""
        tier = scene.open()
        prefix = tier.tier
        if not isinstance(prefix, SupportsPrefix):
            raise NotObservable("the tier has no `leading`")
        expect("leading of blocks that were never stored", prefix.leading(DOCUMENT.keys), 0)
        store(tier, DOCUMENT, end=2)
        tier.put(DOCUMENT, range(4, 8))
        expect("leading, with blocks 2 and 3 missing", prefix.leading(DOCUMENT.keys), 2)
        headless = document("headless", 4)
        tier.put(headless, range(1, 4))
        expect("leading, with block 0 missing", prefix.leading(headless.keys), 0)
        expect("leading of no blocks", prefix.leading(()), 0)
        start = prefix.put_start(DOCUMENT.keys)
        require(0 <= start <= 2, f"put_start is {start}, with 2 blocks held: what is before it is missing")
        expect("put from put_start on stores", tier.put(DOCUMENT, range(start, 8)), range(start, 8))
        expect("leading, with all held", prefix.leading(DOCUMENT.keys), 8)
        start = prefix.put_start(DOCUMENT.keys)
        require(0 <= start <= 8, f"put_start is {start}, of 8 blocks")

    @protects("T12", "P8")
    def test_a_block_is_stored_only_behind_its_parent(self, scene: TierHarness) -> None:
        """A tier that keeps chains stores nothing whose parent it lacks, and none of it appears later."""
        tier = scene.open()
        observable_if(tier.keeps_chains, "the tier keeps no chains: it is shared, or has no `leading`")
        expect("put behind nothing stores", tier.put(DOCUMENT, range(4, 8)), ())
        store(tier, DOCUMENT, end=4)
        expect("blocks held, once those before are stored", tier.held(DOCUMENT), range(4))
        expect("put at last stores", tier.put(DOCUMENT, range(4, 8)), range(4, 8))
        expect("blocks held", tier.held(DOCUMENT), ALL)

    @protects("T9", "H31")
    def test_a_block_without_a_parent_stands_for_itself(self, scene: TierHarness) -> None:
        """It is held, served and dropped without those that were stored with it, and a chain beside it stays."""
        tier = scene.open_with(DOCUMENT)
        tier.put(SEPARATE, (1, 3, 5))
        expect("put of blocks that were held or are new says", tier.put(SEPARATE), range(6))
        if not tier.deletes:
            return
        expect("deleted", tier.delete(SEPARATE, 1), 1)
        expect("deleted once more", tier.delete(SEPARATE, 1), 0)
        expect("blocks held after block 1 was deleted", tier.held(SEPARATE), (0, 2, 3, 4, 5))
        expect("blocks of the document held", tier.held(DOCUMENT), ALL)
        tier.check_accounts(DOCUMENT)
        tier.delete(DOCUMENT, *ALL)
        expect("blocks held after the document was deleted", tier.held(SEPARATE), (0, 2, 3, 4, 5))

    @protects("T10", "T1", needs=TierHarness.require_sizes)
    def test_blocks_of_several_sizes_are_served_into_their_own_size_alone(self, scene: TierHarness) -> None:
        """A buffer's size is what is stored. A record of another size is a miss, and still there afterwards."""
        tier = scene.open_with(SEPARATE)
        slot = self.slot_bytes
        for block, key in enumerate(SEPARATE.keys):
            for nbytes in sorted({0, slot // 4, slot // 2, slot} - {size_of(key, slot)}):
                (arrived,) = tier.tier.get([key], empty_buffers(1, nbytes, self.ranks))
                require(
                    not arrived, f"separate block {block} of {size_of(key, slot)} bytes is served as one of {nbytes}"
                )
        tier.require_undamaged("and all that was asked for were blocks of another size")
        expect("blocks held after reads of other sizes", tier.held(SEPARATE), range(6))

    @protects("T10", "T1", needs=TierHarness.require_sizes)
    def test_a_chain_may_have_small_payloads_or_none(self, scene: TierHarness) -> None:
        """Chains of blocks smaller than the largest, of 0 bytes too, are stored and served like others."""
        for nbytes in (0, self.slot_bytes // 4):
            tier = scene.open(scene.other_place(f"chain of {nbytes} bytes"))
            for part in (range(3), range(3, 8)):
                given = filled_buffers([DOCUMENT.keys[block] for block in part], nbytes, self.ranks)
                stored = tier.put(DOCUMENT, part, buffers=given)
                expect(f"blocks {numbers(part)} of {nbytes} bytes stored", stored, part)
            expect("lookup", tier.lookup(DOCUMENT), ALL)
            buffers = empty_buffers(8, nbytes, self.ranks)
            expect("blocks served", sum(tier.tier.get(DOCUMENT.keys, buffers)), 8)
            right = [content(key, nbytes) for key in DOCUMENT.keys]
            wrong = list(filter(None, map(first_difference, buffers, right)))
            require(not wrong, f"a block of {nbytes} bytes is not what was stored: {wrong[:1]}")
            tier.close()

    @protects("T3")
    def test_what_is_held_is_not_written_again(self, scene: TierHarness) -> None:
        """`put` says that blocks are held which were before, and does not change them."""
        tier = scene.open_with(DOCUMENT, end=5)
        # Buffers of blocks 2 to 4 hold something else, so that a write of them would be found.
        garbage = [*tier.empty(DOCUMENT.keys[2:5]), *tier.filled(DOCUMENT.keys[5:])]
        stored = tier.put(DOCUMENT, range(2, 8), buffers=garbage)
        expect("put of blocks 2 to 7, of which 3 are held, says", stored, range(2, 8))
        expect("blocks held", tier.held(DOCUMENT), ALL)
        expect("put of what is all held says", tier.put(DOCUMENT), ALL)
        tier.check_accounts(DOCUMENT)

    @protects("P11")
    def test_progress_is_told_in_order_and_may_end_a_read(self, scene: TierHarness) -> None:
        """`on_progress` counts blocks that are in their buffers and sound; if it returns False the read ends."""
        tier = scene.open_with(DOCUMENT)
        told: list[int] = []

        def tell(blocks: int) -> bool:
            told.append(blocks)
            return True

        expect("blocks served", tier.get(DOCUMENT, on_progress=tell), ALL)
        tier.put(SEPARATE, (0, 1, 3, 5))
        require(all(a <= b for a, b in pairwise(told)), f"progress went back: {told}")
        told.clear()
        tier.get(SEPARATE, on_progress=tell)
        require(all(a <= b <= 2 for a, b in pairwise([0, *told])), f"progress with block 2 of 0 to 3 missing: {told}")
        buffers = tier.empty(DOCUMENT.keys)
        wrong: list[str] = []

        def once(blocks: int) -> bool:
            for key, buffer in zip(DOCUMENT.keys[:blocks], buffers, strict=False):
                wrong.extend(filter(None, [first_difference(buffer, content(key, scene.place.slot_bytes))]))
            return False

        tier.get(DOCUMENT, buffers=buffers, on_progress=once)
        require(not wrong, f"progress told of a block that was not there: {wrong[:1]}")
        tier.get(SEPARATE, on_progress=lambda blocks: False)
        expect("blocks held after a read that was ended", tier.held(DOCUMENT), ALL)
        expect("separate blocks held after it", tier.held(SEPARATE), (0, 1, 3, 5))

    @protects("T4", "P9", needs=TierHarness.require_deleting)
    def test_deleting_drops_what_is_named(self, scene: TierHarness) -> None:
        """Named blocks are gone, those before them and beside them are not, and can be stored again."""
        tier = scene.open_with(DOCUMENT, BRANCH)
        deleted = tier.delete(DOCUMENT, 6, 7)
        expect("deleted with blocks 6 and 7, the last ones", deleted, 2)
        expect("blocks held", tier.held(DOCUMENT), range(6))
        expect("blocks held of its branch", tier.held(BRANCH), range(6))
        expect("deleted once more", tier.delete(DOCUMENT, 6, 7), 0)
        expect("deleted, of blocks that were never stored", tier.delete(document("never stored", 3), 0, 2), 0)
        tier.delete(DOCUMENT, 2)
        left = tier.held(DOCUMENT)
        require(2 not in left and {0, 1} <= left, f"blocks held after block 2 was deleted: {numbers(left)}")
        tier.check_accounts(DOCUMENT, BRANCH)
        store(tier, DOCUMENT)
        expect("blocks held once stored again", tier.held(DOCUMENT), ALL)

    @protects("T4", "P9", needs=TierHarness.require_deleting)
    def test_deleting_takes_all_that_needs_it(self, scene: TierHarness) -> None:
        """In a tier that keeps chains, blocks after a deleted one go with it, on every branch, and do not return."""
        tier = scene.open_with(DOCUMENT, BRANCH)
        observable_if(tier.keeps_chains, "the tier keeps no chains: it is shared, or has no `leading`")
        expect("deleted with block 5 of the document", tier.delete(DOCUMENT, 5), 3)
        self._require_held(tier, 5, 6)
        expect("deleted with block 2, which both need", tier.delete(DOCUMENT, 2), 6)
        self._require_held(tier, 2, 2)
        expect("put of block 2 alone stores", tier.put(DOCUMENT, (2,)), (2,))
        self._require_held(tier, 3, 3)
        tier.check_accounts(DOCUMENT, BRANCH)

    def _require_held(self, tier: MonitoredTier, of_document: int, of_branch: int) -> None:
        expect("blocks of the document held", tier.held(DOCUMENT), range(of_document))
        expect("blocks of its branch held", tier.held(BRANCH), range(of_branch))

    @protects("T4", "H32", needs=TierHarness.require_clearing)
    def test_clearing_is_for_good(self, scene: TierHarness) -> None:
        """After `clear` nothing is held, also after a restart, and the tier stores again."""
        documents = DOCUMENT, BRANCH, SEPARATE
        tier = scene.open_with(*documents)
        tier.clear()
        expect("blocks held after clear", len(tier.held_keys(documents)), 0)
        tier.check_accounts(DOCUMENT, BRANCH)
        if self.reopens:
            tier = scene.reopen(tier)
            expect("blocks held after clear and a restart", len(tier.held_keys(documents)), 0)
        store(tier, DOCUMENT)
        expect("blocks held of what was stored after it", tier.held(DOCUMENT), ALL)

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
        expect("blocks that another namespace sees", theirs.lookup(DOCUMENT), ())
        expect("blocks that another namespace is served", theirs.get(DOCUMENT), ())
        others = [key[::-1] for key in DOCUMENT.keys]
        stored = theirs.put(DOCUMENT, buffers=theirs.filled(others))
        taken = theirs.empty(DOCUMENT.keys)
        arrived = {block for block, there in enumerate(theirs.tier.get(DOCUMENT.keys, taken)) if there}
        expect("blocks that the other namespace holds of its own", arrived, stored)
        for block in arrived:
            wrong = first_difference(taken[block], content(others[block], scene.place.slot_bytes))
            require(not wrong, f"block {block} of the other namespace is not what it stored: {wrong}")
        if both_open:
            expect("blocks held in the first namespace", mine.held(DOCUMENT), ALL)
            if theirs.clears:
                theirs.clear()
                expect("blocks held after the other namespace was cleared", mine.held(DOCUMENT), ALL)
        elif self.reopens:
            theirs.close()
            scene.open(label="mine").held(DOCUMENT)

    @protects("T6")
    def test_what_it_says_of_itself_is_true(self, scene: TierHarness) -> None:
        """`capacity` and `health` agree with what is served, and `scan` if there is one."""
        tier = scene.open()
        tier.check_accounts(DOCUMENT, BRANCH)
        store(tier, DOCUMENT, BRANCH, SEPARATE)
        tier.check_accounts(DOCUMENT, BRANCH)
        if tier.deletes:
            tier.delete(DOCUMENT, 6, 7)
            tier.check_accounts(DOCUMENT, BRANCH)
        health = tier.tier.health()
        require(health.ok, f"all went well, and health() says: {health.reason}")

    @protects("T6")
    def test_scan_names_all_that_is_held(self, scene: TierHarness) -> None:
        """Each held block's header is listed, with its parent, depth, size and digest."""
        tier = scene.open_with(DOCUMENT, BRANCH, SEPARATE)
        observable_if(isinstance(tier.tier, SupportsScan), "the tier has no `scan`")
        tier.check_accounts(DOCUMENT, BRANCH)

    @protects("T6")
    def test_nothing_is_counted_as_wrong_that_is_not(self, scene: TierHarness) -> None:
        """Misses, deletions and blocks of another size are neither damage nor failed reads."""
        tier = scene.open_with(DOCUMENT)
        observable_if(tier.has_counts, "the tier does not define `counts`")
        tier.held(BRANCH)
        tier.tier.get(DOCUMENT.keys[:1], empty_buffers(1, self.slot_bytes // 2, self.ranks))
        if tier.deletes:
            tier.delete(DOCUMENT, 6)
        counts = tier.tier.counts()
        require(counts.damaged == counts.failed_reads == 0, f"nothing was damaged or failed, and yet: {counts}")

    @protects("T7")
    def test_a_closed_tier_answers_nothing(self, scene: TierHarness) -> None:
        """After `close`, which may be called twice, every method answers as if nothing were held, and none raises."""
        tier = scene.open_with(DOCUMENT)
        tier.close()
        tier.close()
        expect("lookup after close", tier.lookup(DOCUMENT), ())
        expect("blocks served after close", tier.get(DOCUMENT), ())
        expect("blocks stored after close", tier.put(document("late", 2)), ())
        expect("separate blocks stored after close", tier.put(SEPARATE), ())
        if tier.deletes:
            expect("blocks deleted after close", tier.delete(DOCUMENT, 0), 0)
        if tier.clears:
            tier.clear()
        tier.tier.health(), tier.tier.counts(), tier.tier.capacity()
        if isinstance(tier.tier, SupportsScan):
            expect("records scanned after close", len(list(tier.tier.scan())), 0)
        if self.reopens:
            expect("blocks held by the next tier", scene.open().held(DOCUMENT), ALL)
