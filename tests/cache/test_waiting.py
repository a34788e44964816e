"""What a request was told, and until when it waits: every pair of a state and an event, and sequences of events."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from documents import ROOT
from kvpact.cache.waiting import Facts, Reply, WaitEvent, Waiting
from kvpact.errors import PactViolation

ARCHITECTURE = ROOT / "docs" / "architecture.md"
FACTS = Facts(16, 3, None)
BEGUN, NEW = 5.0, 9.0

REACHED = {
    Reply.NOTHING: (),
    Reply.LATER: (WaitEvent.LATER,),
    Reply.NO_ROOM: (WaitEvent.NO_ROOM,),
    Reply.PUT_OFF: (WaitEvent.PUT_OFF,),
    Reply.DECLINED: (WaitEvent.PUT_OFF, WaitEvent.DECLINED),
    Reply.ANSWERED: (WaitEvent.ANSWERED,),
}
"""How a request comes to have been told this."""


def drawn() -> dict[str, list[str]]:
    """The rows of the documents' table: event -> what is told after each state, and the deadline."""
    section = ARCHITECTURE.read_text().partition("## Who waits, and until when\n")[2].partition("\n## ")[0]
    heading, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert heading == ["event", *Reply, "its deadline"]
    return {event: row for event, *row in rows}


def reached(told: Reply) -> Waiting:
    waiting = Waiting()
    for event in REACHED[told]:
        waiting.note(event, BEGUN, FACTS if event in (WaitEvent.LATER, WaitEvent.NO_ROOM) else None)
    assert waiting.reply is told
    return waiting


@pytest.mark.parametrize(("told", "event"), [*product(Reply, WaitEvent)], ids=lambda each: each.name)
def test_every_pair_of_state_and_event_ends_as_the_documents_say(told: Reply, event: WaitEvent) -> None:
    waiting = reached(told)
    before = waiting.until
    waiting.note(event, None if event is WaitEvent.ANEW else NEW)
    *after, deadline = drawn()[event]
    assert waiting.reply == after[[*Reply].index(told)]
    begun = before if before is not None else NEW
    assert waiting.until == {"begins": begun, "stays": before, "ends now": NEW, "has not begun": None}[deadline]
    assert waiting.may_wait(BEGUN) == (waiting.until != BEGUN)
    kept = told in (Reply.LATER, Reply.NO_ROOM) and event in (WaitEvent.AHEAD, WaitEvent.OVER)
    assert waiting.facts == (FACTS if kept else None), "facts of an answer that is void would hold a plan"
    waiting.check()


def test_the_documents_draw_every_event_and_name_every_state() -> None:
    assert [*drawn()] == [*WaitEvent]
    assert all(re.fullmatch(r"[a-z][^|`]+", event) for event in WaitEvent)


TIMEOUTS = st.floats(0.01, 2)


@given(plays=st.lists(st.tuples(st.sampled_from(WaitEvent), TIMEOUTS, st.floats(0, 1)), max_size=30))
def test_p11_however_often_and_by_whom_a_request_is_told_to_wait_its_deadline_stays(
    plays: list[tuple[WaitEvent, float, float]],
) -> None:
    """Until the engine takes tokens or has kept it waiting, whatever is asked of whom in between."""
    waiting, now, deadline = Waiting(), 0.0, None
    for event, timeout, passes in plays:
        now += passes
        waiting.note(event, None if event is WaitEvent.ANEW else now if event is WaitEvent.OVER else now + timeout)
        if event is WaitEvent.ANEW:
            deadline = None
        elif event is WaitEvent.OVER:
            deadline = now
        elif deadline is None and event in (WaitEvent.LATER, WaitEvent.NO_ROOM, WaitEvent.PUT_OFF, WaitEvent.AHEAD):
            deadline = now + timeout
        assert waiting.until == deadline
        assert waiting.may_wait(now) == (deadline is None or now < deadline)
        waiting.check()


def test_who_waits_without_a_deadline_is_found() -> None:
    waiting = Waiting()
    waiting.note(WaitEvent.LATER)
    with pytest.raises(PactViolation, match="is 'later', and it has no deadline"):
        waiting.check()
