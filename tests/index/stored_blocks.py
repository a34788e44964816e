"""An index that comes back from a table of stored blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpact.index.block_index import BlockIndex


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block as a table on disk describes it. `last_used` is any number that grows with time."""

    key: bytes
    parent: bytes
    slot: int
    last_used: float


def restore(index: BlockIndex, table: Sequence[StoredBlock], cuts: Sequence[int] = ()) -> set[int]:
    """Fill an empty index, in pieces that end at the slots `cuts`; returns the slots that it has refused."""
    restoring = index.begin_restore()
    for first, end in zip([0, *cuts], [*cuts, index.num_slots], strict=True):
        piece = sorted((block for block in table if first <= block.slot < end), key=lambda block: block.slot)
        names = [block.key for block in piece], [block.parent or bytes(32) for block in piece]
        keys, parents = (np.frombuffer(b"".join(one), np.uint64).reshape(-1, 4) for one in names)
        slots = np.array([block.slot for block in piece], np.int64)
        restoring.add(slots, keys, parents, np.array([block.last_used for block in piece], np.float64))
    refused = set(restoring.settle().tolist())
    restoring.end(restoring.order_of_use())
    index.check()
    return refused
