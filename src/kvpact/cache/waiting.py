"""Reply to a request's last probe, and the deadline up to which it may be "ask again later": one state, one table.

A request that finds something missing is told "ask again later", and the engine probes it in each step. Something can
be missing in four places: the digests that its identity needs (the adapter knows), its turn in a step that many
requests want (`StepBudget.grant_turn` knows), blocks in the tiers (`lookup.py` knows), and room in memory to read them
into (`Queue` knows). All four tell it here, and all stop at one deadline: P11 counts the seconds that a request waits
on kvpact, whatever it waits for. Who waits for room waits for those before it, too, which the engine would have
computed first: its deadline is later by the time that this would have taken.

Rule 1: whoever changes the reply to a request, or its deadline, calls `Waiting.note` with an event, and `TRANSITIONS`
says what follows. The table is total: hooks of an engine come in any order, and a surprising one must cost a hit and
never a request. docs/architecture.md draws it, and a test walks its pairs.

Rule 2: this module decides nothing. Whether a digest is under way, a step has time or a tier has answered is found out
elsewhere. It reads no clock; times are seconds on the caller's clock, and `until` is when a deadline that begins with
the event would end.

The joint states
----------------

Under vLLM one request has five states that move together:

1. the last reply to it: `Waiting.reply`, in the table below;
2. its deadline: not begun, running, or over. Only the clock tells the last two apart; OVER moves it to now;
3. what is under way for it, `Phase`: nothing, a lookup in the shared tiers, or reads into memory. Nobody keeps that: it
   is read off the request's `TierLookup` and its PENDING plan in each prepare;
4. its plan, in `Ledger`;
5. the bytes of the step that it was promised, in `LoadBudget`, until the step ends.

(1) and (2) are kept here. They are coupled: who is told LATER, NO_ROOM or PUT_OFF has a deadline, so what ends the
deadline (ANEW) makes these three NOTHING. A deadline, once begun, is never moved by a later reply: a request that
changes its range, or waits first for its identity, then for its turn, then for a tier, waits once. (1) and (4) are
coupled by `Facts`: LATER holds while the plan is the one of then, no tier has completed anything, and the engine has as
many tokens. While it holds, a probe costs one comparison. NO_ROOM holds while the room is the same, too, and for who
waits behind another that lacks room in any case. PUT_OFF has no facts, because the next step answers whatever has
changed. (2) and (4): reads for a PENDING plan end at the request's deadline; the ledger has none of its own for them.
(2) and (3): a request whose reads did not bring what was wanted stops waiting (OVER), so that it does not begin anew,
and its lookups are given up; what tiers answer later is there for others.

The reply to a request stays until its next probe is answered, so that the answer may depend on it: tiers' news that
made a step put it off is used in the next step, however late that is. Naming the blocks of a long prompt is excepted:
each step names some.

What is ugly
------------

Two objects of this class follow one request under vLLM. The adapter's knows of identity and turn, and is all there is
before another author's cache; the cache's knows of tiers, and is all there is under an engine that speaks the contract
itself. They meet through the contract alone: AHEAD starts the cache's deadline with the adapter's, a commit sends ANEW
to both. Between these messages each is right about what it knows, and the adapter's LATER may be the cache's PUT_OFF.
One difference can be seen: if the engine kept a request waiting for so long that its postponed plan ended, only the
cache hears of it and lets the request wait anew. The adapter's deadline stays over, and a step without time may decline
the request where the cache would have put it off. None is declined while the cache's own deadline runs, which is later
for who waits for room (`ExternalCache.may_wait`). It'd be nice to have one object; it would have to live on the
engine's side of the contract, which would then have to say what it means.

ANSWERED matters to the adapter alone (who was answered before is not put off, for its promise holds), CHANGED to the
cache alone. And DECLINED could be ANSWERED but for this: the engine spent no time on it, so when the request comes back
it waits for its turn like any other.

Not here: what waits for a later step but is no request (`StepBudget`), loads under way and their deadline
(`TransferJobs`), matches looked for at a step's beginning (`StepLookups`), tiers that open late (`LateTiers`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import NamedTuple

from kvpact.cache.jobs import PactPlan
from kvpact.errors import PactViolation
from kvpact.tiers.costs import PrefillRate

MIN_IDENTITY_SECONDS = 0.05
"""Seconds that a request waits for a digest even where it waits for nothing else: a look at an adapter's files takes
one step."""


class Reply(StrEnum):
    """Reply to the last probe of a request; NOTHING if there was none, or if it is void."""

    NOTHING = "nothing"
    LATER = "later"
    NO_ROOM = "no room"
    PUT_OFF = "put off"
    DECLINED = "declined"
    ANSWERED = "answered"


class WaitEvent(StrEnum):
    """Event in the life of a request that may wait; the value is its text in docs/architecture.md."""

    LATER = "a digest or a tier has not answered its probe"
    NO_ROOM = "memory has no room yet for what a tier can supply"
    PUT_OFF = "the step has no time for its probe"
    DECLINED = "the step has no time, and the deadline is over"
    ANSWERED = "its probe gets a match, or a miss"
    AHEAD = "the adapter has told it to ask again, before the cache was asked"
    CHANGED = "it is probed after something has changed, or has another identity"
    OVER = "it stops waiting for tiers"
    ANEW = "the engine takes tokens, or has kept it waiting until its plan ended"


_STAYS = {reply: reply for reply in Reply}

TRANSITIONS: dict[WaitEvent, dict[Reply, Reply]] = {
    WaitEvent.LATER: dict.fromkeys(Reply, Reply.LATER),
    WaitEvent.NO_ROOM: dict.fromkeys(Reply, Reply.NO_ROOM),
    WaitEvent.PUT_OFF: dict.fromkeys(Reply, Reply.PUT_OFF),
    WaitEvent.DECLINED: dict.fromkeys(Reply, Reply.DECLINED),
    WaitEvent.ANSWERED: dict.fromkeys(Reply, Reply.ANSWERED),
    WaitEvent.AHEAD: _STAYS,
    WaitEvent.CHANGED: _STAYS | dict.fromkeys((Reply.LATER, Reply.NO_ROOM), Reply.NOTHING),
    WaitEvent.OVER: _STAYS,
    WaitEvent.ANEW: _STAYS | dict.fromkeys((Reply.LATER, Reply.NO_ROOM, Reply.PUT_OFF), Reply.NOTHING),
}

BEGINS = {WaitEvent.LATER, WaitEvent.NO_ROOM, WaitEvent.PUT_OFF, WaitEvent.AHEAD}
"""Events that begin a deadline, unless it has begun."""

SETS = {WaitEvent.OVER, WaitEvent.ANEW}
"""Events that end a deadline: at once, or as if it had not begun."""


class Facts(NamedTuple):
    """The facts behind "ask again later": while they are equal, nothing has changed."""

    computed_tokens: int
    completions: int
    """Number of completions of tiers that `TierSet` has counted."""
    plan: PactPlan | None
    room: int = 0
    """Slots of memory that were free, or that nothing needed; of NO_ROOM."""


class Claim(NamedTuple):
    """Read from tiers into memory for which one request waits."""

    blocks: int
    seconds: float
    """Seconds that the tiers take for it; 0 if that is unknown."""
    lacks: int
    """Blocks without room in memory so far."""


class Waiting:
    """Last reply to one request, its reason, and its deadline.

    A new one costs no call of Python: each request has two, and most never wait.
    """

    reply = Reply.NOTHING
    until: float | None = None
    """Deadline of "ask again later", whatever the reason; None before it was the reply."""
    facts: Facts | None = None
    """Snapshot of the inputs of the last LATER or NO_ROOM; while equal, the reply stands."""
    claim: Claim | None = None
    """Read under way or to come for it."""
    ahead: int | None = None
    """Tokens that the engine would have computed before it at its first NO_ROOM."""

    def note(self, event: WaitEvent, until: float | None = None, facts: Facts | None = None) -> None:
        """Apply an event. `until` ends a deadline that begins with it, in seconds; `facts` are those of the reply."""
        self.reply = TRANSITIONS[event][self.reply]
        if event in (WaitEvent.LATER, WaitEvent.NO_ROOM) or self.reply not in (Reply.LATER, Reply.NO_ROOM):
            self.facts = facts
        if event is WaitEvent.ANEW:
            self.ahead = None
        if event in SETS or (event in BEGINS and self.until is None):
            self.until = until

    def may_wait(self, now: float) -> bool:
        """True until its deadline has passed, and without one."""
        return self.until is None or now < self.until

    def check(self) -> None:
        """Verify that a request that waits has a deadline; raises PactViolation."""
        if self.reply in (Reply.LATER, Reply.NO_ROOM, Reply.PUT_OFF) and self.until is None:
            raise PactViolation(f"the reply to a request is '{self.reply}', and it has no deadline")


class Queue:
    """Requests that wait for reads into memory, in the order in which the running step asks about them; their share.

    Engines ask about those first that they admit first. So while one waits for room nobody who is asked about after it
    in the step reads anything, and who is asked about again takes the room of plans of which the step has not asked.
    """

    def __init__(self, usable: Callable[[], int], block_size: int) -> None:
        """Count claims in blocks of `block_size` tokens; `usable` returns the number of slots that memory hands out."""
        self._usable = usable
        self._block_size = block_size
        self._blocks = 0
        self._seconds = 0.0
        self.lacks = 0
        """Blocks without room: like the two sums before, of the claims of those that the step has asked about."""
        self.moved_at = -inf
        """Last time that a request which had waited for room got some."""

    def note(self, waiting: Waiting) -> None:
        """Count the claim of a request answered "ask again later": those asked about later come after it."""
        if (claim := waiting.claim) is not None:
            self._blocks += claim.blocks
            self._seconds += claim.seconds
            self.lacks += claim.lacks

    def end_step(self) -> None:
        """The next step asks from the head of the queue."""
        self._blocks = 0
        self._seconds = 0.0
        self.lacks = 0

    def deadline(self, until: float, ahead: int | None, prefill: PrefillRate, patience: float) -> float:
        """Deadline of a request that would end at `until`, but for the tokens `ahead` of it.

        It is later by the time in which the engine would compute those. While that is unknown it is not before
        `patience` seconds after the queue last moved.
        """
        seconds = prefill.seconds_for(ahead) if ahead else 0.0
        return until + seconds if seconds or not ahead else max(until, self.moved_at + patience)

    @property
    def _share(self) -> int:
        """Slots that reads leave to saves, and saves to reads: a quarter of memory."""
        return self._usable() // 4

    def room_to_read(self, available: int) -> int:
        """Number of the `available` slots that the request asked about now may fill by reads; the first that waits gets
        all.
        """
        if self.lacks:
            return 0
        return max(0, available - self._share) if self._blocks else available

    def room_to_save(self, available: int) -> int:
        """Number of the `available` slots for a save of this step: reads that lack room get their share."""
        held = self._blocks - self.lacks
        return max(0, available - max(0, self._share - held)) if self.lacks else available

    def wait(self, waiting: Waiting, claim: Claim, resident: int, prefill: PrefillRate | None) -> bool:
        """Decide for the request asked about now: True if it should wait until there is room for its `claim`.

        It should if tiers supply that, and what those before it wait for, sooner than the engine computes as much. If
        memory has more of its prompt, `resident` blocks, than it lacks, it waits no longer than it would compute.
        Without `prefill`, or while its speed is unknown, it waits.
        """
        before = 0 if resident > claim.blocks else self._blocks
        computing = prefill.seconds_for((before + claim.blocks) * self._block_size) if prefill is not None else 0.0
        if computing and self._seconds + claim.seconds > computing:
            return False
        waiting.claim = claim._replace(lacks=max(1, claim.lacks))  # of another KV cache group, if not of the chain
        if waiting.ahead is None:
            waiting.ahead = self._blocks * self._block_size
        return True
