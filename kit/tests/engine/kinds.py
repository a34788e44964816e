"""Random KV cache groups: kinds, spans, block sizes, draft layers, with and without full attention."""

from __future__ import annotations

from random import Random

from kvpact_testkit.engine import GroupKind, KVCacheGroup

FULL, WINDOW, CHUNK, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNK, GroupKind.STATE


def random_groups(seed: int, block_size: int) -> tuple[KVCacheGroup, ...]:
    """1 to 4 groups; the smallest block of full attention, else of all, has `block_size` tokens."""
    random = Random(seed)
    kinds = random.choices((FULL, WINDOW, CHUNK, STATE), (3, 3, 2, 2), k=random.randrange(1, 5))
    groups = [
        KVCacheGroup(
            kind,
            random.choice((block_size, block_size, 2 * block_size, block_size // 2)),
            random.randrange(1, 6 * block_size) if kind.has_span else 0,
            kind is not STATE and random.random() < 0.25,
        )
        for kind in kinds
    ]
    return tuple(groups)
