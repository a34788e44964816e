"""The slab against a plain dictionary, with the process dying at any of its writes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpact.tiers.disk.inspection import verify_slab
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.tier import DiskTier
from slab_scenes import (
    bare_tier,
    capacity_for,
    chain,
    overwrite,
    payload_at,
    served,
    served_each,
    slab_path,
    slot_of,
    store,
    stored_alone,
)

TRUNK = chain("trunk", 8)
CHAINS = [TRUNK, chain("branch", 9, TRUNK[:3]), chain("alone", 7)]
ALONE = chain("for itself", 5)
"""Blocks without parents."""


PUNCH = Slab.punch


class Killed(BaseException):
    """The process died at this write."""


class Death:
    """Lets writes through until the one it was told to die at; that one is torn, and none comes after it."""

    def __init__(self) -> None:
        self.writes_left: int | None = None
        self.torn_tenths = 0
        self.tears_between = 1
        """Bytes that reach the file together or not at all."""
        self.dead = False

    def pwritev(self, descriptor: int, views: list[memoryview], offset: int) -> int:
        if self.dead:
            raise Killed
        if self.writes_left is None:
            return os.pwritev(descriptor, views, offset)
        self.writes_left -= 1
        if self.writes_left >= 0:
            return os.pwritev(descriptor, views, offset)
        self.dead = True
        whole = b"".join(views)
        torn = whole[: len(whole) * self.torn_tenths // 10 // self.tears_between * self.tears_between]
        overwrite(Path(f"/proc/self/fd/{descriptor}").resolve(), offset, torn)
        raise Killed

    def punch(self, slab: Slab, first: int, count: int) -> None:
        """A hole counts as a write, and is made or not."""
        if self.writes_left is not None:
            self.writes_left -= 1
            self.dead |= self.writes_left < 0
        if self.dead:
            raise Killed
        PUNCH(slab, first, count)


class SlabMachine(RuleBasedStateMachine):
    slots = 64
    """More than all chains together need: what is held is exactly what was stored."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvpact-slab-"))
        self.death = Death()
        self.held: set[bytes] = set()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Slab, "pwritev", staticmethod(self.death.pwritev))

    def teardown(self) -> None:
        self.patch.undo()
        self.tier.close()
        shutil.rmtree(self.directory)

    @initialize()
    def start(self) -> None:
        self.tier = self.reopened()

    def reopened(self) -> DiskTier:
        try:
            return bare_tier(self.directory, self.slots)
        except Killed:  # while it was starting
            self.death.dead, self.death.writes_left = False, None
            return bare_tier(self.directory, self.slots)

    def prefix(self, keys: list[bytes]) -> int:
        return next((block for block, key in enumerate(keys) if key not in self.held), len(keys))

    def forget(self, key: bytes) -> None:
        for keys in CHAINS:
            if key in keys:
                self.held -= set(keys[keys.index(key) :])
        self.held.discard(key)

    @rule(keys=st.sampled_from(CHAINS), data=st.data())
    def put(self, keys: list[bytes], data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(keys) - 1), label="start")
        end = data.draw(st.integers(start + 1, len(keys)), label="end")
        before = set(self.held)
        try:
            stored = store(self.tier, keys[:end], start)
        except Killed:
            self.recover(may_be_held=before | set(keys[start:end]), must_be_held=before)
            return
        if self.prefix(keys) >= start:
            self.stored(keys, start, end, stored)
        else:
            assert stored == 0

    def stored(self, keys: list[bytes], start: int, end: int, stored: int) -> None:
        assert stored == end - start
        self.held |= set(keys[start:end])

    @rule(keys=st.lists(st.sampled_from(ALONE), min_size=1, unique=True))
    def put_alone(self, keys: list[bytes]) -> None:
        before = set(self.held)
        try:
            stored = stored_alone(self.tier, keys)
        except Killed:
            self.recover(may_be_held=before | set(keys), must_be_held=before)
            return
        self.stored(keys, 0, len(keys), sum(stored))

    @rule(keys=st.lists(st.sampled_from([*CHAINS[1], *CHAINS[2], *ALONE]), unique=True))
    def get_by_key(self, keys: list[bytes]) -> None:
        assert served_each(self.tier, keys) == self.tier.lookup(keys) == [key in self.held for key in keys]

    def there(self) -> set[bytes]:
        """All blocks that the tier says it holds."""
        known = sorted({*ALONE, *(key for keys in CHAINS for key in keys)})
        return {key for key, there in zip(known, self.tier.lookup(known), strict=True) if there}

    @rule(keys=st.sampled_from(CHAINS))
    def get(self, keys: list[bytes]) -> None:
        assert served(self.tier, keys) == self.prefix(keys)

    @rule(keys=st.sampled_from([*CHAINS, ALONE]), data=st.data())
    def delete(self, keys: list[bytes], data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(keys), label="key")
        before = set(self.held)
        self.forget(key)
        try:
            assert self.tier.delete([key]) == len(before - self.held)
        except Killed:
            self.recover(may_be_held=before, must_be_held=set(self.held))

    @rule()
    def restart(self) -> None:
        # Closing writes the time of last use into sound headers, in place. A header lies within one sector and page,
        # so neither a kill nor a power cut tears it.
        self.death.tears_between = 256
        try:
            self.tier.close()
        except Killed:
            self.recover(self.held, self.held)
            return
        finally:
            self.death.tears_between = 1
        self.tier = self.reopened()
        assert self.tier.counts().damaged == 0

    @rule(writes=st.integers(0, 12), torn_tenths=st.integers(0, 10))
    def die_soon(self, writes: int, torn_tenths: int) -> None:
        self.death.writes_left, self.death.torn_tenths = writes, torn_tenths

    def recover(self, may_be_held: set[bytes], must_be_held: set[bytes]) -> None:
        """The process is gone; a new one takes the file as it is."""
        self.tier.slab.close()
        self.death.dead, self.death.writes_left = False, None
        self.tier = self.reopened()
        now = self.there()
        assert now <= may_be_held, "a block appeared that was never stored"
        self.must_be_held(must_be_held, now)
        for keys in CHAINS:
            assert served(self.tier, keys) == self.tier.leading(keys), "a kill leaves nothing damaged to be found late"
        assert served_each(self.tier, ALONE) == self.tier.lookup(ALONE)
        self.held = now

    def must_be_held(self, expected: set[bytes], now: set[bytes]) -> None:
        assert expected <= now, "a block that was stored before the kill is gone"

    @precondition(lambda self: self.held and self.death.writes_left is None)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)), label="key")
        overwrite(
            slab_path(self.directory), payload_at(slab_path(self.directory), slot_of(self.tier, key)), b"garbage!"
        )
        self.forget(key)
        for keys in CHAINS:
            if key in keys:
                assert served(self.tier, keys) <= keys.index(key)
        if key in ALONE:
            assert served_each(self.tier, ALONE) == [each in self.held for each in ALONE]

    @invariant()
    def sound(self) -> None:
        self.tier.check()
        assert slab_path(self.directory).stat().st_size <= capacity_for(self.slots)
        for keys in CHAINS:
            assert self.tier.leading(keys) == self.prefix(keys)
        assert self.there() == self.held
        if not self.death.dead:
            report = verify_slab(slab_path(self.directory))
            assert not report.damaged
            assert report.records == self.tier.capacity().blocks == len(self.held)


