"""Engines of one host, as processes, that load from each other's memory while some are killed: index, arena and ledger
are the production ones, prompts are random chains, and each byte of a block follows from its key.

They meet through sockets in a folder: who connects is sent the descriptors, and the end of the connection is the end of
the neighbour. `storm` kills, stops and replaces engines; `DEATHS` are the points at which an engine can kill itself.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpact.cache.ledger import Ledger
from kvpact.cache.plan import Plan
from kvpact.errors import DataError
from kvpact.index import neighbour as neighbour_module
from kvpact.index.block_index import BlockIndex
from kvpact.index.claims import Claims
from kvpact.index.column_file import ColumnFile
from kvpact.index.key_table import KeyTable
from kvpact.index.neighbour import Lease, Neighbour
from kvpact.index.row_locks import LockFile
from kvpact.index.slot_space import PlainSlots
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.neighbour_slots import NeighbourSlots
from kvpact.metrics import EndReason
from kvpact.ranges import NO_RANGES, BlockRange, RangeSet

SLOT_BYTES: Final = 8192
SLOTS: Final = 512
STEMS: Final = 300
"""Prompts that differ in their first block."""
BLOCK_TOKENS: Final = 16
RESET_AT: Final = 40
"""Turn with the first reset; later ones are at random."""
REPORT: Final = ("loaded", "own", "saved", "wrong", "turns", "no_room", "resets", "rest", "lock", "files", "met")
LIVES: Final = 4096

Bytes: TypeAlias = NDArray[np.uint8]
Leased: TypeAlias = "tuple[Other, Lease]"


def chain(stem: int, blocks: int) -> list[bytes]:
    """Keys of a prompt."""
    name = hashlib.sha256(stem.to_bytes(4, "little"))
    keys = []
    for _ in range(blocks):
        name.update(b".")
        keys.append(name.digest())
    return keys


def content(key: bytes) -> Bytes:
    """Bytes of a block."""
    words: NDArray[np.uint64] = np.frombuffer(key, np.uint64)[0] + np.arange(SLOT_BYTES // 8, dtype=np.uint64)
    return words.view(np.uint8)


class Reports:
    """Numbers of all engines that ever lived, in memory that outlives them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * LIVES * len(REPORT))
        self.each = np.frombuffer(self._memory, np.int64).reshape(LIVES, len(REPORT))

    def total(self, name: str) -> int:
        """Sum over all lives."""
        return int(self.each[:, REPORT.index(name)].sum())


@dataclass(eq=False)
class Other:
    """Neighbour of one engine."""

    connection: socket.socket
    table: Neighbour
    slots: NeighbourSlots
    gone: bool = False
    loads: int = 0

    def release(self, leased: Lease) -> None:
        """End a lease; with the last one of a neighbour that is gone end that."""
        self.table.release(leased)
        self.loads -= 1
        self.close_if_done()

    def close_if_done(self) -> None:
        """Unmap a neighbour that is gone once nothing is loaded from it."""
        if self.gone and not self.loads:
            self.table.close()


@dataclass(eq=False)
class Load:
    """A plan under way, and the first half of each of its blocks."""

    plan: Plan[Leased, tuple[int, ...]]
    keys: list[bytes]
    sources: list[memoryview]
    copies: list[Bytes] = field(default_factory=list)


