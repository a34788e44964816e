"""What the block index costs a block, of CPU time and memory, from 10,000 blocks to ten million, and a slab's restart.

"fill": chains of 250 blocks are reserved and completed while there is room; "new": once each evicts others; beside them
a Python dict of the same keys (`dict_...`), which evicts nothing and knows no chains. `growth` is the cost of a new
block over that in the smallest index; the goal is 1.5. "two classes": slots of two sizes, a chain and a window of
64 side blocks on its end, each new one evicting others. Microseconds of CPU time. "in a memory file": an index as the
cache has it, with columns that other processes can read. "restart": a slab whose payloads are
a hole is opened, with its header table in the page cache and without, beside plain reads of that table. "foreign slab":
what one learns of a slab that another engine writes. Needs no engine. Ten million blocks need 3 GB of memory and 3 GB
of disk.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.needs import find_testbeds
from benchmarks.table import ratio, spread
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.column_file import ColumnFile
from kvpact.index.slot_space import PlainSlots
from kvpact.own_files import PRIVATE
from kvpact.tiers.accounts import Accounts
from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.disk.foreign_slab import ForeignSlab
from kvpact.tiers.disk.tier import DiskTier
from kvpact_testkit.demo.phases import drop_page_cache

find_testbeds()

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
CHAIN_BLOCKS = 250
"""4,000 tokens in blocks of 16."""
LONG_CHAIN_BLOCKS = 4096
"""65,536 tokens in blocks of 16 (H55)."""
WINDOW_BLOCKS = 64
"""A sliding window of 1,024 tokens in blocks of 16."""
REPEATS = 200
PAGE_BYTES = 4096
NAMESPACE = Namespace({"model": "benchmark"})
READ_BYTES = 16 << 20


def seconds(action: Callable[[], object]) -> float:
    """Seconds of CPU time that one call takes on this thread."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


def micros(name: str, actions: Sequence[Callable[[], object]], blocks: int = 1) -> dict[str, float]:
    """The columns of what one of these calls costs, for each of its blocks."""
    return spread(name, [1e6 * seconds(action) / blocks for action in actions])


def resident_bytes() -> int:
    """The process's own memory that is resident, and that of memory files: without other files."""
    with open("/proc/self/status") as status:
        return sum(1024 * int(line.split()[1]) for line in status if line.startswith(("RssAnon", "RssShmem")))


def save(index: BlockIndex, keys: Sequence[BlockKey]) -> None:
    """Reserve and complete what is missing of `keys`, evicting as needed."""
    known = index.known_prefix(keys)
    index.reservable(keys[known - 1] if known else ROOT, len(keys) - known)
    reservation = index.reserve(keys, known, len(keys))
    if reservation is None:
        raise SystemExit("the benchmark's index is too small for one chain")
    index.complete(reservation.slots)


def save_window(index: BlockIndex, keys: Sequence[BlockKey]) -> None:
    """Reserve and complete side blocks on the last blocks of a chain, evicting as needed."""
    names = [key[::-1] for key in keys[-WINDOW_BLOCKS:]]
    index.reservable(keys[-1], WINDOW_BLOCKS, 1)
    reservation = index.reserve_sides(names, keys[-WINDOW_BLOCKS:], 1)
    if reservation is None:
        raise SystemExit("the benchmark's index is too small for one window")
    index.complete(reservation.slots)


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> list[BlockKey]:
    """The keys of chain `number`."""
    from slab_tables import chain_keys

    return chain_keys(0, number * CHAIN_BLOCKS, blocks)


def pin_and_unpin(index: BlockIndex, key: BlockKey) -> None:
    """Hold a chain and let it go."""
    index.unpin(index.pin(key))


