"""Lazy saving with several KV cache groups: a chain's rows and what hangs on them are saved together."""

from __future__ import annotations

from typing import Any, cast

import pytest
from pact import pact_engine
from test_pact_cache import nothing_held

from kvpact.cache.cache import PactCache
from kvpact.identity.groups import GroupKind, KVCacheGroup
from kvpact_testkit.engine import Engine, EngineConfig, Request

BLOCK, PROMPT = 4, 8
FULL, WINDOW = KVCacheGroup(GroupKind.FULL, BLOCK), KVCacheGroup(GroupKind.WINDOW, BLOCK, 10)
STATE, CHUNK = KVCacheGroup(GroupKind.STATE, BLOCK), KVCacheGroup(GroupKind.CHUNK, BLOCK, 16)
SETS = ((FULL, WINDOW), (FULL, WINDOW, CHUNK), (FULL, FULL), (WINDOW,), (FULL, STATE), (STATE,))


def prompt(seed: int, blocks: int = PROMPT) -> list[int]:
    return [1_000 * (seed + 1) + place for place in range(blocks * BLOCK + 1)]


def engine_of(groups: tuple[KVCacheGroup, ...], num_blocks: int = 60, num_slots: int = 400, **more: Any) -> Engine:
    config = EngineConfig(groups=groups, block_size=BLOCK, num_blocks=num_blocks * len(groups))
    return pact_engine(config, num_slots=num_slots, **{"save": "lazy", **more})


def cache_of(engine: Engine) -> PactCache:
    return cast(PactCache, engine.cache)


def saved(engine: Engine) -> float:
    return cache_of(engine).observe()["saved_blocks"]


def serve(engine: Engine, *seeds: int) -> None:
    for seed in seeds:
        engine.run([Request(f"{engine.counts.steps}-{seed}", prompt(seed), 2)])


@pytest.mark.parametrize("groups", SETS)
def test_nothing_is_saved_while_there_is_room(groups: tuple[KVCacheGroup, ...]) -> None:
    engine = engine_of(groups)
    serve(engine, 0, 1, 0, 1)
    assert saved(engine) == 0
    assert engine.counts.local_hits == 2 * PROMPT * BLOCK
    nothing_held(cache_of(engine))


@pytest.mark.parametrize("groups", SETS)
def test_what_is_evicted_is_served_with_all_its_groups(groups: tuple[KVCacheGroup, ...]) -> None:
    engine = engine_of(groups)
    serve(engine, *range(40))
    cache, computed = cache_of(engine), engine.counts.computed
    cache.check()
    serve(engine, *range(39, 29, -1), *range(20, 30))
    assert engine.counts.computed - computed <= 20 * 3, "all of a prompt but its last tokens is there"
    assert cache.observe()["used_tokens"] >= 10 * PROMPT * BLOCK
    nothing_held(cache)


def test_blocks_that_nobody_needs_are_not_saved() -> None:
    """Eager saving would store as much of the windows for each prompt; lazy saving stores what left, and no more."""
    engine, eager = engine_of((FULL, WINDOW)), engine_of((FULL, WINDOW), save="eager")
    for each in (engine, eager):
        serve(each, *range(20))
    assert 0 < saved(engine) < saved(eager)


def test_what_hangs_on_a_stored_row_is_saved_at_once() -> None:
    """The rows are stored and the windows are not: the next request that computes them brings what is missing."""
    engine = engine_of((FULL, WINDOW))
    serve(engine, *range(12))
    cache = cache_of(engine)
    sides = [key for key in map(cache.index.key_at, range(400)) if key and cache.index.is_side(cache.index.slot(key))]
    for key in sides:
        cache.index.drop(key)
    serve(engine, 0)
    assert engine.reset_prefix_cache()
    used = cache.observe()["used_tokens"]
    serve(engine, 0)
    assert cache.observe()["used_tokens"] - used == PROMPT * BLOCK
    nothing_held(cache)


@pytest.mark.parametrize("groups", SETS)
def test_what_cannot_be_saved_does_not_keep_the_engine_stepping(groups: tuple[KVCacheGroup, ...]) -> None:
    engine = engine_of(groups, num_blocks=24, num_slots=5)
    serve(engine, *range(8))
    assert not engine.has_work
    nothing_held(cache_of(engine))


def test_the_memo_is_bounded_by_the_engines_blocks_and_keeps_nothing_of_requests() -> None:
    engine = engine_of((FULL, WINDOW, STATE), num_blocks=16, num_slots=24)
    memo = cache_of(engine).saves.lazy
    assert memo is not None
    for seed in range(40):
        engine.add_request(Request(f"r{seed}", prompt(seed, 1 + seed % 6), 1 + seed % 5))
        engine.step()
        if seed % 7 == 0:
            engine.cancel(f"r{seed}")
        assert len(memo) < 48
        memo.check()
    engine.run()
    assert not memo.known_requests
    engine.update_weights()
    assert len(memo) == 0


@pytest.mark.parametrize("unpublished", [False, True])
def test_a_block_that_the_engine_has_unpublished_is_not_saved(unpublished: bool) -> None:
    engine = engine_of((FULL, WINDOW), num_blocks=40)
    serve(engine, 0)
    assert saved(engine) == 0
    pool = engine.scheduler.kv.pool
    for view in [*engine.context.iter_free_blocks()] if unpublished else ():
        if view.block_hash is not None:
            pool.unpublish(view.block_id)
    serve(engine, 1, 2, 3, 4, 0)
    assert (cache_of(engine).ledger.totals.used_tokens == 0) == unpublished
