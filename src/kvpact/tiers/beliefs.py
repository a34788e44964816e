"""What is believed of a store for which it is not asked. `probes.py` puts it to the test. Never does I/O."""

from __future__ import annotations

from typing import NamedTuple


class Belief(NamedTuple):
    """Something for which a store is not asked."""

    since: float
    reason: str
    """What was seen."""
