"""The rules of `before_update_states`: who may be served, how ranks agree, and that the scheduler's output stays as it
is. On vLLM's own classes of output, with stubs for workers and model runners that this machine does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from hypothesis import given
from hypothesis import strategies as st
from vllm.config import SchedulerConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvpact.errors import ConfigError, PactViolation
from kvpact.vllm import worker as worker_module
from kvpact.vllm.scheduler import KvpactAsyncScheduler, KvpactScheduler, counts_step_hits
from kvpact.vllm.step_hook import Candidates, StepHook, apply_external_hits, hook_of, split_report
from kvpact.vllm.worker import KvpactWorker, base_worker, bind_step_hook, is_second_runner
from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release
from kvpact_testkit.vllm.simple_connector import Saved


def new(name: str, start: int = 0, **changes: Any) -> NewRequestData:
    """A request that the worker does not know yet."""
    fields = {
        "prompt_token_ids": [1] * 4096,
        "mm_features": [],
        "sampling_params": SamplingParams(),
        "pooling_params": None,
        "block_ids": ([3, 4],),
        "lora_request": None,
        **changes,
    }
    return NewRequestData(req_id=name, num_computed_tokens=start, **fields)


def step(
    news: list[NewRequestData], counts: dict[str, int], running: Mapping[str, int] | None = None, **changes: Any
) -> SchedulerOutput:
    """A step of the scheduler; `running` says how many tokens the requests that run already have."""
    running = running or {}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = news
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(running),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(running),
        num_computed_tokens=list(running.values()),
        num_output_tokens=[0] * len(running),
    )
    output.num_scheduled_tokens = counts
    output.total_num_scheduled_tokens = sum(counts.values())
    for field, value in changes.items():
        setattr(output, field, value)
    return output


class Fixed:
    """A connector that supplies a fixed mapping."""

    def __init__(self, hits: Any) -> None:
        self.hits = hits
        self.asked: list[Any] = []
        self.applied: list[Mapping[str, int]] = []

    def before_update_states(self, scheduler_output: Any) -> Mapping[str, int]:
        self.asked.append(scheduler_output)
        if isinstance(self.hits, Exception):
            raise self.hits
        hits: Mapping[str, int] = self.hits
        return hits

    def external_hits_applied(self, hits: Mapping[str, int]) -> None:
        self.applied.append(hits)


def hook(hits: Any, **settings: Any) -> tuple[StepHook, Fixed]:
    """A hook over a fixed mapping."""
    connector = Fixed(hits)
    return StepHook(connector, **{"new_requests_only": False, "minimum": None, **settings}), connector


class Several:
    """A MultiConnector, as far as the hook sees it."""

    def __init__(self, *connectors: object) -> None:
        self._connectors = list(connectors)


def inside(*metadata: object) -> Any:
    """What a scheduler's half sends to the connectors inside a MultiConnector."""
    return MultiKVConnectorMetadata(metadata=cast(Any, metadata))


# The scheduler's output

numbers = st.integers(0, 400)


@given(st.lists(st.tuples(numbers, st.integers(1, 300), st.booleans(), numbers), max_size=6))
def test_h90_the_scheduled_tokens_are_moved_and_none_is_lost(requests: list[tuple[int, int, bool, int]]) -> None:
    names = [str(number) for number in range(len(requests))]
    starts = {name: start for name, (start, *_) in zip(names, requests, strict=True)}
    counts = {name: count for name, (_, count, *_) in zip(names, requests, strict=True)}
    fresh = [name for name, (_, _, is_new, _) in zip(names, requests, strict=True) if is_new]
    output = step(
        [new(name, starts[name]) for name in fresh], counts, {name: starts[name] for name in names if name not in fresh}
    )
    before = deepcopy(output)
    applier, connector = hook({name: hit for name, (*_, hit) in zip(names, requests, strict=True)})
    changed = applier.apply(output)
    assert output == before, "the scheduler's own object was edited"
    (applied,) = connector.applied
    expected = {name: min(hit, counts[name] - 1) for name, (*_, hit) in zip(names, requests, strict=True)}
    assert applied == {name: hit for name, hit in expected.items() if hit}
    assert (changed is output) == (not applied)
    after = {new.req_id: new.num_computed_tokens for new in changed.scheduled_new_reqs}
    cached = changed.scheduled_cached_reqs
    after |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for name in names:
        assert after[name] == starts[name] + expected[name]
        assert changed.num_scheduled_tokens[name] >= 1
        assert after[name] + changed.num_scheduled_tokens[name] == starts[name] + counts[name]
    assert changed.total_num_scheduled_tokens == sum(changed.num_scheduled_tokens.values())
    assert changed.has_sync_kv_loads == bool(applied)
    assert list(changed.num_scheduled_tokens) == names, "the order of requests is part of the step"


