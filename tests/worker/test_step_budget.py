"""What workers find when a step begins stays within the step's budget, together, and is the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.config import load_config
from kvpact.contract import LoadJob, SaveJob, StepLookup, StepWork, StoreRead
from kvpact.identity.keys import BlockKey
from kvpact.wire import SharedTierConfig, StepMessage
from kvpact.worker import step_reader
from kvpact.worker.segment import Sharing
from kvpact.worker.step_reader import Wanted
from kvpact.worker.worker import CacheWorker, RankInfo

BLOCK = 16
PARTS = (4096, 3 * 4096)
"""Bytes of each rank's part of a block."""
STORE = SharedTierConfig("", BLOCK, PARTS, ((0, 0),))
LENGTH = 5
"""Blocks that each request of a step computes."""


def work_of(requests: int, synchronous: int = 0, asynchronous: int = 0) -> StepWork:
    """A step that computes new requests, looks for them, and loads that many blocks for others."""
    blocks = tuple(range(LENGTH))
    loads = tuple(
        LoadJob(100 + waits, f"load {waits}", 0, tuple(range(count)), tuple(range(count)), synchronous=waits)
        for waits, count in ((True, synchronous), (False, asynchronous))
        if count
    )
    saves = tuple(SaveJob(1 + number, f"r{number}", 0, blocks, blocks) for number in range(requests))
    keys = tuple(BlockKey(bytes([block] * 32)) for block in range(LENGTH))
    lookups = tuple(StepLookup(job.job_id, job.request_id, 0, LENGTH * BLOCK, keys) for job in saves)
    return StepWork(loads, saves, lookups=lookups)


class Ranks:
    """Two ranks, each with a reader that finds that many blocks of each request of the step, in order."""

    def __init__(self, budget: int, found: Sequence[Sequence[int]], same_kv: int = 1, **settings: object) -> None:
        """`budget` is in blocks of the rank with the larger part. Ranks with the `same_kv` have one reader."""
        self.asked: list[list[Wanted]] = []
        asked = self.asked

        class Reader:
            def __init__(self, config: object, rank: int, keep: object) -> None:
                self.found = found[rank]

            def read(
                self, store: SharedTierConfig, wanted: Sequence[Wanted], most: int
            ) -> tuple[dict[int, int], tuple[StoreRead, ...]]:
                asked.append([*wanted])
                return {one.job_id: min(len(one.keys), held) for one, held in zip(wanted, self.found, strict=True)}, ()

        config = load_config({"match_at": "step", "sync_load_budget": budget * max(PARTS), **settings}, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_reader, "StepReader", Reader)
            places = [RankInfo(rank, 2, 64, sharing=Sharing(rank, 2, same_kv)) for rank in (0, 1)]
            self.workers = [CacheWorker(config, place, {}) for place in places]

    def hits(self, work: StepWork) -> list[dict[str, int]]:
        """What each rank finds, in blocks."""
        message = StepMessage(work, store=STORE)
        return [
            {name: tokens // BLOCK for name, tokens in worker.find_hits(message).items()} for worker in self.workers
        ]


def test_the_first_requests_of_a_step_are_served_until_its_budget_is_used() -> None:
    assert Ranks(8, [(5, 5, 5)] * 2).hits(work_of(3)) == [{"r0": 5, "r1": 3}] * 2
    assert Ranks(8, [(0, 5, 5)] * 2).hits(work_of(3)) == [{"r1": 5, "r2": 3}] * 2, "what is not found takes nothing"
    assert Ranks(100, [(5, 5, 5)] * 2).hits(work_of(3)) == [{"r0": 5, "r1": 5, "r2": 5}] * 2


def test_loads_that_the_step_waits_for_already_leave_less() -> None:
    assert Ranks(8, [(5, 5)] * 2).hits(work_of(2, synchronous=5, asynchronous=9)) == [{"r0": 3}] * 2
    assert Ranks(8, [(5, 5)] * 2).hits(work_of(2, asynchronous=9)) == [{"r0": 5, "r1": 3}] * 2


def test_nothing_is_read_that_could_not_be_loaded() -> None:
    ranks = Ranks(3, [(5, 5)] * 2)
    assert ranks.hits(work_of(2)) == [{"r0": 3}] * 2
    assert [len(wanted.keys) for wanted in ranks.asked[0]] == [3, 3]
    full = Ranks(3, [(5, 5)] * 2)
    assert full.hits(work_of(2, synchronous=3)) == [{}, {}]
    assert not full.asked


def test_too_short_a_rest_of_the_budget_is_left_to_requests_that_can_use_it() -> None:
    assert Ranks(6, [(4, 5, 2)] * 2, min_match_blocks=2).hits(work_of(3)) == [{"r0": 4, "r1": 2}] * 2
    assert Ranks(5, [(4, 5, 2)] * 2, min_match_blocks=2).hits(work_of(3)) == [{"r0": 4}] * 2


@settings(max_examples=40)
@given(
    st.integers(0, 12), st.lists(st.tuples(*[st.integers(0, LENGTH)] * 2), min_size=1, max_size=4), st.integers(0, 8)
)
def test_whatever_each_rank_finds_no_rank_loads_more_than_its_budget(
    budget: int, found: list[tuple[int, int]], synchronous: int
) -> None:
    """The ranks skip the smaller of each two numbers; a rank alone never answers with more than the budget."""
    work = work_of(len(found), synchronous)
    ranks = Ranks(budget, list(zip(*found, strict=True)))
    for rank, hits in enumerate(ranks.hits(work)):
        assert sum(hits.values()) <= max(0, budget - synchronous)
        assert all(hits.get(f"r{number}", 0) <= one[rank] for number, one in enumerate(found))
        enough = sum(one[rank] for one in found) <= budget - synchronous
        assert not enough or sum(hits.values()) == sum(one[rank] for one in found)


@settings(max_examples=30)
@given(st.integers(0, 12), st.lists(st.integers(0, LENGTH), min_size=1, max_size=4), st.integers(0, 8))
def test_of_ranks_with_the_same_keys_and_values_one_reads_and_all_skip_what_it_found(
    budget: int, found: list[int], synchronous: int
) -> None:
    work = work_of(len(found), synchronous)
    ranks = Ranks(budget, [found], same_kv=2)
    read, other = ranks.hits(work)
    assert len(ranks.asked) <= 1
    assert {name: min(blocks, other[name]) for name, blocks in read.items()} == read
    for worker in ranks.workers:
        worker.apply_hits({name: blocks * BLOCK for name, blocks in read.items()})
        worker.start_loads(StepWork())
    loads = [[(load.request_id, load.slots) for load in worker.jobs.open.values()] for worker in ranks.workers]
    assert loads[0] == loads[1] == [(name, tuple(range(blocks))) for name, blocks in read.items()]
