"""Embedded engines with production caches that meet in one process, and load from each other's memory.

Each engine's oracle knows the content of every block: a wrong, torn or foreign one ends the run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.cache.status_socket import StatusSocket
from kvpact.config import load_config
from kvpact.contract import LoadJob, StepWork
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.identity.keys import Namespace
from kvpact.index.neighbour import Neighbour
from kvpact.index.row_locks import LockFile
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.memory.extents import Extents
from kvpact.memory.neighbour_slots import NeighbourSlots, decode_addresses
from kvpact.metrics import series
from kvpact.pool.meeting import Meeting
from kvpact.pool.neighbours import Neighbours, OtherEngine
from kvpact.pool.own_memory import OwnMemory
from kvpact.tiers.backends import NEIGHBOURS
from kvpact.tiers.base import Tier
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.shared.tier import SharedTier
from kvpact.wire import WorkerHandshake
from kvpact_testkit.engine import Engine, EngineConfig, EngineQuirks, JobBehavior, Request, SimulatedWorker
from kvpact_testkit.engine.engine import StepClock
from kvpact_testkit.engine.simulated_worker import Job
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from pool_engines import leases_on

SLOT_BYTES = 4096
NAMESPACE = Namespace({"model": "pool"})

MODELS: Mapping[str, Sequence[KVCacheGroup]] = {
    "one group": (KVCacheGroup(GroupKind.FULL, 16),),
    "windows": (
        KVCacheGroup(GroupKind.FULL, 16),
        KVCacheGroup(GroupKind.WINDOW, 16, 40),
        KVCacheGroup(GroupKind.WINDOW, 8, 30),
    ),
    "states": (KVCacheGroup(GroupKind.FULL, 16), KVCacheGroup(GroupKind.STATE, 16)),
    "windows alone": (KVCacheGroup(GroupKind.WINDOW, 16, 40), KVCacheGroup(GroupKind.WINDOW, 16, 70)),
}


class PoolWorker(SimulatedWorker):
    """A rank that copies from other engines' slots, too, through read-only mappings."""

    def __init__(
        self, rank: int, segment: ArenaSegment, conduct: Callable[[int, Job], JobBehavior] | None = None
    ) -> None:
        super().__init__(rank, segment.slot_view, conduct)
        self._classes = segment.classes
        self._mapped: dict[int, NeighbourSlots] = {}
        self.loaded_elsewhere = 0

    def start_loads(self, work: StepWork) -> None:
        """See `SimulatedWorker`: maps first what the step names."""
        addresses = decode_addresses(work.extra)
        if addresses is not None:
            known = self._mapped
            self._mapped = {
                each.number: known.get(each.number) or NeighbourSlots.attach(each, self.rank, self._classes)
                for each in addresses
            }
        self.loaded_elsewhere += sum(len(job.slots) for job in work.loads if job.neighbour)
        super().start_loads(work)

    def slots_of(self, job: Job) -> Callable[[int], memoryview]:
        """See `SimulatedWorker`."""
        if isinstance(job, LoadJob) and job.neighbour:
            return self._mapped[job.neighbour].slot_view
        return super().slots_of(job)


