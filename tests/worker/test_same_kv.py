"""Ranks that hold the same keys and values: one copy, which the first of them writes and all of them load."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpact.cache.mounted import attach_all
from kvpact.config import load_config
from kvpact.contract import LoadJob, SaveJob, StepWork
from kvpact.errors import ConfigError, KvpactError
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.shared_slots import SharedSlots
from kvpact.ranges import RangeSet
from kvpact.wire import LentSegment, StepMessage, decode
from kvpact.worker.segment import Sharing
from kvpact.worker.worker import CacheWorker, RankInfo

torch = pytest.importorskip("torch")

BLOCKS, LAYERS, TOKENS, LATENT = 8, 3, 16, 576
MEMORY = 1 << 20
BLOCK_BYTES = LAYERS * TOKENS * LATENT * 2


class Ranks:
    """The workers of an engine, in one process; those of a stage hear what its first one says."""

    def __init__(self, ranks: int, stages: int = 1, *, shared: bool = True, **settings: object) -> None:
        self.told = b""
        config = load_config({"memory": MEMORY, **settings}, {})
        self.tensors: list[dict[str, Any]] = []
        self.workers: list[CacheWorker] = []
        for rank in range(ranks * stages):
            sharing = Sharing(rank, ranks * stages, ranks, self.tell) if shared else None
            worker = CacheWorker(config, RankInfo(rank, ranks * stages, BLOCKS, sharing=sharing), {})
            tensors = {f"layer.{n}": torch.full((BLOCKS, TOKENS, LATENT), rank + 1.0).bfloat16() for n in range(LAYERS)}
            self.tensors.append(tensors)
            self.workers.append(worker)
            worker.register_kv_caches(tensors)

    def tell(self, message: bytes) -> bytes:
        self.told = message or self.told
        return self.told

    def do(self, *jobs: SaveJob | LoadJob, silent: tuple[int, ...] = ()) -> list[dict[int, RangeSet]]:
        """A step with these jobs; what each rank says is done."""
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        message = StepMessage(StepWork(loads=loads, saves=tuple(job for job in jobs if isinstance(job, SaveJob))))
        said: list[dict[int, RangeSet]] = []
        for worker in self.workers:
            worker.begin_step(message)
            worker.wait_for_loads()
            worker.end_forward(message)
            said.append({})
            until = time.monotonic() + 10
            while len(said[-1]) < len(jobs):
                assert time.monotonic() < until
                worker.poll()
                said[-1] |= {job: outcome.done for job, outcome in worker.report().ranks[worker.place.rank].items()}
        return said

    def values(self, block: int) -> list[set[float]]:
        """What each rank has in a block."""
        return [{float(x) for tensor in own.values() for x in tensor[block].unique()} for own in self.tensors]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()


@pytest.fixture
def ranks_of() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*sizes: int, **settings: object) -> Ranks:
        made.append(Ranks(*sizes, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_same_memory_holds_the_same_number_of_blocks_whatever_the_number_of_ranks(
    ranks_of: Callable[..., Ranks], ranks: int
) -> None:
    engine = ranks_of(ranks)
    hellos = [worker.hello() for worker in engine.workers]
    arena, segments = attach_all([hello for hello in hellos if hello is not None])
    slot_bytes = -(-BLOCK_BYTES // 4096) * 4096
    assert (arena.num_slots, arena.slot_bytes) == (MEMORY // slot_bytes, slot_bytes)
    assert (arena.num_ranks, len(arena.segments), len(segments)) == (ranks, 1, ranks)
    arena.close()


def test_each_stage_has_a_copy_of_its_own(ranks_of: Callable[..., Ranks]) -> None:
    engine = ranks_of(2, 2)
    hellos = [hello for worker in engine.workers if (hello := worker.hello()) is not None]
    assert [hello.slots_of for hello in hellos] == [None, 0, None, 2]
    arena, _ = attach_all(hellos)
    assert (len(arena.segments), arena.num_ranks) == (2, 4)
    engine.do(SaveJob(1, "r", 0, (0,), (2,)))
    assert [set(view[1:BLOCK_BYTES:2]) for view in arena.slot_views(0)] == [{0x3F}, {0x40}]
    engine.do(LoadJob(2, "r", 0, (0,), (5,), synchronous=True))
    assert engine.values(5) == [{1.0}, {1.0}, {3.0}, {3.0}]
    arena.close()


def test_the_first_rank_writes_the_others_owe_nothing_and_all_load(ranks_of: Callable[..., Ranks]) -> None:
    engine = ranks_of(3)
    whole = RangeSet.span(4, 6)
    assert engine.do(SaveJob(1, "r", 4, (0, 3), (2, 6))) == [{1: whole}] * 3
    assert engine.values(2) == [{1.0}, {2.0}, {3.0}], "nobody's blocks are written"
    for number, synchronous in ((2, True), (3, False)):
        assert engine.do(LoadJob(number, "r", 4, (0, 3), (1, number), synchronous=synchronous)) == [{number: whole}] * 3
        assert engine.values(1) == engine.values(number) == [{1.0}] * 3


def test_a_rank_whose_weights_changed_says_that_a_save_failed_though_it_owes_none(
    ranks_of: Callable[..., Ranks],
) -> None:
    engine = ranks_of(2)
    notices = engine.workers[1].notices
    assert notices is not None
    notices.weights_change()
    job = SaveJob(1, "r", 0, (0,), (2,))
    for worker, done in zip(engine.workers, (RangeSet.of(job.blocks), RangeSet()), strict=True):
        message = StepMessage(StepWork(saves=(job,)), changes=(0, 0))
        worker.begin_step(message)
        worker.wait_for_loads()
        worker.end_forward(message)
        worker.transfers.drain(10) if worker.transfers else None
        worker.poll()
        assert worker.report().ranks[worker.place.rank][1].done == done


def test_slots_are_usable_when_every_rank_can_copy_them(ranks_of: Callable[..., Ranks]) -> None:
    engine = ranks_of(3)
    arena, segments = attach_all([hello for worker in engine.workers if (hello := worker.hello()) is not None])
    assert arena.usable_slots == arena.num_slots
    for segment, usable in zip(segments, (9, 4, 7), strict=True):
        segment.usable_slots = usable
    arena.close()
    arena, _ = attach_all([hello for worker in engine.workers if (hello := worker.hello()) is not None])
    assert arena.usable_slots == 4
    arena.close()


def test_a_first_rank_without_memory_stops_the_others_by_name() -> None:
    told: list[bytes] = []
    config = load_config({"memory": "1KiB"}, {})
    tensors = {"layer": torch.zeros((BLOCKS, TOKENS, LATENT))}

    def tell(word: bytes) -> bytes:
        told.append(word)
        return word

    first = CacheWorker(config, RankInfo(0, 2, BLOCKS, sharing=Sharing(0, 2, 2, tell)), {})
    with pytest.raises(ConfigError, match="memory: "):
        first.register_kv_caches(tensors)
    assert told == [b""], "the others wait for a word"
    other = CacheWorker(config, RankInfo(1, 2, BLOCKS, sharing=Sharing(1, 2, 2, lambda _: b"")), {})
    with pytest.raises(ConfigError, match="rank 0 has no memory that rank 1 could share"):
        other.register_kv_caches(tensors)


def test_blocks_of_another_size_are_not_shared(ranks_of: Callable[..., Ranks]) -> None:
    told = ranks_of(2).told
    config = load_config({"memory": MEMORY}, {})
    other = CacheWorker(config, RankInfo(1, 2, BLOCKS, sharing=Sharing(1, 2, 2, lambda _: told)), {})
    with pytest.raises(
        ConfigError, match=r"their blocks differ: 18432 bytes in 1 layers here, 55296 bytes in 3 layers"
    ):
        other.register_kv_caches({"layer": torch.zeros((BLOCKS, TOKENS, LATENT)).bfloat16()})


def test_memory_of_a_rank_that_is_gone_is_refused_by_name(ranks_of: Callable[..., Ranks]) -> None:
    gone = ranks_of(2)
    gone.close()
    config = load_config({"memory": MEMORY}, {})
    other = CacheWorker(config, RankInfo(1, 2, BLOCKS, sharing=Sharing(1, 2, 2, lambda _: gone.told)), {})
    with pytest.raises(ConfigError, match="rank 1 cannot share the memory of rank 0: the arena of worker process"):
        other.register_kv_caches(
            {f"layer.{n}": torch.zeros((BLOCKS, TOKENS, LATENT)).bfloat16() for n in range(LAYERS)}
        )


def first_rank(pipe: Any) -> None:
    """A process of its own: the first rank, until it is killed."""
    worker = CacheWorker(
        load_config({"memory": MEMORY}, {}),
        RankInfo(0, 2, BLOCKS, sharing=Sharing(0, 2, 2, lambda it: pipe.send(it))),
        {},
    )
    worker.register_kv_caches(
        {f"layer.{n}": torch.full((BLOCKS, TOKENS, LATENT), 7.0).bfloat16() for n in range(LAYERS)}
    )
    message = StepMessage(StepWork(saves=(SaveJob(1, "r", 0, (1,), (3,)),)))
    worker.begin_step(message)
    worker.wait_for_loads()
    worker.end_forward(message)
    assert worker.transfers is not None
    worker.transfers.drain(10)
    pipe.send("saved")
    pipe.recv()


def test_what_the_first_rank_wrote_is_loaded_by_another_process_and_outlives_a_kill() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=first_rank, args=(there,), daemon=True)
    process.start()
    told = here.recv()
    other = CacheWorker(
        load_config({"memory": MEMORY}, {}), RankInfo(1, 2, BLOCKS, sharing=Sharing(1, 2, 2, lambda _: told)), {}
    )
    tensors = {f"layer.{n}": torch.zeros((BLOCKS, TOKENS, LATENT)).bfloat16() for n in range(LAYERS)}
    other.register_kv_caches(tensors)
    assert here.recv() == "saved"
    assert process.pid is not None
    for killed, block in ((False, 4), (True, 5)):
        if killed:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        other.begin_step(StepMessage(StepWork(loads=(LoadJob(block, "r", 0, (1,), (block,), synchronous=True),))))
        other.wait_for_loads()
        assert all(bool((tensor[block] == 7).all()) for tensor in tensors.values())
    address = decode(told, LentSegment).segment
    with pytest.raises(KvpactError, match="cannot be opened"):
        SharedSlots.attach(address)
    other.shutdown()


def test_two_ranks_pages_have_their_own_notices() -> None:
    first = ArenaSegment.create(4, 4096)
    other = SharedSlots.attach(first.address())
    first.notice[0], other.notice[0] = 1, 2
    seen = [ArenaSegment.attach(segment.address()) for segment in (first, other)]
    assert [segment.notice[0] for segment in seen] == [1, 2]
    first.slot_view(3)[:] = bytes([5]) * 4096
    assert other.slot_view(3)[9] == 5
    for segment in (*seen, other, first):
        segment.close()
