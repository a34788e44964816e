"""What a driver may do wrong, or refuse: the order of fences, copies over two pinned pieces, long batches, captures.

Owns the trials. Those that may end the device's context run in a child process (`children.py`), and tell each result at
once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from kvpact.torch_cuda.doctor.bench import Bench
from kvpact.torch_cuda.doctor.workspace import Amounts
from kvpact.torch_cuda.trial_memory import filled_segment, pinned_segment
from kvpact.worker.cuda.driver import AccessOrder, Addresses, CudaError, Driver

BLOCKS = 256
"""Of one trial of the order."""

BLOCK_BYTES = 64 << 10

TURNS = 20

SMALL_BYTES = 4 << 10
"""Of an entry of a long batch."""

PIECE_BYTES = 16 << 20
"""Of a pinned piece that copies are tried across."""

COPY_BYTES = 2 << 20


def _addresses(start: int, count: int, size: int) -> Addresses:
    return np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(size)


def _sizes(count: int, size: int) -> Addresses:
    return np.full(count, size, np.uint64)


def order(bench: Bench, amounts: Amounts) -> dict[str, Any]:
    """Whether a fence holds: copies behind it see what a late kernel wrote before it, out of the device and into it.

    kvpact's own copies are "out_in_stream_order" and "in_at_any_time". The source of a copy "at any time" may be read
    before its fence; what this driver does then is told, and kvpact never asks for it on the way out.
    """
    driver = bench.driver
    memory = bench.allocate(BLOCKS * BLOCK_BYTES)
    side, fence, done = driver.create_stream(), driver.create_event(), driver.create_event()
    blocks, sizes = _addresses(memory.address, BLOCKS, BLOCK_BYTES), _sizes(BLOCKS, BLOCK_BYTES)
    wrong: dict[str, int] = {}
    with pinned_segment(driver, 2, BLOCKS * BLOCK_BYTES, 2) as segment:
        first, second = np.frombuffer(segment.memory, np.uint8).reshape(2, -1)
        start = segment.mapped_at
        slots, others = (_addresses(start + half * first.size, BLOCKS, BLOCK_BYTES) for half in (0, 1))

        def behind_fence(copy: Callable[[], None]) -> None:
            driver.record(fence, bench.computing_stream())
            driver.stream_wait(side, fence)
            copy()
            driver.record(done, side)
            driver.synchronize(done)

        for name, kind in (("in_stream_order", AccessOrder.STREAM), ("at_any_time", AccessOrder.ANY)):
            out = into = 0
            for turn in range(1, TURNS + 1):
                bench.fill(memory, turn)
                behind_fence(lambda kind=kind: driver.copy_batch(slots, blocks, sizes, kind, side))  # type: ignore[misc]
                out += bool((first != turn).any())
                second[:] = 100 + turn
                bench.fill(memory, turn)
                behind_fence(lambda kind=kind: driver.copy_batch(blocks, others, sizes, kind, side))  # type: ignore[misc]
                bench.synchronize()
                behind_fence(lambda: driver.copy_batch(slots, blocks, sizes, AccessOrder.STREAM, side))
                into += bool((first != 100 + turn).any())
            wrong |= {f"wrong_out_{name}": out, f"wrong_in_{name}": into}
        bench.synchronize()
        driver.destroy_stream(side)
        del first, second
    return {"turns": TURNS, **wrong}


def spans(bench: Bench, amounts: Amounts) -> Iterator[dict[str, Any]]:
    """The driver's errors for copies from pinned memory, across two pinned pieces, and from memory that is not."""
    driver = bench.driver
    memory = bench.allocate(COPY_BYTES)
    stream, done = driver.create_stream(), driver.create_event()
    segment = filled_segment(4, PIECE_BYTES)
    for piece in (0, 1):
        driver.register(segment.mapped_at + piece * PIECE_BYTES, PIECE_BYTES)
    half = COPY_BYTES // 2
    for name, start in (
        ("inside", 0),
        ("across_two", PIECE_BYTES - half),
        ("half_pinned", 2 * PIECE_BYTES - half),
        ("not_pinned", 3 * PIECE_BYTES),
    ):
        source = segment.mapped_at + start

        def copy(source: int = source) -> None:
            _copy_one(driver, memory.address, source, stream)
            driver.record(done, stream)
            driver.synchronize(done)

        yield {"copy": name, "error_code": _code(copy)}
    yield {"copy": "inside, afterwards", "error_code": _code(bench.synchronize)}
    for piece in (0, 1):
        with suppress(CudaError):  # the device was lost, and said so above
            driver.unregister(segment.mapped_at + piece * PIECE_BYTES)
    segment.close()


