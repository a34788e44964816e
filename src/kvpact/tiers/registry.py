"""From a tier's URL to the tier: the kinds that kvpact brings, and those that other packages add.

Owns the entry-point group `kvpact.tiers`. Imports a kind's module only when one of its URLs is opened, so that no
client of an unused store need be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Final, Protocol, TypeAlias, cast

from kvpact.errors import ConfigError, KvpactError, NoSuchTier, TierError, reason_of
from kvpact.identity.keys import Namespace
from kvpact.tiers.backends import BACKEND_OF, BACKENDS, ENTRY_POINTS
from kvpact.tiers.base import UNSEALED, RecordMac, Tier
from kvpact.tiers.shared.store import RecordStore
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import TierURL


@dataclass(frozen=True, slots=True)
class TierContext:
    """Context of a tier's opening. `slot_bytes` is the largest block's size over all ranks; others may be smaller.

    With `for_tool` a command looks at what is there: opening, asking, reading and closing create and evict nothing.
    """

    namespace: Namespace
    slot_bytes: int
    seal: RecordMac = UNSEALED
    for_tool: bool = False


OF_A_TOOL: Final = TierContext(Namespace({"tool": "kvpact"}), 4096, for_tool=True)
"""Namespace for commands that open another package's tier: no engine has it."""


OpenTier: TypeAlias = "Callable[[TierURL, TierContext], Tier]"
"""The function that an entry point of the group `kvpact.tiers` names. Raises TierError with one line for people, or
NoSuchTier if it need not be tried again."""


class OpenStore(Protocol):
    """The function that opens a kind of store; see `open_store`."""

    def __call__(self, url: TierURL, *, for_tool: bool) -> RecordStore: ...


def open_store(url: TierURL, *, for_tool: bool = False) -> RecordStore:
    """The store behind a shared tier's URL. Raises TierError.

    With `for_tool`, for tools: opening, asking, reading and closing create, evict, lend and prolong nothing. Only
    `remove` changes the store. Then another package's is that of its `SharedTier`.
    """
    backend = BACKEND_OF.get(url.scheme)
    if backend is None and for_tool:
        return _store_of(url, open_for_tool(url))
    if backend is None or not backend.shared:
        shared = [scheme for backend in BACKENDS if backend.shared for scheme in backend.schemes]
        raise NoSuchTier(f"{url} is no store that several engines share; those are {', '.join(shared)}")
    return cast(OpenStore, resolve_name(backend.opener))(url, for_tool=for_tool)


def open_for_tool(url: TierURL) -> Tier:
    """Another package's tier, for a command. Raises TierError, whatever the package raises."""
    try:
        return open_tier(url, OF_A_TOOL)
    except KvpactError:
        raise
    except Exception as error:
        raise TierError(f"{url}: {reason_of(error)}") from error


def _store_of(url: TierURL, tier: Tier) -> RecordStore:
    if isinstance(tier, SharedTier):
        tier.store.record_bytes = None  # of any model
        return tier.store
    tier.close()
    raise NoSuchTier(
        f"{url}: a {type(tier).__name__} is opened for one model, and shows a command no blocks of others; "
        "kvpact tiers says how it is, and only a SharedTier over a RecordStore can be looked into"
    )


def open_tier(url: TierURL, place: TierContext) -> Tier:
    """The tier at a URL, for one engine's blocks.

    Raises:
        TierError: one line for people; the engine goes on without this tier, and tries again.
        NoSuchTier: it need not be tried again.
        Exception: another package's.
    """
    backend = BACKEND_OF.get(url.scheme)
    if backend is not None and not backend.shared:
        return cast(OpenTier, resolve_name(backend.opener))(url, place)
    if backend is not None:
        return SharedTier(open_store(url), place.namespace, place.slot_bytes, seal=place.seal)
    for entry in entry_points(group=ENTRY_POINTS, name=url.scheme):
        if isinstance(tier := cast(OpenTier, entry.load())(url, place), Tier):
            return tier
        raise TierError(f"what opens {url} makes a {type(tier).__name__}; a kvpact.tiers.base.Tier is needed")
    raise NoSuchTier(f"no installed package opens {url}: none has an entry point {url.scheme!r} in {ENTRY_POINTS}")


def may_be_planted(url: TierURL, seal: RecordMac) -> bool:
    """True if others can write where this tier is, and nothing distinguishes their records from an engine's.

    Slabs of a disk tier have no seal; a folder without `?group=` is this user's alone.
    """
    backend = BACKEND_OF.get(url.scheme)
    alone = backend is not None and "group" in backend.schemes[url.scheme].options and "group" not in url.options
    return not alone and not (seal.name and (backend is None or backend.shared))


def load_seal(path: Path | None) -> RecordMac:
    """The seal of a record key file; without one, none.

    Raises:
        ConfigError: it cannot be read, or is too short; the engine then does not start, rather than trust every writer.
    """
    if path is None:
        return UNSEALED
    try:
        return RecordMac.from_secret(path.read_bytes().strip())
    except OSError as error:
        raise ConfigError(f"record_key_file={path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"record_key_file={path}: {error}; make one with: openssl rand -hex 32") from None
