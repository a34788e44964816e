"""How a prepare is answered: every row of the table, in the code and in docs/architecture.md."""

from __future__ import annotations

import re
from itertools import product
from math import inf
from pathlib import Path

import pytest

from kvpact.cache.lookup import (
    TABLE,
    Availability,
    Case,
    Decision,
    Limits,
    Lookup,
    Miss,
    Phase,
    Promise,
    Stage,
    Wait,
    decide,
)
from kvpact.metrics import EndReason, MissReason

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"

NOW = 10.0
FREE = Lookup(Phase.FREE, 2, 8, inf)
ASKING = Lookup(Phase.ASKING, 2, 8, 11.0)
READING = Lookup(Phase.READING, 2, 6, 11.0)
OVER = Lookup(Phase.READING, 2, 6, NOW)
USUAL = Limits(min_blocks=2)
LATE = Limits(min_blocks=2, puts_off=True)
FASTER = Limits(min_blocks=2, computes_faster=True)
NOTHING = Availability(0)

CASES: list[list[tuple[Availability, Lookup, Limits, Decision]]] = [
    [  # being read, too late
        (Availability(4, (6,), arriving=True), OVER, USUAL, Promise(4, MissReason.DEADLINE, tiers_done=True)),
        (Availability(8, (8,)), OVER, LATE, Promise(6, MissReason.DEADLINE)),
        (Availability(3, (6,), arriving=True), OVER, USUAL, Miss(MissReason.DEADLINE, True, EndReason.DEADLINE)),
    ],
    [  # being read, the step has cost enough
        (Availability(4, (6,), arriving=True), READING, LATE, Wait(put_off=True)),
        (Availability(6, (6,)), READING, LATE, Wait(put_off=True)),
    ],
    [  # being read
        (Availability(2, (6,), arriving=True), READING, USUAL, Wait()),
        (Availability(5, (6,), arriving=True), READING, FASTER, Wait()),
    ],
    [  # was read
        (Availability(6, (6,)), READING, USUAL, Promise(6, MissReason.NOT_STORED)),
        (Availability(7, (6,)), READING, USUAL, Promise(6, MissReason.NOT_STORED)),
        (Availability(4, (6,)), READING, USUAL, Promise(4, MissReason.NOT_DELIVERED, tiers_done=True)),
        (Availability(4, (4, 4)), READING, USUAL, Promise(4, MissReason.NOT_DELIVERED, tiers_done=True)),
        (Availability(2, (6,)), READING, USUAL, Miss(MissReason.NOT_DELIVERED, True, EndReason.TIER_FAILED)),
    ],
    [  # too late
        (Availability(4, (8,)), Lookup(Phase.FREE, 2, 8, NOW), USUAL, Promise(4, MissReason.NOT_STORED, True)),
        (NOTHING, Lookup(Phase.FREE, 2, 8, -inf), USUAL, Miss(MissReason.NOT_STORED, True)),
        (NOTHING, Lookup(Phase.ASKING, 2, 8, NOW), USUAL, Miss(MissReason.DEADLINE, True)),
    ],
    [  # asked
        (NOTHING, ASKING, USUAL, Wait()),
        (Availability(7, (8,)), ASKING, LATE, Wait()),
    ],
    [  # answered before the first prepare, the step has cost enough
        (Availability(7, (8,)), FREE, LATE, Wait(put_off=True)),
    ],
    [  # not worth reading
        (Availability(4, (8,)), FREE, FASTER, Promise(4, MissReason.RECOMPUTE_FASTER)),
        (Availability(3, (8,)), FREE, FASTER, Miss(MissReason.RECOMPUTE_FASTER)),
    ],
    [  # worth reading
        (Availability(4, (3, 8)), FREE, USUAL, Stage(8, Promise(4, MissReason.NO_ROOM))),
        (Availability(0, (4,)), FREE, USUAL, Stage(4, Miss(MissReason.NO_ROOM))),
        (Availability(6, (8,)), READING, USUAL, Stage(8, Promise(6, MissReason.NO_ROOM))),
        (Availability(4, (4, 6)), READING, USUAL, Stage(6, Promise(4, MissReason.NO_ROOM))),
    ],
    [  # else
        (Availability(8, (8,)), FREE, FASTER, Promise(8, MissReason.NOT_STORED)),
        (Availability(0, (3,)), FREE, USUAL, Miss(MissReason.NOT_STORED)),
        (NOTHING, FREE, Limits(2, not_found=MissReason.ASKED_AT_STEP), Miss(MissReason.ASKED_AT_STEP)),
        (Availability(8, (7,)), READING, USUAL, Promise(8, MissReason.NOT_STORED)),
    ],
]


@pytest.mark.parametrize("place", range(len(TABLE)), ids=lambda place: TABLE[place].when)
def test_every_row_answers_what_it_says(place: int) -> None:
    assert len(CASES) == len(TABLE)
    for available, lookup, limits, expected in CASES[place]:
        case = Case(available, lookup, limits, NOW)
        assert next(row for row in TABLE if row.applies(case)) is TABLE[place], (
            f"{available} and {lookup} belong to another row"
        )
        decision = decide(available, lookup, limits, NOW)
        assert decision == expected
        assert says(decision, TABLE[place].then)


def says(decision: Decision, then: str) -> bool:
    """Whether the words of a row name this decision, and its reason where they name one."""
    if isinstance(decision, Wait):
        return then.startswith("Wait") and decision.put_off == ("next step" in then)
    if isinstance(decision, Stage):
        return then.startswith("Stage") and f"`{decision.otherwise.reason}`" in then
    reason = re.search(r"Miss `(\w+)`(?! if)", then)
    return then.startswith("Promise, or Miss") and (reason is None or reason[1] == decision.reason)


def test_whatever_is_there_one_row_applies_and_no_more_is_promised_than_memory_holds() -> None:
    numbers = range(4)
    for resident, stored, other, start, deadline, phase in product(
        numbers, numbers, numbers, range(2), (NOW - 1, NOW + 1), Phase
    ):
        for arriving, puts_off, faster in product((False, True), repeat=3):
            available = Availability(resident, (stored, other), arriving)
            lookup, limits = Lookup(phase, start, 2, deadline), Limits(1, puts_off, faster)
            decision = decide(available, lookup, limits, NOW)
            if isinstance(decision, Promise):
                assert start < decision.end <= resident
            elif isinstance(decision, Stage):
                assert resident < decision.end == max(stored, other)
                assert deadline > NOW
                assert not faster
            elif isinstance(decision, Wait):
                assert deadline > NOW, "nobody waits longer than that (P11)"


def test_the_documents_table_is_the_codes() -> None:
    section = ARCHITECTURE.read_text().partition("## How a prepare is answered\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert rows == [(str(number), row.when, row.then) for number, row in enumerate(TABLE, 1)]
