"""Calls of a tier for blocks of one prompt that follow one another, in the way in which an engine's threads call it."""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Progress, SupportsLocate, Tier, chained, leading
from kvpact_testkit.sample_blocks import Document, content, empty_buffers, filled_buffers


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


def put_document(tier: Tier, wanted: Document, slot_bytes: int, start: int = 0, end: int | None = None) -> int:
    """Store the blocks of a document; how many are held in a row from `start`."""
    keys = wanted.keys[start:end]
    return put_chain(tier, keys, filled_buffers(keys, slot_bytes, 2), wanted.keys[:start])


def served_of_document(tier: Tier, wanted: Document, slot_bytes: int, start: int = 0, end: int | None = None) -> int:
    """How many blocks of a document are served in a row from `start`; each of them is itself."""
    keys = wanted.keys[start:end]
    buffers = empty_buffers(len(keys), slot_bytes, 2)
    arrived = get_chain(tier, keys, buffers, wanted.keys[:start])
    for key, buffer in zip(keys[:arrived], buffers, strict=False):
        assert b"".join(buffer) == content(key, slot_bytes)
    return arrived
