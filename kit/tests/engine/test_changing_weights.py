"""Weights that change under a running engine: what its own blocks hold goes on, what a cache serves must be of the new.

The oracle tells weights apart: keys, values and tokens depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from pact import pact_engine
from workloads import prompt

from kvpact.identity.groups import GroupKind, KVCacheGroup
from kvpact_testkit.engine import (
    ByteSegment,
    Engine,
    EngineConfig,
    EngineQuirks,
    JobBehavior,
    OracleViolation,
    ReferenceCache,
    Request,
    RequestStatus,
    SimulatedWorker,
    reference_engine,
)

CONFIG = EngineConfig(num_blocks=128, max_tokens_per_step=64)
NO_REUSE = EngineConfig(num_blocks=128, prefix_caching=False)


class SavesOldBlocks(ReferenceCache):
    """Blocks that requests computed before a reset are saved after it."""

    def _note_filled(self, *arguments: object) -> int:
        super()._note_filled(*arguments)  # type: ignore[arg-type]
        return 1 << 20


def engine_of(kind: type[ReferenceCache], config: EngineConfig = CONFIG) -> Engine:
    """An engine of one rank with a cache of this kind."""
    segment = ByteSegment(256, config.page_bytes)
    return Engine(config, None, kind(config.block_size, 256), [SimulatedWorker(0, segment.slot_view)])


def outputs(weights: int, tokens: list[int], count: int = 8) -> list[int]:
    """What an engine without a cache generates under these weights alone."""
    engine = Engine(CONFIG)
    engine.change_weights(weights)
    return engine.run([Request("alone", tokens, count)])["alone"].output_token_ids


def test_tokens_depend_on_the_weights_and_on_nothing_else() -> None:
    assert outputs(1, prompt(64)) == outputs(1, prompt(64))
    assert len({tuple(outputs(weights, prompt(64))) for weights in range(8)}) == 8


@pytest.mark.parametrize("preset", EngineQuirks.presets())
def test_a_running_request_goes_on_with_what_is_in_its_blocks(preset: str) -> None:
    engine = reference_engine(CONFIG, EngineQuirks.presets()[preset])
    request = engine.add_request(Request("running", prompt(100), 40))
    for _ in range(12):
        engine.step()
    engine.update_weights(clear_cache=False)
    assert request.status is RequestStatus.RUNNING
    before = len(request.output_token_ids)
    engine.run()
    assert engine.counts.wrong_reads == engine.counts.preemptions == 0
    assert request.output_token_ids[:before] == outputs(0, prompt(100), 40)[:before]
    assert request.output_token_ids not in (outputs(0, prompt(100), 40), outputs(1, prompt(100), 40))
    engine.check_nothing_held()


def test_a_prompt_half_computed_goes_on_too() -> None:
    engine = reference_engine(CONFIG)
    request = engine.add_request(Request("half", prompt(150), 4))
    engine.step()
    engine.update_weights(clear_cache=False)
    assert 0 < request.num_computed_tokens < 150
    engine.run()
    assert engine.finished["half"].output_token_ids not in (outputs(0, prompt(150), 4), outputs(1, prompt(150), 4))


def test_the_engines_own_prefix_cache_stays_and_is_its_own_business() -> None:
    engine = reference_engine(CONFIG)
    engine.run([Request("first", prompt(64), 1)])
    engine.update_weights(clear_cache=False)
    engine.run([Request("own", prompt(112), 4)])
    engine.run([Request("longer", prompt(150), 4)])
    assert engine.counts.local_hits == 64 + 112, "the third has what the second computed on top of old blocks"
    engine.check_nothing_held()


def test_with_its_caches_cleared_an_engine_is_as_new() -> None:
    engine = reference_engine(CONFIG)
    request = engine.add_request(Request("running", prompt(100), 40))
    for _ in range(12):
        engine.step()
    before = request.num_computed_tokens
    engine.update_weights()
    assert request.num_computed_tokens == 0 < before
    engine.run([Request("new", prompt(64, 3), 8)])
    assert engine.finished["new"].output_token_ids == outputs(1, prompt(64, 3))


def test_h32_what_a_cache_keeps_of_the_old_weights_is_seen() -> None:
    engine = engine_of(ReferenceCache, NO_REUSE)
    engine.run([Request("old", prompt(64), 1)])
    engine.change_weights(1)  # nobody resets the cache
    with pytest.raises(OracleViolation, match="token 0 of request old"):
        engine.run([Request("new", [*prompt(64), 1], 1)])


def test_h38_what_stands_on_old_blocks_is_seen_when_it_is_served() -> None:
    def play(engine: Engine) -> None:
        engine.add_request(Request("running", prompt(100), 40))
        for _ in range(12):
            engine.step()
        engine.update_weights(clear_cache=False)
        engine.run()
        engine.scheduler.kv.pool.unpublish_all()
        everything = engine.finished["running"].token_ids
        engine.run([Request("after", [*everything, 1], 1)])

    play(engine_of(ReferenceCache))
    with pytest.raises(OracleViolation, match="request after reads token 0"):
        play(engine_of(SavesOldBlocks))


def test_h38_a_chain_behind_old_blocks_of_the_engines_own_is_not_saved() -> None:
    def play(engine: Engine) -> None:
        engine.run([Request("first", prompt(64), 1)])
        engine.update_weights(clear_cache=False)
        engine.run([Request("longer", prompt(112), 1)])
        engine.scheduler.kv.pool.unpublish_all()
        engine.run([Request("after", prompt(112), 1)])

    play(engine_of(ReferenceCache))
    with pytest.raises(OracleViolation, match="request after reads token 0"):
        play(engine_of(SavesOldBlocks))


@pytest.mark.parametrize("several", [False, True], ids=["one group", "several groups"])
@pytest.mark.parametrize("build", [reference_engine, pact_engine])
def test_h38_what_was_computed_on_old_blocks_is_not_saved_behind_new_ones(
    build: Callable[..., Engine], several: bool
) -> None:
    window = (KVCacheGroup(GroupKind.FULL, 16), KVCacheGroup(GroupKind.WINDOW, 16, 32))
    engine = build(replace(CONFIG, groups=window) if several else CONFIG)
    pool = engine.scheduler.kv.pool
    engine.run([Request("first", prompt(64), 1)])
    old = [block for block in range(pool.num_blocks) if pool.block_hash[block] is not None]
    if several:
        engine.reset_connector()  # the embedded engine's windows and updates of weights do not go together
    else:
        engine.update_weights(clear_cache=False)
    engine.run([Request("on top of old blocks", prompt(112), 1)])
    for block in old:
        pool.unpublish(block)
    engine.run([Request("the beginning anew", prompt(64), 1)])
    before = engine.counts.local_hits
    engine.run([Request("mixed", prompt(150), 1)])
    assert engine.counts.local_hits == before + 112, "new blocks, and behind them those on top of old ones"
    pool.unpublish_all()
    engine.run([Request("after", prompt(150), 1)])
    assert engine.counts.external_hits == 64, "what stands on nothing old is served"
    engine.check_nothing_held()


def test_a_load_that_was_taken_before_the_update_is_the_engines_own() -> None:
    engine = reference_engine(NO_REUSE, conduct=lambda rank, job: JobBehavior(copy_after_steps=3))
    engine.run([Request("first", prompt(64), 1)])
    request = engine.add_request(Request("loading", [*prompt(64), 1], 4))
    engine.step()
    assert request.status is RequestStatus.WAITING_FOR_LOAD
    engine.update_weights(clear_cache=False)
    engine.run()
    assert engine.counts.external_hits == 64
    assert not engine.counts.wrong_reads
    engine.run([Request("after", [*prompt(64), 1], 4)])
    assert engine.counts.external_hits == 64, "what was loaded before the reset is served after it"


def test_a_prefix_cache_is_reset_alone_only_while_nobody_holds_a_block() -> None:
    engine = reference_engine(CONFIG)
    engine.run([Request("first", prompt(64), 1)])
    running = engine.add_request(Request("running", prompt(64, 3), 20))
    for _ in range(3):
        engine.step()
    assert engine.reset_prefix_cache() is False
    engine.add_request(Request("hit", [*prompt(64), 1], 1))
    engine.run()
    assert engine.counts.local_hits == 64
    assert running.has_ended
    assert engine.reset_prefix_cache() is True
    engine.run([Request("again", [*prompt(64), 1], 1)])
    assert (engine.counts.local_hits, engine.counts.external_hits) == (64, 64)
    assert engine.reset_prefix_cache(reset_connector=True, reset_running_requests=True) is True
    engine.run([Request("anew", [*prompt(64), 1], 1)])
    assert (engine.counts.local_hits, engine.counts.external_hits) == (64, 64)


@pytest.mark.parametrize("preset", EngineQuirks.presets())
@pytest.mark.parametrize("seed", range(3))
def test_random_updates_with_and_without_cleared_caches(preset: str, seed: int) -> None:
    random = Random(seed)
    config = EngineConfig(num_blocks=60, max_tokens_per_step=48, max_running=6, num_ranks=2, num_layers=2)
    engine = reference_engine(
        config,
        EngineQuirks.presets()[preset],
        num_slots=100,
        asynchronous=seed != 1,
        conduct=lambda rank, job: JobBehavior(copy_after_steps=(job.job_id * (rank + 1)) % 4),
    )
    names = 0
    for _ in range(400):
        if random.random() < 0.4:
            names += 1
            own = [10**6 + 1000 * names + at for at in range(random.randint(1, 30))]
            tokens = prompt(random.randrange(0, 150), random.randrange(3)) + own
            engine.add_request(Request(f"r{names}", tokens, random.randint(1, 24)))
        chance = random.random()
        if chance < 0.05:
            engine.update_weights(random.randrange(3), clear_cache=False)
        elif chance < 0.07 and not (engine.quirks.reset_refuses_loading and engine.scheduler.loads):
            engine.update_weights(random.randrange(3))
        elif chance < 0.10:
            engine.reset_prefix_cache(reset_connector=random.random() < 0.5)
        elif chance < 0.2:
            engine.scheduler.kv.pool.unpublish_all()
        engine.step()
        engine.check()
    engine.run()
    assert engine.counts.external_hits
    assert engine.counts.local_hits
    assert not engine.counts.wrong_reads
    engine.check_nothing_held()
