"""The bytes and copies that one scheduler step may take for loads, and who has been promised them.

Owns the running step's account, the time of the last steps of decodes, and which requests the last step computed: those
are in the running step too. An answer "the step waits for this load" holds its bytes until the request is asked about
again, commits or is aborted, at the latest until the step ends. So two requests that are asked about before either
commits are never promised the same bytes, and a request that is never admitted keeps no bytes from others in a step
that does not ask about it.

Beside decodes a device's loads follow the time of a step: `COPIES_SHARE` of it to give copies to the device,
`BYTES_SHARE` of it in bytes that the step waits for. The bus carries the asynchronous loads of a step by its end, so
that they are not in the way of the next one's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from kvpact.errors import PactViolation

STEP_COPIES: Final = 512
"""Copies of loads that a step with others' tokens waits for before any step of decodes was timed: 0.3 ms."""

COPY_SECONDS: Final = 0.6e-6
"""Time of the computing thread for each copy that it gives to a device: 0.6 us (LMCache's cost model, H200)."""

BUS_BYTES_PER_SECOND: Final = 55e9
"""PCIe 5.0 x16 carries 55 to 57 GB/s in each direction; an H100 loaded at that rate (benchmarks/RESULTS.md)."""

COPIES_SHARE: Final = 0.1
"""Part of a decode step's time to give copies to the device, of which loads that the step waits for get half."""

BYTES_SHARE: Final = 0.5
"""Part of a decode step's time that it may wait for bytes."""

DECODE_TOKENS: Final = 16
"""A step of more tokens a request, on average, is none of decodes, even with drafts: it computes a prompt."""

TIMED_STEPS: Final = 3
"""Steps of decodes whose median counts: one that was interrupted does not."""


class LoadBudget:
    """At most `limit` bytes on each rank, in blocks of which the rank with the largest part has `block_bytes`.

    Where the computing thread gives `copies_per_block` of a block to a device, less beside requests that run already.
    """

    def __init__(self, limit: int, block_bytes: int, copies_per_block: int = 0) -> None:
        self.blocks = limit // block_bytes
        """Blocks that one step may wait for."""
        self._block_bytes = block_bytes
        self._copies_per_block = copies_per_block
        self._left = self.blocks
        """Blocks neither held nor committed in this step."""
        self._held: dict[str, int] = {}
        """Request id -> blocks of a load that the step was promised to wait for, not committed yet."""
        self._computed: set[str] = set()
        """The requests of this step so far."""
        self._running: set[str] = set()
        """The requests that the last step computed and that have not finished."""
        self._times: deque[float] = deque(maxlen=TIMED_STEPS)
        """Seconds of the last steps of decodes, without those that each waited for bytes."""
        self._step_began = 0.0
        """End of the last step's scheduling, when the workers begin it."""
        self._awaited_bytes: int | None = None
        """Bytes that the last step waits for; None if it was none of decodes."""

    @property
    def decode_seconds(self) -> float:
        """Time of a step of decodes, the median of the last ones; 0 while none was timed."""
        return sorted(self._times)[len(self._times) // 2] if self._times else 0.0

    @property
    def max_copies(self) -> int:
        """Most copies that a step of decodes gives to a device, in all; one at least."""
        return max(1, int(COPIES_SHARE * self.decode_seconds / COPY_SECONDS))

    @property
    def max_bytes(self) -> int:
        """Most bytes that a step of decodes waits for."""
        return min(self.blocks * self._block_bytes, int(BYTES_SHARE * self.decode_seconds * BUS_BYTES_PER_SECOND))

    @property
    def blocks_beside_others(self) -> int:
        """Blocks that one step may wait for while it computes other requests that run already."""
        if not self._copies_per_block:
            return self.blocks
        if not self._times:
            return min(self.blocks, STEP_COPIES // self._copies_per_block)
        return min(self.max_bytes // self._block_bytes, self.max_copies // 2 // self._copies_per_block)

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

    def end_step(self, now: float, tokens: int = 0, *, copies: bool = False) -> tuple[int, int] | None:
        """End the scheduling, at `now`, of a step that computes `tokens` tokens; the next begins with the whole budget.

        With `copies` under way, returns what the step may give to a device beside the loads that it waits for, as in
        `StepWork`: copies, and bytes of loads. None: no decodes wait for that, or none was timed.
        """
        goes_on = not self._running.isdisjoint(self._computed)
        limits = None
        if self._copies_per_block:
            awaited = self.blocks - self._left - sum(self._held.values())
            # Only if it goes on with a request of the last step was the engine never idle between both.
            if goes_on and self._awaited_bytes is not None:
                seconds = now - self._step_began - self._awaited_bytes / BUS_BYTES_PER_SECOND
                if seconds > 0.0:
                    self._times.append(seconds)
            has_prompt = tokens > DECODE_TOKENS * len(self._computed)
            self._awaited_bytes = awaited * self._block_bytes if goes_on and not has_prompt else None
            self._step_began = now
            if copies and goes_on and self._times:
                left = max(1, self.max_copies - awaited * self._copies_per_block)
                limits = (left, int(self.decode_seconds * BUS_BYTES_PER_SECOND))
        self._running = self._computed
        self._computed = set()
        self._held.clear()
        self._left = self.blocks
        return limits

    def check(self) -> None:
        """Verify the account; raises PactViolation."""
        if min(self._held.values(), default=1) < 1 or self._left + sum(self._held.values()) > self.blocks:
            raise PactViolation(f"of {self.blocks} blocks that a step waits for {self._left} are left of {self._held}")