def test_an_early_pipeline_stage_takes_no_prompt_token_for_a_sampled_one() -> None:
    """It gets the step's tokens by value, and takes those beyond what it knows for new: 64 + 36 of 100 are none."""
    output = step([], {"r": 36, "other": 1}, {"r": 64, "other": 7})
    output.scheduled_cached_reqs.new_token_ids = [list(range(64, 100)), [5]]
    cached = apply_external_hits(output, {"r": 35}).scheduled_cached_reqs
    assert cached.num_computed_tokens == [99, 7]
    assert cached.new_token_ids == [[99], [5]]
    assert output.scheduled_cached_reqs.new_token_ids[0] == list(range(64, 100)), "the scheduler's own is as it was"


@pytest.mark.parametrize("hits", [{"nobody": 3}, {"r": -1}, {"r": 40}, {"r": 0}])
def test_hits_that_cannot_be_are_an_error(hits: dict[str, int]) -> None:
    with pytest.raises(PactViolation, match="to be skipped"):
        apply_external_hits(step([new("r")], {"r": 40}), hits)


def test_by_default_nothing_changes() -> None:
    output = step([new("r")], {"r": 40})
    before = deepcopy(output)
    assert apply_external_hits(output, {}) is output
    for hits in ({}, {"r": 0}, {"somebody else": 12}):
        applier, connector = hook(hits)
        assert applier.apply(output) is output
        assert connector.applied == [{}]
    assert output == before


@pytest.mark.parametrize("hits", [RuntimeError("injected"), None, {"r": "many"}, {"r": None}, ["r"]])
def test_h13_what_the_connector_gets_wrong_costs_its_hits(hits: Any) -> None:
    output = step([new("r")], {"r": 40})
    applier, connector = hook(hits)
    assert applier.apply(output) is output
    assert applier.apply(output) is output
    assert len(connector.asked) == 2, "it may be right again the next time"


def test_h92_the_connector_is_asked_in_every_step() -> None:
    applier, connector = hook({})
    for output in (step([], {}), step([new("r")], {"r": 9}), step([], {"r": 1}, {"r": 9})):
        applier.apply(output)
    assert len(connector.asked) == 3


# What the scheduler's process hears


class Reporting(Fixed):
    """A connector with a report of its own."""

    def __init__(self, hits: Any, report: Any) -> None:
        super().__init__(hits)
        self.report = report

    def build_connector_worker_meta(self) -> Any:
        return self.report


def output_of(*reports: Any) -> Any:
    """A step's output with these ranks' reports, each from a process of its own, as vLLM's executors combine them."""
    outputs = [ModelRunnerOutput([], {}, kv_connector_output=words(deepcopy(report))) for report in reports]
    return KVOutputAggregator(len(reports)).aggregate(outputs)


def words(report: Any) -> KVConnectorOutput:
    return KVConnectorOutput(kv_connector_worker_meta=report)


def several(*reports: Any) -> MultiKVConnectorWorkerMetadata:
    """The reports of the connectors in a MultiConnector."""
    return MultiKVConnectorWorkerMetadata(metadata=reports)


REPORTS: dict[str, tuple[list[Any], Any]] = {
    "each rank": ([Saved({b"a": 1}), Saved({b"a": 1, b"b": 1})], Saved({b"a": 2, b"b": 1})),
    "none": ([None, None], None),
    "the first rank": ([Saved({b"a": 1}), None], Saved({b"a": 1})),
    "the second rank": ([None, Saved({b"a": 1})], Saved({b"a": 1})),
    "several connectors": ([several(None, Saved({b"a": 1}))] * 2, several(None, Saved({b"a": 2}))),
}
"""Who reports something of its own, what, and what vLLM makes of it."""


