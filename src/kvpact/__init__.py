"""kvpact: an external KV cache for LLM serving engines, with an explicit plan, commit and abort contract.

The public names can be imported from here; docs/public-names.md says what each is and whether it is stable. Nothing is
loaded before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpact.cache.cache import PactCache
    from kvpact.cache.memory import EngineKV
    from kvpact.config import KvpactConfig, load_config
    from kvpact.contract import (
        POSTPONED_STEPS,
        BlockHolder,
        ExternalCache,
        ExternalCacheWorker,
        ExternalKVMatch,
        ExternalMatchExit,
        JobOutcome,
        JobQuery,
        JobTally,
        KVCacheBlockView,
        LoadJob,
        LoadSettlement,
        SaveJob,
        SchedulerContext,
        StepWork,
        WorkerReport,
    )
    from kvpact.errors import ConfigError, NoSuchTier, PactViolation, TierError
    from kvpact.identity.keys import BlockKey, BlockKeys, Namespace, RequestIdentity
    from kvpact.matches.forms import ConfirmsExternalMatch, PostponesExternalMatch, SupportsExternalMatch
    from kvpact.ranges import BlockRange, RangeSet
    from kvpact.tiers.base import Tier
    from kvpact.tiers.shared.store import RecordStore
    from kvpact.tiers.shared.tier import SharedTier

__version__ = "0.1.0"

__all__ = [
    "POSTPONED_STEPS",
    "BlockHolder",
    "BlockKey",
    "BlockKeys",
    "BlockRange",
    "ConfigError",
    "ConfirmsExternalMatch",
    "EngineKV",
    "ExternalCache",
    "ExternalCacheWorker",
    "ExternalKVMatch",
    "ExternalMatchExit",
    "JobOutcome",
    "JobQuery",
    "JobTally",
    "KVCacheBlockView",
    "KvpactConfig",
    "LoadJob",
    "LoadSettlement",
    "Namespace",
    "NoSuchTier",
    "PactCache",
    "PactViolation",
    "PostponesExternalMatch",
    "RangeSet",
    "RecordStore",
    "RequestIdentity",
    "SaveJob",
    "SchedulerContext",
    "SharedTier",
    "StepWork",
    "SupportsExternalMatch",
    "Tier",
    "TierError",
    "WorkerReport",
    "load_config",
]

_HOMES: Final = {
    "kvpact.cache.cache": ("PactCache",),
    "kvpact.cache.memory": ("EngineKV",),
    "kvpact.config": ("KvpactConfig", "load_config"),
    "kvpact.errors": ("ConfigError", "NoSuchTier", "PactViolation", "TierError"),
    "kvpact.identity.keys": ("BlockKey", "BlockKeys", "Namespace", "RequestIdentity"),
    "kvpact.matches.forms": ("ConfirmsExternalMatch", "PostponesExternalMatch", "SupportsExternalMatch"),
    "kvpact.ranges": ("BlockRange", "RangeSet"),
    "kvpact.tiers.base": ("Tier",),
    "kvpact.tiers.shared.store": ("RecordStore",),
    "kvpact.tiers.shared.tier": ("SharedTier",),
}
"""Where the public names are defined; all others are the contract's."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "kvpact.contract")
    return getattr(import_module(home), name)
