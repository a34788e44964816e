"""How fast tiers write and read blocks, over the bare calls below them, with 1 to 16 reads or writes in flight.

Disk over `preadv` and `pwritev` past the page cache, Redis (a server on loopback) over pipelined redis-py, objects
(moto's S3 server on loopback, which is itself slow) over bare obstore, a chain in one object. Both take turns over the
same bytes, in as many threads as chains are in flight. The goal is 0.8 for reads.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import local
from typing import Any

from benchmarks.needs import find_testbeds, require_known
from benchmarks.table import spread

find_testbeds()

MIB = 1 << 20
Chain = list[bytes]
Move = Callable[[int, Chain, list[memoryview]], object]
"""Moves one chain of blocks: its number, its keys, its buffers."""


@contextmanager
def _disk(stack: ExitStack, folder: Path, size: int, chains: int) -> Iterator[tuple[str, Move, Move]]:
    descriptor = os.open(folder / "bare", os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
    os.posix_fallocate(descriptor, 0, size * chains)

    def put(number: int, keys: Chain, buffers: list[memoryview]) -> None:
        os.pwritev(descriptor, buffers, number * size)

    def get(number: int, keys: Chain, buffers: list[memoryview]) -> None:
        os.preadv(descriptor, buffers, number * size)

    yield f"disk://{folder}?capacity={4 * size * chains + 64 * MIB}B", put, get
    os.close(descriptor)


@contextmanager
def _redis(stack: ExitStack, folder: Path, size: int, chains: int) -> Iterator[tuple[str, Move, Move]]:
    import redis

    from servers.redis_server import redis_server

    server = stack.enter_context(redis_server(folder / "redis"))
    own = local()

    def pipeline() -> Any:
        if not hasattr(own, "client"):
            own.client = redis.Redis(host=server.host, port=server.port)
        return own.client.pipeline(transaction=False)

    def put(number: int, keys: Chain, buffers: list[memoryview]) -> None:
        calls = pipeline()
        for key, buffer in zip(keys, buffers, strict=True):
            calls.set(b"bare" + key, buffer)
        calls.execute()

    def get(number: int, keys: Chain, buffers: list[memoryview]) -> None:
        calls = pipeline()
        for key in keys:
            calls.get(b"bare" + key)
        for buffer, value in zip(buffers, calls.execute(), strict=True):
            buffer[:] = value

    yield f"redis://{server.host}:{server.port}?timeout=20s", put, get


@contextmanager
def _objects(stack: ExitStack, folder: Path, size: int, chains: int) -> Iterator[tuple[str, Move, Move]]:
    from obstore.store import S3Store

    from servers.object_server import CREDENTIALS, object_server

    os.environ.update(CREDENTIALS)
    endpoint = stack.enter_context(object_server()).server
    store = S3Store(
        "bucket",
        endpoint=endpoint,
        access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region=CREDENTIALS["AWS_REGION"],
        client_options={"allow_http": True},
    )

    def put(number: int, keys: Chain, buffers: list[memoryview]) -> None:
        store.put(f"bare/{keys[-1].hex()}", b"".join(buffers))

    def get(number: int, keys: Chain, buffers: list[memoryview]) -> None:
        value, at = memoryview(store.get(f"bare/{keys[-1].hex()}").bytes()), 0
        for buffer in buffers:
            buffer[:] = value[at : at + buffer.nbytes]
            at += buffer.nbytes

    yield f"s3://bucket/tiers?endpoint={endpoint}&allow_http=true&timeout=20s", put, get


TIERS = {"disk": _disk, "redis": _redis, "objects": _objects}


def _measure(name: str, block_bytes: int, blocks: int, in_flight: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    from kvpact.identity.keys import Namespace
    from kvpact.tiers.base import SupportsLocate, chained
    from kvpact.tiers.registry import TierContext, open_tier
    from kvpact.tiers.urls import parse_tier_url

    chains, size = max(in_flight), blocks * block_bytes
    memory = memoryview(mmap.mmap(-1, size * chains))
    memory[:] = os.urandom(MIB) * (size * chains // MIB)
    buffers = [
        [memory[at : at + block_bytes] for at in range(number * size, (number + 1) * size, block_bytes)]
        for number in range(chains)
    ]
    found = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpact-tiers-")))
        url, bare_put, bare_get = stack.enter_context(TIERS[name](stack, folder, size, chains))
        tier = open_tier(parse_tier_url(url), TierContext(Namespace({"benchmark": "tiers"}), block_bytes))
        stack.callback(tier.close)

        def put(number: int, keys: Chain, its: list[memoryview]) -> None:
            if isinstance(tier, SupportsLocate):
                tier.locate(keys)
            if not all(tier.put(chained(keys, [[one] for one in its]))):
                raise SystemExit(f"{name}: the tier did not keep every block")

        def get(number: int, keys: Chain, its: list[memoryview]) -> None:
            if isinstance(tier, SupportsLocate):
                tier.locate(keys)
            if not all(tier.get(keys, [[one] for one in its])):
                raise SystemExit(f"{name}: the tier did not bring every block")

        def gb_per_s(move: Move, keys: list[Chain]) -> float:
            began = time.perf_counter()
            list(threads.map(move, range(len(keys)), keys, buffers))
            return size * len(keys) / (time.perf_counter() - began) / 1e9

        for count in in_flight:
            with ThreadPoolExecutor(count) as threads:
                values: dict[str, list[float]] = {"put": [], "bare_put": [], "get": [], "bare_get": []}
                for number in range(rounds + 1):
                    keys = [[os.urandom(32) for _ in range(blocks)] for _ in range(count)]
                    for pair in (("put", put), ("bare_put", bare_put)), (("get", get), ("bare_get", bare_get)):
                        for word, move in pair if number % 2 else reversed(pair):
                            value = gb_per_s(move, keys)
                            if number:
                                values[word].append(value)
            for way in ("put", "get"):
                ours, bare = values[way], values[f"bare_{way}"]
                where = {"tier": name, "way": way, "in_flight": count, "block_kib": block_bytes >> 10}
                ratios = [one / other for one, other in zip(ours, bare, strict=True)]
                figures = spread("gb_per_s", ours) | spread("bare_gb_per_s", bare) | spread("ratio", ratios)
                found.append(where | figures)
    return found


def rows(
    tiers: tuple[str, ...] = tuple(TIERS),
    in_flight: tuple[int, ...] = (1, 4, 16),
    block_kib: int = 1024,
    blocks: int = 8,
    rounds: int = 7,
) -> list[dict[str, Any]]:
    """One row for each tier, way and number in flight; each moves a chain of `blocks` blocks."""
    require_known("--tiers", tiers, TIERS)
    found: list[dict[str, Any]] = []
    for name in tiers:
        found += _measure(name, block_kib << 10, blocks, in_flight, rounds)
    return found