@pytest.mark.parametrize("reports", REPORTS)
@pytest.mark.parametrize("hits", [{"r": 7}, {}], ids=["hits", "no hits"])
def test_h40_what_steps_skip_travels_with_the_ranks_reports_and_leaves_them_as_they_were(
    reports: str, hits: dict[str, int]
) -> None:
    theirs, together = REPORTS[reports]
    connectors = [Reporting(hits, report) for report in theirs]
    for connector in connectors:
        applier = StepHook(connector, new_requests_only=False, minimum=None)
        applier.report_hits()
        applier.apply(step([new("r")], {"r": 40}))
    output = output_of(*(connector.build_connector_worker_meta() for connector in connectors))
    assert split_report(output) == hits
    assert output.kv_connector_output.kv_connector_worker_meta == together
    assert split_report(output) == {}, "hits are counted once"
    assert [connector.build_connector_worker_meta() for connector in connectors] == theirs, "of this step alone"


@pytest.mark.parametrize("output", [None, words(None), words(Saved({}))], ids=["silent", "none", "another report"])
def test_outputs_without_hits_are_left_alone(output: KVConnectorOutput | None) -> None:
    both = ModelRunnerOutput([], {}, kv_connector_output=output)
    report = output.kv_connector_worker_meta if output else None
    assert split_report(both) == {}
    assert both.kv_connector_output is output
    assert not output or output.kv_connector_worker_meta is report


class OfAUser(KvpactScheduler):
    """A user's own class over kvpact's."""


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("named", "counts"),
    [
        (None, False),
        (Scheduler, False),
        ("vllm.v1.core.sched.scheduler.Scheduler", False),
        ("kvpact.vllm.scheduler.pact_scheduler", True),
        ("kvpact.vllm.scheduler.KvpactScheduler", True),
        (KvpactAsyncScheduler, True),
        (OfAUser, True),
        (f"{__name__}.new", False),
    ],
)
def test_h92_hits_are_sent_where_the_engines_scheduler_counts_them(named: Any, counts: bool) -> None:
    """Another scheduler would hand the two in one to the connector, which does not know it."""
    worker, connector = engine_worker(), Reporting({"r": 7}, None)
    worker.vllm_config.scheduler_config = SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, scheduler_cls=named, async_scheduling=False
    )
    bound = bind_step_hook(worker, connector, ATTENTION)
    assert bound is not None
    bound.apply(step([new("r")], {"r": 40}))
    assert (connector.build_connector_worker_meta() is not None) == counts


def test_diffusion_models_have_vllms_own_scheduler_which_counts_nothing() -> None:
    named = "kvpact.vllm.scheduler.pact_scheduler"
    scheduling = SchedulerConfig(max_model_len=64, is_encoder_decoder=False, scheduler_cls=named)
    assert counts_step_hits(SimpleNamespace(scheduler_config=scheduling))
    assert not counts_step_hits(SimpleNamespace(scheduler_config=scheduling, diffusion_config=object()))


# Connectors inside MultiConnector

some_hits = st.dictionaries(st.sampled_from("rst"), st.integers(-1, 50), max_size=3)


@given(st.lists(st.one_of(st.none(), some_hits), min_size=1, max_size=4), st.integers(1, 50))
def test_inside_multi_connector_the_first_that_has_tokens_supplies_them(
    found: list[dict[str, int] | None], other_rank: int
) -> None:
    """None stands for a connector without the hook. On the other rank each request has a fixed number."""
    connectors = [object() if hits is None else Fixed(hits) for hits in found]
    hooked = [one for one in connectors if isinstance(one, Fixed)]
    if not hooked:
        assert hook_of(Several(*connectors)) is None
        return
    asks = StepHook(
        Several(*connectors),
        new_requests_only=False,
        minimum=lambda mine: [min(number, other_rank) for number in mine],
    )
    output = step([new(name) for name in "rst"], dict.fromkeys("rst", 40), kv_connector_metadata=inside(*range(4)))
    left = asks.apply(output)
    for name in "rst":
        having = [one for one in hooked if one.hits.get(name, 0) > 0]
        skipped = min(having[0].hits[name], other_rank, 39) if having else 0
        assert left.num_scheduled_tokens[name] == 40 - skipped
        for one in hooked:
            assert one.applied[-1].get(name, 0) == (skipped if [one] == having[:1] else 0)
    assert [one.asked[0].kv_connector_metadata for one in hooked] == [
        number for number, one in enumerate(connectors) if isinstance(one, Fixed)
    ], "each is asked once, with metadata of its own"


