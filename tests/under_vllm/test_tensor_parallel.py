"""Two tensor-parallel ranks on two cores: what one engine computed, it and the next one load, each rank its part.

An engine of two ranks takes a minute to start, so one is shared by all tests that leave it alive; the last ones kill it
and start the next one on the same slab. Its 24 KV blocks are as tight as those of `test_pressure.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_engine import FaultyEngine
from references import References

from engines import BLOCK, BLOCK_BY_BLOCK, prompt
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.phases import settle
from leftovers import named_shared_memory, orphaned_shared_memory, shared_memory, slabs_still_locked

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RANKS = 2
KV_BLOCKS = 24
BLOCKS = 6
TIGHT = {**BLOCK_BY_BLOCK, "num_gpu_blocks_override": KV_BLOCKS, "max_model_len": 8 * BLOCK}
ARGUMENTS = {**TIGHT, "tensor_parallel_size": RANKS, "kv_cache_memory_bytes": 1 << 28}

ASKED = [prompt(seed, BLOCKS) for seed in range(700, 703)]
BLIND = "cache.prepare_external_match"
"""While this fails, the engine computes everything or has it from its own prefix cache: the reference."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the first life gave for `ASKED`, in the order of asking."""

    computed: list[Output]
    local_hits: list[Output]
    loaded: list[Output]


class Ranks:
    """Lives of the engine on one slab."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory
        self.before = shared_memory()
        self.engine = self.start()

    def start(self) -> FaultyEngine:
        self.engine = FaultyEngine(self._model, self._directory, arguments=ARGUMENTS, memory="64MiB")
        self.engine.process.wait_ready()
        return self.engine

    def kill(self) -> None:
        """SIGKILL to all of it; what vLLM itself leaves in /dev/shm, with kvpact or without, is removed."""
        segments = named_shared_memory(self.engine.process.processes())
        self.engine.process.kill()
        for path in segments:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The engine."""
    lives = Ranks(tiny_model, tmp_path_factory.mktemp("ranks"))
    yield lives
    lives.engine.process.kill()


@pytest.fixture(scope="module")
def seen(ranks: Ranks) -> Seen:
    """`ASKED` three times: cold, from the engine's own prefix cache, from kvpact's memory."""
    engine = ranks.engine
    computed, local_hits, loaded = [], [], []
    for tokens in ASKED:  # one by one: the engine has room for three
        computed.append(engine.ask(tokens))
        local_hits.append(engine.ask(tokens, keep_local=True))
        loaded.append(engine.ask(tokens))
    return Seen(computed, local_hits, loaded)


@pytest.fixture
def engine(ranks: Ranks, seen: Seen) -> Iterator[FaultyEngine]:
    """The living engine; no test leaves a fault on."""
    yield ranks.engine
    ranks.engine.fail()


def reference(engine: FaultyEngine, tokens: list[int], blocks: int) -> Output:
    """What this engine says when it has `blocks` of the prompt from its own prefix cache, and nothing from kvpact."""
    engine.fail(BLIND)
    answer = References(engine.process).answer(tokens, blocks)
    engine.fail()
    return answer


def test_what_two_ranks_computed_is_loaded_from_memory_bit_for_bit_as_the_engines_own_hit(seen: Seen) -> None:
    assert [output.cached_tokens for output in seen.computed] == [0] * len(ASKED)
    for loaded, local in zip(seen.loaded, seen.local_hits, strict=True):
        assert loaded.cached_tokens == local.cached_tokens == BLOCKS * BLOCK
        assert loaded.same_answer(local)


def test_each_rank_holds_its_part_of_every_slot(engine: FaultyEngine) -> None:
    log = engine.process.log.read_text()
    whole = 2 * 4 * 4 * 64 * 2 * BLOCK  # keys and values of 4 layers, 4 heads of 64 in bfloat16
    assert f"64MiB of memory for {(64 << 20) // whole * BLOCK:,} tokens, tiers below: disk" in log


