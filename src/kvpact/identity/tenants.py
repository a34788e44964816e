"""Tenants of an engine: clients that have a share of its memory, told apart by the salts of their requests.

Owns the settings of tenants and their salts, which are secrets: only names appear in messages, metrics and logs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpact.errors import ConfigError, printable

OTHERS: Final = "others"
"""Name of all clients that are no tenant; they have the rest of memory."""

WHOLE: Final = 10_000
"""All of a place, in parts; a share has a precision of a hundredth of a percent."""

MOST_TENANTS: Final = 64
"""Most tenants of an engine: bounds the series in metrics, and the queues of eviction."""

EXAMPLE: Final = '{"alice": {"salt_file": "/run/secrets/alice", "memory": "25%"}}'

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_PERCENT: Final = re.compile(r"([0-9]{1,3})(?:\.([0-9]{1,2}))? ?%", re.ASCII)


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """Settings of one tenant: the file with its salt, and its share of memory in parts of `WHOLE`."""

    salt_file: Path
    parts: int

    @property
    def memory(self) -> str:
        """The share as the user writes it, such as "12.5%"."""
        return f"{self.parts / 100:g}%"

    def described(self) -> dict[str, str]:
        """Value in JSON, as `parse_tenants` reads it."""
        return {"salt_file": str(self.salt_file), "memory": self.memory}


def parse_tenants(value: object) -> dict[str, TenantSettings]:
    """Settings by tenant's name, from a table or its JSON; reads no file. Raises ValueError, never with a salt."""
    given = value
    if isinstance(value, str):  # an environment variable
        try:
            given = json.loads(value)
        except ValueError:
            given = None
    if not isinstance(given, Mapping):
        raise ValueError(f"a table of tenants is needed, such as '{EXAMPLE}'")
    try:
        if len(given) > MOST_TENANTS:
            raise ValueError(f"{len(given)} tenants, and there may be {MOST_TENANTS}")
        tenants = {_name(name): _settings(name, settings) for name, settings in given.items()}
        total = sum(settings.parts for settings in tenants.values())
        if total > WHOLE:
            raise ValueError(f"the shares of memory add up to {total / 100:g}%, and may to 100%")
    except ValueError as error:
        raise ValueError(f"{error}; write a table such as '{EXAMPLE}'") from None
    return tenants


def _name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f'"{printable(str(name)[:40])}" is no name: small letters, digits, "-" and "_", 40 at most')
    if name == OTHERS:
        raise ValueError(f'the name "{OTHERS}" stands for all clients that are no tenant')
    return name


def _settings(name: str, given: object) -> TenantSettings:
    fields = ("salt_file", "memory")
    if not isinstance(given, Mapping):
        raise ValueError(f'"{name}": a table with salt_file and memory is needed')
    for key in given:
        if key not in fields:
            raise ValueError(f'"{name}": unknown field "{printable(str(key)[:40])}"')
    for key in fields:
        if key not in given:
            raise ValueError(f'"{name}": {key} is missing')
    path = given["salt_file"]
    if not isinstance(path, str | Path) or not str(path):
        raise ValueError(f'"{name}": salt_file is the path of a file')
    try:
        path = Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f'"{name}": salt_file is in the home folder of a user who does not exist') from None
    return TenantSettings(path, _parts(name, given["memory"]))


def _parts(name: str, share: object) -> int:
    match = _PERCENT.fullmatch(share.strip()) if isinstance(share, str) else None
    parts = int(match[1]) * 100 + int((match[2] or "").ljust(2, "0")) if match else 0
    if not 0 < parts <= WHOLE:
        raise ValueError(f'"{name}": memory is a share above 0% and up to 100%')
    return parts


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tenants with their salts. An *owner* of blocks is 0 for others, or 1 and more for a tenant, in this order."""

    names: tuple[str, ...]
    shares: tuple[int, ...]
    """Share of each tenant's in memory, in parts of `WHOLE`."""
    _owner_of_salt: Mapping[str, int] = field(repr=False)

    def owner_of(self, salt: str) -> int:
        """Owner of the blocks of requests with this salt."""
        return self._owner_of_salt.get(salt, 0)

    def owners_of(self, names: Iterable[str]) -> frozenset[int]:
        """Owners with these names."""
        return frozenset(self.names.index(name) + 1 for name in names)

    @property
    def labels(self) -> tuple[str, ...]:
        """Name of each owner in metrics."""
        return (OTHERS, *self.names)


def load_tenants(settings: Mapping[str, TenantSettings]) -> Tenants | None:
    """Tenants with the salts of their files; None without tenants. Raises ConfigError, without a salt."""
    if not settings:
        return None
    owners: dict[str, int] = {}
    names = tuple(settings)
    for owner, (name, of_tenant) in enumerate(settings.items(), 1):
        salt = _read_salt(name, of_tenant.salt_file)
        if salt in owners:
            raise ConfigError(f'tenants: "{names[owners[salt] - 1]}" and "{name}" have one salt; give each its own')
        owners[salt] = owner
    return Tenants(names, tuple(of_tenant.parts for of_tenant in settings.values()), owners)


def _read_salt(name: str, path: Path) -> str:
    """Salt in a file, without the end of its line."""
    at = f'tenants: "{name}": salt_file={path}'
    try:
        salt = path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise ConfigError(f"{at} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{at} is no text in UTF-8; write the tenant's cache_salt into it") from None
    if not salt:
        raise ConfigError(f"{at} is empty; write the tenant's cache_salt into it")
    return salt