def test_h13_inside_multi_connector_a_hook_that_fails_costs_its_own_hits(caplog: pytest.LogCaptureFixture) -> None:
    fails, serves = Fixed(RuntimeError("injected")), Fixed({"r": 7})
    asks = StepHook(Several(fails, serves), new_requests_only=False, minimum=None)
    output = step([new("r")], {"r": 40}, kv_connector_metadata=inside(None, None))
    assert [asks.apply(output).num_scheduled_tokens["r"] for _ in range(2)] == [33, 33]
    assert (fails.applied, serves.applied) == ([{}] * 2, [{"r": 7}] * 2)
    assert caplog.text.count("before_update_states failed") == 1


def test_inside_a_multi_connector_that_is_inside_another_each_is_asked_with_its_metadata() -> None:
    first, second = Fixed({"r": 3}), Fixed({"s": 4})
    both = Several(object(), Several(first, second))
    asks = StepHook(both, new_requests_only=False, minimum=None)
    output = step([new("r"), new("s")], {"r": 9, "s": 9}, kv_connector_metadata=inside("none", inside("1", "2")))
    assert asks.apply(output).num_scheduled_tokens == {"r": 6, "s": 5}
    assert [one.asked[0].kv_connector_metadata for one in (first, second)] == ["1", "2"]
    assert (first.applied, second.applied) == ([{"r": 3}], [{"s": 4}])


def test_inside_multi_connector_ranks_agree_by_themselves_only_where_all_do() -> None:
    agrees, asks = Fixed({}), Fixed({})
    agrees.hits_agree_over_ranks = True  # type: ignore[attr-defined]
    for connectors, collectives in (((agrees,), 0), ((agrees, asks), 1)):
        minimum = Mock(side_effect=list)
        several = StepHook(Several(*connectors), new_requests_only=False, minimum=minimum)
        several.apply(step([new("r")], {"r": 40}, kv_connector_metadata=inside(None, None)))
        assert minimum.call_count == collectives


# Who may be served


def test_requests_that_need_every_token_are_left_out_until_they_end() -> None:
    candidates = Candidates(new_requests_only=False)
    kinds: dict[str, Any] = {
        "media": {"mm_features": [object()]},
        "embeddings": {"prompt_embeds": object()},
        "prompt log-probabilities": {"sampling_params": SamplingParams(prompt_logprobs=1)},
        "no cache to be read": {"sampling_params": SamplingParams(skip_reading_prefix_cache=True)},
        "pooling": {"pooling_params": PoolingParams(), "sampling_params": None},
    }
    counts = dict.fromkeys([*kinds, "plain"], 9)
    news = [new(name, **changes) for name, changes in kinds.items()]
    assert candidates.of_step(step([*news, new("plain")], counts)) == {"plain": 8}
    assert candidates.of_step(step([], counts, dict.fromkeys(counts, 9))) == {"plain": 8}
    ended = step([new("media")], {"media": 9}, finished_req_ids=set(counts))
    assert candidates.of_step(ended) == {"media": 8}, "a later request of the same name is another one"


def test_requests_with_speculative_tokens_or_an_encoder_to_run_are_left_out_of_the_step() -> None:
    candidates = Candidates(new_requests_only=False)
    output = step([new("a"), new("b"), new("c")], {"a": 9, "b": 9, "c": 1})
    output.scheduled_spec_decode_tokens = {"a": [1, 2]}
    assert candidates.of_step(output) == {"b": 8}
    output.scheduled_spec_decode_tokens, output.scheduled_encoder_inputs = {}, {"b": [0]}
    assert candidates.of_step(output) == {"a": 8}


