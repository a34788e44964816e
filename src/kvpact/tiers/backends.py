"""The kinds of tier that kvpact brings. Adding one is a folder beside this file and a word in it."""

from __future__ import annotations

from importlib import import_module
from typing import Final, cast

from kvpact.tiers.backend import Backend

ENTRY_POINTS: Final = "kvpact.tiers"
"""The entry-point group in which other packages add kinds of tier; an entry's name is its URLs' scheme."""

_KINDS: Final = ("disk", "directory", "redis", "objects", "mooncake")
"""The folders beside this file, one for each kind of tier; see `kvpact.tiers.backend`."""

BACKENDS: Final = tuple(cast(Backend, import_module(f"kvpact.tiers.{kind}").BACKEND) for kind in _KINDS)
BACKEND_OF: Final = {scheme: backend for backend in BACKENDS for scheme in backend.schemes}
"""The kind with URLs of each scheme."""

SCHEMES: Final = {scheme: rules for backend in BACKENDS for scheme, rules in backend.schemes.items()}
"""What the URLs of the kinds that kvpact brings look like."""

OTHER: Final = "other"
"""The label in metrics of every kind that another package adds."""


def label_of(name: str) -> str:
    """The label in metrics of a tier with this `name`."""
    return name if any(name == backend.label for backend in BACKENDS) else OTHER
