"""What all adapters of other people's tiers have in common: memory of their own, and the suite that judges them.

Owns the copies between a caller's buffers and the rows that a peer reads and writes. Adds no checksum, no framing and
no retry: what a peer answers is what the caller gets.
"""

from __future__ import annotations

import mmap
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Entry, Progress, Tier, TierCapacity, TierHealth, leading
from kvpact_testkit.faults import Crash, Faults
from kvpact_testkit.results import NotObservable
from kvpact_testkit.sample_blocks import fill
from kvpact_testkit.tier.conformance import Damage, StoreContext, TierConformance

ROWS = 512
"""Rows of an adapter's memory: more than the blocks that all threads of a check have under way at once."""


POLL_S = 0.0002
"""Seconds between two looks at a peer that answers later."""


class Rows:
    """Memory of fixed rows, each beginning at a page boundary where its size allows it. Thread-safe."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.memory = memoryview(mmap.mmap(-1, ROWS * row_bytes))
        self._free = list(range(ROWS))
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int]:
        """Rows for `count` blocks. Raises RuntimeError if there are not as many."""
        with self._lock:
            if count > len(self._free):
                raise RuntimeError(f"{count} rows are wanted, and {len(self._free)} are free")
            taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, rows: Iterable[int]) -> None:
        """Nobody reads or writes these rows any more."""
        with self._lock:
            self._free.extend(rows)

    def view(self, row: int) -> memoryview:
        """The memory of one row."""
        return self.memory[row * self.row_bytes : (row + 1) * self.row_bytes]


class PeerTier(Tier):
    """A peer's tier: `exists`, `load` and `save` are the peer's own calls, each block by itself.

    What the peer has no call for raises NotObservable. `capacity` is unknown.
    """

    exclusive = False

    def __init__(self, name: str, row_bytes: int, faults: Faults) -> None:
        self.name = name
        self._faults = faults
        self.rows = Rows(row_bytes)
        self.closed = False
        self._trouble = ""

    @abstractmethod
    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether the peer says that it has each block."""

    @abstractmethod
    def load(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        """Whether the peer says that it has read each block into its row."""

    @abstractmethod
    def save(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        """Whether the peer says that it has stored each block from its row."""

    @abstractmethod
    def end(self) -> None:
        """Close the peer. Called once."""

    def until(self, answered: Callable[[], bool]) -> bool:
        """Call `answered` until it returns True; False if this is closed before. Raises Crash if the process died."""
        while not self.closed:
            if answered():
                return True
            if self._faults.crashed:
                raise Crash("the process died")
            time.sleep(POLL_S)
        return False

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys) if self.closed or not keys else self.exists(keys)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        """Read what the peer says that it has: engines ask first."""
        arrived = self.lookup(keys)
        wanted = [index for index, held in enumerate(arrived) if held]
        rows = self.rows.take(len(wanted))
        loaded = self.load([keys[index] for index in wanted], rows) if wanted else []
        for index, row, good in zip(wanted, rows, loaded, strict=True):
            arrived[index] = good
            if good:
                fill(buffers[index], bytes(self.rows.view(row)))
        self.rows.give_back(rows)
        if on_progress is not None:
            on_progress(leading(arrived))
        return arrived

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        if self.closed or not entries:
            return [False] * len(entries)
        rows = self.rows.take(len(entries))
        for entry, row in zip(entries, rows, strict=True):
            self.rows.view(row)[:] = b"".join(entry.buffer)
        stored = self.save([entry.key for entry in entries], rows)
        self.rows.give_back(rows)
        self._trouble = "" if all(stored) else f"{stored.count(False)} of {len(stored)} blocks were not stored"
        return stored

    def delete(self, keys: Iterable[BlockKey]) -> int:
        raise NotObservable(f"{self.name} has no call that drops single blocks")

    def clear(self) -> None:
        raise NotObservable(f"{self.name} has no call that drops all of a namespace")

    def capacity(self) -> TierCapacity:
        return TierCapacity(0, 0, 0)

    def health(self) -> TierHealth:
        """Whether the peer stored all that it was given last: peers say no more of themselves."""
        return TierHealth(not self._trouble, self._trouble)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.end()


class PeerSuite(TierConformance):
    """The checks for a peer that keeps each block as a file of its bytes and nothing else.

    A promise that the adapter keeps and the peer never sees is not checked.
    """

    reopens = True
    several_writers = True
    bounded = False
    one_size = True
    deletes = False
    clears = False

    # The adapter copies between rows and buffers, so no peer can write to a buffer, late or unaligned.
    test_memory_needs_no_alignment = None  # type: ignore[assignment]
    test_h21_a_read_that_ended_early_writes_no_more = None  # type: ignore[assignment]
    test_h21_a_read_that_was_given_up_writes_no_more = None  # type: ignore[assignment]
    # The adapter tells of progress, and answers for a closed peer.
    test_progress_is_told_in_order_and_may_end_a_read = None  # type: ignore[assignment]
    test_a_closed_tier_answers_nothing = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.faults = Faults()
        """What the peer's store meets; `store_calls` sets it."""

    def file_of(self, place: StoreContext, key: BlockKey) -> Path:
        """The file that holds block `key`."""
        raise NotImplementedError

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        path = self.file_of(place, key)
        if how is Damage.GONE:
            path.unlink()
            return True
        others = (other for other in path.parent.parent.rglob(f"*{path.suffix}") if other != path)
        raw = damaged(path.read_bytes(), next(others, path).read_bytes(), how)
        if raw is not None:
            path.write_bytes(raw)
        return raw is not None


def damaged(raw: bytes, other: bytes, how: Damage) -> bytes | None:
    """A block's bytes, damaged; `other` are another block's. None for what bytes alone cannot show."""
    half = len(raw) // 2
    return {
        Damage.FLIPPED: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:],
        Damage.GARBAGE: b"?" * len(raw),
        Damage.TORN: raw[:half] + bytes(len(raw) - half),
        Damage.SHORT: raw[:-1],
        Damage.MISPLACED: other,
    }.get(how)
