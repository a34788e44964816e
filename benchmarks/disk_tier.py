"""How fast the disk tier is against the disk itself: the same bytes through DiskTier and through bare O_DIRECT calls.

    python benchmarks/disk_tier.py [DIRECTORY] [--rounds N] [--blocks N] [--block-mib N]

Every round times both, in alternating order and in the same file, so that a busy disk slows both alike; the ratios are
taken round by round. Prints medians and the range from the first to the third quartile, as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpact.identity.keys import Namespace
from kvpact.tiers.base import BlockBuffer, chained
from kvpact.tiers.disk.tier import DiskTier

MIB = 1 << 20


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, digits), "from": round(low, digits), "to": round(high, digits)}


def raw(call: Callable[[int, list[memoryview], int], int], descriptor: int, memory: memoryview) -> None:
    moved = call(descriptor, [memory], 0)
    if moved != memory.nbytes:
        raise SystemExit(f"the disk moved {moved} of {memory.nbytes} bytes")


def measure(directory: Path, rounds: int, blocks: int, block_bytes: int) -> dict[str, object]:
    size = blocks * block_bytes
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = os.urandom(MIB) * (size // MIB)
    buffers: list[BlockBuffer] = [[memory[at : at + block_bytes]] for at in range(0, size, block_bytes)]
    tier = DiskTier.open(directory, Namespace({"benchmark": "disk"}), block_bytes, 3 * size + 64 * MIB)
    bare = os.open(directory / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(bare, 0, size)

    def new_keys() -> list[bytes]:
        return [os.urandom(32) for _ in range(blocks)]

    def put() -> None:
        if not all(tier.put(chained(keys, buffers))):
            raise SystemExit("the tier did not keep every block")

    def get() -> None:
        if not all(tier.get(keys, buffers)):
            raise SystemExit("the tier did not serve every block")

    times: dict[str, list[float]] = {"put": [], "bare_write": [], "get": [], "bare_read": []}
    pairs = [
        [("put", put), ("bare_write", lambda: raw(os.pwritev, bare, memory))],
        [("get", get), ("bare_read", lambda: raw(os.preadv, bare, memory))],
    ]
    for number in range(rounds + 3):  # three to lay out the file
        keys = new_keys()
        for pair in pairs:
            for name, action in pair if number % 2 else reversed(pair):
                took = seconds(action)
                if number >= 3:
                    times[name].append(took)
    lookup = statistics.median(seconds(lambda: tier.leading(keys)) for _ in range(1000))
    os.close(bare)
    (directory / "bare").unlink()
    report: dict[str, object] = {
        "blocks": blocks,
        "block_bytes": block_bytes,
        "rounds": rounds,
        "direct_io": tier.slab.direct,
        "lookup_us": round(lookup * 1e6, 1),
    }
    report |= {f"{name}_gb_per_s": spread([size / took / 1e9 for took in values], 2) for name, values in times.items()}
    for mine, its in (("put", "bare_write"), ("get", "bare_read")):
        ratios = [bare / took for took, bare in zip(times[mine], times[its], strict=True)]
        report[f"{mine}_against_{its}"] = spread(ratios, 3)
    tier.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, help="where to write; a temporary directory if not given")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--block-mib", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvpact-benchmark-", dir=options.directory) as directory:
        print(json.dumps(measure(Path(directory), options.rounds, options.blocks, options.block_mib * MIB), indent=2))


if __name__ == "__main__":
    main()
