"""What moves bytes between the engine's pages and the arena's slots: one implementation for each kind of device.

Owns the protocol alone. Who orders copies, waits for them and reports them is `kvpact.worker.transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from kvpact.contract import LoadJob, SaveJob

Job: TypeAlias = LoadJob | SaveJob


class Transfer(Protocol):
    """One job's copies under way."""

    @property
    def ended(self) -> bool:
        """Whether nothing of it is copied any more. Does not wait."""

    @property
    def failed(self) -> Sequence[int]:
        """Once it has ended: the job's blocks, counted from 0, that were not copied."""

    @property
    def error(self) -> Exception | None:
        """Once it has ended: why blocks were not copied, if anything was raised."""

    def wait(self, groups: int, seconds: float | None) -> bool:
        """Called on the computing thread: what it computes next finds the first `groups` groups of layers copied.

        Waits at most `seconds` (None: without end); whether they have been copied, or the transfer has ended. Of a
        transfer that is not urgent all groups arrive at its end.
        """

    def cancel(self) -> None:
        """Copy no more: it ends at once, or when the call that copies now returns; what was not copied has failed."""


class TransferEngine(Protocol):
    """Carries out jobs on one kind of device.

    `load` and `save` are called on the computing thread, return at once and never raise because of a job; copies come
    after all that the thread has computed by then. Transfers of one direction are carried out in order, but urgent
    loads come first, together, group by group. Saves make way for urgent loads.
    """

    @property
    def groups(self) -> Sequence[range]:
        """Layers that are copied together, in the order of the forward pass."""

    def load(self, jobs: Sequence[LoadJob], *, urgent: bool) -> Sequence[Transfer]:
        """Slots into pages. An urgent load that cannot be copied fails as a whole, another one block by block."""

    def save(self, jobs: Sequence[SaveJob]) -> Sequence[Transfer]:
        """Pages into slots."""

    def close(self, seconds: float) -> bool:
        """Begin nothing more: what has not begun fails. Whether all has ended within `seconds`. Idempotent."""
