"""What a request's last probe was told, and until when it may be told "ask again later": one state, one table.

A request that finds something missing is told "ask again later", and the engine probes it in each step. Something can
be missing in three places: the digests that its identity needs (the adapter knows), its turn in a step that many
requests want (`StepBudget.has_turn` knows), and blocks in the tiers (`lookup.py` knows). All three tell it here, and
all stop at one deadline: P11 counts the seconds that a request waits on kvpact, whatever it waits for.

Rule 1: whoever changes what a request was told, or its deadline, calls `Waiting.note` with an event, and `TRANSITIONS`
says what follows. The table is total: hooks of an engine come in any order, and a surprising one must cost a hit and
never a request. docs/architecture.md draws it, and a test walks its pairs.

Rule 2: this module decides nothing. Whether a digest is under way, a step has time or a tier has answered is found out
elsewhere. It reads no clock; times are seconds on the caller's clock, and `until` is when a deadline that begins with
the event would end.

The joint states
----------------

Under vLLM one request has five states that move together:

1. what it was told: `Waiting.told`, in the table below;
2. its deadline: not begun, running, or over. Only the clock tells the last two apart; OVER moves it to now;
3. what is under way for it, `Phase`: nothing, a lookup in the shared tiers, or reads into memory. Nobody keeps that: it
   is read off the request's `TierLookup` and its PENDING plan in each prepare;
4. its plan, in `Ledger`;
5. the bytes of the step that it was promised, in `LoadBudget`, until the step ends.

(1) and (2) are kept here. They are coupled: who is told LATER or PUT_OFF has a deadline, so what ends the deadline
(ANEW) makes these two NOTHING. A deadline, once begun, is never moved by being told again: a request that changes its
range, or waits first for its identity, then for its turn, then for a tier, waits once. (1) and (4) are coupled by
`Facts`: LATER holds while the plan is the one of then, no tier has completed anything, and the engine has as many
tokens. While it holds, a probe costs one comparison. PUT_OFF has no facts, because the next step answers whatever has
changed. (2) and (4): reads for a PENDING plan end at the request's deadline; the ledger has none of its own for them.
(2) and (3): a request whose reads did not bring what was wanted stops waiting (OVER), so that it does not begin anew,
and its lookups are given up; what tiers answer later is there for others.

What a request was told stays until its next probe is answered, so that the answer may depend on it: tiers' news that
made a step put it off is used in the next step, however late that is. Naming the blocks of a long prompt is excepted:
each step names some.

What is ugly
------------

Two objects of this class follow one request under vLLM. The adapter's knows of identity and turn, and is all there is
before another author's cache; the cache's knows of tiers, and is all there is under an engine that speaks the contract
itself. They meet through the contract alone: AHEAD starts the cache's deadline with the adapter's, a commit sends ANEW
to both. Between these messages each is right about what it knows, and
the adapter's LATER may be the cache's PUT_OFF. One difference can be seen: if the engine kept a request waiting for so
long that its postponed plan ended, only the cache hears of it and lets the request wait anew. The adapter's deadline
stays over, and a step without time may decline the request where the cache would have put it off. It'd be nice to have
one object; it would have to live on the engine's side of the contract, which would then have to say what it means.

ANSWERED matters to the adapter alone (who was answered before is not put off, for its promise holds), CHANGED to the
cache alone. And DECLINED could be ANSWERED but for this: the engine spent no time on it, so when the request comes back
it waits for its turn like any other.

Not here: what waits for a later step but is no request (`StepBudget`), loads under way and their deadline
(`TransferJobs`), matches looked for at a step's beginning (`StepLookups`), tiers that open late (`LateTiers`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvpact.cache.jobs import PactPlan
from kvpact.errors import PactViolation

MIN_IDENTITY_SECONDS = 0.05
"""Seconds for which a request waits for a digest even where it waits for nothing else: a look at an adapter's files
takes one step."""


class Told(StrEnum):
    """What the last probe of a request was told; NOTHING if there was none, or if it is void."""

    NOTHING = "nothing"
    LATER = "later"
    PUT_OFF = "put off"
    DECLINED = "declined"
    ANSWERED = "answered"


class Event(StrEnum):
    """What happens to a request that waits, or may; the value is its text in docs/architecture.md."""

    LATER = "a digest or a tier has not answered its probe"
    PUT_OFF = "the step has no time for its probe"
    DECLINED = "the step has no time, and the deadline is over"
    ANSWERED = "its probe gets a match, or a miss"
    AHEAD = "the adapter has told it to ask again, before the cache was asked"
    CHANGED = "it is probed after something has changed, or has another identity"
    OVER = "it stops waiting for tiers"
    ANEW = "the engine takes tokens, or has kept it waiting until its plan ended"


_STAYS = {told: told for told in Told}

TRANSITIONS: dict[Event, dict[Told, Told]] = {
    Event.LATER: dict.fromkeys(Told, Told.LATER),
    Event.PUT_OFF: dict.fromkeys(Told, Told.PUT_OFF),
    Event.DECLINED: dict.fromkeys(Told, Told.DECLINED),
    Event.ANSWERED: dict.fromkeys(Told, Told.ANSWERED),
    Event.AHEAD: _STAYS,
    Event.CHANGED: _STAYS | {Told.LATER: Told.NOTHING},
    Event.OVER: _STAYS,
    Event.ANEW: _STAYS | {Told.LATER: Told.NOTHING, Told.PUT_OFF: Told.NOTHING},
}

BEGINS, SETS = {Event.LATER, Event.PUT_OFF, Event.AHEAD}, {Event.OVER, Event.ANEW}
"""The events with which a deadline begins, unless it has begun, and those that end it: at once, or as if it had not
begun."""


class Facts(NamedTuple):
    """The facts behind "ask again later": while they are equal, nothing has changed."""

    computed_tokens: int
    completions: int
    """How many completions of tiers `TierSet` has counted."""
    plan: PactPlan | None


class Waiting:
    """What one request was told, why, and until when it may be told so.

    A new one costs no call of Python: each request has two, and most never wait.
    """

    told = Told.NOTHING
    until: float | None = None
    """Time until which it may be told "ask again later", for whatever reason; None before it is."""
    facts: Facts | None = None
    """What the cache knew when it told it LATER."""

    def note(self, event: Event, until: float | None = None, facts: Facts | None = None) -> None:
        """Something happens. `until` is when a deadline ends that begins with it, `facts` are those of LATER."""
        self.told = TRANSITIONS[event][self.told]
        if event is Event.LATER or self.told is not Told.LATER:
            self.facts = facts
        if event in SETS or (event in BEGINS and self.until is None):
            self.until = until

    def may_wait(self, now: float) -> bool:
        """Whether its deadline has not passed."""
        return self.until is None or now < self.until

    def check(self) -> None:
        """Verify that who waits has a deadline; raises PactViolation."""
        if self.told in (Told.LATER, Told.PUT_OFF) and self.until is None:
            raise PactViolation(f"a request was told '{self.told}', and nobody knows until when")
