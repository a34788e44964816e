"""A scheduler and a worker in two processes that save and load through a `PactCache` until killed.

Run by test_crash_cache.py without arguments. To load its modules takes longer than most lives, so it forks a process,
in a session of its own, for each line `[DIRECTORY, SLOTS, SEED, LOG]` of standard input; it says the process's id, and
the exit code when it has ended. The rest is of that process, whose output goes to LOG, a file.

The engine is played: random requests share stems, are admitted, cut short, cancelled. Every block's bytes follow from
its tokens, and the worker compares each block that was loaded. Prints "ready BLOCKS READ" (blocks found on disk, bytes
read to find them), then "reused BLOCKS FROM_DISK" after each step that reused something. Leaves with 3 if anything is
wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.config import load_config
from kvpact.contract import ExternalKVMatch, StepWork, WorkerReport
from kvpact.identity.groups import one_group
from kvpact.identity.keys import Namespace
from kvpact.memory.arena import Arena, ArenaSegment, SegmentAddress
from kvpact.metrics import series
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.executor import TierExecutor
from kvpact.worker.copy import transfer_engine_for
from kvpact.worker.paged import PagedKV
from kvpact.worker.transfer import RankTransfers
from scenes import SceneBlocks, SceneRequest
from slab_scenes import capacity_for

NAMESPACE = Namespace({"model": "crash child", "block_size": "4"})
BLOCK_SIZE = 4
LAYERS = 4
PAGE = 32 << 10
"""Bytes of one block in one layer: large enough that a kill falls into the middle of a copy or a write."""
SLOT_BYTES = LAYERS * PAGE
ENGINE_BLOCKS = 160
ARENA_SLOTS = 48
STEM, TAIL = 6, 10
DOCUMENTS = [(family, branch) for family in range(4) for branch in range(3)]
"""4 families x (6 blocks of stem + 3 branches of 10 blocks) = 144 blocks: more than the arena or the slab holds."""
ACTIVE = 3

Document = tuple[int, int]


class Check(msgspec.Struct, frozen=True):
    """An engine block and what it holds, or must hold."""

    block_id: int
    label: str


class Step(msgspec.Struct, frozen=True):
    """One step of the worker: start the loads, compare, compute, start the saves."""

    work: StepWork
    verify: list[Check]
    compute: list[Check]


def label(document: Document, block: int) -> str:
    """What decides the content of a block: the document, or only its family inside the common stem."""
    family, branch = document
    return f"{family}/{block}" if block < STEM else f"{family}.{branch}/{block}"


def token_ids(document: Document, blocks: int) -> list[int]:
    """The tokens of the first `blocks` blocks, and one more, so that all of them can be loaded."""
    named = [hashlib.blake2b(label(document, block).encode(), digest_size=3).digest() for block in range(blocks)]
    return [int.from_bytes(name, "little") * BLOCK_SIZE + place for name in named for place in range(BLOCK_SIZE)] + [1]


def page(name: str, layer: int) -> NDArray[np.uint8]:
    """The bytes of one block in one layer."""
    digest = hashlib.blake2b(f"{name}#{layer}".encode(), digest_size=64).digest()
    return np.frombuffer(digest * (PAGE // 64), np.uint8)


def payload(name: str) -> bytes:
    """The bytes of one block's slot."""
    return b"".join(page(name, layer).tobytes() for layer in range(LAYERS))


def open_disk(directory: Path, slots: int, timeout: float = 2.0) -> DiskTier:
    """The disk tier of these processes."""
    return DiskTier.open(directory, NAMESPACE, SLOT_BYTES, capacity_for(slots, SLOT_BYTES), timeout=timeout)


