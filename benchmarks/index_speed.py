"""How fast the block index is at 100,000 blocks: medians of the CPU time of what a scheduler step asks of it.

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
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.index.classed_slots import ClassedSlots

CHAIN_BLOCKS = 250
"""4,000 tokens in blocks of 16: the prompt length of the project's own demonstration."""
SHARED_BLOCKS = 64
LONG_CHAIN_BLOCKS = 4096
"""65,536 tokens in blocks of 16 (H55)."""
WINDOW_BLOCKS = 64
"""A sliding window of 1,024 tokens in blocks of 16."""
REPEATS = 500


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> list[BlockKey]:
    """The keys of chain `number`, the first `SHARED_BLOCKS` common to all."""
    names = ((f"shared-{block}" if block < SHARED_BLOCKS else f"{number}-{block}") for block in range(blocks))
    return [blake3(name.encode()).digest() for name in names]


def seconds(action: Callable[[], object]) -> float:
    """Seconds of CPU time that one call of `action` takes."""
    started = time.thread_time()
    action()
    return time.thread_time() - started


def save(index: BlockIndex, keys: list[BlockKey]) -> None:
    """Reserve and complete what is missing of `keys`, evicting as needed."""
    known = index.known_prefix(keys)
    index.reservable(keys[known - 1] if known else ROOT, len(keys) - known)
    reservation = index.reserve(keys, known, len(keys))
    if reservation is None:
        raise SystemExit("the benchmark's index is too small for one chain")
    index.complete(reservation.slots)


def save_window(index: BlockIndex, keys: list[BlockKey]) -> None:
    """Reserve and complete side blocks on the last blocks of a chain, evicting as needed."""
    names = [b"window" + key for key in keys[-WINDOW_BLOCKS:]]
    index.reservable(keys[-1], WINDOW_BLOCKS, 1)
    reservation = index.reserve_sides(names, keys[-WINDOW_BLOCKS:], 1)
    if reservation is None:
        raise SystemExit("the benchmark's index is too small for one window")
    index.complete(reservation.slots)


def measure_classes(num_slots: int) -> dict[str, tuple[float, int]]:
    """As `measure`, of chains with one window on each, in slots of two sizes; half of `num_slots` for each."""
    space = ClassedSlots([16, 16], num_slots // 16)
    index = BlockIndex(space.num_rows, space=space, classes=2)
    saves, windows = [], []
    for number in range(num_slots // WINDOW_BLOCKS + REPEATS):
        keys = chain(number)
        saves.append(seconds(partial(save, index, keys)))
        windows.append(seconds(partial(save_window, index, keys)))
    return {
        "reserve + complete, two classes": (statistics.median(saves[-REPEATS:]), CHAIN_BLOCKS - SHARED_BLOCKS),
        f"window of {WINDOW_BLOCKS}, two classes": (statistics.median(windows[-REPEATS:]), WINDOW_BLOCKS),
    }


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
    for name, (median, blocks) in (measure(arguments.blocks) | measure_classes(arguments.blocks)).items():
        print(f"{name:34} {median * 1e6:9.1f} us {1 / median:12,.0f} {median / blocks * 1e9:8.0f} ns")


if __name__ == "__main__":
    main()
