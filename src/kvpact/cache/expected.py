"""Turns that clients expect: the blocks of a session are brought from tiers to memory before its next request.

Owns the expected turns, and the reads that wait for their time. Blocks that are brought are retained until a while
after the turn is due, so they never take more of memory than `retain` may. They are read as all others are, by
`prefetch.py`, without a plan, and no hit is counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpact.cache.finder import Finder
from kvpact.cache.needs.match import Needs
from kvpact.cache.needs.runs import Supply
from kvpact.cache.prefetch import READ_BYTES
from kvpact.cache.request import RequestState, TierLookup
from kvpact.cache.waiting import Queue
from kvpact.hints.schema import Brought
from kvpact.identity.keys import BlockKey
from kvpact.index.key_table import FEW
from kvpact.index.retained_chains import RetainedChains

LEAD: Final = 2.0
"""Reads begin so many times their expected duration before the turn is due, as others' reads go on beside them."""

LEAD_SECONDS: Final = 0.5
"""Seconds that they begin earlier yet: for a step that comes late, and the question to a shared tier."""

UNKNOWN_SECONDS: Final = 2.0
"""Expected duration of reads while no tier's speed is known."""

GRACE_SECONDS: Final = 5.0
GRACE: Final = 0.25
"""Time after the turn was due for which its blocks are retained: in seconds, and as a part of the time until then."""


@dataclass(eq=False, slots=True)
class ExpectedTurn:
    """The next request of a session, which begins with these blocks."""

    session: int
    keys: Sequence[BlockKey]
    owner: int
    due: float
    until: float
    """End of its blocks' retention."""
    lookup: TierLookup | None = None
    """Question to the shared tiers."""
    brought: range = range(0)
    """Blocks that were brought for it."""
    wakes_at: float = 0.0
    """Time of the next work for it."""
    is_reading: bool = False
    """True once its reads have begun."""
    has_come: bool = False
    """True while its request lives, which loads for itself."""