class PoolEngine:
    """One engine of several."""

    def __init__(
        self,
        model: str,
        slots: int,
        *,
        ranks: int = 1,
        several_classes: bool = False,
        quirks: EngineQuirks | None = None,
        conduct: Callable[[int, Job], JobBehavior] | None = None,
        meets: bool = False,
        store: DictionaryStore | None = None,
        device: bool = False,
        **settings: object,
    ) -> None:
        """With `meets` it meets all others of its folder by itself, else by `meet`; a `store` is a tier below it. On a
        `device` it reads from others' memory into its own, whose ranks copy from there alone."""
        groups = MODELS[model]
        classes = tuple(range(len(groups))) if several_classes else ()
        if classes:
            sizes = tuple(SLOT_BYTES * (number + 1) for number in classes)
            extents = Extents(slots // 8, 8 * SLOT_BYTES * len(groups), sizes)
            self.segments = [ArenaSegment.create_extents(extents, 1) for _ in range(ranks)]
        else:
            self.segments = [ArenaSegment.create(slots, SLOT_BYTES) for _ in range(ranks)]
        named = [replace(group, digest=bytes([number]) * 32) for number, group in enumerate(groups)]
        clock = StepClock()
        arena = Arena(self.segments)
        self.tiers: list[SteppedExecutor] = []
        if store is not None:
            self.tiers.append(SteppedExecutor(SharedTier(store, NAMESPACE, SLOT_BYTES * ranks), 1 << 30, clock))
        self.neighbours = Neighbours()

        def reader(tier: Tier) -> TierExecutor:
            if meets:
                return TierExecutor(tier, 2, 1)
            self.tiers.append(SteppedExecutor(tier, 1, clock))
            return self.tiers[-1]

        config = {"plan_lifetime": 0.05, "load_deadline": 0.3, "weights_version": "1", **settings}
        self.cache = PactCache(
            load_config(config, {}),
            EngineKV(
                NAMESPACE.digest,
                GroupSet(tuple(named)),
                classes,
                int(device),
                None,
                self.neighbours,
                reader if device else None,
            ),
            arena=arena,
            tiers=[*self.tiers],
            clock=clock,
        )
        self.index = self.cache.index
        self.locks = LockFile()
        self.socket: StatusSocket | None = None
        if meets:
            hellos = [WorkerHandshake(rank, segment.address()) for rank, segment in enumerate(self.segments)]
            own = OwnMemory(self.index, arena, hellos, NAMESPACE.digest, lambda stopped: "equal")
            self.socket = StatusSocket(lambda: b"status", Meeting(own, self.neighbours))
        else:
            columns = self.index.columns
            assert columns is not None
            columns.lend(self.locks)
            for segment in self.segments:
                segment.seal()
        self.workers = [PoolWorker(rank, segment, conduct) for rank, segment in enumerate(self.segments)]
        self.engine = Engine(
            EngineConfig(
                groups=tuple(groups),
                num_blocks=80 * (1 + 2 * (len(groups) > 1)),
                num_ranks=ranks,
                max_tokens_per_step=128,
                prefix_caching=False,
                oracle="incremental",
            ),
            quirks or EngineQuirks.native(),
            self.cache,
            self.workers,
            clock,
        )
        self.met: dict[PoolEngine, OtherEngine] = {}

    def meet(self, other: PoolEngine, neighbours: int) -> None:
        """Find another engine, as one of so many."""
        columns = other.index.columns
        assert columns is not None
        index = os.open(f"/proc/self/fd/{columns.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        table = Neighbour(index, other.locks.opened(), neighbours)
        addresses = tuple(segment.address() for segment in other.segments)
        engine = self.met[other] = OtherEngine("other", table, addresses, None, 0, 0)
        self.neighbours.enter(engine, table.close, is_near=True)

    def leave(self, other: PoolEngine) -> None:
        """End the connection to another engine."""
        self.neighbours.leave(self.met.pop(other))

    @property
    def loaded_elsewhere(self) -> int:
        """Blocks that its first rank was to load from other engines' memory."""
        return self.workers[0].loaded_elsewhere

    @property
    def read_elsewhere(self) -> int:
        """Blocks that were read from other engines' memory into its own."""
        return int(self.cache.observe().get(series("read_blocks", NEIGHBOURS), 0))

    def used_from(self) -> dict[str, int]:
        """Used tokens by the place where they were found."""
        ledger = self.cache.ledger
        return dict(ledger.totals.used_from)

    @property
    def is_leased(self) -> bool:
        """True if another engine leases rows of this one."""
        return self.locks.leased(range(self.index.num_slots)) is not None


REPORT = ("turns", "loaded", "wrong", "rest")


def lock_files() -> set[int]:
    """Inodes of all files of leases that this process has open."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "kvpact-leases" in os.readlink(f"/proc/self/fd/{descriptor}"):
                found.add(os.fstat(int(descriptor)).st_ino)
    return found


def run(life: int, report: NDArray[np.int64], inodes: Path, model: str, *, device: bool) -> None:
    """Serve requests until SIGTERM; then come to rest, and wait."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    random = Random(life)
    of_the_parent = lock_files()  # of engines that it played before, whose leases are not this storm's
    engine = PoolEngine(model, 120 * len(MODELS[model]), meets=True, device=device)
    while not stop:
        engine.engine.add_request(request_of(random, f"{life}-{report[0]}"))
        for _ in range(random.randrange(1, 6)):
            engine.engine.step()
        report[0] += 1
        report[1] = engine.read_elsewhere if device else engine.loaded_elsewhere
        if random.random() < 0.002:
            engine.engine.reset()
    while engine.engine.has_work:
        engine.engine.step()
    for _ in range(40):
        engine.engine.step()
    engine.cache.check()
    inodes.write_text("\n".join(map(str, lock_files() - of_the_parent)))
    report[3] = 1
    while True:
        time.sleep(1)


def started(life: int, report: NDArray[np.int64], folder: Path, model: str, *, device: bool) -> int:
    """Fork an engine; returns its process id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive a test that fails
        run(life, report, folder / f"{life}.inodes", model, device=device)
    except BaseException:
        report[2] += 1
        traceback.print_exc()
    finally:
        os._exit(1)


def storm(folder: Path, seconds: float, engines: int, model: str, *, device: bool = False) -> dict[str, int]:
    """Let engines in processes serve, kill and replace them at random; returns counts, and the leases left at rest.

    Those on a `device` read from others' memory on threads of their own.
    """
    reports = np.frombuffer(mmap.mmap(-1, 8 * 512 * len(REPORT)), np.int64).reshape(512, len(REPORT))
    chance = Random(7)
    start = partial(started, folder=folder, model=model, device=device)
    living = [start(life, reports[life]) for life in range(engines)]
    kills = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and engines + kills < len(reports):
        time.sleep(chance.uniform(0.2, 0.8))
        at = chance.randrange(engines)
        os.kill(living[at], signal.SIGKILL)
        os.waitpid(living[at], 0)
        living[at] = start(engines + kills, reports[engines + kills])
        kills += 1
    for pid in living:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while reports[:, 3].sum() < engines and time.monotonic() < deadline and not reports[:, 2].sum():
        time.sleep(0.05)
    found = {name: int(reports[:, number].sum()) for number, name in enumerate(REPORT)}
    inodes = {int(line) for path in folder.glob("*.inodes") for line in path.read_text().split()}
    found |= {"kills": kills, "leases": len(leases_on(inodes)), "files": len(inodes)}
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def pool(count: int, model: str, slots: int, **options: object) -> list[PoolEngine]:
    """So many engines, each of which has met all others."""
    engines = [PoolEngine(model, slots, **options) for _ in range(count)]  # type: ignore[arg-type]
    for engine in engines:
        for other in engines:
            if other is not engine:
                engine.meet(other, count - 1)
    return engines


def request_of(random: Random, name: str) -> Request:
    """A request that shares a prefix with others of any engine."""
    shared = [*Random(random.randrange(3)).choices(range(30_000), k=400)]
    own = random.choices(range(30_000), k=random.randrange(1, 60))
    return Request(
        name, shared[: random.choice((40, 160, 320, 400)) - random.randrange(20)] + own, random.randrange(1, 12)
    )


def play(engines: Sequence[PoolEngine], seed: int, requests: int) -> None:
    """Serve requests at random engines, with cancellations, resets, and engines that leave and come back."""
    random = Random(seed)
    alive: list[tuple[PoolEngine, str]] = []
    for number in range(requests):
        engine = random.choice(engines)
        alive.append((engine, f"r{number}"))
        engine.engine.add_request(request_of(random, f"r{number}"))
        for _ in range(random.randrange(1, 8)):
            step(engines)
        if random.random() < 0.1:
            one, name = random.choice(alive)
            one.engine.cancel(name)
        if random.random() < 0.03:
            random.choice(engines).index.reset_columns()
        if random.random() < 0.05:
            one, other = random.sample(engines, 2)
            if other in one.met:
                one.leave(other)
            one.meet(other, len(engines) - 1)
    while any(engine.engine.has_work for engine in engines):
        step(engines)
    for _ in range(40):  # plans expire, and rows are taken back
        step(engines)


def step(engines: Sequence[PoolEngine]) -> None:
    """A step of each engine, and of its tier."""
    for engine in engines:
        engine.engine.step()
        for tier in engine.tiers:
            tier.advance()
