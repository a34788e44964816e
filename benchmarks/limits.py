"""What this machine can do, without kvpact: memcpy, the disk, a Redis server and digests, in GB/s."""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from blake3 import blake3

from benchmarks.needs import find_testbeds
from benchmarks.table import spread

find_testbeds()

MIB = 1 << 20


def speed(action: Callable[[], object], size: int, rounds: int) -> dict[str, float]:
    """GB/s of an action over `size` bytes, with the quartiles; the first of its runs does not count."""
    values = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        action()
        values.append(size / (time.perf_counter() - began) / 1e9)
    return spread("gb_per_s", values[1:])


def _disk(found: list[dict[str, Any]], directory: Path | None, size: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kvpact-limits-", dir=directory) as folder:
        path = Path(folder, "bare")
        memory = memoryview(mmap.mmap(-1, size))
        memory[:] = os.urandom(MIB) * (size // MIB)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        os.posix_fallocate(descriptor, 0, size)
        for name, call in (("write", os.pwritev), ("read", os.preadv)):
            for piece in (MIB, 4 * MIB):

                def move(call: Any = call, piece: int = piece) -> None:
                    for at in range(0, size, piece):
                        call(descriptor, [memory[at : at + piece]], at)

                figures = speed(move, size, rounds)
                found.append({"what": f"disk, direct {name}, {piece // MIB} MiB pieces", "bytes": size, **figures})
        os.close(descriptor)


def _redis(found: list[dict[str, Any]], rounds: int) -> None:
    try:
        import redis

        from servers.redis_server import redis_server
    except ImportError as error:
        print(f"without Redis: {error}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="kvpact-limits-") as folder, redis_server(Path(folder)) as server:
        client = redis.Redis(host=server.host, port=server.port)
        for piece in (MIB, 4 * MIB):
            value, names = os.urandom(piece), [f"v{number}" for number in range(32 * MIB // piece)]

            def put(names: list[str] = names, value: bytes = value) -> None:
                pipeline = client.pipeline(transaction=False)
                for name in names:
                    pipeline.set(name, value)
                pipeline.execute()

            def get(names: list[str] = names) -> None:
                pipeline = client.pipeline(transaction=False)
                for name in names:
                    pipeline.get(name)
                pipeline.execute()

            for word, action in (("SET", put), ("GET", get)):
                figures = speed(action, 32 * MIB, rounds)
                found.append({"what": f"redis-py, {word} pipelined, {piece // MIB} MiB", "bytes": 32 * MIB, **figures})
        client.close()


def rows(rounds: int = 5, mib: int = 64, directory: Path | None = None) -> list[dict[str, Any]]:
    """One row for each limit; `directory` is on the disk to measure, by default that of temporary files."""
    size = mib * MIB
    found: list[dict[str, Any]] = []
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    for piece in (4096, 64 << 10, MIB, size):
        short, other = source[:piece], target[:piece]
        times = max(1, 16 * MIB // piece)

        def copy(short: Any = short, other: Any = other, times: int = times) -> None:
            for _ in range(times):
                np.copyto(other, short)

        what = f"memcpy, {piece >> 10} KiB, {'not ' * (piece == size)}in the caches"
        found.append({"what": what, "bytes": piece, **speed(copy, piece * times, rounds)})
    data = source.tobytes()
    digests: dict[str, Callable[[], object]] = {
        "xxh3_64": lambda: xxhash.xxh3_64(data).digest(),
        "blake3": lambda: blake3(data).digest(),
        "sha256": lambda: hashlib.sha256(data).digest(),
        "crc32": lambda: zlib.crc32(data),
    }
    found += [
        {"what": f"digest, {name}", "bytes": size, **speed(action, size, rounds)} for name, action in digests.items()
    ]
    _disk(found, directory, size, rounds)
    _redis(found, rounds)
    return found