def _copy_one(driver: Driver, target: int, source: int, stream: int) -> None:
    target_at, source_at, size = (np.array([value], np.uint64) for value in (target, source, COPY_BYTES))
    driver.copy_batch(target_at, source_at, size, AccessOrder.STREAM, stream)


def _code(call: Callable[[], None]) -> int:
    """The number of the driver's error; 0 for none, -1 for one without a number."""
    try:
        call()
    except CudaError as error:
        return error.code
    except Exception:
        return -1
    return 0


def long_batches(bench: Bench, amounts: Amounts) -> Iterator[dict[str, Any]]:
    """Batches of more entries than kvpact gives in one call: a driver has crashed at 51,828 of them."""
    driver = bench.driver
    most = max(amounts.batches)
    memory = bench.allocate(most * SMALL_BYTES)
    with pinned_segment(driver, most, SMALL_BYTES, most) as segment:
        for count in sorted(amounts.batches):
            targets = _addresses(memory.address, count, SMALL_BYTES)[::-1].copy()
            sources, sizes = _addresses(segment.mapped_at, count, SMALL_BYTES), _sizes(count, SMALL_BYTES)

            def batch(
                stream: int, targets: Addresses = targets, sources: Addresses = sources, sizes: Addresses = sizes
            ) -> None:
                driver.copy_long_batch(targets, sources, sizes, stream)

            timing = bench.timed(batch, 1)
            yield {
                "entries": count,
                "gb_per_s": timing.gb_per_s(count * SMALL_BYTES),
                "call_us_per_entry": timing.call / count * 1e6,
            }


def captures(bench: Bench, amounts: Amounts) -> Iterator[dict[str, Any]]:
    """Graphs that are captured while another thread pins, copies and waits, as at an engine's start.

    First as kvpact's threads do it, then as a thread does that has not said that it does no harm.
    """
    for relaxed in (True, False):
        yield _captured(bench, amounts.captures, relaxed=relaxed)


class _Pinning:
    """A thread that pins, copies, waits and unpins until it is told to stop."""

    def __init__(self, bench: Bench, *, relaxed: bool) -> None:
        driver = self._driver = bench.driver
        self._relaxed = relaxed
        self._segment = filled_segment(1, PIECE_BYTES)
        self._memory = bench.allocate(COPY_BYTES)
        self._stream, self._done = driver.create_stream(), driver.create_event()
        self.codes: dict[str, int] = {}
        """"call: error code" -> how often."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._segment.close()

    def _run(self) -> None:
        driver, address = self._driver, self._segment.mapped_at
        if self._relaxed:
            driver.attach()
        else:
            driver.attach_strictly()
        while not self._stop.is_set():
            for name, call in (
                ("register", lambda: driver.register(address, PIECE_BYTES)),
                ("copy", lambda: _copy_one(driver, self._memory.address, address, self._stream)),
                ("record", lambda: driver.record(self._done, self._stream)),
                ("synchronize", lambda: driver.synchronize(self._done)),
                ("unregister", lambda: driver.unregister(address)),
            ):
                code = f"{name}: {_code(call)}"
                self.codes[code] = self.codes.get(code, 0) + 1


def _captured(bench: Bench, count: int, *, relaxed: bool) -> dict[str, Any]:
    pinning, good, error = _Pinning(bench, relaxed=relaxed), 0, None
    for _ in range(count):
        try:
            bench.capture()
            good += 1
        except Exception as failed:
            error = str(failed)[:200]
    pinning.end()
    return {
        "attached_as_kvpact": relaxed,
        "captures": count,
        "good_captures": good,
        "capture_error": error,
        "calls_by_error_code": pinning.codes,
    }
