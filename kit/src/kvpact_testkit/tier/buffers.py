"""Buffers that report when they are read, and whether they are written to after their caller has them back.

Owns nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvpact.tiers.base import BlockBuffer
from kvpact_testkit.results import Broken
from kvpact_testkit.sample_blocks import CANARY, fill

SETTLE_S = 0.15
"""Real seconds in which a late write would show."""


def give_back(buffers: Sequence[BlockBuffer]) -> None:
    """Fill the buffers with `CANARY`, as if their caller used them for something else."""
    for buffer in buffers:
        fill(buffer, bytes([CANARY]) * sum(piece.nbytes for piece in buffer))


def require_untouched(buffers: Sequence[BlockBuffer], settle: float = SETTLE_S) -> None:
    """Raises Broken if returned buffers are written to within `settle` seconds."""
    deadline = time.monotonic() + settle
    while True:
        for block, buffer in enumerate(buffers):
            clean = bytes([CANARY]) * sum(piece.nbytes for piece in buffer)
            if b"".join(buffer) != clean:
                raise Broken(f"buffer {block} was written to after get had returned")
        if time.monotonic() >= deadline:
            return
        time.sleep(settle / 10)


def told_buffers(buffers: Sequence[BlockBuffer], tell: Callable[[int], None], first: int = 0) -> list[BlockBuffer]:
    """Buffers that call `tell(block)` when the tier takes one of the block's pieces; the first is block `first`."""
    return [_ToldPieces(pieces, partial(tell, block)) for block, pieces in enumerate(buffers, first)]


class _ToldPieces(Sequence[memoryview]):
    def __init__(self, pieces: BlockBuffer, tell: Callable[[], None]) -> None:
        self._pieces = pieces
        self._tell = tell

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: Any) -> Any:
        piece = self._pieces[index]
        self._tell()
        return piece