class PageTensor:
    """A layer's KV memory with the few methods of a tensor that the copies ask for."""

    device = SimpleNamespace(type="cpu")

    def __init__(self) -> None:
        self.pages = np.zeros((ENGINE_BLOCKS, PAGE), np.uint8)
        self.shape = self.pages.shape

    def data_ptr(self) -> int:
        return int(self.pages.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return self.pages.strides

    def element_size(self) -> int:
        return 1


def worker(scheduler: Connection) -> None:
    """The worker's process: owns the KV memory and the arena segment, obeys until the scheduler is gone."""
    layers = [PageTensor() for _ in range(LAYERS)]
    paged = PagedKV.from_tensors({f"layer {number}": layer for number, layer in enumerate(layers)}, ENGINE_BLOCKS)
    segment = ArenaSegment.create(ARENA_SLOTS, paged.layout.rank_slot_bytes)
    transfer = RankTransfers(
        transfer_engine_for(load_config({}, {}), paged, segment, 0, {}),
        paged.layer_index,
        0,
        time.monotonic,
        layerwise=True,
    )
    try:
        scheduler.send_bytes(msgspec.msgpack.encode(segment.address()))
        while True:
            step = msgspec.msgpack.decode(scheduler.recv_bytes(), type=Step)
            transfer.start_loads(step.work.loads)
            for number in range(LAYERS):
                transfer.wait_for_layer(f"layer {number}")
                for check in step.verify:
                    if not np.array_equal(layers[number].pages[check.block_id], page(check.label, number)):
                        fail(f"block {check.label} was loaded wrong in layer {number}")
                for check in step.compute:
                    layers[number].pages[check.block_id] = page(check.label, number)
            transfer.wait_for_loads()
            transfer.start_saves(step.work.saves)
            scheduler.send_bytes(msgspec.msgpack.encode(WorkerReport({0: transfer.poll()})))
    except (EOFError, ConnectionError):  # the scheduler was killed
        transfer.shutdown(2.0)
        segment.close()


@dataclass
class Admitted:
    """A request that has its engine blocks. `loading` until its asynchronous load is settled."""

    request: SceneRequest
    document: Document
    table: list[int]
    reused: int
    loading: bool
    cancelled: bool = False


@dataclass
class Scheduler:
    """The scheduler's process: plays the engine's part with random requests."""

    cache: PactCache
    worker: Connection
    choose: random.Random
    blocks: SceneBlocks = field(default_factory=SceneBlocks)
    free: list[int] = field(default_factory=lambda: list(range(ENGINE_BLOCKS)))
    waiting: list[tuple[SceneRequest, Document]] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)
    reused: int = 0

    def run(self) -> None:
        """Step until the worker is gone; then shut down in order."""
        self.cache.bind_scheduler_context(self.blocks)
        try:
            while True:
                self.step()
        except (EOFError, ConnectionError):
            self.cache.shutdown()

    def step(self) -> None:
        """One engine step."""
        while len(self.waiting) + len(self.admitted) < ACTIVE:
            document = self.choose.choice(DOCUMENTS)
            tokens = token_ids(document, self.choose.randrange(1, STEM + TAIL + 1))
            self.waiting.append((SceneRequest(f"request {next(self.numbers)}", tokens), document))
        for request, document in list(self.waiting):
            self.admit(request, document)
        running = [one for one in self.admitted if not one.loading]
        verify = [self.check(one, block) for one in running for block in range(one.reused)]
        compute = [self.check(one, block) for one in running for block in range(one.reused, len(one.table))]
        for one in running:
            self.cache.note_computed(one.request, len(one.request.token_ids), one.table.copy)
        self.worker.send_bytes(msgspec.msgpack.encode(Step(self.cache.end_step(), verify, compute)))
        report = msgspec.msgpack.decode(self.worker.recv_bytes(), type=WorkerReport)
        self.settle(report)
        for one in running:
            self.leave(one)
        if verify:
            self.reused += len(verify)
            from_disk = self.cache.observe()[series("read_blocks", "disk")]
            print(f"reused {self.reused} {from_disk:.0f}", flush=True)

    def check(self, one: Admitted, block: int) -> Check:
        return Check(one.table[block], label(one.document, block))

    def admit(self, request: SceneRequest, document: Document) -> None:
        """Probe; then take the match, or a part of it, or change one's mind."""
        match = self.cache.prepare_external_match(request, 0)
        needed = len(request.token_ids) // BLOCK_SIZE
        usable = [block for block in reversed(self.free) if block not in self.blocks.held]  # the warmest first
        if self.choose.random() < 0.1:  # cancelled before it was admitted
            self.waiting.remove((request, document))
            self.cache.request_finished(request.request_id)
        elif match is not None and len(usable) >= needed and self.choose.random() < 0.8:
            self.waiting.remove((request, document))
            self.commit(request, document, match, usable[:needed])

    def commit(self, request: SceneRequest, document: Document, match: ExternalKVMatch, table: list[int]) -> None:
        reused = match.num_tokens // BLOCK_SIZE
        if reused and self.choose.random() < 0.2:
            reused = self.choose.randrange(reused + 1)
        self.free = [block for block in self.free if block not in table]
        if match.num_tokens:
            self.cache.commit_external_match(request, match, reused * BLOCK_SIZE, table)
        loading = bool(reused) and match.load_kv_async
        self.admitted.append(Admitted(request, document, table, reused, loading))
        if loading and self.choose.random() < 0.1:  # cancelled while its blocks are being written: they stay its own
            self.admitted[-1].cancelled = True
            self.cache.request_finished(request.request_id)

    def settle(self, report: WorkerReport) -> None:
        for settlement in self.cache.apply_report(report):
            if settlement.failed:
                fail(f"a load failed: {settlement}")
            for one in list(self.admitted):
                if one.request.request_id == settlement.request_id:
                    one.loading = False
                    if one.cancelled:
                        self.leave(one)

    def leave(self, one: Admitted) -> None:
        """The request is over: its blocks are free, though some may still be held for a save."""
        self.admitted.remove(one)
        self.free.extend(one.table)
        if not one.cancelled:
            self.cache.request_finished(one.request.request_id)


def fail(why: str) -> None:
    """Nothing of this may happen, whoever was killed and when."""
    print(f"wrong: {why}", flush=True)
    os._exit(3)


def main(directory: Path, slots: int, seed: int) -> None:
    """Fork the worker, open the cache on what the last life left, and go on."""
    ours, theirs = Pipe()
    if os.fork() == 0:
        ours.close()
        worker(theirs)
        os._exit(0)
    theirs.close()
    address = msgspec.msgpack.decode(ours.recv_bytes(), type=SegmentAddress)
    read: list[int] = []

    def counted(*arguments: Any) -> int:
        read.append(os.preadv(*arguments))
        return read[-1]

    Slab.preadv = staticmethod(counted)
    tier = open_disk(directory, slots)
    Slab.preadv = staticmethod(os.preadv)
    if tier.counts().damaged:
        fail(f"{tier.counts().damaged} records were damaged by a kill")
    choose = random.Random(seed)
    cache = PactCache(
        load_config({"sync_load_budget": choose.choice([0, 4 * SLOT_BYTES, "1GiB"]), "shutdown_timeout": "2s"}, {}),
        EngineKV(NAMESPACE.digest, one_group(BLOCK_SIZE)),
        arena=Arena([ArenaSegment.attach(address)]),
        tiers=[TierExecutor(tier, 2, 32 << 20)],
        clock=time.monotonic,
    )
    print("ready", tier.capacity().blocks, sum(read), flush=True)
    Scheduler(cache, ours, choose).run()


def live(directory: str, slots: int, seed: int, log: str) -> None:
    """The forked process's life."""
    os.setsid()
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        main(Path(directory), slots, seed)
        os._exit(0)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(3)


if __name__ == "__main__":
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            live(*json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
