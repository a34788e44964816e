"""Engines that break the rules of loads from neighbours: what each changes while a test runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpact.index import neighbour as neighbour_module
from kvpact.index.neighbour import Lease, Neighbour
from kvpact.index.table import RESERVED


def lists_before_the_ranks_have_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(neighbour_module, "HELD", RESERVED)


def trusts_a_row_number(patch: pytest.MonkeyPatch) -> None:
    """A block is where it was when it was first found."""
    slots: dict[tuple[Neighbour, bytes], int] = {}
    leased = Neighbour.lease

    def lease(self: Neighbour, keys: Sequence[bytes]) -> Lease | None:
        found = leased(self, keys)
        if found is None:
            return None
        numbers = [slots.setdefault((self, key), slot) for key, slot in zip(keys, found.slots, strict=False)]
        return Lease(found.runs, numbers)

    patch.setattr(Neighbour, "lease", lease)
