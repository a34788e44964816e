"""What the block index costs a block, of CPU time and memory, from 10,000 blocks to ten million, and a slab's restart.

Also of a slab that another engine writes. Run: python benchmarks/index.py [--blocks N,N,..] [--restart N]
[--foreign N]. Needs no engine. Ten million blocks need 2 GB of memory
and 3 GB of disk, most of the file being a hole.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "testbeds"))

from kvpact.identity.keys import BlockKey, Namespace
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.own_files import PRIVATE
from kvpact.tiers.disk.foreign_slab import ForeignSlab
from kvpact.tiers.disk.tier import DiskTier
from slab_tables import chain_keys, write_slab

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
CHAIN_BLOCKS = 250
"""4,000 tokens in blocks of 16."""
LONG_CHAIN_BLOCKS = 4096
"""65,536 tokens in blocks of 16 (H55)."""
REPEATS = 200
PAGE_BYTES = 4096


def seconds(action: Callable[[], object]) -> float:
    """Seconds of CPU time that one call takes on this thread."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


def resident_bytes() -> int:
    """The process's own memory that is resident: without files."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def save(index: BlockIndex, keys: Sequence[BlockKey]) -> None:
    """Reserve and complete what is missing of `keys`, evicting as needed."""
    known = index.known_prefix(keys)
    index.reservable(keys[known - 1] if known else ROOT, len(keys) - known)
    reservation = index.reserve(keys, known, len(keys))
    if reservation is None:
        raise SystemExit("the benchmark's index is too small for one chain")
    index.complete(reservation.slots)


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> list[BlockKey]:
    """The keys of chain `number`."""
    return chain_keys(0, number * CHAIN_BLOCKS, blocks)


def pin_and_unpin(index: BlockIndex, key: BlockKey) -> None:
    """Hold a chain and let it go."""
    index.unpin(index.pin(key))


def index_row(blocks: int) -> dict[str, Any]:
    """An index of `blocks` slots that is filled, and then evicts for each new block."""
    before = resident_bytes()
    index, chains = BlockIndex(blocks), blocks // CHAIN_BLOCKS
    filling = [seconds(partial(save, index, keys)) for keys in map(chain, range(chains))]
    resident = resident_bytes() - before
    held = [chain(chains - 1 - turn * (chains - 1) // REPEATS) for turn in range(REPEATS)]
    row = {
        "blocks": blocks,
        "fill_us_per_block": 1e6 * statistics.median(filling[-REPEATS:]) / CHAIN_BLOCKS,
        "resident_bytes_per_block": resident / blocks,
        "held_prefix_250_us": 1e6 * statistics.median(seconds(partial(index.held_prefix, keys)) for keys in held),
        "slots_of_250_us": 1e6 * statistics.median(seconds(partial(index.slots_of, keys)) for keys in held),
        "pin_unpin_250_us": 1e6 * statistics.median(seconds(partial(pin_and_unpin, index, keys[-1])) for keys in held),
    }
    fresh = map(chain, range(chains, chains + 3 * REPEATS))
    evicting = [seconds(partial(save, index, keys)) for keys in fresh]
    row["new_us_per_block"] = 1e6 * statistics.median(evicting[-REPEATS:]) / CHAIN_BLOCKS
    long_chain = chain(2 * chains + 3 * REPEATS, LONG_CHAIN_BLOCKS)
    save(index, long_chain)
    for name, action in (
        ("held_prefix_4096_us", partial(index.held_prefix, long_chain)),
        ("slots_of_4096_us", partial(index.slots_of, long_chain)),
        ("pin_unpin_4096_us", partial(pin_and_unpin, index, long_chain[-1])),
    ):
        row[name] = 1e6 * statistics.median(seconds(action) for _ in range(50))
    return row


def restart_rows(blocks: int, directory: Path | None) -> list[dict[str, Any]]:
    """A slab of `blocks` records is opened with its header table in the page cache and without."""
    rows, namespace = list[dict[str, Any]](), Namespace({"model": "benchmark"})
    with tempfile.TemporaryDirectory(prefix="kvpact-restart-", dir=directory) as folder:
        path, capacity = write_slab(Path(folder), namespace, blocks, slot_bytes=PAGE_BYTES)
        for page_cache in ("warm", "cold"):
            if page_cache == "cold":
                drop_from_page_cache(path)
            before, cpu, began = resident_bytes(), time.process_time(), time.monotonic()
            tier = DiskTier.open(Path(folder), namespace, PAGE_BYTES, capacity)
            opened, first = time.monotonic() - began, tier.capacity().blocks
            while tier.reading:
                time.sleep(0.01)
            cpu, took = time.process_time() - cpu, time.monotonic() - began
            rows.append(
                {
                    "blocks": blocks,
                    "page_cache": page_cache,
                    "opened_s": opened,
                    "served_when_opened": first,
                    "all_read_s": took,
                    "cpu_us_per_block": 1e6 * cpu / blocks,
                    "resident_bytes_per_block": (resident_bytes() - before) / blocks,
                    "served": tier.capacity().blocks,
                }
            )
            tier.close()
            del tier
    return rows


def foreign_row(blocks: int, directory: Path | None) -> dict[str, Any]:
    """What one learns of a slab with `blocks` records that another engine writes, with its table in the page cache.

    Then a chain is looked up, and one block with all after it is refused.
    """
    namespace, chains = Namespace({"model": "benchmark"}), blocks // CHAIN_BLOCKS
    with tempfile.TemporaryDirectory(prefix="kvpact-foreign-", dir=directory) as folder:
        path, _ = write_slab(Path(folder), namespace, blocks, slot_bytes=PAGE_BYTES)
        before = resident_bytes()
        slab = ForeignSlab.open(path, namespace.digest, PAGE_BYTES, PRIVATE, lambda *_: None)
        if slab is None:
            raise SystemExit(f"{path} cannot be read")
        began = time.monotonic()
        learning = seconds(partial(slab.scan, lambda: False))
        took, resident = time.monotonic() - began, resident_bytes() - before
        some = [chain(chains - 1 - turn * (chains - 1) // REPEATS) for turn in range(REPEATS)]
        row = {
            "blocks": blocks,
            "foreign": True,
            "all_read_s": took,
            "cpu_us_per_block": 1e6 * learning / blocks,
            "resident_bytes_per_block": resident / blocks,
            "run_250_us": 1e6 * statistics.median(seconds(partial(slab.run, keys, 0)) for keys in some),
            "served": len(slab),
            "refuse_ms": 1e3 * seconds(partial(slab.refuse, some[0][:1])),
        }
        slab.close()
    return row


def drop_from_page_cache(path: Path) -> None:
    """Have the next reads of a file come from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def rows(
    sizes: Sequence[int] = SIZES,
    restart_blocks: int = SIZES[-1],
    foreign_blocks: int = 1_000_000,
    directory: Path | None = None,
) -> list[dict[str, Any]]:
    """One row for each size of the index, two for the restart, and one for another engine's slab.

    Slabs are in `directory`, or where temporary files are.
    """
    foreign = [foreign_row(foreign_blocks, directory)] if foreign_blocks else []
    return [*map(index_row, sizes), *(restart_rows(restart_blocks, directory) if restart_blocks else ()), *foreign]


def main() -> None:
    """Print the figures of each row on a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default=",".join(map(str, SIZES)), help="sizes of the index")
    parser.add_argument("--restart", type=int, default=SIZES[-1], help="blocks of the slab; 0: none")
    parser.add_argument("--foreign", type=int, default=1_000_000, help="blocks of another engine's slab; 0: none")
    parser.add_argument("--directory", type=Path, help="where the slab lies")
    given = parser.parse_args()
    for row in rows(
        [int(size) for size in given.blocks.split(",") if size], given.restart, given.foreign, given.directory
    ):
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )


if __name__ == "__main__":
    main()
