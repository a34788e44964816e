"""Engines on one directory against what they were given: they come, go, and die at any write, in any order."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from test_slab_stateful import Death, Killed

from kvpact.errors import TierError
from kvpact.tiers.disk import slab_directory, slab_size
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.inspection import verify_slab
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.tier import DiskTier
from slab_scenes import bare_tier, capacity_for, chain, files_in, served, store

TRUNK = chain("trunk", 8)
CHAINS = [TRUNK, chain("branch", 9, TRUNK[:3]), chain("alone", 7)]
MOST_ENGINES = 3

T = TypeVar("T")
engines = st.integers(0, MOST_ENGINES - 1)
chains = st.sampled_from(CHAINS)
writes = st.one_of(st.none(), st.none(), st.integers(0, 12))
"""After how many writes of a step its engine dies; None: it lives on."""


class ReplicaMachine(RuleBasedStateMachine):
    slots = 24
    """All chains have room in one engine's slab; three engines have 8 slots each."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvpact-slab-"))
        self.tiers: list[DiskTier] = []
        self.refused: dict[DiskTier, set[bytes]] = {}
        """What an engine knew and deleted: it must not be served that until somebody stores it again."""
        self.deleted: dict[DiskTier, set[bytes]] = {}
        """What an engine ever deleted: it may not be served that by all who have it."""
        self.death = Death()
        self.death.tears_between = 256  # a kill tears no header, which lies within a sector and a page
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Slab, "pwritev", staticmethod(self.death.pwritev))
        self.patch.setattr(Slab, "punch", lambda *arguments: self.death.punch(*arguments))
        self.patch.setattr(slab_size, "LIMIT_STEP", 3)  # a slab shrinks in several turns
        self.patch.setattr(disk_tier, "start_background", lambda *_: None)

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        self.patch.undo()
        shutil.rmtree(self.directory)

    def tier(self, number: int) -> DiskTier:
        return self.tiers[number % len(self.tiers)]

    def do(self, tier: DiskTier, work: Callable[[DiskTier], T], writes: int | None, torn_tenths: int = 0) -> T | None:
        """What `work` returns; None if the engine died in it."""
        self.death.writes_left, self.death.torn_tenths = writes, torn_tenths
        try:
            return work(tier)
        except Killed:
            try:
                tier.slab.close()
            except TierError:  # it died as it made its first slab
                tier.close()
            self.tiers.remove(tier)
            return None
        finally:
            self.death.dead, self.death.writes_left = False, None
            self.look()

    def look(self) -> None:
        """What holds after each step."""
        assert files_in(self.directory) <= capacity_for(self.slots)
        paths = []
        for tier in self.tiers:
            tier.check()
            try:
                paths.append(tier.slab.path)
            except TierError:
                continue
        assert len(set(paths)) == len(paths), "two engines write one slab"
        assert len(list(self.directory.glob("kvpact/*.slab"))) <= MOST_ENGINES

    @precondition(lambda self: len(self.tiers) < MOST_ENGINES)
    @rule()
    def open(self) -> None:
        self.tiers.append(bare_tier(self.directory, self.slots))
        self.refused[self.tiers[-1]], self.deleted[self.tiers[-1]] = set(), set()
        self.look()

    @precondition(lambda self: self.tiers)
    @rule(number=engines, writes=writes)
    def close(self, number: int, writes: int | None) -> None:
        tier = self.tier(number)
        self.do(tier, DiskTier.close, writes)
        if tier in self.tiers:
            self.tiers.remove(tier)

    @precondition(lambda self: self.tiers)
    @rule(number=engines, keys=chains, data=st.data(), writes=writes, torn=st.integers(0, 10))
    def put(self, number: int, keys: list[bytes], data: st.DataObject, writes: int | None, torn: int) -> None:
        tier = self.tier(number)
        end = data.draw(st.integers(1, len(keys)), label="end")
        start = tier.put_start(keys[:end])
        if start < end:
            stored = self.do(tier, lambda tier: store(tier, keys[:end], start), writes, torn)
            for refused in self.refused.values():
                refused.difference_update(keys[start:end])
            if stored:
                assert tier.leading(keys) >= start + stored

    @precondition(lambda self: self.tiers)
    @rule(number=engines, keys=chains)
    def get(self, number: int, keys: list[bytes]) -> None:
        tier = self.tier(number)
        held = tier.leading(keys)
        assert served(tier, keys) <= held
        assert self.refused[tier].isdisjoint(keys[:held])
        assert tier.counts().damaged == tier.counts().failed_reads == 0
        tier.tend()
        assert served(tier, keys) == tier.leading(keys), "what it has looked for is there"

    @precondition(lambda self: self.tiers)
    @rule(number=engines, keys=chains, data=st.data(), writes=writes)
    def delete(self, number: int, keys: list[bytes], data: st.DataObject, writes: int | None) -> None:
        tier, block = self.tier(number), data.draw(st.integers(0, len(keys) - 1), label="block")
        known = {key for each in CHAINS for key in each[: tier.leading(each)]}
        if self.do(tier, lambda tier: tier.delete([keys[block]]), writes) is not None:
            gone = {key for each in CHAINS if keys[block] in each for key in each[each.index(keys[block]) :]}
            self.refused[tier] |= gone & known
            self.deleted[tier] |= gone

    @precondition(lambda self: self.tiers)
    @rule(number=engines, writes=writes)
    def tend(self, number: int, writes: int | None) -> None:
        self.do(self.tier(number), DiskTier.tend, writes)

    @rule(seconds=st.sampled_from([0.0, slab_directory.ABSENT_S]))
    def wait(self, seconds: float) -> None:
        """Whether idle slabs give way now, and holes are filled that were made for their engines."""
        self.patch.setattr(slab_directory, "ABSENT_S", seconds)

    @precondition(lambda self: self.tiers)
    @rule()
    def settle(self) -> None:
        for _ in range(2):
            for tier in self.tiers:
                tier.tend()
                self.look()
        for tier in self.tiers:
            for keys in CHAINS:
                most = max(other.put_start(keys) for other in self.tiers)
                wanted = next((at for at in range(most) if keys[at] in self.deleted[tier]), most)
                assert tier.leading(keys) >= wanted, "all see what each has"
                assert served(tier, keys) == tier.leading(keys)
            with suppress(TierError):  # it has no slab yet
                assert verify_slab(tier.slab.path).records == tier.capacity().blocks, "it drops what it evicts on disk"
        for path in self.directory.glob("kvpact/*.slab"):
            assert not verify_slab(path).damaged, "neither a death nor a shrinking file leaves a torn record"


class CrowdedMachine(ReplicaMachine):
    slots = 9
    """One engine has room for a chain, and three have 3 slots each."""


steps = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestReplicas = ReplicaMachine.TestCase
TestReplicas.settings = steps
TestCrowd = CrowdedMachine.TestCase
TestCrowd.settings = steps


class LongReplicaMachine(ReplicaMachine):
    """For the soak."""


TestReplicasSoak = pytest.mark.soak(pytest.mark.timeout(7200)(LongReplicaMachine.TestCase))
TestReplicasSoak.settings = settings(steps, max_examples=1000, stateful_step_count=60)


class LongCrowdedMachine(CrowdedMachine):
    """For the soak."""


TestCrowdSoak = pytest.mark.soak(pytest.mark.timeout(7200)(LongCrowdedMachine.TestCase))
TestCrowdSoak.settings = settings(steps, max_examples=1000, stateful_step_count=60)
