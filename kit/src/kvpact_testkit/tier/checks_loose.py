"""Checks of loose blocks, which form no chain, and of blocks of several sizes.

Part of `TierConformance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvpact_testkit.results import observable_if, require
from kvpact_testkit.sample_blocks import (
    DOCUMENT,
    LOOSE,
    content,
    empty_buffers,
    filled_buffers,
    first_difference,
    size_of,
)
from kvpact_testkit.suite import Suite, protects
from kvpact_testkit.tier.context import Damage, TierOptions
from kvpact_testkit.tier.harness import TierHarness
from kvpact_testkit.tier.monitor import MonitoredTier, expect, store

ALL = range(len(LOOSE))


def _stored(scene: TierHarness, blocks: Sequence[int]) -> MonitoredTier:
    tier = scene.open()
    expect("loose blocks stored", tier.put_each(blocks).count(True), len(blocks))
    return tier


def _expect_held(tier: MonitoredTier, right: set[int], when: str) -> None:
    held = tier.held_loose()
    require(held == right, f"loose blocks held {when}: {sorted(held)}, not {sorted(right)}")


class LooseChecks(TierOptions, Suite[TierHarness]):
    """What holds for blocks that form no chain."""

    @protects("T9", "H31")
    def test_loose_blocks_stand_for_themselves(self, scene: TierHarness) -> None:
        """Each is held and served whatever is there of the others, and a chain beside them is what it was."""
        tier = _stored(scene, [1, 3, 5])
        store(tier, DOCUMENT)
        for blocks in ([0, 3, 5], [0], [3], [5, 2, 1], [0, 2, 4]):
            found = tier.get_each(blocks)
            right = [block in {1, 3, 5} for block in blocks]
            require(found == right, f"get_each of loose blocks {blocks}, of which 1, 3 and 5 are held: {found}")
        _expect_held(tier, {1, 3, 5}, "with holes before and between them")
        expect("loose blocks put that were held or are new", tier.put_each(ALL).count(True), len(LOOSE))
        _expect_held(tier, set(ALL), "once all are stored")
        expect("deleted", tier.delete(LOOSE, 3), 1)
        expect("deleted once more", tier.delete(LOOSE, 3), 0)
        _expect_held(tier, {0, 1, 2, 4, 5}, "after block 3 was deleted")
        expect("blocks of the document held", tier.held(DOCUMENT), 8)
        tier.check_accounts(DOCUMENT)
        tier.delete(DOCUMENT, 0)
        _expect_held(tier, {0, 1, 2, 4, 5}, "after the document was deleted")
        tier.clear()
        _expect_held(tier, set(), "after clear")

    @protects("T9", "H59", needs=TierHarness.require_reopening)
    def test_h59_a_restart_finds_loose_blocks(self, scene: TierHarness) -> None:
        """The next tier at the same place holds every loose block that was stored, and none that was deleted."""
        tier = _stored(scene, [0, 1, 3, 4, 5])
        tier.delete(LOOSE, 4)
        tier = scene.reopen(tier)
        _expect_held(tier, {0, 1, 3, 5}, "after a restart")
        tier.check_accounts()
        tier.require_undamaged("after an orderly restart")

    @protects("T9", "H22")
    def test_h22_damage_of_a_loose_block_is_a_miss_and_costs_no_other_one(self, scene: TierHarness) -> None:
        """The damaged one is not served, counted and dropped; the others arrive."""
        possible = False
        for how in (Damage.FLIPPED, Damage.GARBAGE, Damage.TORN, Damage.SHORT):
            tier = scene.open(scene.other_place(f"loose {how.name.lower()}"), label=how.name.lower())
            tier.put_each([0, 1, 3, 5])
            before = tier.tier.counts().damaged
            if scene.damage(tier, LOOSE, 3, how):
                possible = True
                arrived = tier.get_each([0, 1, 3, 5])
                if not arrived[2]:  # otherwise the tier had the sound bytes elsewhere
                    require(arrived == [True, True, False, True], f"with block 3 damaged arrive {arrived}")
                    require(tier.tier.counts().damaged > before, "counts() tells of no damaged block")
                    _expect_held(tier, {0, 1, 5}, "after a read found the damage")
                expect("loose blocks put again", tier.put_each([3]).count(True), 1)
                _expect_held(tier, {0, 1, 3, 5}, "once stored again")
            tier.close()
        observable_if(possible, "the suite does not override `damage`")

    @protects("T9", "P11")
    def test_progress_of_a_loose_read_counts_those_in_a_row(self, scene: TierHarness) -> None:
        """`on_progress` tells of no block that is not there; if it returns False the read ends and harms nothing."""
        tier = _stored(scene, [0, 1, 3, 5])
        told: list[int] = []

        def tell(blocks: int) -> bool:
            told.append(blocks)
            return True

        tier.get_each(ALL, on_progress=tell)
        require(all(a <= b for a, b in pairwise(told)), f"progress went back: {told}")
        require(
            not told or told[-1] <= 2, f"progress told of {told[-1:]} blocks in a row, of which the third is missing"
        )
        tier.get_each(ALL, on_progress=lambda blocks: False)
        _expect_held(tier, {0, 1, 3, 5}, "after a read that was ended")

    @protects("T10", "T1")
    def test_blocks_of_several_sizes_are_served_into_their_own_size_alone(self, scene: TierHarness) -> None:
        """A buffer's size is what is stored. A record of another size is a miss, and still there afterwards."""
        tier = _stored(scene, ALL)
        slot = self.slot_bytes
        for block, key in enumerate(LOOSE.keys):
            others = {0, slot // 4, slot // 2, slot} - {size_of(key, slot)}
            for nbytes in sorted(others):
                (arrived,) = tier.tier.get_each([key], empty_buffers(1, nbytes, self.ranks))
                require(not arrived, f"loose block {block} of {size_of(key, slot)} bytes is served as one of {nbytes}")
        tier.require_undamaged("and all that was asked for were blocks of another size")
        _expect_held(tier, set(ALL), "after reads of other sizes")

    @protects("T10", "T1")
    def test_a_chain_may_have_small_payloads_or_none(self, scene: TierHarness) -> None:
        """Chains of blocks smaller than the largest, of 0 bytes too, are stored, counted and served like others."""
        for nbytes in (0, self.slot_bytes // 4):
            tier = scene.open(scene.other_place(f"chain of {nbytes} bytes"))
            keys = DOCUMENT.keys
            for start, end in ((0, 3), (3, 8)):
                stored = tier.tier.put(keys, start, filled_buffers(keys[start:end], nbytes, self.ranks))
                expect(f"blocks {start} to {end - 1} of {nbytes} bytes stored", stored, end - start)
            expect("blocks held", tier.lookup(DOCUMENT), 8)
            buffers = empty_buffers(8, nbytes, self.ranks)
            expect("blocks served", tier.tier.get(keys, 0, buffers), 8)
            wrong = list(filter(None, map(first_difference, buffers, [content(key, nbytes) for key in keys])))
            require(not wrong, f"a block of {nbytes} bytes is not what was stored: {wrong[:1]}")
            tier.close()

    @protects("T7", "T9")
    def test_a_closed_tier_holds_no_loose_blocks(self, scene: TierHarness) -> None:
        """After `close` every method for loose blocks answers as if nothing were held, and none raises."""
        tier = _stored(scene, [0, 1])
        tier.close()
        answers = [*tier.lookup_each(ALL), *tier.get_each(ALL), *tier.put_each(ALL)]
        expect("loose blocks held, served or stored after close", answers.count(True), 0)
