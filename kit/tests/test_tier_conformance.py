"""Our own tiers pass the suite that authors of tiers inherit, and deliberately broken ones do not."""

from __future__ import annotations

from dictionary_suite import DictionarySuite
from kvpact_testkit.peers.own import DiskSuite


class TestDictionaryTier(DictionarySuite):
    pass


class TestDiskTier(DiskSuite):
    pass