def test_h92_the_second_runner_is_given_new_and_resumed_requests_only() -> None:
    output = step([new("fresh")], {"fresh": 9, "running": 9}, {"running": 16})
    first, _ = hook({"fresh": 5, "running": 5})
    assert first.apply(output).num_scheduled_tokens == {"fresh": 4, "running": 4}
    second, connector = hook({"fresh": 5, "running": 5}, new_requests_only=True)
    assert second.apply(output).num_scheduled_tokens == {"fresh": 4, "running": 9}
    assert connector.applied == [{"fresh": 5}]


# Ranks


def test_h43_every_rank_takes_part_in_the_minimum_whatever_its_connector_does() -> None:
    output = step([new("a"), new("b")], {"a": 40, "b": 40})
    sent: list[list[int]] = []

    def minimum(numbers: Any) -> Any:
        sent.append(list(numbers))
        return [min(number, 7) for number in numbers]

    for hits, expected in (({"b": 30}, [0, 30]), (RuntimeError("injected"), [0, 0]), ({}, [0, 0])):
        applier, connector = hook(hits, minimum=minimum)
        applier.apply(output)
        assert sent.pop() == expected
        assert connector.applied == [{"b": 7} if any(expected) else {}]
    applier, _ = hook({"a": 3}, minimum=minimum)
    applier.apply(step([], {"a": 1}, {"a": 9}))
    assert sent == [], "a step in which nothing can be skipped needs no collective"


def test_no_collective_where_ranks_always_agree() -> None:
    connector = Fixed({"a": 3})
    connector.hits_agree_over_ranks = True  # type: ignore[attr-defined]
    applier = StepHook(connector, new_requests_only=False, minimum=lambda numbers: pytest.fail("a collective"))
    assert applier.apply(step([new("a")], {"a": 9})).num_scheduled_tokens == {"a": 6}


# The worker


def runner(module: str, name: str = "GPUModelRunner") -> Any:
    """A model runner that derives from a class of this name."""
    return type("CPUModelRunner", (type(name, (), {"__module__": module}),), {})()


FIRST, SECOND = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
ATTENTION = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace())])


