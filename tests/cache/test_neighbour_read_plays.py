"""Embedded engines on a simulated device that read from each other's memory into their own: whatever happens in the
midst of a read, no wrong block, no lease at rest, no descriptor more."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_neighbour_plays import Misfortune

from broken_neighbours import (
    compares_nothing_after_a_read,
    ends_a_lease_before_its_read,
    keeps_the_leases_of_reads,
    lists_before_the_ranks_have_written,
)
from kvpact.cache.staging import Staging
from kvpact.errors import KvpactError
from kvpact.metrics import MissReason, series
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from pool_caches import MODELS, PoolEngine, pool, storm
from pool_reads import Readings


def misses(engines: list[PoolEngine]) -> Counter[str]:
    """Look-ups that promised nothing, by reason."""
    found = Counter[str]()
    for engine in engines:
        found.update({name: int(count) for name, count in engine.cache.observe().items() if name.startswith("misses")})
    return found


def at_rest(readings: Readings) -> None:
    """Check all accounts of engines that have nothing to do."""
    for engine in readings.engines:
        engine.cache.check()
        assert not engine.is_leased
        assert not engine.cache.tiers.under_way
        assert not engine.loaded_elsewhere, "a rank copied from another engine's slots"
    assert not readings.unleased


def devices(model: str, seed: int, slots: int = 120, **options: object) -> list[PoolEngine]:
    """Three engines that wait at most 30 steps for a read."""
    options = {"conduct": Misfortune(seed), "device": True, "prepare_deadline": "300ms", **options}
    return pool(3, model, slots * len(MODELS[model]), **options)


def descriptors_of(engine: PoolEngine) -> tuple[int, int]:
    """Descriptors of an engine's lock file, and of its table, that this process has open."""
    assert engine.index.columns is not None
    files = [os.fstat(each.descriptor).st_ino for each in (engine.locks, engine.index.columns)]
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            found.append(os.fstat(int(descriptor)).st_ino)
    return found.count(files[0]), found.count(files[1])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_engines_read_from_each_others_memory_and_no_block_is_wrong(model: str, ranks: int) -> None:
    engines = devices(model, ranks, ranks=ranks)
    readings = Readings(engines, ranks)
    readings.play(ranks, 80)
    at_rest(readings)
    for engine in engines:
        for other in [*engine.met]:
            engine.leave(other)
        engine.engine.step()
    gc.collect()
    assert [descriptors_of(engine) for engine in engines] == [(1, 2)] * 3, "its own, and its own mapping's"
    assert sum(engine.read_elsewhere for engine in engines) > 10
    assert sum(engine.used_from().get("neighbours", 0) for engine in engines) > 0


def test_all_that_may_happen_in_the_midst_of_a_read_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Counter[str]()
    missed = Counter[str]()
    preempted = 0
    waits: list[bool] = []
    waits_for_room = Staging.waits_for_room

    def noted(staging: Staging, *facts: Any) -> bool:
        waits.append(waits_for_room(staging, *facts))
        return waits[-1]

    monkeypatch.setattr(Staging, "waits_for_room", noted)
    for seed in range(6):
        engines = devices("one group", seed, 50 if seed % 2 else 14)
        readings = Readings(engines, seed)
        readings.play(seed, 60)
        at_rest(readings)
        seen.update(readings.seen)
        missed.update(misses(engines))
        preempted += sum(engine.engine.scheduler.counts.preemptions for engine in engines)
    assert min(seen[name] for name in ("go_on", "fail", "reset", "drop", "leave", "cancel", "stall")) > 2, seen
    assert min(missed[series("misses", reason)] for reason in (MissReason.DEADLINE, MissReason.NOT_DELIVERED)) > 2
    assert sum(waits) > 2, "for room"
    assert preempted > 2


def test_slots_of_several_sizes_are_read_alike() -> None:
    engines = pool(3, "windows", 480, several_classes=True, device=True)
    readings = Readings(engines, 5)
    readings.play(5, 80)
    at_rest(readings)
    assert sum(engine.read_elsewhere for engine in engines) > 50


@pytest.mark.parametrize("model", ["one group", "windows", "states"])
def test_tiers_below_and_neighbours_beside_go_together(model: str) -> None:
    used = Counter[str]()
    for seed in range(3):
        engines = pool(
            3, model, 60 * len(MODELS[model]), conduct=Misfortune(seed), store=DictionaryStore(), device=True
        )
        readings = Readings(engines, seed)
        readings.play(seed, 60)
        at_rest(readings)
        for engine in engines:
            used.update(engine.used_from())
    assert len([source for source, tokens in used.items() if tokens]) == 3, used


@pytest.mark.parametrize(
    "breaks",
    [
        compares_nothing_after_a_read,
        keeps_the_leases_of_reads,
        ends_a_lease_before_its_read,
        lists_before_the_ranks_have_written,
    ],
)
def test_broken_engines_are_caught(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    found: list[object] = []
    for seed in range(20):
        engines = devices("one group", seed, 60, conduct=Misfortune(seed, 20), load_deadline="60s")
        try:
            readings = Readings(engines, seed)
            readings.play(seed, 60)
            found += [engine for engine in engines if engine.is_leased]
            found += ["a read without a lease"] * readings.unleased
        except KvpactError as error:
            found.append(error)
        if found:
            break
    assert found


@pytest.mark.parametrize("model", ["one group", "windows"])
def test_engines_in_processes_that_are_killed_serve_no_wrong_block(model: str, tmp_path: Path) -> None:
    """They meet by their sockets, and read on threads of their own."""
    found = storm(tmp_path, 5.0, 3, model, device=True)
    assert (found["wrong"], found["rest"], found["leases"]) == (0, 3, 0)
    assert min(found["loaded"], found["kills"], found["files"]) > 0
