"""Under vLLM's scheduler a step in which requests only decode costs kvpact no call for each of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from benchmarks import running
from benchmarks.lifecycle import random_prompts, started
from benchmarks.scheduler_halves import SchedulerHalf

from kvpact.contract import ExternalKVMatch
from kvpact.vllm.request_identity import OfferedMatch, VllmRequest

RUNNING = ("r0", "r1", "r2")


def test_a_step_of_decodes_calls_no_function_for_each_request() -> None:
    """The benchmark's own count, beside the cheapest connector of vLLM."""
    try:
        rows_of_connectors = running.rows(running=(10, 64), waiting=(0,), subjects=("kvpact", "simple"), steps=4)
        found = [*islice(rows_of_connectors, 4)]  # those of KV events come last
    finally:
        logging.disable(logging.NOTSET)
    rows = {(row["who"], row["running"]): row for row in found}
    assert {*rows} == {(who, running) for who in ("kvpact", "simple") for running in (10, 64)}
    assert rows["kvpact", 64]["calls"] <= rows["kvpact", 10]["calls"] + 3
    assert rows["kvpact", 64]["calls"] <= 60
    assert rows["kvpact", 64]["calls"] < rows["simple", 64]["calls"] / 3
    assert all(row["hooks_us"] > 0 and row["schedule_us"] > 0 and row["waiting"] == 0 for row in rows.values())


class Told:
    """An engine without a model in which requests run, and of which of them the cache was told in each step."""

    def __init__(self, half: SchedulerHalf) -> None:
        self.half, self.side, self.names = half, half.connector.scheduler_side, list[str]()
        cache = self.side.cache
        assert cache is not None
        note = cache.note_computed

        def noted(request: Any, *others: Any) -> None:
            self.names.append(request.request_id)
            note(request, *others)

        cache.note_computed = noted

    def step(self) -> list[str]:
        """The requests that the cache was told of in one step."""
        self.names.clear()
        self.half.step()
        return sorted(self.names)


@pytest.fixture
def told() -> Iterator[Told]:
    """Three requests that decode, each a few tokens into its second block."""
    with started(("kvpact",), 1, None, 0, tokens=64, block_size=16, chunk=0, requests=3) as halves:
        found = Told(halves["kvpact"])
        for name, prompt in zip(RUNNING, random_prompts(1, 19, 3), strict=True):
            found.half.add(name, prompt, max_tokens=40)
        assert found.step() == [*RUNNING]
        yield found


def test_the_cache_is_told_of_requests_that_fill_a_block_and_of_new_ones(told: Told) -> None:
    steps = [told.step() for _ in range(16)]
    assert steps[12] == [*RUNNING], "32 tokens: the second block is full"
    assert [step for step in steps if step] == [[*RUNNING]]


def test_the_cache_is_told_of_all_when_a_name_may_stand_for_another_content(told: Told) -> None:
    assert told.step() == []
    told.side.identities.adapters.revision += 1
    assert told.step() == [*RUNNING]
    assert told.step() == []


def test_the_cache_is_not_told_of_a_request_over_blocks_that_were_not_loaded(told: Told) -> None:
    view = VllmRequest(told.half.scheduler.requests["r1"], told.side.identities)
    load = told.side.loads.admit(view, OfferedMatch(ExternalKVMatch(0), 0), 0, ((1,),), 0)
    load.is_broken = True
    assert [told.step() for _ in range(14)] == [["r0", "r2"]] * 14, "its block too was filled meanwhile"
    told.side.loads.lost("r1")
    assert told.step() == ["r1"], "it did not go on from where it was noted last"


def test_the_cache_is_told_of_all_after_a_reset(told: Told) -> None:
    assert told.step() == []
    told.half.connector.reset_cache()
    assert told.step() == [*RUNNING]
    assert told.step() == []