class Engine:
    """One engine: memory of its own, neighbours, plans."""

    def __init__(self, folder: Path, report: NDArray[np.int64], seed: int, slots: int = SLOTS) -> None:
        self.random = random.Random(seed)
        self.report = report
        self.segment = ArenaSegment.create(slots, SLOT_BYTES)
        self.segment.seal()
        self.locks = LockFile()
        self.space = PlainSlots(slots)
        self.index = BlockIndex(slots, space=self.space, columns=ColumnFile(self.space, Claims(self.locks)))
        self.ledger: Ledger[Leased, tuple[int, ...]] = Ledger(lambda lease: lease[0].release(lease[1]), 1e9)
        self.loads: list[Load] = []
        self.number = 0
        self.folder = folder
        self.path = folder / f"{os.getpid()}-{seed}.sock"
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(self.path))
        self.server.listen(64)
        self.server.setblocking(False)
        self.given: list[socket.socket] = []
        self.others: dict[str, Other] = {}
        self.count("lock", os.fstat(self.locks.descriptor).st_ino)

    def count(self, name: str, more: int = 1) -> None:
        self.report[REPORT.index(name)] += more

    def nap(self) -> None:
        time.sleep(self.random.choice((0, 0, 0.0003, 0.001)))

    # Meeting

    def meet(self) -> None:
        """Answer those who ask, drop those who are gone, and ask those who are new."""
        while select.select([self.server], [], [], 0)[0]:
            peer, _ = self.server.accept()
            columns = self.index.columns
            assert columns is not None
            lock = self.locks.opened()
            with suppress(OSError):  # killed meanwhile, or tired of waiting
                socket.send_fds(peer, [b"."], [columns.descriptor, lock, self.segment.descriptor])
            os.close(lock)
            self.given.append(peer)
        for peer in select.select(self.given, [], [], 0)[0]:
            peer.close()
            self.given.remove(peer)
        known = {other.connection: path for path, other in self.others.items()}
        for connection in select.select([*known], [], [], 0)[0] if known else ():
            self.drop(known[connection])
        for path in self.folder.glob("*.sock"):
            if path != self.path and str(path) not in self.others:
                self.ask(path)

    def ask(self, path: Path) -> None:
        """Connect to another engine; what a dead one left goes."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(0.2)
        descriptors: list[int] = []
        try:
            connection.connect(str(path))
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            if len(descriptors) == 3:
                table = Neighbour(descriptors[0], descriptors[1])
                other = Other(connection, table, NeighbourSlots(descriptors[2], self.segment.classes))
                self.others[str(path)] = other
                self.count("met")
                os.close(descriptors[2])
                return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (OSError, DataError):
            pass
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()

    def drop(self, path: str) -> None:
        other = self.others.pop(path)
        other.connection.close()
        other.gone = True
        other.close_if_done()

    def reset(self) -> None:
        """Let all neighbours meet again, in a new file."""
        self.index.reset_columns()
        for peer in self.given:
            peer.close()
        self.given = []
        self.count("resets")

    # A step

    def turn(self) -> None:
        """A prompt: loads from neighbours what they have, and saves the rest; older loads end before or after."""
        self.count("turns")
        self.meet()
        keys = chain(int(self.random.paretovariate(0.6)) % STEMS, self.random.randrange(4, 40))
        have = self.index.held_prefix(keys)
        pin = self.index.pin(keys[have - 1]) if have else None
        for key in keys[:have:7]:
            self.check(key, self.segment.slot_view(self.index.slot(key)), "own")
        found = self.lease(keys[have:])
        if found is not None:
            self.open(keys, have, *found)
        self.save(keys, self.random.random() < 0.1)
        if pin is not None:
            self.index.unpin(pin)
        while len(self.loads) > 3 or (self.loads and self.random.random() < 0.5):
            self.end(self.loads.pop(self.random.randrange(len(self.loads))))
        self.index.claim_again()
        if self.random.random() < 0.003 or self.report[REPORT.index("turns")] == RESET_AT:
            self.reset()

    def lease(self, keys: list[bytes]) -> tuple[Other, Lease] | None:
        for other in self.random.sample([*self.others.values()], len(self.others)) if keys else ():
            leased = other.table.lease(keys)
            if leased is not None:
                other.loads += 1
                return other, leased
        return None

    def open(self, keys: list[bytes], have: int, other: Other, leased: Lease) -> None:
        """A plan for leased blocks: some are aborted, or shrink; of the others the first half is copied now."""
        self.number += 1
        count = len(leased.slots)
        plan = self.ledger.open_plan(
            f"r{self.number}",
            BlockRange(have, count),
            block_size=BLOCK_TOKENS,
            slots=(),
            now=0.0,
            leases=[(other, leased)],
            promised_tokens=count * BLOCK_TOKENS,
        )
        if self.random.random() < 0.1:
            self.ledger.abort(plan, EndReason.DECLINED)
            return
        taken = self.random.randrange(1, count + 1)
        self.ledger.commit(plan, taken * BLOCK_TOKENS, now=0.0)
        load = Load(plan, keys[have : have + taken], [other.slots.slot_view(slot) for slot in leased.slots[:taken]])
        for source in load.sources:
            copy = np.empty(SLOT_BYTES, np.uint8)
            copy[: SLOT_BYTES // 2] = np.frombuffer(source, np.uint8)[: SLOT_BYTES // 2]
            load.copies.append(copy)
        self.loads.append(load)
        self.nap()

    def end(self, load: Load) -> None:
        """Copy the second halves, compare, and settle."""
        for key, source, copy in zip(load.keys, load.sources, load.copies, strict=True):
            copy[SLOT_BYTES // 2 :] = np.frombuffer(source, np.uint8)[SLOT_BYTES // 2 :]
            self.check(key, copy.data, "loaded")
        load.sources.clear()
        self.ledger.settle(load.plan, loaded=RangeSet.of(load.plan.committed_blocks), failed=NO_RANGES, used_tokens=0)

    def check(self, key: bytes, there: memoryview, name: str) -> None:
        self.count(name)
        if not (np.frombuffer(there, np.uint8) == content(key)).all():
            self.count("wrong")

    def save(self, keys: list[bytes], is_slow: bool) -> None:
        known = self.index.known_prefix(keys)
        reservation = self.index.reserve(keys, known, len(keys))
        if reservation is None:
            self.count("no_room")
            return
        for key, slot in zip(keys[known:], reservation.slots, strict=True):
            view = np.frombuffer(self.segment.slot_view(slot), np.uint8)
            data = content(key)
            view[: SLOT_BYTES // 2] = data[: SLOT_BYTES // 2]
            if is_slow:
                self.nap()
            view[SLOT_BYTES // 2 :] = data[SLOT_BYTES // 2 :]
        self.index.complete(reservation.slots)
        self.count("saved", len(reservation.slots))

    def rest(self) -> None:
        """End all loads, and drop all neighbours."""
        while self.loads:
            self.end(self.loads.pop())
        for path in [*self.others]:
            self.drop(path)


def without_leases() -> None:
    """Take the lease out of the code of this process."""
    vars(neighbour_module)["lease"] = lambda descriptor, rows: True


def descriptors() -> int:
    """Number of this process's open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def leases_on(inodes: set[int]) -> list[str]:
    """Locks that the kernel has on these files."""
    lines = Path("/proc/locks").read_text().splitlines()
    return [line for line in lines if int(line.split()[-3].rpartition(":")[2]) in inodes]


