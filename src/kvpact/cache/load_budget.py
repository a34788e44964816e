"""The bytes of loads that one scheduler step may wait for, and who has been promised them.

Owns the running step's account, and which requests the last step computed: those are in the running step too. An answer
"the step waits for this load" holds its bytes until the request is asked about again, commits or is aborted, at the
latest until the step ends. So two requests that are asked about before either commits are never promised the same
bytes, and a request that is never admitted keeps no bytes from others in a step that does not ask about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpact.errors import PactViolation

STEP_COPIES: Final = 512
"""Copies of loads that a step with others' tokens waits for: the computing thread gives them to the device, 0.3 ms at
0.6 us each."""


class LoadBudget:
    """At most `limit` bytes on each rank, in blocks of which the rank with the largest part has `block_bytes`.

    And, while a step computes other requests that run already, at most `STEP_COPIES` copies, where the computing thread
    gives `copies_per_block` of a block to a device.
    """

    def __init__(self, limit: int, block_bytes: int, copies_per_block: int = 0) -> None:
        self.blocks = limit // block_bytes
        """Blocks that one step may wait for."""
        self.blocks_beside_others = (
            min(self.blocks, STEP_COPIES // copies_per_block) if copies_per_block else self.blocks
        )
        """Blocks that one step may wait for while it computes other requests that run already."""
        self._left = self.blocks
        """Blocks neither held nor committed in this step."""
        self._held: dict[str, int] = {}
        """Request id -> blocks of a load that the step was promised to wait for, not committed yet."""
        self._computed: set[str] = set()
        """The requests of this step so far."""
        self._running: set[str] = set()
        """The requests that the last step computed and that have not finished."""

    def hold(self, request_id: str, blocks: int) -> bool:
        """Hold room for a load of `blocks` blocks, in place of earlier ones; returns True if the step waits for it."""
        self._left += self._held.pop(request_id, 0)
        beside_others = len(self._running) > (request_id in self._running)
        if blocks > self._left - (self.blocks - self.blocks_beside_others if beside_others else 0):
            return False
        self._held[request_id] = blocks
        self._left -= blocks
        return True

    def release(self, request_id: str) -> None:
        """Release the request's blocks: it does not load them as promised; harmless if nothing is held for it."""
        self._left += self._held.pop(request_id, 0)

    def spend(self, blocks: int) -> None:
        """The engine has committed a load of `blocks` blocks that the step waits for.

        One that was answered in an earlier step cannot be refused: later answers of this step get less.
        """
        self._left -= blocks

    def note_running(self, request_ids: Iterable[str]) -> None:
        """The running step computes tokens of these requests."""
        self._computed.update(request_ids)

    def request_finished(self, request_id: str) -> None:
        """No later step computes it."""
        self.release(request_id)
        self._running.discard(request_id)
        self._computed.discard(request_id)

    def end_step(self) -> None:
        """The next step begins with the whole budget."""
        self._running = self._computed
        self._computed = set()
        self._held.clear()
        self._left = self.blocks

    def check(self) -> None:
        """Verify the account; raises PactViolation."""
        if min(self._held.values(), default=1) < 1 or self._left + sum(self._held.values()) > self.blocks:
            raise PactViolation(f"of {self.blocks} blocks that a step waits for {self._left} are left of {self._held}")
