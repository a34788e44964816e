"""Opens the cache of an engine: kvpact's own, or another author's that the configuration names.

Owns what only the builder of a cache can do: give it tiers, and read its counts. All others see the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from kvpact.cache.budget import StepBudget
from kvpact.cache.cache import PactCache
from kvpact.config import NO_TIERS, KvpactConfig
from kvpact.contract import CacheSpec, ExternalCache
from kvpact.errors import ConfigError
from kvpact.identity.groups import GroupSet
from kvpact.memory.arena import Arena
from kvpact.metrics import Metrics, Snapshot
from kvpact.tiers.executor import TierExecutor


@dataclass(frozen=True, slots=True)
class OpenCache:
    """A cache and its arena. Only kvpact's own cache, `own`, has tiers."""

    cache: ExternalCache
    observe: Callable[[], Snapshot]
    """Returns all counts."""
    _arena: Arena
    own: PactCache | None = None

    @property
    def shared_tiers(self) -> Sequence[int]:
        """The positions of the shared tiers."""
        return self.own.tiers.shared_tiers if self.own is not None else ()

    def open_tiers(self, tiers: Sequence[TierExecutor]) -> None:
        """Use these tiers, which were not there from the start."""
        if self.own is None:
            raise ConfigError(NO_TIERS)
        self.own.open_tiers(tiers)

    def shutdown(self) -> None:
        """End the cache, and then its arena."""
        self.cache.shutdown()
        self._arena.close()


def open_cache(
    config: KvpactConfig,
    *,
    namespace: bytes,
    block_size: int,
    arena: Arena,
    tiers: Sequence[TierExecutor] = (),
    clock: Callable[[], float],
    metrics: Metrics,
    budget: StepBudget,
    groups: GroupSet | None = None,
    classes: Sequence[int] = (),
    copies_per_block: int = 0,
) -> OpenCache:
    """The cache that `config` names; the arguments are those of `PactCache`. Raises ConfigError if it cannot open."""
    if config.cache is None:
        own = PactCache(
            config,
            namespace=namespace,
            block_size=block_size,
            arena=arena,
            tiers=tiers,
            clock=clock,
            metrics=metrics,
            budget=budget,
            groups=groups,
            classes=classes,
            copies_per_block=copies_per_block,
        )
        return OpenCache(own, own.observe, arena, own)
    spec = CacheSpec(
        block_size=block_size,
        num_slots=arena.num_slots,
        num_ranks=arena.num_ranks,
        slot_bytes=arena.rank_slot_bytes,
        namespace=namespace,
        clock=clock,
        groups=groups,
    )
    cache = _find_factory(config.cache)(spec)
    if not isinstance(cache, ExternalCache):
        raise ConfigError(
            f'"cache": "{config.cache}" made a {type(cache).__name__}; a kvpact.contract.ExternalCache is needed'
        )
    return OpenCache(cache, metrics.snapshot, arena)


def _find_factory(name: str) -> Callable[[CacheSpec], object]:
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'"cache": "{name}" cannot be loaded: {error}; name a module that the engine\'s Python can import, and a '
            "class or function in it"
        ) from error
    if not callable(factory):
        raise ConfigError(f'"cache": "{name}" is a {type(factory).__name__}; a class or function is needed')
    made: Callable[[CacheSpec], object] = factory
    return made
