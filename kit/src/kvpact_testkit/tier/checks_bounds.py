"""Checks of a tier's bound: how much it holds, and what it evicts first.

Part of `TierConformance`.
"""

from __future__ import annotations

from kvpact_testkit.results import observable_if, require
from kvpact_testkit.sample_blocks import Document, document
from kvpact_testkit.suite import Suite, protects
from kvpact_testkit.tier.context import TierOptions
from kvpact_testkit.tier.harness import TierHarness
from kvpact_testkit.tier.monitor import MonitoredTier, expect

CAPACITY = 12


class BoundChecks(TierOptions, Suite[TierHarness]):
    """What holds when the tier is full."""

    def _open(self, scene: TierHarness) -> MonitoredTier:
        observable_if(self.bounded, "the suite says `bounded = False`: the store's owner bounds it")
        return scene.open(scene.sized(CAPACITY))

    @protects("H50", "P12")
    def test_h50_capacity_is_never_exceeded(self, scene: TierHarness) -> None:
        """The tier never holds more blocks than it has room for, nor more bytes than `capacity` says."""
        tier = self._open(scene)
        documents = [document(f"document {number}", 5) for number in range(40)]
        documents += [wanted.branch(f"branch of {wanted.name}", 3, 7) for wanted in documents[::8]]
        for number, wanted in enumerate(documents):
            stored = tier.put(wanted)
            require(tier.lookup(wanted) >= stored, f"put says that {stored} blocks are held, lookup knows of fewer")
            if number % 4 == 0:
                self._require_bound(tier, documents[: number + 1])
        self._require_bound(tier, documents)
        require(tier.held(documents[-1]) > 0, "a full tier takes nothing new")
        require(tier.tier.counts().evicted > 0, "blocks were evicted, and counts() tells of none")
        tier.check_accounts(*documents)

    def _require_bound(self, tier: MonitoredTier, documents: list[Document]) -> None:
        held = len(tier.within_reach(documents))
        require(held <= CAPACITY, f"{held} blocks are held, in a tier with room for {CAPACITY}")
        said = tier.tier.capacity()
        used = sum(path.stat().st_size for path in tier.place.directory.rglob("*") if path.is_file())
        if said.capacity_bytes:
            require(said.used_bytes <= said.capacity_bytes, f"capacity() says so itself: {said}")
            require(used <= said.capacity_bytes, f"files of {used} bytes, in a tier of {said.capacity_bytes}")

    @protects("H50")
    def test_h50_a_document_larger_than_the_tier_keeps_its_head(self, scene: TierHarness) -> None:
        """Only its tail does not fit: the held blocks are a prefix, and they are served."""
        tier = self._open(scene)
        wanted = document("longer than the tier", 2 * CAPACITY + 1)
        stored = tier.put(wanted)
        require(0 < stored <= CAPACITY, f"put of {len(wanted)} blocks says {stored}, with room for {CAPACITY}")
        expect("blocks held", tier.held(wanted), stored)

    @protects("H54")
    def test_h54_tails_go_before_heads(self, scene: TierHarness) -> None:
        """Only blocks that no other block needs are evicted: every remaining block can still be reached."""
        tier = self._open(scene)
        first, second = document("first", CAPACITY), document("second", CAPACITY // 2)
        tier.put(first)
        stored = tier.put(second)
        left = tier.held(first)
        require(stored > 0, "a full tier takes nothing new")
        require(left > 0, f"of {CAPACITY} blocks no head is left, after {stored} others were stored")
        documents = [first, second]
        for number in range(12):
            documents.append(first.branch(f"branch {number}", number % 4 + 1, CAPACITY // 2 + number % 3))
            tier.put(documents[-1])
            reached = len(tier.within_reach(documents))
            if tier.tier.exclusive:
                expect("blocks held that can be reached from a first block", reached, tier.tier.capacity().blocks)
        tier.check_accounts(*documents)
