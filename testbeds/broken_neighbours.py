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


def compares_nothing_after_a_read(patch: pytest.MonkeyPatch) -> None:
    """A block that was leased stays what it was."""
    patch.setattr(Neighbour, "are_held", lambda self, leased, keys: [True] * len(keys))


def keeps_the_leases_of_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Neighbour, "release", lambda self, leased: None)


def ends_a_lease_before_its_read(patch: pytest.MonkeyPatch) -> None:
    """What was leased once is there."""
    leased, release = Neighbour.lease, Neighbour.release

    def lease(self: Neighbour, keys: Sequence[bytes]) -> Lease | None:
        found = leased(self, keys)
        if found is not None:
            release(self, found)
        return found

    patch.setattr(Neighbour, "lease", lease)
    patch.setattr(Neighbour, "release", lambda self, leased: None)
