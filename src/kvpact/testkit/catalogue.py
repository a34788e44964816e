"""What the kit looks for, by id: the contract's properties (P), a tier's further promises (T), known failures (H).

Owns their names and nothing else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

TITLES: Mapping[str, str] = MappingProxyType(
    tomllib.loads((files("kvpact.testkit") / "hazards.toml").read_text(encoding="utf-8"))
)
"""What each property promises and what each hazard does, in one line, by id."""
