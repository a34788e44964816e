"""Everything that the kit checks, by id: the contract's properties (P), a tier's further promises (T), hazards (H).

Owns their titles and nothing else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

TITLES: Mapping[str, str] = MappingProxyType(
    tomllib.loads((files("kvpact_testkit") / "hazards.toml").read_text(encoding="utf-8"))
)
"""Id -> one line: what the property promises, or what goes wrong in the hazard."""
