"""Checks of a tier's bound: how much it holds, and what it evicts first.

Part of `TierConformance`.
"""

from __future__ import annotations

from kvpact_testkit.results import observable_if, require
from kvpact_testkit.sample_blocks import Document, document, separate
from kvpact_testkit.suite import Suite, protects
from kvpact_testkit.tier.context import TierOptions
from kvpact_testkit.tier.harness import TierHarness
from kvpact_testkit.tier.monitor import MonitoredTier, expect, numbers

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
            held = tier.lookup(wanted)
            said = f"put says that blocks {numbers(stored)} are held, lookup names {numbers(held)}"
            require(stored <= held, said)
            if number % 4 == 0:
                self._require_bound(tier, documents[: number + 1])
        self._require_bound(tier, documents)
        require(tier.held(documents[-1]), "a full tier takes nothing new")
        evicted = not tier.has_counts or tier.tier.counts().evicted
        require(evicted, "blocks were evicted, and counts() tells of none")
        tier.check_accounts(*documents)

    def _require_bound(self, tier: MonitoredTier, documents: list[Document]) -> None:
        held = len(tier.named_keys(documents))
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
        said = f"put of {len(wanted)} blocks says that {len(stored)} are held, with room for {CAPACITY}"
        require(0 < len(stored) <= CAPACITY, said)
        expect("blocks that put says are held", stored, range(len(stored)))
        expect("blocks held", tier.held(wanted), stored)

    @protects("H54")
    def test_h54_tails_go_before_heads(self, scene: TierHarness) -> None:
        """Only blocks that no other block needs are evicted: every remaining block can still be reached."""
        tier = self._open(scene)
        first, second = document("first", CAPACITY), document("second", CAPACITY // 2)
        tier.put(first)
        stored = tier.put(second)
        left = tier.lookup(first)
        require(stored, "a full tier takes nothing new")
        require(0 in left, f"of {CAPACITY} blocks no head is left, after {len(stored)} others were stored")
        expect("blocks held of it", tier.held(first), left)
        documents = [first, second]
        for number in range(12):
            documents.append(first.branch(f"branch {number}", number % 4 + 1, CAPACITY // 2 + number % 3))
            tier.put(documents[-1])
            for wanted in documents if tier.keeps_chains else ():
                held = tier.lookup(wanted)
                expect(f"blocks held of {wanted.name}, which need those before them", held, range(len(held)))
        tier.check_accounts(*documents)

    @protects("T13", "H54")
    def test_the_deepest_of_blocks_without_a_parent_go_first(self, scene: TierHarness) -> None:
        """Blocks are stored together, then others: what is left of the first has the smallest depth."""
        tier = self._open(scene)
        first, second = separate("first", CAPACITY), separate("second", CAPACITY // 3)
        order = [*range(1, CAPACITY, 2), *range(0, CAPACITY, 2)]
        expect("blocks stored of as many as it has room for", tier.put(first, order), order)
        stored = tier.put(second)
        require(stored, "a full tier takes nothing new")
        left = tier.lookup(first)
        require(len(left) + len(stored) <= CAPACITY, f"{len(left) + len(stored)} blocks are held, not {CAPACITY}")
        expect(f"of {CAPACITY} blocks stored together, those left", left, range(len(left)))
        expect("blocks held of the others", tier.held(second), stored)
