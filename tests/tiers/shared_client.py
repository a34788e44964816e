"""Uses a shared store until it is killed: `python shared_client.py URL`; says "ready" when its first chain is stored.

A process of a test's, so that it can be killed at any moment. Reads what it stored, and stores ever new chains.
"""

from __future__ import annotations

import sys
from itertools import count

from kvpact.config import load_config
from kvpact.identity.keys import BlockKey, BlockKeys, Namespace, RequestIdentity
from kvpact.tiers.base import SupportsLocate, Tier, chained, leading
from kvpact.tiers.registry import TierContext, open_tier

NAMESPACE = Namespace({"model": "of a client that is killed"})
SLOT_BYTES, BLOCKS, BLOCK_SIZE = 256 << 10, 6, 16


def chain(seed: int) -> list[BlockKey]:
    """The keys of one prompt."""
    keys = BlockKeys(NAMESPACE.digest, BLOCK_SIZE, RequestIdentity())
    return keys.extend([seed] * (BLOCKS * BLOCK_SIZE))


def payload(seed: int, block: int) -> bytes:
    """What a block of it holds."""
    return bytes([(seed * 7 + block) % 251]) * SLOT_BYTES


def open_client(url: str) -> Tier:
    """The tier at `url`, as an engine has it."""
    (tier_url,) = load_config({"tiers": [url]}, {}).tiers
    return open_tier(tier_url, TierContext(NAMESPACE, SLOT_BYTES))


def located(tier: Tier, seed: int) -> list[BlockKey]:
    """The keys of a chain, which the tier is told of as an engine's threads tell it."""
    keys = chain(seed)
    if isinstance(tier, SupportsLocate):
        tier.locate(keys)
    return keys


def store(tier: Tier, seed: int) -> int:
    """How many blocks of a chain could be stored."""
    keys = located(tier, seed)
    return leading(tier.put(chained(keys, [(memoryview(payload(seed, block)),) for block in range(BLOCKS)])))


def load(tier: Tier, seed: int) -> int:
    """How many blocks of a chain arrive. AssertionError if one is not what was stored."""
    buffers = [bytearray(SLOT_BYTES) for _ in range(BLOCKS)]
    arrived = leading(tier.get(located(tier, seed), [(memoryview(buffer),) for buffer in buffers]))
    for block in range(arrived):
        assert buffers[block] == payload(seed, block), f"block {block} of chain {seed} is not what was stored"
    return arrived


def main() -> None:
    """Never returns."""
    tier = open_client(sys.argv[1])
    assert store(tier, 0) == BLOCKS
    print("ready", flush=True)
    for seed in count(1):
        load(tier, 0)
        store(tier, seed % 8)


if __name__ == "__main__":
    main()
