"""Pins on the blocks of an index. Owns nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.identity.keys import BlockKey


@dataclass(eq=False, slots=True)
class Pin:
    """Reference to a block and the whole chain before it; released with `BlockIndex.unpin`, exactly once."""

    key: BlockKey
    slot: int
    active: bool = True