@dataclass(eq=False)
class ExpectedTurns:
    """All turns that are expected, with no more blocks than memory has slots: the one expected first gives way."""

    finder: Finder
    queue: Queue
    chains: RetainedChains
    clock: Callable[[], float]
    _turns: dict[int, ExpectedTurn] = field(default_factory=dict, init=False)
    """By session, each with one turn, in the order in which they were expected."""
    _times: list[tuple[float, int]] = field(default_factory=list, init=False)
    """Heap of times at which something is to do for a session, with some that are out of date."""
    _reading: list[ExpectedTurn] = field(default_factory=list, init=False)
    blocks: int = field(default=0, init=False)
    """Blocks of all turns. For reading only."""

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def can_read(self) -> bool:
        """True if there is a tier."""
        return bool(self.finder.tiers.clients)

    def expect(self, state: RequestState, keys: Sequence[BlockKey], seconds: float) -> int:
        """Expect the next turn of a request's session, which ended now, so many seconds later; it begins with `keys`.

        Returns the number of blocks that are expected: not more than may be retained.
        """
        now = self.clock()
        keys = keys[: self.chains.most(state.owner)]
        if not keys:
            return 0
        turn = ExpectedTurn(state.session, keys, state.owner, now + seconds, 0.0)
        turn.until = turn.due + GRACE_SECONDS + GRACE * seconds
        self._turns[turn.session] = turn
        self.blocks += len(keys)
        while self.blocks > self.finder.index.num_slots:
            self._end(next(iter(self._turns.values())), 0)
        self._wake(turn.due - LEAD * self._seconds_to_read(len(keys)) - LEAD_SECONDS, turn)
        return len(keys)

    def begin_turn(self, session: int) -> None:
        """A request of a session has come."""
        turn = self._turns.get(session)
        if turn is not None:
            turn.has_come = True

    def end_turn(self, state: RequestState) -> None:
        """A request of a session has ended: what was brought for it was loaded, or was not needed."""
        turn = self._turns.get(state.session)
        if turn is not None:
            keys = state.keys.keys if state.keys is not None else ()
            first = max(turn.brought.start, state.record.engine_tokens // self.finder.groups.block_size)
            end = min(state.loaded_rows, len(keys), turn.brought.stop)
            is_loaded = end > first and keys[end - 1] == turn.keys[end - 1]
            self._end(turn, end - first if is_loaded else 0)

    def end_step(self, now: float) -> None:
        """Begin the reads whose time has come, one read a step, and end turns that did not come."""
        while self._times and self._times[0][0] <= now:
            self._do(self._turns.get(heapq.heappop(self._times)[1]), now)
        if self._reading:
            turn = self._reading.pop(0)
            if self._turns.get(turn.session) is turn and not turn.has_come and now < turn.until:
                if now < turn.due and self._bring(turn, now):
                    self._reading.append(turn)
                else:
                    self._wake(turn.until, turn)

    def forget(self) -> None:
        """A new epoch begins: nobody asks for these blocks any more."""
        for turn in [*self._turns.values()]:
            self._end(turn, 0)
        self._times.clear()
        self._reading.clear()

    def _wake(self, at: float, turn: ExpectedTurn) -> None:
        """Do something for a turn at this time."""
        turn.wakes_at = at
        heapq.heappush(self._times, (at, turn.session))
        if len(self._times) > 2 * len(self._turns) + FEW:
            self._times = sorted((turn.wakes_at, session) for session, turn in self._turns.items())

    def _do(self, turn: ExpectedTurn | None, now: float) -> None:
        """Begin to read for a turn whose time has come, or end one that has not come."""
        if turn is None or turn.has_come or now < turn.wakes_at:
            return
        if now >= turn.until:
            self._end(turn, 0)
        elif not turn.is_reading:
            turn.is_reading = True
            self._reading.append(turn)

    def _end(self, turn: ExpectedTurn, used: int) -> None:
        """Expect a turn no longer, of whose blocks that were brought so many were used."""
        del self._turns[turn.session]
        self.blocks -= len(turn.keys)
        if turn.lookup is not None:
            turn.lookup.give_up(late=False)
        metrics = self.finder.tiers.metrics
        metrics.add("brought_blocks", used, Brought.USED)
        metrics.add("brought_blocks", len(turn.brought) - used, Brought.UNUSED)

    def _seconds_to_read(self, blocks: int) -> float:
        """Seconds to read so many blocks from the slowest tier; `UNKNOWN_SECONDS` if that is unknown."""
        nbytes = blocks * self.finder.tiers.arena.slot_bytes
        known = [client.costs.seconds_for(nbytes) for client in self.finder.tiers.clients]
        return max((seconds for seconds in known if seconds is not None), default=UNKNOWN_SECONDS)

    def _bring(self, turn: ExpectedTurn, now: float) -> bool:
        """Begin one read for a turn, and retain what is there; returns True if there may be more to read."""
        index = self.finder.index
        if turn.lookup is None and self.finder.may_be_shared:
            turn.lookup = self.finder.reads.ask(turn.keys, lambda seconds: False, None)
        if turn.lookup is not None and not turn.lookup.done:
            return True
        known = index.known_prefix(turn.keys)
        room = self.chains.room_after(turn.keys[:known], turn.owner)
        if room < 0:
            return False
        answers = self.finder.reads.answers(turn.lookup, now) if known < len(turn.keys) else ()
        supplies = [Supply(has.count(turn.keys), has.each) for has in answers]
        wanted = min(known + room, max((supply.end for supply in supplies), default=0)) - known
        begun = self._fetch(turn, known, wanted, supplies) if wanted > 0 else 0
        if begun:
            before = turn.brought or range(known, known)
            turn.brought = range(min(before.start, known), max(before.stop, known + begun))
        if known + begun:
            self.chains.retain(turn.keys[: known + begun], turn.until)
        return begun < wanted

    def _fetch(self, turn: ExpectedTurn, known: int, wanted: int, supplies: Sequence[Supply]) -> int:
        """Begin to read blocks after the `known` ones, without a plan's end; returns their number."""
        finder = self.finder
        parent = turn.keys[known - 1] if known else b""
        piece = max(1, READ_BYTES // finder.tiers.arena.slot_bytes)
        room = finder.index.reservable(parent, min(wanted, piece))
        end = known + min(wanted, piece, self.queue.room_to_read(room))
        needs = Needs(finder.groups, turn.keys, 0, {}, owner=turn.owner)
        return finder.reads.fetch(needs.linked(known, end), supplies, self.queue.room_to_read) if end > known else 0
