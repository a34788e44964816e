"""From a tier's URL to the tier: the kinds that kvpact brings, and those that other packages add.

Owns the table of kinds and the entry-point group `kvpact.tiers`. Loads a kind's module only when one of its URLs is
opened, so that nobody needs the client of a store that he does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from kvpact._moved import renamed
from kvpact.errors import ConfigError, TierError
from kvpact.identity.keys import Namespace
from kvpact.tiers.backend import Backend
from kvpact.tiers.backends import BACKEND_OF, BACKENDS, ENTRY_POINTS
from kvpact.tiers.base import UNSEALED, RecordMac, Tier
from kvpact.tiers.shared.store import RecordStore
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import TierURL


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is opened for. `slot_bytes` is a block's size over all ranks."""

    namespace: Namespace
    slot_bytes: int
    seal: RecordMac = UNSEALED


OpenTier: TypeAlias = "Callable[[TierURL, TierContext], Tier]"
"""What an entry point of the group `kvpact.tiers` names. It raises TierError, with one message for people."""


class OpenStore(Protocol):
    """What opens a kind of store; see `open_store`."""

    def __call__(self, url: TierURL, *, for_tool: bool) -> RecordStore: ...


def open_store(url: TierURL, *, for_tool: bool = False) -> RecordStore:
    """The store behind a shared tier's URL. Raises TierError.

    `for_tool`: for a person who looks. Nothing is made, evicted, kept for longer or lent by opening, asking, reading
    and closing; `remove` alone changes what is there, and nothing is written.
    """
    backend = BACKEND_OF.get(url.scheme)
    if backend is None or not backend.shared:
        shared = [scheme for backend in BACKENDS if backend.shared for scheme in backend.schemes]
        raise TierError(f"{url} is no store that several engines share; those are {', '.join(shared)}")
    return cast(OpenStore, _opener(backend))(url, for_tool=for_tool)


def _opener(backend: Backend) -> object:
    module, _, function = backend.opener.partition(":")
    return getattr(import_module(module), function)


def open_tier(url: TierURL, place: TierContext) -> Tier:
    """The tier at a URL, for one engine's blocks.

    Raises:
        TierError: with one message for people; the engine serves on without this tier.
    """
    backend = BACKEND_OF.get(url.scheme)
    if backend is not None and not backend.shared:
        return cast(OpenTier, _opener(backend))(url, place)
    if backend is not None:
        return SharedTier(open_store(url), place.namespace, place.slot_bytes, seal=place.seal)
    for entry in entry_points(group=ENTRY_POINTS, name=url.scheme):
        try:
            return cast(OpenTier, entry.load())(url, place)
        except TierError:
            raise
        except Exception as error:  # somebody else's code must not cost the engine
            raise TierError(f"{entry.value} cannot open {url}: {type(error).__name__}: {error}") from error
    raise TierError(f"no installed package opens {url}: none has an entry point {url.scheme!r} in {ENTRY_POINTS}")


def load_seal(path: Path | None) -> RecordMac:
    """The seal of a record key file; without one, none.

    Raises:
        ConfigError: it cannot be read, or holds too little; the engine does not start, rather than trust everybody.
    """
    if path is None:
        return UNSEALED
    try:
        return RecordMac.from_secret(path.read_bytes().strip())
    except OSError as error:
        raise ConfigError(f"record_key_file={path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"record_key_file={path}: {error}; make one with: openssl rand -hex 32") from None


__getattr__ = renamed(__name__, TierPlace="TierContext")
