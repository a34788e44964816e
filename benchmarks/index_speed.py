"""How fast the block index is at 100,000 blocks: medians of what a scheduler step asks of it.

Run: python benchmarks/index_speed.py [--blocks N]. Needs no engine. Chains share 64 blocks of system prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

from blake3 import blake3

from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex

CHAIN_BLOCKS = 250
"""4,000 tokens in blocks of 16: the prompt length of the project's own demonstration."""
SHARED_BLOCKS = 64
LONG_CHAIN_BLOCKS = 4096
"""65,536 tokens in blocks of 16 (H55)."""
REPEATS = 500


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> list[BlockKey]:
    """The keys of chain `number`, the first `SHARED_BLOCKS` common to all."""
    names = ((f"shared-{block}" if block < SHARED_BLOCKS else f"{number}-{block}") for block in range(blocks))
    return [blake3(name.encode()).digest() for name in names]


def seconds(action: Callable[[], object]) -> float:
    """Seconds that one call of `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def save(index: BlockIndex, keys: list[BlockKey]) -> None:
    """Reserve and complete what is missing of `keys`, evicting as needed."""
    reservation = index.reserve(keys, index.known_prefix(keys), len(keys))
    if reservation is None:
        raise SystemExit("the benchmark's index is too small for one chain")
    index.complete(reservation.slots)


def pin_and_unpin(index: BlockIndex, keys: list[BlockKey]) -> None:
    """Hold a chain and let it go."""
    index.unpin(index.pin(keys[-1]))


def measure(num_slots: int) -> dict[str, tuple[float, int]]:
    """For each operation: median seconds, and blocks that one operation covers."""
    index = BlockIndex(num_slots)
    number = 0
    while index.free_slots:
        save(index, chain(number))
        number += 1
    newest = chain(number - 1)
    others = [chain(number - 2 - turn % (number // 2)) for turn in range(REPEATS)]
    fresh = [chain(number + turn) for turn in range(REPEATS)]

    lookups = [seconds(partial(index.held_prefix, keys)) for keys in others]
    touches = [seconds(partial(index.touch, keys[-1])) for keys in others]
    pins = [seconds(partial(pin_and_unpin, index, keys)) for keys in others]
    slots = [seconds(partial(index.slots_of, keys)) for keys in others]
    held = index.pin(newest[-1])
    pins_held = [seconds(partial(pin_and_unpin, index, newest)) for _ in others]
    index.unpin(held)
    saves = [seconds(partial(save, index, keys)) for keys in fresh]
    long_chain = chain(-1, LONG_CHAIN_BLOCKS)
    save(index, long_chain)
    long_lookups = [seconds(partial(index.held_prefix, long_chain)) for _ in others]
    long_pins = [seconds(partial(pin_and_unpin, index, long_chain)) for _ in range(50)]
    table = list(index.entries())
    rebuilt = BlockIndex(num_slots)
    restore = seconds(partial(rebuilt.restore, table))
    return {
        f"held_prefix, {CHAIN_BLOCKS} blocks": (statistics.median(lookups), CHAIN_BLOCKS),
        f"held_prefix, {LONG_CHAIN_BLOCKS} blocks": (statistics.median(long_lookups), LONG_CHAIN_BLOCKS),
        "touch": (statistics.median(touches), CHAIN_BLOCKS),
        f"slots_of, {CHAIN_BLOCKS} blocks": (statistics.median(slots), CHAIN_BLOCKS),
        f"pin + unpin, {CHAIN_BLOCKS} blocks": (statistics.median(pins), CHAIN_BLOCKS),
        f"pin + unpin, {LONG_CHAIN_BLOCKS} blocks": (statistics.median(long_pins), LONG_CHAIN_BLOCKS),
        "pin + unpin, pinned already": (statistics.median(pins_held), CHAIN_BLOCKS),
        "reserve + complete, all evicted": (statistics.median(saves), CHAIN_BLOCKS - SHARED_BLOCKS),
        f"restore, {len(table)} blocks": (restore, len(table)),
    }


def main() -> None:
    """Print one line for each operation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000, help="slots of the index, all filled")
    arguments = parser.parse_args()
    print(f"{'operation':34} {'median':>12} {'per second':>12} {'per block':>11}")
    for name, (median, blocks) in measure(arguments.blocks).items():
        print(f"{name:34} {median * 1e6:9.1f} us {1 / median:12,.0f} {median / blocks * 1e9:8.0f} ns")


if __name__ == "__main__":
    main()
