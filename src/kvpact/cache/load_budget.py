"""The bytes of loads that one scheduler step may wait for, and who has been promised them.

Owns the running step's account, and nothing that outlives the step. An answer "the step waits for this load" holds its
bytes until the request is asked about again, commits or is aborted, at the latest until the step ends. So two requests
that are asked about before either commits are never promised the same bytes, and a request that is never admitted keeps
no bytes from others in a step that does not ask about it.
"""

from __future__ import annotations

from kvpact.errors import PactViolation


class LoadBudget:
    """At most `limit` bytes on each rank, in blocks of which the rank with the largest part has `block_bytes`."""

    def __init__(self, limit: int, block_bytes: int) -> None:
        self.blocks = limit // block_bytes
        """Blocks that one step may wait for."""
        self._left = self.blocks
        """Blocks neither held nor committed in this step."""
        self._held: dict[str, int] = {}
        """Request id -> blocks that it was told the step waits for, and has not committed."""

    def hold(self, request_id: str, blocks: int) -> bool:
        """Whether the step waits for a load of `blocks` blocks; if so, the request, which held none, holds them."""
        if blocks > self._left:
            return False
        self._held[request_id] = blocks
        self._left -= blocks
        return True

    def release(self, request_id: str) -> None:
        """The request does not load what it was told, or not as it was told; harmless if nothing is held for it."""
        self._left += self._held.pop(request_id, 0)

    def spend(self, blocks: int) -> None:
        """The engine has committed a load of `blocks` blocks that the step waits for.

        One that was answered in an earlier step cannot be refused: later answers of this step get less.
        """
        self._left -= blocks

    def end_step(self) -> None:
        """The next step begins with the whole budget."""
        self._held.clear()
        self._left = self.blocks

    def check(self) -> None:
        """Verify the account; raises PactViolation."""
        if min(self._held.values(), default=1) < 1 or self._left + sum(self._held.values()) > self.blocks:
            raise PactViolation(f"of {self.blocks} blocks that a step waits for {self._left} are left of {self._held}")
