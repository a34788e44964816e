"""Random plays of four indexes that lease from each other, against one dictionary; and engines that break the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from broken_neighbours import lists_before_the_ranks_have_written, trusts_a_row_number
from kvpact.index.claims import Claims
from kvpact.index.losses import Losses
from kvpact.index.neighbour import Neighbour
from kvpact.index.row_locks import LockFile
from kvpact.index.table import Table
from pool_plays import Plays

SEEN = (
    "evicted", "leased elsewhere", "loads", "refused loads", "waiting rows", "restarts", "leases during a claim",
    "events during a lease",
)  # fmt: skip


@pytest.mark.parametrize("classed", [False, True], ids=["one class", "several classes"])
@pytest.mark.parametrize(
    ("seeds", "plays"),
    [pytest.param(1, 8000, id="short"), pytest.param(100, 5000, marks=pytest.mark.soak, id="500,000 plays")],
)
def test_h130_no_block_is_served_that_its_owner_has_given_up(seeds: int, plays: int, classed: bool) -> None:
    for seed in range(seeds):
        played = Plays(seed, classed=classed)
        played.run(plays)
        assert min(played.seen[name] for name in SEEN) > 0, f"seed {seed} has played too little: {played.seen}"
        assert not classed or played.seen["moved"], "no extent has changed its class"


def refills_without_asking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claims, "granted", lambda self, rows: [rows])


def gives_an_extent_with_a_leased_row_to_another_class(patch: pytest.MonkeyPatch) -> None:
    """The rows of an extent that is to move are free as soon as they have left the table."""
    drop_rows = Losses.drop_rows
    moving: list[object] = []
    granted = Claims.granted

    def drop(self: Losses, rows: Sequence[int]) -> None:
        moving.append(rows)
        drop_rows(self, rows)
        moving.clear()

    patch.setattr(Losses, "drop_rows", drop)
    patch.setattr(Claims, "granted", lambda self, rows: [rows] if moving else granted(self, rows))


def replaces_the_lock_file_at_a_reset(patch: pytest.MonkeyPatch) -> None:
    reset = Table.reset

    def other_file(self: Table) -> None:
        reset(self)
        assert self.columns is not None
        self.columns.claims = Claims(LockFile())

    patch.setattr(Table, "reset", other_file)


def keeps_leases_of_finished_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Neighbour, "release", lambda self, leased: None)


def goes_on_with_a_refused_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Neighbour, "is_refused", False)


# what breaks, what is found, the seed of plays that find it soon, and plays between two looks at the accounts
BROKEN: Sequence[tuple[Callable[[pytest.MonkeyPatch], None], str, int, int]] = (
    (refills_without_asking, "other bytes", 8, 2000),
    (gives_an_extent_with_a_leased_row_to_another_class, "other bytes", 11, 2000),
    (replaces_the_lock_file_at_a_reset, "other bytes", 8, 2000),
    (lists_before_the_ranks_have_written, "other bytes|given up", 0, 2000),
    (keeps_leases_of_finished_requests, "locks are not those", 0, 100),
    (trusts_a_row_number, "other bytes", 0, 2000),
    (goes_on_with_a_refused_engine, "refused", 0, 2000),
)


@pytest.mark.parametrize(("breaks", "found", "seed", "every"), BROKEN, ids=[breaks.__name__ for breaks, *_ in BROKEN])
def test_h130_broken_engines_are_caught(
    breaks: Callable[[pytest.MonkeyPatch], None], found: str, seed: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    played = Plays(seed, classed=True)
    with pytest.raises(AssertionError, match=found):
        played.run(2000, every=every)
