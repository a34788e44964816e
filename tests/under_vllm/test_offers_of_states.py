"""States together with drafts on vLLM's scheduler: every state that it offers is in memory at rest, and serves.

The workers are the driver's, without a model: what a state's block holds is checked wherever it is read. The offers are
counted in vLLM's own output, not in kvpact's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, repeat
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from at_the_end import at_the_end
from kvpact.cache.cache import PactCache
from kvpact.cache.status import status_of
from kvpact.contract import LoadJob
from kvpact.identity.keys import BlockKeys
from kvpact.vllm.checks import state_limits
from kvpact.vllm.groups import EngineGroups
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.model_groups import STATES
from vllm_played_engine import make_prompt

UNIT = 16
"""Tokens of a block of any group."""

STATE_GROUP = 1

PROMPTS = [make_prompt(seed, blocks)[: blocks * UNIT - seed] for seed, blocks in enumerate((3, 5, 8, 2))]
"""They end at a boundary, or up to three tokens before one."""

ANSWER = 90
"""Tokens of each answer."""


@dataclass(eq=False)
class Offers:
    """An engine, and the states that its scheduler has offered."""

    engine: VllmEngine
    all: set[tuple[str, int]] = field(default_factory=set)
    """Request and tokens of each."""
    names: dict[str, BlockKeys] = field(default_factory=dict)
    pauses: Iterator[bool] = field(default_factory=lambda: repeat(False))
    """For each step whether it has room for no token."""
    most_held: int = 0
    """The most states of one request that were held at once."""
    held: set[tuple[str, int]] = field(default_factory=set)
    """Request and row of those that were held."""

    @property
    def cache(self) -> PactCache:
        """The cache of the engine."""
        cache: PactCache = self.engine.connector.scheduler_side.mounted.cache
        return cache

    def run(self, *names: str) -> None:
        """Step until these requests have ended, and the cache is at rest."""
        for _ in range(2_000):
            self.engine.scheduler.max_num_scheduled_tokens = 0 if next(self.pauses) else 2048
            self.engine.step()
            self.all |= {(name, tokens) for name, _, _, tokens in self.engine.observed.offered}
            self.names |= {name: each.keys for name, each in self.cache.requests.live.items() if each.keys is not None}
            for name, held in self.cache.saves.put_off.jobs.unnamed.items():
                self.most_held = max(self.most_held, len(held))
                self.held |= {(name, each.pieces[0].start) for each in held.values()}
            if all(map(self.engine.ended, names)) and not self.cache.has_pending_work:
                self.engine.drain()
                return
        pytest.fail(f"{names} do not end")

    def in_memory(self) -> set[tuple[str, int]]:
        """Those of the offered states that memory has."""
        groups = self.cache.requests.groups
        found = set()
        for name, tokens in self.all:
            block = tokens // UNIT - 1
            row = groups.row_of(STATE_GROUP, block)
            keys = self.names[name].keys
            if row < len(keys) and groups.side_key(keys[row], STATE_GROUP, block) in self.cache.index:
                found.add((name, tokens))
        return found


def offering(method: str, *, overlap: bool, **settings: Any) -> Offers:
    """An engine with states and three drafts a step, of which more than half are right."""
    transfer = {"kv_connector": "PactConnector", "kv_connector_module_path": "kvpact.vllm"}
    transfer["kv_connector_extra_config"] = {"memory": "64MiB"}  # type: ignore[assignment]
    engine = VllmEngine(
        EngineSettings(
            groups=STATES,
            draft_method=method,
            accepted_drafts=60,
            overlap=overlap,
            scheduler="kvpact.vllm.scheduler.pact_scheduler",
            **{"num_blocks": 401, "chunk": 40, "draft_tokens": 3, **settings},
        ),
        transfer,
        lambda line: None,
    )
    at_the_end(engine.close)
    return Offers(engine)


def loads_of(cache: PactCache, monkeypatch: pytest.MonkeyPatch) -> list[LoadJob]:
    """The loads that the cache orders from now on."""
    loads: list[LoadJob] = []
    end_step = cache.end_step

    def noted() -> Any:
        work = end_step()
        loads.extend(work.loads)
        return work

    monkeypatch.setattr(cache, "end_step", noted)
    return loads


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "asynchronous scheduling"])
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_every_offered_state_is_in_memory_at_rest(method: str, overlap: bool) -> None:
    offers = offering(method, overlap=overlap)
    names = [f"r{number}" for number in range(len(PROMPTS))]
    for name, prompt in zip(names, PROMPTS, strict=True):
        offers.engine.add(name, prompt, max_tokens=ANSWER)
    offers.run(*names)
    assert offers.engine.observed.accepted > 50
    assert len(offers.all) > 15
    assert offers.in_memory() == offers.all
    held_any = method == "mtp"  # of n-gram drafts nothing is stored, and keys end with their row
    assert (len(offers.held) > 0) == held_any
    assert offers.most_held == held_any
    assert offers.cache.observe()["dropped_blocks"] == 0
    assert not offers.engine.observed.wrong_slots


def test_a_state_that_is_offered_in_a_step_without_its_request_is_in_memory() -> None:
    """With asynchronous scheduling vLLM offers what the last output has confirmed, whatever the step computes."""
    offers = offering("mtp", overlap=True)
    offers.pauses = cycle((False, True, True))
    offers.engine.add("r", PROMPTS[0], max_tokens=ANSWER)
    offers.run("r")
    assert len(offers.all) > 3
    assert offers.in_memory() == offers.all


def turns(offers: Offers, first: Sequence[int]) -> Sequence[int]:
    """The prompt of the next turn of the request "turn"."""
    return [*first, *offers.engine.observed.outputs["turn"], *make_prompt(77, 1)]


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "asynchronous scheduling"])
def test_a_load_fills_the_column_where_the_match_ends_and_no_other(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind that column vLLM has three more, for the states of drafts."""
    offers = offering("mtp", overlap=overlap)
    engine = offers.engine
    engine.add("turn", PROMPTS[1], max_tokens=ANSWER)
    offers.run("turn")
    last = max(tokens for _, tokens in offers.all)
    assert last > len(PROMPTS[1])
    assert engine.forget_computed()
    loads = loads_of(offers.cache, monkeypatch)
    engine.add("next", turns(offers, PROMPTS[1]), max_tokens=ANSWER)
    engine.step()
    tables = engine.scheduler.kv_cache_manager.get_block_ids("next")
    (state,) = [job for job in loads if job.group_id == STATE_GROUP]
    column = last // UNIT - 1
    assert (state.start_block, state.block_ids) == (column, (tables[STATE_GROUP][column],))
    assert not any(tables[STATE_GROUP][:column])
    offers.run("next")
    assert engine.observed.outputs["next"] == engine.expected("next")
    assert offers.in_memory() == offers.all
    assert not engine.observed.wrong_slots