class EvictingMachine(SlabMachine):
    slots = 5
    """Far fewer than the chains need: nearly every write evicts, and what is held is whatever was used last."""

    @initialize()
    def start(self) -> None:
        self.tier = self.reopened()
        store(self.tier, TRUNK)
        self.stored(TRUNK, 0, 8, 5)

    def stored(self, keys: list[bytes], start: int, end: int, stored: int) -> None:
        assert stored <= end - start
        self.held = self.there()
        assert len(self.held) <= self.slots

    def must_be_held(self, expected: set[bytes], now: set[bytes]) -> None:
        """Anything may have been evicted by the write that died."""


steps = settings(max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestSlab = SlabMachine.TestCase
TestSlab.settings = steps
TestEviction = EvictingMachine.TestCase
TestEviction.settings = steps


class LongSlabMachine(SlabMachine):
    """For the soak."""


TestSlabSoak = pytest.mark.soak(pytest.mark.timeout(7200)(LongSlabMachine.TestCase))
TestSlabSoak.settings = settings(steps, max_examples=1000, stateful_step_count=60)


class LongEvictingMachine(EvictingMachine):
    """For the soak."""


TestEvictionSoak = pytest.mark.soak(pytest.mark.timeout(7200)(LongEvictingMachine.TestCase))
TestEvictionSoak.settings = settings(steps, max_examples=1000, stateful_step_count=60)
