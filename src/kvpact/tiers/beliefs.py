"""Belief about a store because of which it is not asked. `probes.py` tests it. Never does I/O."""

from __future__ import annotations

from typing import NamedTuple


class Belief(NamedTuple):
    """Reason for not asking a store, and the time since when."""

    since: float
    reason: str
    """Observation behind the belief, as one line."""