def dies(owner: Any, name: str, *, before: bool, calls: int = 5) -> None:
    """Let this process kill itself at the so many-th call of a function: before, or after its work."""
    real: Callable[..., Any] = getattr(owner, name)
    left = calls

    @wraps(real)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if before and left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*arguments, **named)
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, call)


DEATHS: Final[dict[str, Callable[[], None]]] = {
    "between unlisting and asking": lambda: dies(Claims, "granted", before=True),
    "between asking and refill": lambda: dies(Claims, "granted", before=False),
    "between write and listing": lambda: dies(BlockIndex, "complete", before=True),
    "between a reset's new index and its first row": lambda: dies(KeyTable, "move", before=True, calls=1),
    "between lease and compare": lambda: dies(neighbour_module, "lease", before=False),
    "between lease and load": lambda: dies(Neighbour, "lease", before=False),
    "between load and release": lambda: dies(Neighbour, "release", before=True),
}


def started(folder: Path, reports: Reports, life: int, *prepare: Callable[[], None], forks: bool = False) -> int:
    """Fork an engine that runs until it gets SIGTERM, when it comes to rest and waits; returns its process id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the child has its handler
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive a test that fails
        for each in prepare:
            each()
        run(folder, reports.each[life], life, forks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(folder: Path, report: NDArray[np.int64], life: int, forks: bool) -> None:
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    engine = Engine(folder, report, life)
    before = descriptors()
    while not stop:
        engine.turn()
        if forks and engine.random.random() < 0.02 and os.fork() == 0:
            time.sleep(1)
            os._exit(0)
    engine.rest()
    for peer in engine.given:
        peer.close()
    engine.index.check()
    gc.collect()
    engine.count("files", max(0, descriptors() - before))  # fewer: of what the parent had open, some was garbage
    engine.count("rest")
    while True:
        time.sleep(1)


def storm(
    seconds: float, engines: int, *, kill: bool = True, leased: bool = True, forks: bool = False
) -> dict[str, Any]:
    """Let engines load from each other, and kill, stop and replace them; returns counts, and what is left at rest."""
    reports = Reports()
    chance = random.Random(7)
    prepare = () if leased else (without_leases,)
    before = descriptors()
    with tempfile.TemporaryDirectory(prefix="kvpact-pool-") as name:
        folder = Path(name)
        life = 0
        living: list[int] = []

        def start() -> int:
            nonlocal life
            life += 1
            return started(folder, reports, life - 1, *prepare, forks=forks)

        living = [start() for _ in range(engines)]
        kills = stops = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end and life < LIVES and (leased or not reports.total("wrong")):
            time.sleep(chance.uniform(0.05, 0.4))
            if not kill:
                continue
            at = chance.randrange(engines)
            if chance.random() < 0.2:
                os.kill(living[at], signal.SIGSTOP)
                time.sleep(0.05)
                stops += 1
                if chance.random() < 0.5:
                    os.kill(living[at], signal.SIGCONT)
                    continue
            os.kill(living[at], signal.SIGKILL)
            _, status = os.waitpid(living[at], 0)
            if not os.WIFSIGNALED(status):
                raise RuntimeError(f"an engine has ended by itself: {status}")
            kills += 1
            living[at] = start()
        for pid in living:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while reports.total("rest") < engines and time.monotonic() < deadline:
            time.sleep(0.05)
        inodes = {*reports.each[:, REPORT.index("lock")].tolist()} - {0}
        left = leases_on(inodes)
        at_rest = reports.total("rest")
        for pid in living:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    counts = {name: reports.total(name) for name in REPORT if name not in ("lock", "rest")}
    return counts | {
        "kills": kills,
        "stops": stops,
        "lives": life,
        "not_at_rest": engines - at_rest,
        "leases_left": len(left),
        "descriptors_more": descriptors() - before,
    }


def die_at(point: str, seconds: float = 10.0) -> tuple[dict[str, Any], bool]:
    """One of two engines kills itself at a point of `DEATHS`; returns the counts of both, and whether it has died."""
    reports = Reports()
    with tempfile.TemporaryDirectory(prefix="kvpact-pool-") as name:
        folder = Path(name)
        survivor = started(folder, reports, 0)
        victim = started(folder, reports, 1, DEATHS[point])
        end = time.monotonic() + seconds
        died = False
        while not died and time.monotonic() < end:
            time.sleep(0.02)
            died = os.waitpid(victim, os.WNOHANG)[0] == victim
        turns = reports.each[0, REPORT.index("turns")] + 20
        while reports.each[0, REPORT.index("turns")] < turns and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(survivor, signal.SIGTERM)
        while not reports.each[0, REPORT.index("rest")] and time.monotonic() < end + seconds:
            time.sleep(0.02)
        inodes = {*reports.each[:, REPORT.index("lock")].tolist()} - {0}
        left = leases_on(inodes)
        for pid in (survivor, *(() if died else (victim,))):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return {name: reports.total(name) for name in REPORT} | {"leases_left": len(left)}, died
