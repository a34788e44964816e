"""Embedded engines with production caches that load from each other's memory: no wrong block, no lease at rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from broken_neighbours import lists_before_the_ranks_have_written, trusts_a_row_number
from kvpact.cache.neighbour_blocks import NeighbourBlocks
from kvpact.contract import LoadJob
from kvpact.errors import KvpactError
from kvpact.index.block_index import Pin
from kvpact.ranges import BlockRange, RangeSet
from kvpact_testkit.engine import JobBehavior
from kvpact_testkit.engine.simulated_worker import Job
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from pool_caches import MODELS, play, pool, storm


class Misfortune:
    """Copies that are slow, fail, or are reported twice, as a seed says."""

    def __init__(self, seed: int, slowest: int = 4) -> None:
        """The slowest copy takes so many steps more than the fastest."""
        self._random = Random(seed)
        self._slowest = slowest

    def __call__(self, rank: int, job: Job) -> JobBehavior:
        random, failed = self._random, RangeSet()
        if random.random() < 0.1 and not (isinstance(job, LoadJob) and job.synchronous):
            first = random.randrange(job.blocks.start, job.blocks.end)
            failed = RangeSet.of(BlockRange(first, random.randrange(1, 1 + job.blocks.end - first)))
        return JobBehavior(
            copy_after_steps=random.choice((0, 0, 1, self._slowest)),
            report_after_steps=random.choice((0, 0, 1, 3)),
            failed_blocks=failed,
            times_reported=random.choice((1, 1, 2)),
        )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_engines_serve_from_each_others_memory_and_no_block_is_wrong(model: str, ranks: int) -> None:
    for seed in range(2):
        engines = pool(3, model, 120 * len(MODELS[model]), ranks=ranks, conduct=Misfortune(seed))
        play(engines, seed, 60)
        for engine in engines:
            engine.cache.check()
            assert not engine.is_leased
        assert sum(engine.loaded_elsewhere for engine in engines) > 50
        for engine in engines:
            engine.engine.shutdown()


@pytest.mark.parametrize("model", ["one group", "windows", "states"])
def test_tiers_below_and_neighbours_beside_go_together(model: str) -> None:
    for seed in range(2):
        store = DictionaryStore()
        engines = pool(3, model, 60 * len(MODELS[model]), conduct=Misfortune(seed), store=store)
        play(engines, seed, 60)
        for engine in engines:
            engine.cache.check()
            assert not engine.is_leased
        used = Counter[str]()
        for engine in engines:
            used.update(engine.used_from())
        assert len([source for source, tokens in used.items() if tokens]) == 3, used


def test_slots_of_several_sizes_are_leased_alike() -> None:
    engines = pool(3, "windows", 480, several_classes=True)
    play(engines, 5, 80)
    for engine in engines:
        engine.cache.check()
        assert not engine.is_leased
    assert sum(engine.loaded_elsewhere for engine in engines) > 50


def keeps_leases_of_finished_requests(patch: pytest.MonkeyPatch) -> None:
    release = NeighbourBlocks.release
    patch.setattr(NeighbourBlocks, "release", lambda self, lease: isinstance(lease, Pin) and release(self, lease))


@pytest.mark.parametrize(
    "breaks",
    [
        lists_before_the_ranks_have_written,
        keeps_leases_of_finished_requests,
        trusts_a_row_number,
    ],
)
def test_broken_engines_are_caught(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    found: list[object] = []
    for seed in range(12):
        engines = pool(3, "one group", 40, conduct=Misfortune(seed, 20), load_deadline="60s")
        try:
            play(engines, seed, 60)
            found += [engine for engine in engines if engine.is_leased]
        except KvpactError as error:
            found.append(error)
        if found:
            break
    assert found


@pytest.mark.parametrize("model", ["one group", "windows"])
def test_engines_in_processes_that_are_killed_serve_no_wrong_block(model: str, tmp_path: Path) -> None:
    found = storm(tmp_path, 5.0, 3, model)
    assert (found["wrong"], found["rest"], found["leases"]) == (0, 3, 0)
    assert min(found["loaded"], found["kills"], found["files"]) > 0
