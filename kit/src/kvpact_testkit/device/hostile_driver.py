"""A device that is played: streams, events and pinned memory as CUDA documents them, in the worst order it allows.

Owns the queues of all streams, what of them is done, and what was done wrong. A seed decides which stream's head runs
next, and when a source is read that may be read at any time. Memory is the process's own: "device memory" is a buffer
that a test names. Errors that a real driver would return are raised, and noted.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import IntEnum

from kvpact.worker.device.base import MAX_BATCH_ENTRIES, Addresses

FOREVER_SECONDS = 10.0
"""A wait that lasts longer is noted as one that never ends."""

STARVING = 0.005
"""How likely it is, at each call, that other streams are starved from now on."""

COMPUTING_STREAM = 1
"""The engine's own; it exists from the start."""


class AccessOrder(IntEnum):
    """When a copy of a batch may read its source, as CUDA numbers it."""

    STREAM = 1
    """After all that its stream waits for."""
    ANY = 3
    """At any time, before or after the call returns."""


class HostileError(RuntimeError):
    """What a device's libraries raise."""


@dataclass(slots=True, eq=False)
class Copy:
    """One run of bytes, done when `run` returns."""

    target: int
    source: int
    size: int
    early: bytes | None = None
    """What the source held when it was read ahead of its turn."""

    def read(self) -> None:
        """Ahead of its turn."""
        self.early = ctypes.string_at(self.source, self.size)

    def run(self) -> None:
        """Do it."""
        data = self.early if self.early is not None else ctypes.string_at(self.source, self.size)
        ctypes.memmove(self.target, data, self.size)


class WatchedCopy(Copy):
    """Nobody may write to its source or its target until it is done."""

    __slots__ = ("_was", "_wrong")

    def __init__(self, wrong: list[str], target: int, source: int, size: int) -> None:
        """`wrong` gets a line if somebody did."""
        super().__init__(target, source, size)
        self._wrong = wrong
        self._was = self._now()

    def _now(self) -> tuple[bytes, bytes]:
        return ctypes.string_at(self.source, self.size), ctypes.string_at(self.target, self.size)

    def run(self) -> None:
        """Do it."""
        if self._now() != self._was:
            self._wrong.append(f"{self.size} bytes changed under a copy")
        super().run()


@dataclass(slots=True, eq=False)
class _Operation:
    """The head of a stream runs it, in one go or copy by copy."""

    copies: list[Copy] = field(default_factory=list)
    """Copies that are not done."""
    run: Callable[[], object] | None = None
    waits_for: tuple[int, int] = (0, 0)
    """(event, number of its record)."""
    records: tuple[int, int] = (0, 0)