def dict_columns(blocks: int) -> dict[str, float]:
    """What a dict of the same keys costs."""
    before, known = resident_bytes(), dict[BlockKey, int]()

    def enter(keys: list[BlockKey], first: int) -> None:
        known.update(zip(keys, range(first, first + CHAIN_BLOCKS), strict=True))

    taken = [seconds(partial(enter, chain(number), number * CHAIN_BLOCKS)) for number in range(blocks // CHAIN_BLOCKS)]
    columns = spread("dict_fill_us", [1e6 * one / CHAIN_BLOCKS for one in taken[-REPEATS:]])
    return columns | {"dict_bytes": round((resident_bytes() - before) / len(known), 1)}


def index_row(blocks: int, smallest: dict[str, Any] | None, *, in_file: bool) -> dict[str, Any]:
    """An index of `blocks` slots that is filled, and then evicts for each new block."""
    before, chains, space = resident_bytes(), blocks // CHAIN_BLOCKS, PlainSlots(blocks)
    index = BlockIndex(blocks, space=space, columns=ColumnFile(space) if in_file else None)
    filling = [seconds(partial(save, index, chain(number))) for number in range(chains)]
    resident = resident_bytes() - before
    held = [chain(chains - 1 - turn * (chains - 1) // REPEATS) for turn in range(REPEATS)]
    row: dict[str, Any] = {"what": "index in a memory file" if in_file else "index", "blocks": blocks}
    row |= spread("fill_us", [1e6 * one / CHAIN_BLOCKS for one in filling[-REPEATS:]])
    row["bytes"] = round(resident / blocks, 1)
    row |= micros("held_prefix_250_us", [partial(index.held_prefix, keys) for keys in held])
    row |= micros("slots_of_250_us", [partial(index.slots_of, keys) for keys in held])
    row |= micros("touch_250_us", [partial(index.touch, keys[-1]) for keys in held])
    row |= micros("pin_unpin_250_us", [partial(pin_and_unpin, index, keys[-1]) for keys in held])
    fresh = map(chain, range(chains, chains + 3 * REPEATS))
    evicting = [seconds(partial(save, index, keys)) for keys in fresh]
    row |= spread("new_us", [1e6 * one / CHAIN_BLOCKS for one in evicting[-REPEATS:]])
    long_chain = chain(2 * chains + 3 * REPEATS, LONG_CHAIN_BLOCKS)
    save(index, long_chain)
    row |= micros("held_prefix_4096_us", [partial(index.held_prefix, long_chain)] * 50)
    row |= micros("slots_of_4096_us", [partial(index.slots_of, long_chain)] * 50)
    row |= micros("pin_unpin_4096_us", [partial(pin_and_unpin, index, long_chain[-1])] * 50)
    row["growth"] = ratio(row["new_us"], (smallest or row)["new_us"])
    return row


def classes_row(blocks: int) -> dict[str, Any]:
    """Chains with one window on each, in slots of two sizes; half of `blocks` for each size."""
    space = ClassedSlots([16, 16], blocks // 16)
    index, needed = BlockIndex(space.num_rows, space=space, classes=2), blocks // WINDOW_BLOCKS + 3 * REPEATS
    chains, windows = list[float](), list[float]()
    for keys in map(chain, range(needed)):
        chains.append(1e6 * seconds(partial(save, index, keys)) / CHAIN_BLOCKS)
        windows.append(1e6 * seconds(partial(save_window, index, keys)) / WINDOW_BLOCKS)
    row = {"what": "two classes", "blocks": blocks}
    return row | spread("new_us", chains[-REPEATS:]) | spread("window_us", windows[-REPEATS:])


def restart_rows(blocks: int, directory: Path | None) -> list[dict[str, Any]]:
    """A slab of `blocks` records is opened with its header table in the page cache and without."""
    with slab(blocks, directory) as (path, capacity):
        return [in_child(restart_row, path, capacity, blocks, cache) for cache in ("warm", "cold")]


@contextmanager
def slab(blocks: int, directory: Path | None) -> Iterator[tuple[Path, int]]:
    """The file of a slab with `blocks` records, and a capacity that holds it."""
    from slab_tables import write_slab

    with tempfile.TemporaryDirectory(prefix="kvpact-slab-", dir=directory) as folder:
        yield in_child(partial(write_slab, slot_bytes=PAGE_BYTES), Path(folder), NAMESPACE, blocks)


def restart_row(path: Path, capacity: int, blocks: int, page_cache: str) -> dict[str, Any]:
    """The slab in this file is read by plain reads, and then opened."""
    if page_cache == "cold":
        drop_page_cache(path.parent)
    plain = read_table(path, blocks)
    if page_cache == "cold":
        drop_page_cache(path.parent)
    before, cpu, began = resident_bytes(), time.process_time(), time.monotonic()
    tier = DiskTier.open(path.parents[1], NAMESPACE, PAGE_BYTES, capacity)
    opened, first = time.monotonic() - began, tier.capacity().blocks
    while tier.own is not None and tier.own.content.reading:
        time.sleep(0.01)
    cpu, took = time.process_time() - cpu, time.monotonic() - began
    row = {
        "what": f"restart, {page_cache}",
        "blocks": blocks,
        "opened_s": round(opened, 3),
        "served_when_opened": first,
        "all_read_s": round(took, 3),
        "table_read_s": round(plain, 3),
        "restart_us": round(1e6 * cpu / blocks, 3),
        "bytes": round((resident_bytes() - before) / blocks, 1),
        "served": tier.capacity().blocks,
    }
    tier.close()
    return row


def read_table(path: Path, blocks: int) -> float:
    """Seconds in which plain reads bring the header table of a slab."""
    room, left, began = bytearray(READ_BYTES), PAGE_BYTES + blocks * HEADER_BYTES, time.monotonic()
    with path.open("rb", buffering=0) as file:
        while left > 0 and (got := file.readinto(room)):
            left -= got
    return time.monotonic() - began


def foreign_row(path: Path, blocks: int) -> dict[str, Any]:
    """What one learns of a slab with `blocks` records that another engine writes, with its table in the page cache.

    Then chains are looked up, and one block with all after it is refused.
    """
    chains, before = blocks // CHAIN_BLOCKS, resident_bytes()
    foreign = ForeignSlab.open(path, NAMESPACE.digest, PAGE_BYTES, PRIVATE, Accounts(logging.getLogger(), path.name))
    if foreign is None:
        raise SystemExit(f"{path} cannot be read")
    began = time.monotonic()
    learning = seconds(partial(foreign.scan, lambda: False))
    took, resident = time.monotonic() - began, resident_bytes() - before
    some = [chain(chains - 1 - turn * (chains - 1) // REPEATS) for turn in range(REPEATS)]
    row = {
        "what": "foreign slab",
        "blocks": blocks,
        "all_read_s": round(took, 3),
        "restart_us": round(1e6 * learning / blocks, 3),
        "bytes": round(resident / blocks, 1),
        **micros("held_prefix_250_us", [partial(foreign.records.run, keys, 0) for keys in some]),
        "served": len(foreign.records),
        "refuse_ms": round(1e3 * seconds(partial(foreign.records.refuse_after, some[0][:1])), 1),
    }
    foreign.close()
    return row


def rows(
    sizes: Sequence[int] = SIZES,
    classes: int = 100_000,
    restart: int = SIZES[-1],
    foreign: int = 1_000_000,
    directory: Path | None = None,
) -> list[dict[str, Any]]:
    """One row for each size of the index, and those of the others; a number of blocks is 0: not measured.

    Slabs are in `directory`, or where temporary files are.
    """
    found: list[dict[str, Any]] = []
    for blocks in sizes:
        known = in_child(dict_columns, blocks)
        for in_file in (False, True):
            row = in_child(partial(index_row, in_file=in_file), blocks, found[0] if found else None) | known
            found.append(row | {"fill_over_dict": ratio(row["fill_us"], row["dict_fill_us"])})
    if classes:
        found.append(in_child(classes_row, classes))
    if restart:
        found += restart_rows(restart, directory)
    if foreign:
        with slab(foreign, directory) as (path, _):
            found.append(in_child(foreign_row, path, foreign))
    return found


def in_child(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns in a process of its own, which has no memory of earlier ones to use again."""
    with ProcessPoolExecutor(1, get_context("fork")) as process:
        return process.submit(measure, *arguments).result()
