"""Calls of a tier for blocks of one prompt that follow one another, in the way in which an engine's threads call it."""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Progress, SupportsLocate, Tier, chained, leading


def put_chain(
    tier: Tier,
    keys: Sequence[BlockKey],
    buffers: Sequence[BlockBuffer],
    before: Sequence[BlockKey] = (),
    epoch: Epoch = FIRST_EPOCH,
) -> int:
    """Store block `keys[i]` from `buffers[i]`, after those `before` them; how many are held in a row from the first."""
    if isinstance(tier, SupportsLocate):
        tier.locate([*before, *keys])
    return leading(tier.put(chained(keys, buffers, before, epoch)))


def get_chain(
    tier: Tier,
    keys: Sequence[BlockKey],
    buffers: Sequence[BlockBuffer],
    before: Sequence[BlockKey] = (),
    on_progress: Progress | None = None,
) -> int:
    """Read block `keys[i]` into `buffers[i]`, after those `before` them; how many arrive in a row from the first."""
    if isinstance(tier, SupportsLocate):
        tier.locate([*before, *keys])
    return leading(tier.get(keys, buffers, on_progress))