def test_a_preempted_request_holds_nothing_and_its_states_are_saved_when_it_comes_back() -> None:
    """Two requests in a pool that has room for one to the end."""
    offers = offering("mtp", overlap=False, num_blocks=30, max_num_seqs=4)
    engine = offers.engine
    names = [f"r{number}" for number in range(3)]
    for name, prompt in zip(names, PROMPTS, strict=False):
        engine.add(name, prompt, max_tokens=ANSWER)
    offers.run(*names)
    assert engine.observed.preemptions > 0
    assert [engine.observed.outputs[name] for name in names] == [engine.expected(name) for name in names]
    assert len(offers.held) > 0
    assert offers.in_memory() == offers.all
    assert not offers.cache.saves.put_off.jobs.unnamed
    assert not engine.observed.wrong_slots


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("interval", [0, UNIT], ids=["by default", "as advised"])
def test_answers_hit_in_the_next_turn_with_the_option_that_is_advised(interval: int, drafts: int) -> None:
    """By default the next prompt hits the end of the one before; the answer's tokens are counted, and that advised."""
    offers = offering("mtp" if drafts else "ngram", overlap=False, draft_tokens=drafts)
    engine = offers.engine
    engine.scheduler.kv_cache_manager.coordinator.retention_interval = interval
    engine.add("turn", PROMPTS[1], max_tokens=ANSWER)
    offers.run("turn")
    assert engine.forget_computed()
    prompt = turns(offers, PROMPTS[1])
    engine.add("next", prompt, max_tokens=2)
    offers.run("next")
    assert engine.observed.outputs["next"] == engine.expected("next")
    of_prompt = (len(PROMPTS[1]) - 1) // UNIT * UNIT
    ends = [tokens for name, tokens in offers.all if name == "turn"]
    counts = offers.cache.observe()
    kept = of_prompt - (UNIT if drafts else 0)  # where there are drafts vLLM keeps the boundary before the last
    assert max(ends) == kept if not interval else max(ends) > len(PROMPTS[1])
    assert counts["used_tokens"] == max(ends)
    whole = (len(PROMPTS[1]) + ANSWER - 1) // UNIT * UNIT
    assert counts["lost_answer_tokens"] == (0 if interval else whole - of_prompt)
    status = status_of(offers.cache, offers.cache.metrics, "model", UNIT)
    settings = SimpleNamespace(block_size=UNIT, prefix_cache_retention_interval=interval)
    members = EngineGroups(offers.cache.requests.groups, ())
    limits = state_limits(members, SimpleNamespace(cache_config=settings))
    status.remedies = {lacking: remedy for lacking, _, remedy in limits}
    advised = f"add --prefix-cache-retention-interval {UNIT}"
    assert (status.to_change() == advised) == (not interval)
