"""`TierConformance`: what every tier must do, as checks that its author inherits.

An author declares the tier's properties in `TierOptions`; the checks are in the modules beside this one, by subject.
pytest collects them from a subclass named `Test...`; `run_suite` runs them without pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpact_testkit.faults import Crash, Faults
from kvpact_testkit.tier.checks_bounds import BoundChecks
from kvpact_testkit.tier.checks_faults import FaultChecks
from kvpact_testkit.tier.checks_lives import LifeChecks
from kvpact_testkit.tier.checks_promises import PromiseChecks
from kvpact_testkit.tier.context import Damage, StoreContext
from kvpact_testkit.tier.harness import TierHarness

__all__ = ["Crash", "Damage", "Faults", "StoreContext", "TierConformance", "TierHarness"]

ROOMY_BLOCKS = 64
"""Blocks of room where nothing is to be evicted; no check stores as many."""


class TierConformance(PromiseChecks, FaultChecks, BoundChecks, LifeChecks):
    """Inherit this class and define how your tier is opened: every promise of `Tier` is checked.

        class TestMyTier(TierConformance):
            reopens = True

            def open_tier(self, place: StoreContext) -> Tier:
                return MyTier(place.directory, place.namespace, place.slot_bytes, place.capacity_blocks)

    Checks that need an option of `TierOptions` that you do not define are reported as not observable (skipped, under
    pytest), with its name. A check that does not apply to your tier is switched off with
    `test_name = None`, next to the reason.
    """

    @contextmanager
    def scene(self, directory: Path) -> Iterator[TierHarness]:
        scene = TierHarness(self, directory, ROOMY_BLOCKS)
        with self.store_calls(scene.faults):
            try:
                yield scene
            finally:
                scene.end()