def engine_worker(module: str = FIRST, **parallel: int) -> Any:
    """As much of a worker as the hook asks of it."""
    scheduling = SimpleNamespace(get_scheduler_cls=lambda: Scheduler)
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel), scheduler_config=scheduling)
    return SimpleNamespace(model_runner=runner(module), vllm_config=config)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without the process groups of an engine."""
    monkeypatch.setattr(worker_module, "_rank_groups", list)


@pytest.mark.usefixtures("alone")
def test_h92_the_runner_is_recognised_by_what_it_is() -> None:
    assert not is_second_runner(runner(FIRST))
    assert is_second_runner(runner(SECOND))
    output = step([], {"r": 9}, {"r": 16})
    for module, computed in ((FIRST, 4), (SECOND, 9)):
        bound = bind_step_hook(engine_worker(module), Fixed({"r": 5}), ATTENTION)
        assert bound is not None
        assert bound.apply(output).num_scheduled_tokens == {"r": computed}


def test_h92_vllms_own_runners_have_the_names_that_are_looked_for() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    assert not is_second_runner(CPUModelRunner.__new__(CPUModelRunner))
    source = Path(sys.modules["vllm"].__file__ or "").parent
    assert "class GPUModelRunner(" in (source / "v1/worker/gpu/model_runner.py").read_text()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("worker", "groups", "message"),
    [
        (
            engine_worker("somebody.runner"),
            ATTENTION,
            r"does not know the model runner .*; it knows .*leave worker_cls",
        ),
        (engine_worker(decode_context_parallel_size=2), ATTENTION, "decode_context_parallel_size=2"),
        (
            engine_worker(),
            SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=type("MambaSpec", (), {})())]),
            "recurrent state",
        ),
    ],
)
def test_engines_that_the_hook_is_not_known_to_be_right_on_are_refused(worker: Any, groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind_step_hook(worker, Fixed({}), groups)
    assert bind_step_hook(worker, object(), groups) is None, "without the hook nothing is asked of the engine"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("release", ["0.29.0", "0.34.0", "1.0.0", "0.3.2", "0.330.1"])
def test_unknown_releases_are_refused(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr("vllm.__version__", release)
    with pytest.raises(ConfigError, match=rf"not known to be right on vLLM {release}, only on 0\.30"):
        bind_step_hook(engine_worker(), Fixed({}), ATTENTION)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("release", ["0.30.0", "0.32.0+cpu", "0.33.1"])
def test_known_releases_are_served(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr("vllm.__version__", release)
    assert bind_step_hook(engine_worker(), Fixed({}), ATTENTION) is not None


def test_each_platform_has_its_own_base_worker() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert base_worker(current_platform) is CPUWorker
    assert issubclass(KvpactWorker, CPUWorker)
    kinds = dict.fromkeys(["is_cpu", "is_cuda", "is_rocm", "is_xpu"], lambda: False)
    cuda = base_worker(SimpleNamespace(**{**kinds, "is_cuda": lambda: True}))
    assert (cuda.__module__, cuda.__name__) == ("vllm.v1.worker.gpu_worker", "Worker")
    with pytest.raises(ConfigError, match=r"no worker for the platform 'npu'.*cpu, cuda"):
        base_worker(SimpleNamespace(device_name="npu", **kinds))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("connector", [None, object(), Fixed({}), Fixed({"r": 5})], ids=["none", "old", "idle", "hits"])
def test_h91_the_worker_returns_what_its_base_returns_and_is_its_base_where_nothing_is_supplied(
    monkeypatch: pytest.MonkeyPatch, connector: Any
) -> None:
    base = KvpactWorker.__bases__[0]
    executed, answer = [], object()

    def execute_model(self: Any, scheduler_output: Any) -> object:
        executed.append(scheduler_output)
        return answer

    monkeypatch.setattr(base, "execute_model", execute_model)
    monkeypatch.setattr(base, "initialize_from_config", lambda self, kv_cache_config: answer)
    monkeypatch.setattr(worker_module, "_connector", lambda: connector)
    worker = KvpactWorker.__new__(KvpactWorker)
    worker.__dict__.update(vars(engine_worker()))
    assert worker.initialize_from_config(ATTENTION) is answer
    assert (worker.step_hook is not None) == isinstance(connector, Fixed)
    output = step([new("r")], {"r": 40})
    before = deepcopy(output)
    assert worker.execute_model(output) is answer
    if isinstance(connector, Fixed) and connector.hits:
        assert executed[0].num_scheduled_tokens == {"r": 35}
    else:
        assert executed[0] is output
    assert output == before


# Releases

CHECK = """
import dataclasses, sys
from types import SimpleNamespace
import vllm.v1.core.sched.output as out
from kvpact.vllm.step_hook import StepHook
fields = {f.name: None for f in dataclasses.fields(out.NewRequestData)}
new = out.NewRequestData(**{**fields, "req_id": "r", "num_computed_tokens": 16, "block_ids": ([1],), "mm_features": []})
output = out.SchedulerOutput.make_empty()
output.scheduled_new_reqs, output.num_scheduled_tokens, output.total_num_scheduled_tokens = [new], {"r": 9}, 9
connector = SimpleNamespace(before_update_states=lambda output: {"r": 5})
changed = StepHook(connector, new_requests_only=True, minimum=None).apply(output)
assert changed.scheduled_new_reqs[0].num_computed_tokens == 21, changed
assert (changed.num_scheduled_tokens, changed.total_num_scheduled_tokens) == ({"r": 4}, 4)
assert changed.has_sync_kv_loads
assert (new.num_computed_tokens, output.num_scheduled_tokens) == (16, {"r": 9})
"""


@pytest.mark.soak
@pytest.mark.parametrize("release", [release for release in RELEASES if release != installed_release()])
def test_the_step_of_each_release_is_copied_right(release: str, tmp_path: Path) -> None:
    folder = fetch_release(release)
    path = os.pathsep.join([str(folder), str(Path(worker_module.__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_CACHE_ROOT": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for runner_file, needed in (
        ("v1/worker/gpu/model_runner.py", "num_computed_tokens=new_req_data.num_computed_tokens"),
        ("v1/worker/gpu_model_runner.py", "req_state.num_computed_tokens = num_computed_tokens"),
    ):
        assert needed in (folder / "vllm" / runner_file).read_text()
