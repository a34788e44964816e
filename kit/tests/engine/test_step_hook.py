"""`before_update_states`: nothing by default, the minimum over ranks otherwise, on a copy, one token left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from workloads import outputs_of, plain_outputs, prompt, workload

from kvpact.errors import PactViolation
from kvpact_testkit.engine import (
    ByteSegment,
    Engine,
    EngineConfig,
    EngineQuirks,
    OracleViolation,
    ReferenceCache,
    Request,
    SchedulerOutput,
    SimulatedWorker,
    agree_on_hits,
    apply_external_hits,
    reference_engine,
)

CONFIG = EngineConfig(num_ranks=2, num_layers=2, num_blocks=40)


class Supplier:
    """Writes what the oracle wants to see, for the first tokens of each request's step; `ranks[i]` tokens on rank i."""

    def __init__(self, tokens_of_rank: Mapping[int, int], config: EngineConfig = CONFIG) -> None:
        self.tokens_of_rank = tokens_of_rank
        self.engine: Engine
        self.calls: list[tuple[int, int]] = []
        self.outputs: list[SchedulerOutput] = []
        self.config = config

    def for_rank(self, rank: int) -> Callable[[SchedulerOutput], Mapping[str, int]]:
        def supply(output: SchedulerOutput) -> Mapping[str, int]:
            self.calls.append((output.step, rank))
            self.outputs.append(output)
            hits = {}
            for request, start, count in zip(output.requests, output.starts, output.counts, strict=True):
                if start < request.num_prompt_tokens and self.tokens_of_rank.get(rank, 0):
                    hits[request.request_id] = self.tokens_of_rank[rank]
                    self.write(rank, request, start, min(self.tokens_of_rank[rank], count))
            return hits

        return supply

    def write(self, rank: int, request: Request, start: int, count: int) -> None:
        truth = self.engine.runner.truth_of(request)
        for layer, pages in enumerate(self.engine.workers[rank].layers.values()):  # type: ignore[attr-defined]
            words = pages.view(np.uint64)
            for position in range(start, min(start + count, len(truth))):
                block = request.block_ids[0][position // 16]
                words[block, position % 16] = (truth + self.engine.runner.masks[0, rank * 2 + layer])[position]


def engine_with(
    supplier: Supplier, quirks: EngineQuirks | None = None, config: EngineConfig = CONFIG, num_slots: int = 1
) -> Engine:
    cache = ReferenceCache(16, num_slots, num_ranks=2)
    workers = [
        SimulatedWorker(rank, ByteSegment(num_slots, 4096).slot_view, supply=supplier.for_rank(rank)) for rank in (0, 1)
    ]
    supplier.engine = Engine(config, quirks, cache, workers)
    return supplier.engine


def test_by_default_nothing_changes() -> None:
    output = SchedulerOutput(1)
    output.add(Request("r", prompt(40)), 0, 40)
    assert apply_external_hits(output, {}) is output
    assert agree_on_hits([{}, {}]) == {}
    engines = [reference_engine(CONFIG, num_slots=8) for _ in range(2)]
    for engine in engines:
        engine.run(workload(3))
    assert engines[0].counts == engines[1].counts
    assert engines[0].counts.hook_hits == 0


def test_h43_ranks_agree_on_the_minimum() -> None:
    assert agree_on_hits([{"a": 5, "b": 3}, {"a": 2, "c": 9}]) == {"a": 2}
    assert agree_on_hits([{"a": 5}, {}]) == {}
    supplier = Supplier({0: 24, 1: 10})
    engine = engine_with(supplier)
    engine.run([Request("r", prompt(40), 4)])
    assert engine.counts.hook_hits == 10
    assert engine.counts.external_hits == 10
    assert engine.counts.computed == 40 + 3 - 10


def test_at_least_one_token_stays_to_compute() -> None:
    engine = engine_with(Supplier({0: 1000, 1: 1000}))
    engine.run([Request("r", prompt(40), 4)])
    assert engine.counts.hook_hits == 39
    plain = Engine(CONFIG)
    plain.run([Request("r", prompt(40), 4)])
    assert outputs_of(engine) == outputs_of(plain)


@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
@pytest.mark.parametrize("preset", EngineQuirks.presets())
def test_supplied_tokens_change_counts_and_no_output(preset: str, tokens: int) -> None:
    engine = engine_with(Supplier({0: tokens, 1: tokens}), EngineQuirks.presets()[preset])
    engine.run(workload(4))
    assert outputs_of(engine) == plain_outputs(4)
    assert engine.counts.hook_hits > 0
    engine.check_nothing_held()


def test_h90_the_schedulers_output_is_not_edited_and_preempted_requests_come_back() -> None:
    request = Request("r", prompt(40))
    output = SchedulerOutput(1)
    output.add(request, 0, 40)
    before = (list(output.requests), deepcopy(output.starts), deepcopy(output.counts))
    changed = apply_external_hits(output, {"r": 24})
    assert (changed.starts, changed.counts, changed.external_hits) == ([24], [16], {"r": 24})
    assert (output.requests, output.starts, output.counts) == before
    assert output.external_hits == {}

    supplier = Supplier({0: 20, 1: 20})
    engine = engine_with(supplier, config=replace(CONFIG, num_blocks=16))
    engine.run(workload(6))
    assert engine.counts.preemptions > 0
    assert outputs_of(engine) == plain_outputs(6)
    assert all(seen.external_hits == {} for seen in supplier.outputs)


def test_h91_what_the_hook_returns_arrives_and_so_do_the_steps_results() -> None:
    supplier = Supplier({0: 8, 1: 8})
    engine = engine_with(supplier)
    engine.add_request(Request("r", prompt(20), 1))
    assert [request.request_id for request in engine.step()] == ["r"]
    assert engine.counts.hook_hits == 8


def test_h92_the_hook_runs_on_every_rank_in_every_step() -> None:
    supplier = Supplier({})
    engine = engine_with(supplier)
    engine.run([Request("r", prompt(20), 5)])
    steps = engine.scheduler.step
    assert supplier.calls == [(step, rank) for step in range(1, steps + 1) for rank in (0, 1)]


def test_h93_new_blocks_are_zeroed_before_the_hook_and_not_behind_it() -> None:
    config = replace(CONFIG, zero_new_blocks=True)
    engine = engine_with(Supplier({0: 24, 1: 24}), config=config)
    engine.run([Request("r", prompt(40), 4)])
    assert engine.counts.hook_hits == 24

    wiped = engine_with(Supplier({0: 24, 1: 24}), replace(EngineQuirks(), zeroes_after_hook=True), config)
    with pytest.raises(OracleViolation, match=r"reads token 0 .*never written"):
        wiped.run([Request("r", prompt(40), 4)])


def test_a_rank_that_claims_tokens_it_did_not_write_is_found() -> None:
    supplier = Supplier({0: 24, 1: 24})
    engine = engine_with(supplier)
    supplier.write = lambda rank, request, start, count: None  # type: ignore[method-assign]
    with pytest.raises(OracleViolation, match="never written"):
        engine.run([Request("r", prompt(40), 4)])


@pytest.mark.parametrize("hits", [{"nobody": 3}, {"r": -1}])
def test_hits_that_cannot_be_are_an_error(hits: dict[str, int]) -> None:
    output = SchedulerOutput(1)
    output.add(Request("r", prompt(40)), 0, 40)
    with pytest.raises(PactViolation, match="a worker supplied"):
        apply_external_hits(output, hits)


@pytest.mark.parametrize(("of_ranks", "given_back"), [(0, 0), (40, 0), (50, 10), (64, 24), (500, 24)])
def test_the_next_step_may_schedule_what_the_hits_of_this_one_spared_as_far_as_the_ranks_can_take_it(
    of_ranks: int, given_back: int
) -> None:
    supplier = Supplier({0: 24, 1: 24})
    engine = engine_with(supplier, config=replace(CONFIG, max_tokens_per_step=40, max_tokens_of_ranks=of_ranks))
    engine.add_request(Request("first", prompt(40), 2))
    engine.add_request(Request("second", prompt(90, 7), 2))
    engine.step()
    supplier.tokens_of_rank = {}
    engine.step()
    assert engine.counts.given_back == given_back
    assert supplier.outputs[-1].total_num_scheduled_tokens == 40 + given_back
    engine.step()
    assert engine.counts.given_back == given_back  # once
    engine.run()
    assert engine.finished["first"].num_cached_tokens == 24
    plain = Engine(CONFIG)
    plain.run([Request("first", prompt(40), 2), Request("second", prompt(90, 7), 2)])
    assert outputs_of(engine) == outputs_of(plain)
