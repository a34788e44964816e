"""`TierConformance`: what every tier must do, as checks that its author inherits.

Owns what an author says of his tier and shows of its store; the checks themselves stand in the modules beside this
one, by subject. pytest collects them from a subclass named `Test...`; `run_suite` runs them without pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import ClassVar

from kvpact.identity.keys import BlockKey
from kvpact.testkit.faults import Crash, Faults
from kvpact.testkit.tier.checks_bounds import BoundChecks
from kvpact.testkit.tier.checks_faults import FaultChecks
from kvpact.testkit.tier.checks_lives import LifeChecks
from kvpact.testkit.tier.checks_promises import PromiseChecks
from kvpact.testkit.tier.harness import Damage, Place, TierScene
from kvpact.tiers.base import UNSEALED, RecordMac, Tier

__all__ = ["Crash", "Damage", "Faults", "Place", "TierConformance", "TierScene"]

ROOMY_BLOCKS = 64
"""Room of a tier where nothing is to be evicted; no check stores as much."""


class TierConformance(PromiseChecks, FaultChecks, BoundChecks, LifeChecks):
    """Inherit this, say how your tier is opened, and every promise of `Tier` is checked.

        class TestMyTier(TierConformance):
            reopens = True

            def open_tier(self, place: Place) -> Tier:
                return MyTier(place.directory, place.namespace, place.slot_bytes, place.capacity_blocks)

    What you do not say cannot be checked: such checks are reported as not observable (skipped, under pytest), with what
    is missing. A check that does not apply to your tier is switched off with `test_name = None`, next to the reason.
    """

    slot_bytes = 8192
    ranks = 2
    reopens = False
    bounded = True
    several_writers = False
    seal: ClassVar[RecordMac] = UNSEALED

    def open_tier(self, place: Place) -> Tier:
        """Your tier, opened at `place`: again what is there, if it was opened there before. May raise TierError."""
        raise NotImplementedError(f"{type(self).__name__} must say in `open_tier` how the tier is opened")

    def damage(self, place: Place, key: BlockKey, how: Damage) -> bool:
        """Optional: change what the store holds of block `key`, past the tier, which may be open; False if you cannot.

        The tier need not notice, but must never serve the damaged bytes.
        """
        return False

    def store_calls(self, faults: Faults) -> AbstractContextManager[None]:
        """Optional: within, each of the tier's reads of its store is announced with `faults.before_read()`, each write
        with `faults.before_write()`, before it is made.

        Those wait, or raise OSError or `Crash`; translate OSError to what your store's client raises. Announce, do not
        replace: what does not raise is to be done. Entered before `open_tier`, and left after the tiers are closed.
        """
        return nullcontext()

    def bury(self, tier: Tier) -> None:
        """Optional: end `tier` as the death of its process would: locks and descriptors go, nothing is flushed.

        By default it is closed, while all that it tries to write raises `Crash`.
        """
        with suppress(Crash):
            tier.close()

    @property
    def shows_store_calls(self) -> bool:
        return type(self).store_calls is not TierConformance.store_calls

    @contextmanager
    def scene(self, directory: Path) -> Iterator[TierScene]:
        scene = TierScene(self, directory, ROOMY_BLOCKS)
        with self.store_calls(scene.faults):
            try:
                yield scene
            finally:
                scene.end()
