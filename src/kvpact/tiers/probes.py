"""The probes of one store: operations of the tier's own thread for which no request waits.

Owns the pace, the probes under way, and the belief that the store is too slow, which like the breakers' keeps it from
being asked until a probe says otherwise. Time is an argument; never does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf
from typing import Final, TypeAlias

import numpy as np

from kvpact.identity.keys import BlockKey
from kvpact.tiers.beliefs import Belief
from kvpact.tiers.breaker import Breaker
from kvpact.tiers.costs import TierCosts
from kvpact.tiers.executor import GetDone, Job, LookupDone, OpId, PutDone

PROBE_SECONDS: Final = 10.0
"""Between two probes of one store, and none while no prompt comes."""

PROBE_BYTES: Final = 16 << 20
"""Bytes that a probe reads at most: as many as one read of a long prompt, so that the rate is the same."""

Asked: TypeAlias = type[LookupDone | GetDone]


class Probes:
    """Tests the beliefs that keep one store from being asked: its open breakers, and that it is too slow."""

    def __init__(self, lookups: Breaker, reads: Breaker, costs: TierCosts) -> None:
        self._lookups = lookups
        self._reads = reads
        self._costs = costs
        self._slow: dict[Asked, Belief] = {}
        """Operations that were not ordered, because the engine computed the missing blocks sooner."""
        self._due_at = -inf
        self._ids = count(1)
        self._under_way: dict[OpId, tuple[Sequence[BlockKey], Sequence[BlockKey] | None]] = {}
        """Each with its keys and those before them."""
        self._block_sizes: dict[bool, int] = {}
        """Bytes of a block that was read last: of those that follow one another, and of those that do not."""

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, op_id: OpId) -> bool:
        return op_id in self._under_way

    # What is believed

    def note_too_slow(self, kind: Asked, seconds: float, now: float) -> str:
        """Believe that such an operation takes longer than to compute the missing blocks; returns that as text."""
        what = "a look-up takes" if kind is LookupDone else "a read would take"
        reason = f"{what} {1000 * seconds:,.0f} ms, and the engine computes such prompts sooner"
        since = self._slow[kind].since if kind in self._slow else now
        self._slow[kind] = Belief(since, reason)
        return reason

    def note_asked(self, kind: Asked) -> None:
        """Drop the belief that such an operation is too slow, as a request orders one."""
        self._slow.pop(kind, None)

    def note_read(self, block_bytes: int, *, in_a_row: bool) -> None:
        """Record the bytes of the blocks that a request reads, which follow one another or not."""
        self._block_sizes[in_a_row] = block_bytes

    @property
    def slowness(self) -> str:
        """Reason why prompts were computed for which it could be asked; "" if none was since it was asked last."""
        return "; ".join(belief.reason for belief in list(self._slow.values()))

    def doubted_for(self, now: float) -> float:
        """Seconds since when it has been paused, or too slow; 0 if it is neither."""
        beliefs = [self._lookups.belief, self._reads.belief, *list(self._slow.values())]
        return max((now - belief.since for belief in beliefs if belief is not None), default=0.0)

    # Trying it

    def begin(self, keys: Sequence[BlockKey], now: float, before: Sequence[BlockKey] | None) -> Job | None:
        """The look-up of a probe with a prompt's `keys`, if one is due."""
        if now < max(self._due_at, self._lookups.try_at, self._reads.try_at):
            return None
        self._due_at = now + PROBE_SECONDS
        return Job(self._new(keys, before), keys, before=before, kind=LookupDone)

    def end(self, done: LookupDone | GetDone | PutDone, *, shared: bool) -> Job | None:
        """Record the result of a probe's operation; returns the read that follows where reads are suspect.

        What was measured before counts no more where it kept the tier from being asked. Where a look-up has asked
        nobody, as exclusive tiers answer from memory, the next probe may come at once.
        """
        keys, before = self._under_way.pop(done.op_id)
        if isinstance(done, PutDone):
            return None
        if done.ok and done.seconds and type(done) in self._slow:
            forget = self._costs.forget_lookups if isinstance(done, LookupDone) else self._costs.forget_reads
            forget()
        if isinstance(done, GetDone) or not (done.ok and (self._reads.is_open or GetDone in self._slow)):
            return None
        size = self._block_sizes.get(before is not None, 0)
        held = min(done.in_a_row, max(1, PROBE_BYTES // size)) if size else 0
        if held:
            memory = np.empty(held * size, np.uint8).data
            buffers = [[memory[block * size : (block + 1) * size]] for block in range(held)]
            return Job(self._new(keys, before), keys[:held], buffers, before)
        if not size:  # nothing was ever read like this: a request finds out
            self._reads.succeeded()
            self._slow.pop(GetDone, None)
            self._costs.forget_reads()
        elif not shared:
            self._due_at = -inf
        return None

    def _new(self, keys: Sequence[BlockKey], before: Sequence[BlockKey] | None) -> OpId:
        op_id = ("probe", next(self._ids))
        self._under_way[op_id] = keys, before
        return op_id
