"""The states of a request in mode "align": which block they are in, and vLLM's copies of them between blocks.

Owns a request's running column and accepted count, as `vllm.v1.worker.mamba_utils` has them: the state after a
step's last known token is in the running column, those after its drafts in the columns behind, until the step has
sampled. A convolution's window is different: one block has all of them, to be read from an offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Copy = Callable[[int, int, int], None]
"""(column, accepted drafts, column): copies the state of the first one with so many drafts to the last one."""


@dataclass(slots=True)
class RunningState:
    """Where a request's state is, for blocks of `size` tokens."""

    size: int
    column: int | None = None
    """The running column; None before the request's first step in these blocks."""
    accepted: int = 1
    """Tokens that the last step sampled: the state is so many places, less one, behind the running column."""

    def before(self, computed: int, scheduled: int, copy: Copy) -> None:
        """Move the state of the computed tokens to the step's running column (`preprocess_mamba`)."""
        previous = (computed - 1) // self.size if self.column is None else self.column
        self.column = -(-(computed + scheduled) // self.size) - 1
        if previous not in (-1, self.column):
            copy(previous, self.accepted - 1, self.column)
            self.accepted = 1

    def after(self, running: int, sampled: int, copy: Copy) -> None:
        """Put the state at a boundary among the accepted drafts into its block (`postprocess_mamba_fused_kernel`).

        `running` is how many tokens the step knew before it sampled, drafts excluded.
        """
        assert self.column is not None
        self.accepted = max(sampled, 1)
        boundary = (running + self.accepted - 1) // self.size * self.size
        if boundary < running:
            return
        behind, column = boundary - running, boundary // self.size - 1
        if column == self.column:
            self.accepted = 1
        if (column, behind) != (self.column, 0):
            copy(self.column, behind, column)