class HostileDriver:
    """The device's calls, with numbers for streams and events.

    The thread that makes it is the engine's, and has the device already.
    """

    def __init__(self, seed: int) -> None:
        self.violations: list[str] = []
        """What a real device would have answered with an error, or with wrong bytes."""
        self.num_calls = 0
        """Batches of copies so far."""
        self.num_entries = 0
        self.capturing = False
        """Whether the engine captures a graph: threads that are not relaxed must not touch the device."""
        self.copy_kind: Callable[[int, int, int], Copy] = Copy
        """What makes a copy of its target, its source and its bytes."""
        self.needs_pinned = True
        """Whether a copy from memory of the host that is not pinned is a mistake."""
        self.stopped = False
        """Whether nothing in any stream runs."""
        self.before_call: Callable[[str], object] = str
        """Called with the name of each call before it is made; what it raises, the call raises."""
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._streams: dict[int, deque[_Operation]] = {COMPUTING_STREAM: deque()}
        self._recorded: dict[int, int] = {}
        """Event -> how often it was recorded."""
        self._pending: set[tuple[int, int]] = set()
        """(event, number of its record) of those that are not done."""
        self._unread: list[Copy] = []
        """Copies whose source may be read at any time."""
        self._device: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        """Start -> bytes."""
        self.pinned_bytes = 0
        """Host memory that is registered now."""
        self._handles = COMPUTING_STREAM
        self._engine_thread = threading.get_ident()
        self._relaxed: set[int] = set()
        self._lost = False
        self._starved: set[int] = set()
        """Streams that do not run for a while, unless somebody waits for something."""

    # What a test does

    def add_device_memory(self, address: int, num_bytes: int) -> None:
        """Declare `num_bytes` from `address` on to be memory of the device."""
        self._device[address] = num_bytes

    def remove_device_memory(self, address: int) -> None:
        """The device unmaps it: no copy may be under way there, and none may come."""
        with self._lock:
            self._require_untouched(address, address + self._device.pop(address), "device memory goes under a copy")

    def memory_at(self, address: int) -> str:
        """Whose memory this is: "device", "pinned" of the host, or "" if the device cannot reach it."""
        kinds = {"device": self._device, "pinned": self._pinned}
        return next((kind for kind, pieces in kinds.items() if self._within(pieces, address, 1)), "")

    def launch(self, kernel: Callable[[], object], stream: int = COMPUTING_STREAM) -> None:
        """Put a kernel into a stream: `kernel` runs when all before it is done."""
        with self._lock:
            self._streams[stream].append(_Operation(run=kernel))
            self._run_some()

    def starve(self, stream: int) -> None:
        """Let this stream do nothing for a while, unless somebody waits for something."""
        with self._lock:
            self._starved = {stream}

    def finish(self) -> None:
        """Run everything, in a random order."""
        with self._lock:
            while self._run_one():
                pass
            left = sum(len(stream) for stream in self._streams.values())
            if left:
                self._violated(f"{left} operations wait for ever")

    def lose(self) -> None:
        """The device fails for good: every later call does, and nothing in its queues is done."""
        with self._lock:
            self._lost = True
            for stream in self._streams.values():
                stream.clear()

    @property
    def busy_streams(self) -> int:
        """Streams but the engine's own in which something is left."""
        with self._lock:
            return sum(bool(stream) for handle, stream in self._streams.items() if handle != COMPUTING_STREAM)

    # The driver

    def attach(self) -> None:
        """Use the device on the calling thread, relaxed: the engine may capture a graph meanwhile."""
        self._relaxed.add(threading.get_ident())
        self._called("attach")

    def create_stream(self) -> int:
        """Return the number of a new stream."""
        self._called("create_stream")
        with self._lock:
            self._streams[stream := self._handle()] = deque()
            return stream

    def create_event(self) -> int:
        """Return the number of a new event."""
        self._called("create_event")
        with self._lock:
            self._recorded[event := self._handle()] = 0
            return event

    def record(self, event: int, stream: int) -> None:
        """Record the event in a stream: it is done when all that is in the stream now is done."""
        self._called("record")
        with self._lock:
            self._require_both("record", event, stream)
            self._recorded[event] += 1
            self._pending.add(record := (event, self._recorded[event]))
            self._streams[stream].append(_Operation(records=record))
            self._run_some()

    def stream_wait(self, stream: int, event: int) -> None:
        """Have what is put into the stream from now on begin after the event."""
        self._called("stream_wait")
        with self._lock:
            self._require_both("stream_wait", event, stream)
            self._streams[stream].append(_Operation(waits_for=(event, self._recorded[event])))
            self._run_some()

    def is_done(self, event: int) -> bool:
        """Whether the event, as it was recorded last, is done. Does not wait."""
        self._called("is_done")
        with self._lock:
            self._require(event in self._recorded, "is_done", f"event {event} is not there")
            self._run_some()
            return (event, self._recorded[event]) not in self._pending

    def synchronize(self, event: int) -> None:
        """Wait until the event, as it was recorded last, is done."""
        self._called("synchronize")
        end = time.monotonic() + FOREVER_SECONDS
        number = self._recorded.get(event, 0)
        while True:
            with self._lock:
                self._require(event in self._recorded, "synchronize", f"event {event} is not there")
                if self._lost:
                    raise self._error("synchronize", 700, "the device was lost")
                if (event, number) not in self._pending:
                    return
                ran = self._run_one()
            if not ran:
                time.sleep(0.001)
                if time.monotonic() > end:
                    self._violated("synchronize waits for ever")
                    raise self._error("synchronize", 702, "timeout")

    def synchronize_all(self) -> None:
        """Wait until nothing is left in any stream."""
        self._called("synchronize_all")
        for stream in list(self._streams):
            self.record(event := self.create_event(), stream)
            self.synchronize(event)

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory; none of it may be pinned already."""
        self._called("register")
        with self._lock:
            end = address + num_bytes
            good = not any(start < end and address < start + size for start, size in self._pinned.items())
            self._require(good, "register", "memory is registered already", code=712)
            self._pinned[address] = num_bytes
            self.pinned_bytes += num_bytes
            self._run_some()

    def unregister(self, address: int) -> None:
        """Unpin what was registered from `address` on; no copy may be under way there."""
        self._called("unregister")
        with self._lock:
            self._require(address in self._pinned, "unregister", "memory is not registered", code=713)
            self.pinned_bytes -= (num_bytes := self._pinned.pop(address))
            self._require_untouched(address, address + num_bytes, "memory is unpinned under a copy")

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, order: AccessOrder, stream: int
    ) -> None:
        """Put copies, at most `MAX_BATCH_ENTRIES`, into a stream; `order` says when their sources may be read."""
        self._called("copy_batch")
        with self._lock:
            self._require(0 < len(sizes) <= MAX_BATCH_ENTRIES, "copy_batch", f"{len(sizes)} entries")
            self._require(stream in self._streams, "copy_batch", f"stream {stream} is not there")
            copies = [
                self.copy_kind(*entry) for entry in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
            ]
            for copy in copies:
                for address in (copy.target, copy.source):
                    known = any(self._within(one, address, copy.size) for one in (self._device, self._pinned))
                    what = f"{copy.size} bytes at {address:#x} are neither the device's nor in one pinned piece"
                    self._require(known or not self.needs_pinned, "copy_batch", what)
            self.num_calls += 1
            self.num_entries += len(copies)
            if order == AccessOrder.ANY:
                when = self._random.choice(("now", "at any time", "when it runs"))
                for copy in copies if when == "now" else ():
                    copy.read()
                self._unread += copies if when == "at any time" else ()
            self._streams[stream].append(_Operation(copies=copies))
            self._run_some()

    # What it does with it

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    def _called(self, call: str) -> None:
        thread = threading.get_ident()
        self.before_call(call)
        if self._lost:
            raise self._error(call, 700, "the device was lost")
        if thread != self._engine_thread and thread not in self._relaxed:
            self._violated(f"{call} on a thread that is not attached")
            raise self._error(call, 201, "invalid context")
        if self.capturing and thread not in self._relaxed:
            self._violated(f"{call} while a graph is captured")
            raise self._error(call, 900, "operation not permitted while a stream is capturing")

    def _require_both(self, call: str, event: int, stream: int) -> None:
        self._require(event in self._recorded, call, f"event {event} is not there")
        self._require(stream in self._streams, call, f"stream {stream} is not there")

    def _require(self, good: bool, call: str, what: str, code: int = 1) -> None:
        if not good:
            self._violated(f"{call}: {what}")
            raise self._error(call, code, what)

    def _require_untouched(self, start: int, end: int, otherwise: str) -> None:
        for stream in self._streams.values():
            for copy in (copy for operation in stream for copy in operation.copies):
                if start <= copy.target < end or start <= copy.source < end:
                    self._violated(otherwise)

    def _error(self, call: str, code: int, what: str) -> HostileError:
        return HostileError(f"{call} failed with error {code}: {what}")

    def _violated(self, what: str) -> None:
        self.violations.append(what)

    def _within(self, pieces: dict[int, int], address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + length for start, length in pieces.items())

    def _run_some(self) -> None:
        if self._random.random() < STARVING:
            self._starved = {stream for stream in self._streams if self._random.random() < 0.5}
        for _ in range(self._random.choice((0, 0, 1, 3, 20))):
            self._run_one(self._starved)

    def _run_one(self, starved: Collection[int] = ()) -> bool:
        """Do something that the documentation allows now; returns whether there was anything."""
        if self.stopped:
            return False
        if self._unread and self._random.random() < 0.2:
            copy = self._unread.pop(self._random.randrange(len(self._unread)))
            if copy.early is None:
                copy.read()
            return True
        heads = [
            stream
            for handle, stream in self._streams.items()
            if stream and handle not in starved and stream[0].waits_for not in self._pending
        ]
        if not heads:
            return False
        stream = self._random.choice(heads)
        operation = stream[0]
        if operation.copies:
            copy = operation.copies.pop(self._random.randrange(len(operation.copies)))
            copy.run()
            if copy in self._unread:
                self._unread.remove(copy)
            if operation.copies:
                return True
        stream.popleft()
        if operation.run is not None:
            operation.run()
        self._pending.discard(operation.records)
        return True