def test_h41_failures_of_two_ranks_are_recomputed_from_the_first_on_and_gone_everywhere(engine: FaultyEngine) -> None:
    """Rank 0 cannot load block 1, rank 1 cannot load blocks 2 to 3: the hull is blocks 1 to 3."""
    tokens = prompt(710, BLOCKS)
    engine.ask(tokens)
    expected = reference(engine, tokens, 1)
    before, plans, struck = settle(engine.process), len(engine.plans), len(engine.raised)
    engine.fail("rank0.transfer.fault.1-1", "rank1.transfer.fault.2-3", "engine.gather")
    failed = engine.ask(tokens)
    assert failed.same_answer(expected)
    struck_by = {"rank0.transfer.fault.1-1", "rank1.transfer.fault.2-3", "engine.gather"}
    assert set(engine.raised[struck:]) == struck_by
    after = settle(engine.process)
    (plan,) = engine.plans[plans:]
    assert (plan.committed, plan.loaded, plan.failed, plan.used) == (6 * BLOCK, 3 * BLOCK, 3 * BLOCK, BLOCK)
    assert plan.adds_up
    for tier in ("memory", "disk"):  # the first failed block and all behind it; nothing was saved anew
        assert after[f'held_blocks{{tier="{tier}"}}'] == before[f'held_blocks{{tier="{tier}"}}'] - 5, tier
    engine.fail()
    again = engine.ask(tokens)
    assert again.cached_tokens == BLOCK, "the block before the first failed one is still there"
    assert again.same_answer(expected)
    once_more = engine.ask(tokens)
    assert once_more.cached_tokens == BLOCKS * BLOCK, "what was computed again is stored again"
    assert once_more.same_answer(reference(engine, tokens, BLOCKS))


def test_p8_what_one_rank_could_not_save_is_not_saved(engine: FaultyEngine) -> None:
    tokens = prompt(720, BLOCKS)
    engine.fail("rank1.save")
    engine.ask(tokens)
    settle(engine.process)
    engine.fail()
    computed = engine.ask(tokens)
    assert computed.cached_tokens == 0
    assert computed.same_answer(reference(engine, tokens, 0))
    assert engine.ask(tokens).cached_tokens == BLOCKS * BLOCK


def crowd_of(seed: int, requests: int) -> list[list[int]]:
    """Prompts of one to six blocks, most of which begin like another one."""
    choose = random.Random(seed)
    stems = [prompt(800 + family, 5, tail=0) for family in range(10)]
    crowd = []
    for number in range(requests):
        stem = choose.choice(stems)[: choose.randrange(2, 6) * BLOCK]
        crowd.append([*stem, *prompt(900 + number, 0, choose.randrange(1, BLOCK))])
    return crowd


@pytest.mark.proof
def test_p1_p7_under_pressure_every_plan_ends_and_adds_up(engine: FaultyEngine) -> None:
    """Sixty requests, eight at a time, want three times the blocks that there are; a fifth of the users leave."""
    before, plans = settle(engine.process), len(engine.plans)
    answers = engine.process.crowd(crowd_of(1, 60), at_once=8, leaving=0.2, seed=1, max_tokens=24)
    assert {answer.finish_reason for answer in answers} == {"length", "abort"}
    engine.process.reset_prefix_cache()  # refused as long as a block is held
    after = settle(engine.process)
    ended = engine.plans[plans:]
    assert sum(plan.used > 0 for plan in ended) > 5
    assert all(plan.adds_up for plan in ended), [plan for plan in ended if not plan.adds_up]
    assert after["leases_held"] == after["open_plans"] == 0
    assert after["hook_errors"] == before["hook_errors"], "no invariant was broken on the way"


def test_after_kill_9_nothing_is_left(ranks: Ranks, seen: Seen) -> None:
    settle(ranks.engine.process)
    ranks.engine.process.send_prompts([prompt(730 + number, 5) for number in range(8)], max_tokens=8)
    ranks.kill()
    assert ranks.engine.process.processes() == {}
    assert orphaned_shared_memory(ranks.before) == set()
    assert slabs_still_locked(ranks.engine.slabs) == []
