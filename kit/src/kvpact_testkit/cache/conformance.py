"""`CacheConformance`: the properties P1 to P14 and the hazards of a cache, as checks that its author inherits.

Owns the class that an author inherits; the checks are in the modules beside this one, by subject. pytest collects them
from a subclass named `Test...`; `run_conformance` runs them without pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvpact.contract import ExternalCache
from kvpact_testkit.cache.checks_bounds import BoundChecks
from kvpact_testkit.cache.checks_epochs import EpochChecks
from kvpact_testkit.cache.checks_failures import FailureChecks
from kvpact_testkit.cache.checks_groups import GroupChecks
from kvpact_testkit.cache.checks_promises import PromiseChecks
from kvpact_testkit.cache.checks_queue import QueueChecks
from kvpact_testkit.cache.subjects import CacheContext, CacheFactory, CacheUnderTest
from kvpact_testkit.results import Check, ConformanceReport
from kvpact_testkit.suite import run_suite

__all__ = [
    "CacheConformance",
    "CacheContext",
    "CacheFactory",
    "CacheUnderTest",
    "run_conformance",
    "run_suite_as_report",
]


class CacheConformance(PromiseChecks, FailureChecks, BoundChecks, QueueChecks, EpochChecks, GroupChecks):
    """Inherit this class and define how your cache is made: the whole pact is checked on the embedded engine.

        class TestMyCache(CacheConformance):
            def make_cache(self, place: CacheContext) -> ExternalCache:
                return MyCache(place.block_size, place.num_slots, place.num_ranks)

    Each check runs in every mode of `modes`: an engine that speaks the contract, and engines that act like releases of
    vLLM. `timeout` is the longest time, in seconds of the kit's clock, that a request may wait for your cache.
    """


def run_conformance(
    factory: CacheFactory,
    *,
    subject: str = "a cache",
    only: str = "",
    modes: tuple[str, ...] = (),
    parent: Path | None = None,
    progress: Callable[[Check], object] = lambda check: None,
) -> ConformanceReport:
    """Run all checks whose name matches `only` on the caches that `factory` makes, in all modes or the named ones."""

    class Anonymous(CacheConformance):
        """The suite around one factory."""

        def make_cache(self, place: CacheContext) -> ExternalCache | CacheUnderTest:
            return factory(place)

    Anonymous.modes = modes or CacheConformance.modes
    return run_suite_as_report(Anonymous, subject, only=only, parent=parent, progress=progress)


def run_suite_as_report(
    suite: type[CacheConformance],
    subject: str,
    *,
    only: str = "",
    parent: Path | None = None,
    progress: Callable[[Check], object] = lambda check: None,
) -> ConformanceReport:
    """Run an author's own suite; `progress` is called with each check when it ends."""
    checks = []
    for check in run_suite(suite, only, parent=parent):
        checks.append(check)
        progress(check)
    return ConformanceReport(subject, f"the embedded engine as {', '.join(suite.modes)}", tuple(checks))
