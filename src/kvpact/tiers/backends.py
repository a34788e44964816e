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
"""URL forms of the kinds that kvpact brings."""
MEMORY: Final = "memory"
"""The label of the memory tier, which is the arena and no backend; `urls.tier_labels` makes the others."""

NEIGHBOURS: Final = "neighbours"
"""Label of blocks in the memory of other engines of this host."""

SOURCES: Final = ("engine", MEMORY, NEIGHBOURS)
"""Labels of the sources above the tiers: the engine's own prefix cache, memory, other engines' memory."""


def kind_of(scheme: str) -> str:
    """The kind of tier with URLs of this scheme: for one that another package adds, the scheme itself."""
    backend = BACKEND_OF.get(scheme)
    return backend.label if backend is not None else scheme
