"""Under `kvpact.vllm.scheduler` a connector hears of each match that a step does not take, and why, in that step.

vLLM's schedulers are real; the workers are played (docs/internals/vllm-driver.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from leasing_connectors import (
    LeasesOf,
    Leasing,
    OfThePact,
    OfTheTupleApi,
    WithADocumentedContract,
    WithAnAbort,
    WithAQueryResult,
)

from kvpact.contract import POSTPONED_STEPS, ExternalKVMatch, ExternalMatchExit
from kvpact.vllm.compat.restarts import Restarts
from kvpact.vllm.exits import EngineExits
from kvpact_testkit.results import NotObservable
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, ConnectorUnderTest, Harness, ScenarioOver, named, prompt

SCHEDULER = "kvpact.vllm.scheduler.pact_scheduler"

STORED = prompt(1, 10)

EXITS = {
    "h01_lookups_that_are_not_committed": ExternalMatchExit.NO_BLOCKS,
    "prompt_exceeds_the_step": ExternalMatchExit.BUDGET,
    "draft_model_wants_the_rest_of_the_prompt": ExternalMatchExit.BUDGET,
    "prefills_are_throttled": ExternalMatchExit.THROTTLED,
    "as_many_run_as_may": ExternalMatchExit.MAX_RUNNING,
    "encoder_outputs_are_on_their_way": ExternalMatchExit.ENCODER,
    "preemption_closes_the_queue": ExternalMatchExit.PREEMPTION,
    "overtaken_by_priority": ExternalMatchExit.NOT_REACHED,
    "paused_with_a_promise": ExternalMatchExit.PAUSED,
    "another_connector_asks_for_time": ExternalMatchExit.OTHER_CONNECTOR_WAITS,
    "h04_another_connector_wins": ExternalMatchExit.OTHER_CONNECTOR,
    "window_is_computed_again": ExternalMatchExit.DECLINED,
    "cancelled_while_blocked": ExternalMatchExit.CANCELLED,
}


@pytest.fixture(autouse=True)
def nothing_heard() -> Iterator[None]:
    Leasing.begin()
    yield
    Leasing.begin()


def under_test(connector: type[Leasing], **config: Any) -> ConnectorUnderTest:
    return ConnectorUnderTest(connector.__module__, connector.__name__, config, LeasesOf(), scheduler=SCHEDULER)


def play(scenario: str, connector: type[Leasing] = OfThePact, **config: Any) -> Harness:
    """The scenario under the class, judged by all rules of the driver: at its end nothing is held."""
    subject = under_test(connector, **config)
    driver = VllmDriver(f"{subject.module}:{subject.name}", config, subject.adapter, scheduler=SCHEDULER)
    (found,) = driver.scenarios([scenario])
    harness = Harness(subject)
    try:
        harness.judge(found.run, found.protects)
    except NotObservable as reason:
        pytest.fail(f"the scenario did not come to pass: {reason}")
    assert not harness.violations, harness.violations
    return harness


def heard(call: str) -> set[int | str]:
    """What was said in calls of this name."""
    return {said for name, _, said in Leasing.heard if name == call}


@pytest.mark.parametrize("scenario", EXITS)
def test_each_exit_is_said_by_its_name(scenario: str) -> None:
    wanted = EXITS[scenario]
    play(scenario)
    assert wanted in heard("abort" if wanted.is_dropped else "postpone")
    assert all(ExternalMatchExit(str(said)).is_dropped for said in heard("abort"))
    assert not any(ExternalMatchExit(str(said)).is_dropped for said in heard("postpone"))


@contextmanager
def engine_of(
    connector: type[Leasing] = OfThePact, *, asynchronous: bool = False, **settings: Any
) -> Iterator[VllmEngine]:
    """An engine that has computed `STORED` and forgotten it; at its end all rules of the driver are judged."""
    harness = Harness(under_test(connector, asynchronous=asynchronous))
    try:
        with harness.engine(**settings) as engine:
            harness.store(engine, STORED)
            Leasing.heard.clear()
            yield engine
    except ScenarioOver:
        pass
    finally:
        harness.close()
    assert not harness.violations, harness.violations


def leases(engine: VllmEngine) -> dict[str, int]:
    found: dict[str, int] = engine.connector.leases
    return found


def held_back(engine: VllmEngine) -> Any:
    """A request with a match that was put off once: its prefill was throttled beside a running request."""
    engine.add("running", prompt(2, 4), max_tokens=80)
    engine.step(3)
    engine.add("silent", [*STORED, 1], priority=5)
    engine.step(throttle_prefills=True)
    assert Leasing.heard == [("prepare", "silent", 160), ("postpone", "silent", ExternalMatchExit.THROTTLED)]
    assert leases(engine) == {"silent": 10}
    Leasing.heard.clear()
    return engine.scheduler.requests["silent"]


def said_in_a_step(engine: VllmEngine) -> list[tuple[str, str, int | str]]:
    Leasing.heard.clear()
    engine.step()
    return [*Leasing.heard]


def test_a_spent_budget_is_said_of_a_request_that_is_not_reached() -> None:
    with engine_of(num_blocks=65, token_budget=64, by_priority=True) as engine:
        held_back(engine)
        engine.add("urgent", prompt(3, 20), priority=0)
        assert said_in_a_step(engine) == [("postpone", "silent", ExternalMatchExit.BUDGET)]


def test_a_request_that_waits_for_its_grammar_is_blocked() -> None:
    from vllm.v1.request import RequestStatus

    with engine_of() as engine:
        request = held_back(engine)
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        assert said_in_a_step(engine) == [("postpone", "silent", ExternalMatchExit.BLOCKED)]
        request.status = RequestStatus.WAITING


def test_as_many_adapters_as_may_be() -> None:
    with engine_of(adapters=1) as engine:
        request = held_back(engine)
        running = engine.scheduler.requests["running"]
        running.lora_request, request.lora_request = SimpleNamespace(lora_int_id=1), SimpleNamespace(lora_int_id=2)
        assert said_in_a_step(engine) == [("postpone", "silent", ExternalMatchExit.LORA_LIMIT)]
        running.lora_request = request.lora_request = None


def test_a_reset_drops_every_match_at_once() -> None:
    with engine_of() as engine:
        held_back(engine)
        engine.reset(running=True, connector=False)
        assert Leasing.heard == [("abort", "silent", ExternalMatchExit.RESET)]
        assert not leases(engine)


@pytest.mark.parametrize("during_step", [False, True])
def test_the_lease_of_a_cancelled_request_ends_before_another_step(during_step: bool) -> None:
    with engine_of() as engine:
        held_back(engine)
        engine.abort("silent", during_step=during_step)
        if during_step:
            engine.step(throttle_prefills=True)
        assert ("abort", "silent", ExternalMatchExit.CANCELLED) in Leasing.heard
        assert not leases(engine)
        assert "silent" not in engine.scheduler.requests


def test_a_match_that_is_not_asked_for_is_kept_for_some_steps_and_then_dropped() -> None:
    from vllm.v1.request import RequestStatus

    with engine_of() as engine:
        request = held_back(engine)
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        engine.step(POSTPONED_STEPS - 1)
        assert {*Leasing.heard} == {("postpone", "silent", ExternalMatchExit.BLOCKED)}
        assert leases(engine) == {"silent": 10}
        assert said_in_a_step(engine) == [("abort", "silent", ExternalMatchExit.NOT_RENEWED)]
        assert not leases(engine)
        request.status = RequestStatus.WAITING


def test_a_head_that_is_blocked_for_long_keeps_one_match() -> None:
    with engine_of(num_blocks=21) as engine:
        engine.add("wall", prompt(2, 10), max_tokens=60)
        engine.step()
        engine.add("blocked", [*STORED, 1])
        engine.step(POSTPONED_STEPS + 10)
        assert [call for call in Leasing.heard if call[0] == "postpone"] == [
            ("postpone", "blocked", ExternalMatchExit.NO_BLOCKS)
        ]
        assert not heard("abort") | heard("commit")
        assert leases(engine) == {"blocked": 10}


# A cache that takes back what it promised


@pytest.mark.parametrize("fewer", [1, 4, 10])
def test_less_of_an_asynchronous_load_is_honoured_in_the_same_step(fewer: int) -> None:
    Leasing.begin(lambda request_id, tokens: tokens - fewer * BLOCK)
    with engine_of(asynchronous=True) as engine:
        engine.add("less", [*STORED, 1], max_tokens=4)
        engine.step()
        request = engine.scheduler.requests["less"]
        assert request.num_computed_tokens == 160 - fewer * BLOCK
        assert engine.finish("less")
        commits = [said for call, _, said in Leasing.heard if call == "commit"]
        assert commits == [160 - fewer * BLOCK], "what was refused is not promised again"


def test_less_of_an_asynchronous_load_behind_a_local_hit() -> None:
    Leasing.begin(lambda request_id, tokens: 0 if request_id == "none" else tokens - BLOCK)
    with engine_of(asynchronous=True) as engine:
        engine.add("local", STORED[: 4 * BLOCK + 1], max_tokens=1)
        engine.finish("local")
        for name in ("none", "less"):
            engine.add(name, [*STORED, 1], max_tokens=4)
        assert engine.finish()
    # The driver has compared all tokens, all blocks that attention read, and all published ones.


def test_a_load_that_the_step_waits_for_is_confirmed_before_blocks_are_allocated() -> None:
    with engine_of() as engine:
        pool = engine.scheduler.kv_cache_manager.block_pool
        Leasing.begin(lambda request_id, tokens: tokens - 3 * BLOCK)
        free, published = pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)
        engine.add("less", [*STORED, 1], max_tokens=4)
        engine.step()
        assert Leasing.heard == [
            ("prepare", "less", 160),
            ("confirm", "less", 160),
            ("abort", "less", ExternalMatchExit.REFUSED),
        ]
        assert (pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)) == (free, published)
        assert not leases(engine)
        engine.step()
        assert Leasing.heard[3:] == [("prepare", "less", 160), ("commit", "less", 160 - 3 * BLOCK)]
        assert engine.finish()


def test_a_cache_that_confirms_nothing_costs_one_step() -> None:
    with engine_of() as engine:
        Leasing.begin(lambda request_id, tokens: 0)
        engine.add("none", [*STORED, 1], max_tokens=4)
        assert engine.finish()
        assert not heard("commit")
        assert len([call for call, _, _ in Leasing.heard if call == "confirm"]) == 1


class TooLate(OfThePact):
    """Confirms a load for which the step waits, and then accepts less of it, or raises."""

    def confirm_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int) -> int:
        return num_tokens

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        self.end_lease("commit", request, num_tokens)
        accepted = self._accepted(request, num_tokens)
        self.load(request, blocks, accepted)
        return accepted


def broken_commit(request_id: str, tokens: int) -> int:
    raise RuntimeError("broken")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "accepts", [lambda request_id, tokens: 0, lambda request_id, tokens: tokens - 3 * BLOCK, broken_commit]
)
def test_p14_a_refusal_that_comes_too_late_costs_the_step_of_those_who_share_the_blocks(
    accepts: Callable[[str, int], int], overlap: bool
) -> None:
    """vLLM has published the blocks, and another request of the step has them: both got wrong tokens."""
    settings = EngineSettings(scheduler=SCHEDULER, overlap=overlap)
    engine = VllmEngine(settings, named(TooLate), lambda line: None)
    engine.add("first", [*STORED, 1], max_tokens=1)
    engine.finish()
    engine.drain()
    engine.forget_computed()
    Leasing.begin(accepts)
    for number, name in enumerate(("late", "shares"), 1):
        engine.add(name, [*STORED, number], max_tokens=6)
    assert engine.finish()
    assert ("commit", "late", 160) in Leasing.heard
    for name in ("late", "shares"):
        assert engine.observed.outputs[name] == engine.expected(name)
    assert not engine.wrong_published()
    assert not leases(engine)
    engine.close()


def at_most(left: int) -> Callable[[str, int], int]:
    return lambda request_id, tokens: min(left, tokens)


def test_a_refusal_under_pressure_and_an_abort_in_that_very_step() -> None:
    """The head is refused, a running request is preempted or blocked, and the head is cancelled while the step runs."""
    for tokens_left in (0, 2 * BLOCK, 9 * BLOCK):
        with engine_of(num_blocks=24) as engine:
            engine.add("wall", prompt(2, 9), max_tokens=40)
            engine.step()
            Leasing.begin(at_most(tokens_left))
            engine.add("refused", [*STORED, 1], max_tokens=4)
            engine.add("next", prompt(5, 2), max_tokens=20)
            engine.abort("refused", during_step=True)
            engine.step()
            assert not leases(engine)
            assert engine.finish()


# The smaller forms of the pact


@pytest.mark.parametrize(
    "scenario", ["h01_lookups_that_are_not_committed", "cancelled_while_blocked", "overtaken_by_priority"]
)
@pytest.mark.parametrize("form", [WithADocumentedContract, WithAnAbort, WithAQueryResult])
def test_each_form_of_the_pact_ends_every_lease(form: type[Leasing], scenario: str) -> None:
    play(scenario, form)
    assert heard("prepare")
    assert heard("commit") | heard("abort")


def test_the_tuple_api_alone_leaks_as_before() -> None:
    with pytest.raises(AssertionError, match="leases are held for a request that is gone"):
        play("cancelled_while_blocked", OfTheTupleApi)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_query_result_comes_back_at_the_commit(asynchronous: bool) -> None:
    with engine_of(WithAQueryResult, asynchronous=asynchronous) as engine:
        engine.add("again", [*STORED, 1])
        assert engine.finish()
        assert ("commit", "again", 160) in Leasing.heard


# The class itself


def test_an_engine_without_a_connector_has_no_matches_and_begins_nothing_again() -> None:
    pool = SimpleNamespace(null_block=SimpleNamespace(block_id=0))
    manager = SimpleNamespace(empty_kv_cache_blocks=(), block_pool=pool)
    scheduler = SimpleNamespace(connector=None, kv_cache_manager=manager, requests={})
    assert not EngineExits(scheduler).trackers
    assert Restarts(scheduler).begin_again([1]) == set()


def test_a_connector_without_the_pact_sees_nothing_new() -> None:
    subject = ConnectorUnderTest("kvpact_testkit.vllm.simple_connector", "SimpleConnector", scheduler=SCHEDULER)
    harness = Harness(subject)
    with harness.engine() as engine:
        assert not engine.scheduler.exits.trackers
        assert "allocate_slots" not in vars(engine.scheduler.kv_cache_manager)
        harness.store(engine, STORED)
        harness.load(engine, "again", [*STORED, 1])
    harness.close()
    assert not harness.violations


@pytest.mark.parametrize("overlap", [False, True])
def test_the_factory_takes_the_class_for_the_engines_scheduling(overlap: bool) -> None:
    from kvpact.vllm.scheduler import KvpactAsyncScheduler, KvpactScheduler

    with engine_of(overlap=overlap) as engine:
        assert type(engine.scheduler) is (KvpactAsyncScheduler if overlap else KvpactScheduler)
        engine.add("again", [*STORED, 1])
        assert engine.finish()
        assert heard("commit") == {160}


def test_an_abort_that_raises_costs_the_engine_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of() as engine:
        held_back(engine)
        engine.connector.end_lease = Mock(side_effect=RuntimeError("broken"))
        engine.abort("silent")
        engine.connector.leases.clear()
        del engine.connector.end_lease
        assert "abort of OfThePact failed" in caplog.text
