"""The harness of a tier's check: monitored tiers in a place of their own, with every step in the script.

Owns the script. Decides no check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvpact.errors import TierError
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import Tier
from kvpact_testkit.background import Background
from kvpact_testkit.faults import Crash, Fault, Faults, Operation
from kvpact_testkit.results import observable_if
from kvpact_testkit.sample_blocks import Document
from kvpact_testkit.tier.context import Damage, StoreContext, TierOptions
from kvpact_testkit.tier.monitor import MonitoredTier, store
from kvpact_testkit.trace import Trace

NAMESPACE = Namespace({"model": "kvpact-testkit", "dtype": "bytes", "block_size": "16"})
FOREIGN = Namespace({"model": "kvpact-testkit-foreign", "dtype": "bytes", "block_size": "16"})


class TierHarness:
    """The argument of a tier's check: a place, faults for the tier's store, and tiers to open."""

    def __init__(self, suite: TierOptions, directory: Path, capacity_blocks: int) -> None:
        self.suite = suite
        self.faults = Faults()
        self.script = Trace()
        self.place = StoreContext(directory / "place", NAMESPACE, suite.slot_bytes, capacity_blocks, suite.seal)
        self.place.directory.mkdir()
        self._directory = directory
        self._opened: list[Tier] = []

    def open(self, place: StoreContext | None = None, label: str = "") -> MonitoredTier:
        """A tier at `place`, by default the scene's own."""
        place = place or self.place
        tier = self.suite.open_tier(place)
        self._opened.append(tier)
        watched = MonitoredTier(tier, place, self.suite, self.script, label)
        watched.say(f"open(room for {place.capacity_blocks} blocks)")
        return watched

    def open_with(
        self, *documents: Document, place: StoreContext | None = None, end: int | None = None
    ) -> MonitoredTier:
        """A tier at `place`, by default the scene's own, in which the first `end` blocks of `documents` are stored."""
        tier = self.open(place)
        store(tier, *documents, end=end)
        return tier

    def open_or_none(self, place: StoreContext, label: str = "") -> MonitoredTier | None:
        """Open a tier, see `open`; None if the tier refuses with a TierError."""
        try:
            return self.open(place, label)
        except TierError as refused:
            self.script.note(f"open refused: {refused}")
            return None

    def other_place(self, name: str, capacity_blocks: int | None = None) -> StoreContext:
        """A new place that shares nothing with any other."""
        directory = self._directory / name
        directory.mkdir()
        return replace(self.place, directory=directory, capacity_blocks=capacity_blocks or self.place.capacity_blocks)

    def sized(self, capacity_blocks: int) -> StoreContext:
        """The scene's place, with room for `capacity_blocks` blocks."""
        return replace(self.place, capacity_blocks=capacity_blocks)

    def reopen(self, watched: MonitoredTier) -> MonitoredTier:
        """Close a tier and open another one at its place."""
        watched.close()
        return self.open(watched.place)

    def bury(self, watched: MonitoredTier) -> MonitoredTier:
        """After a crash: another process opens the place."""
        self.suite.bury(watched.tier)
        self._opened.remove(watched.tier)
        self.faults.revive()
        return self.open(watched.place)

    def damage(self, watched: MonitoredTier, wanted: Document, block: int, how: Damage) -> bool:
        """Damage what the store holds of a block; False if the author of the suite cannot do it."""
        done = self.suite.damage(watched.place, wanted.keys[block], how)
        if done:
            self.script.note(f"the store's record of {wanted.name}, block {block}, is damaged: {how}")
        return done

    @contextmanager
    def hanging(self, tier: MonitoredTier, operation: Operation, call: Callable[[], object]) -> Iterator[bool]:
        """Within, `call` runs on a thread; yields whether the store hangs in the call's first `operation`."""
        self.faults.arm(operation, Fault.HANG)
        running = Background(call)
        hangs = self.faults.until_waiting(1, self.suite.gives_up_after)
        tier.say(f"the store hangs in a {operation}")
        yield hangs
        self.faults.disarm()
        self.faults.release()
        running.result()

    def let_all_fail(self, tier: MonitoredTier) -> None:
        """From now on every call of the store fails."""
        for operation in (Operation.READ, Operation.WRITE):
            self.faults.arm(operation, Fault.ERROR, times=1_000_000)
        tier.say("every read and write of the store fails from now on")

    def require_store_calls(self) -> None:
        """Raises NotObservable if the suite does not show the tier's calls of its store."""
        observable_if(self.suite.shows_store_calls, "the suite does not override `store_calls`")

    def require_reopening(self) -> None:
        """Raises NotObservable if nothing outlives a tier."""
        observable_if(self.suite.reopens, "the suite says `reopens = False`: nothing outlives the tier")

    def require_deleting(self) -> None:
        """Raises NotObservable if the tier has nothing that drops single blocks."""
        observable_if(self.suite.deletes, "the suite says `deletes = False`: nothing drops single blocks")

    def require_clearing(self) -> None:
        """Raises NotObservable if the tier has nothing that drops all."""
        observable_if(self.suite.clears, "the suite says `clears = False`: nothing drops all")

    def require_sizes(self) -> None:
        """Raises NotObservable if the tier keeps blocks of one size only."""
        observable_if(not self.suite.one_size, "the suite says `one_size = True`: the tier keeps no other sizes")

    def end(self) -> None:
        """Release every waiting operation, and close all tiers."""
        self.faults.reset()
        for tier in self._opened:
            with suppress(Exception, Crash):
                tier.close()
