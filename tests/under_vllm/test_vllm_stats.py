"""kvpact's counts reach vLLM's log line and Prometheus endpoint, each once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.cache.status import EngineStatus, status_of
from kvpact.metrics import MOST_SAMPLES, STEP_SECONDS, Metrics, MissReason
from kvpact.vllm.stats import INTERVAL_SECONDS, PATIENCE_SECONDS, PactPromMetrics, PactStats, StatsCollector
from servers.redis_server import free_ports
from vllm_played_engine import BLOCK, PlayedEngine, make_prompt


def heard_by_the_page(engine: PlayedEngine) -> PactStats:
    """What vLLM hands over to its metrics page from now on."""
    shown, update = PactStats(), engine.scheduler.update_from_output

    def update_and_listen(scheduled: Any, output: Any) -> Any:
        results = update(scheduled, output)
        for outputs in results.values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                shown.aggregate(PactStats(data=outputs.scheduler_stats.kv_connector_stats))
        return results

    engine.scheduler.update_from_output = update_and_listen
    return shown


def on_the_socket(engine: PlayedEngine) -> EngineStatus:
    """What the engine says of itself to `kvpact status`."""
    mounted = engine.connector.scheduler_side.mounted
    assert mounted is not None
    return status_of(mounted.own, engine.connector.metrics, "m", BLOCK)


def healths(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The tiers' health, by series."""
    return {name: value for name, value in metrics.items() if name.startswith("tier_up")}


def test_counts_are_handed_over_once_and_at_most_once_an_interval() -> None:
    metrics, now = Metrics(), [0.0]
    collector = StatsCollector(metrics.snapshot, lambda: now[0])
    metrics.add("lookups", 3)
    metrics.set("leases_held", 2)
    metrics.observe(STEP_SECONDS, 0.002)
    assert collector.collect() is None  # one step looks, the next one takes the difference
    first = collector.collect()
    assert first is not None
    assert first.data["lookups"] == 3
    assert (first.data["steps"], first.data["slow_steps"]) == (1, 1)
    metrics.add("lookups", 2)
    assert collector.collect() is None
    now[0] += INTERVAL_SECONDS
    assert collector.collect() is None
    metrics.add("lookups", 4)
    second = collector.collect()
    assert second is not None
    assert second.data == {"lookups": 2}
    both = PactStats(data=dict(first.data)).aggregate(second)
    assert (both.data["lookups"], both.data["leases_held"]) == (5, 2)
    assert both.reduce()["kvpact lookups"] == 5
    times = PactStats(data={"load_seconds": [0.1]}).aggregate(PactStats(data={"load_seconds": [0.2] * 40}))
    assert times.data["load_seconds"] == [0.2] * MOST_SAMPLES


def test_steps_that_are_late_leave_the_counts_to_others_for_a_while() -> None:
    metrics, now = Metrics(), [10.0]
    collector = StatsCollector(metrics.snapshot, lambda: now[0])

    def can_wait() -> bool:
        return collector.can_wait

    collector.collect()
    collector.collect()
    metrics.add("lookups", 3)
    now[0] += INTERVAL_SECONDS
    assert can_wait()
    assert collector.collect() is None
    metrics.add("lookups", 1)
    assert can_wait()
    now[0] += PATIENCE_SECONDS
    assert not can_wait()
    stats = collector.collect()  # there was no step with time, so a late one does it
    assert stats is not None
    assert stats.data == {"lookups": 3}


def test_h115_before_the_engine_rests_all_counts_are_handed_over_in_one_more_step() -> None:
    metrics, now = Metrics(), [10.0]
    collector = StatsCollector(metrics.snapshot, lambda: now[0])

    def wants_step() -> bool:
        return collector.ask_for_step()

    assert not wants_step(), "there was no step"
    collector.collect()
    collector.collect()
    metrics.add("lookups", 7)
    assert collector.collect() is None, "the interval is not over"
    assert wants_step()
    assert wants_step(), "vLLM asks more than once before it steps"
    stats = collector.collect()
    assert stats is not None
    assert stats.data["lookups"] == 7
    assert not wants_step(), "the engine rests"
    collector.collect()
    assert wants_step()
    now[0] += PATIENCE_SECONDS
    assert not wants_step(), "nobody collects: the engine is not kept stepping"
    metrics.add("lookups", 1)
    now[0] += INTERVAL_SECONDS
    last = collector.collect()
    assert last is not None
    assert last.data["lookups"] == 1


def test_h128_of_a_tier_that_was_not_asked_nothing_is_claimed_and_of_one_that_is_away_that_it_is(
    tmp_path: Path,
) -> None:
    """An idle engine tells its page once, before its first request; its socket says the same."""
    (away,) = free_ports(1)
    near = f"disk://{tmp_path}/near?capacity=64MiB"
    (tmp_path / "near").mkdir()
    never = "az://container/x"
    engine = PlayedEngine(tmp_path, tiers=[near, f"redis://127.0.0.1:{away}", never])
    told = heard_by_the_page(engine)
    engine.run()
    assert not engine.scheduler.has_requests()
    known = {'tier_up{tier="memory"}': 1, 'tier_up{tier="redis"}': 0, 'tier_up{tier="object"}': 0}
    assert healths(told.data) == healths(on_the_socket(engine).metrics) == known
    troubles = {tier.name: bool(tier.trouble) for tier in on_the_socket(engine).tiers}
    assert troubles == {"disk": False, "redis": True, "object": True}
    engine.generate(make_prompt(0, 3))
    assert healths(told.data) == healths(on_the_socket(engine).metrics)
    assert healths(told.data)['tier_up{tier="disk"}'] == 1
    engine.close()


def test_h115_after_a_burst_an_idle_engines_metrics_show_all_of_it(tmp_path: Path) -> None:
    """The burst takes a part of the second for which vLLM gets counts once; then there is no step until a request."""
    engine = PlayedEngine(tmp_path)
    shown = heard_by_the_page(engine)
    for number in range(8):
        engine.generate(make_prompt(number, 3))
        assert shown.data["lookups"] == engine.counts["lookups"] == number + 1
        assert shown.data["saved_blocks"] == engine.counts["saved_blocks"]
        assert not engine.scheduler.has_requests()
    engine.step()  # for a reason of the engine's own
    assert engine.scheduler.has_requests()
    engine.step()
    assert not engine.scheduler.has_requests(), "one more step, and no second one"
    engine.assert_at_rest()
    engine.close()


def test_every_count_has_a_series_on_the_endpoint() -> None:
    registry = CollectorRegistry()
    modes = set()

    def on(kind: type) -> object:
        def made(**arguments: Any) -> object:
            modes.add((kind, arguments.get("multiprocess_mode")))
            return kind(registry=registry, **arguments)

        return made

    types = {kind: on(kind) for kind in (Counter, Gauge, Histogram)}
    tiers = ["redis://one", "redis://two?name=rack", "disk:///x?capacity=1GiB"]
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"tiers": tiers}))
    prom = PactPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    metrics = Metrics()
    metrics.add("misses", 4, MissReason.NO_ROOM)
    metrics.add("used_tokens", 128)
    metrics.set("leases_held", 1)
    metrics.use_tiers(["redis", "rack", "disk"])
    metrics.observe("lookup_seconds", 0.003, "rack")
    metrics.observe("lookup_seconds", 0.2, "rack")
    metrics.set_info("tier_info", "rack", "redis://***@two")
    now = count(step=INTERVAL_SECONDS)
    collector = StatsCollector(metrics.snapshot, lambda: next(now), metrics.collect_samples)
    assert collector.collect() is None
    stats = collector.collect()
    assert stats is not None
    prom.observe({**stats.data, "of_another_release": 3, 'misses{reason="no_room"}': 4})
    page = generate_latest(registry).decode()
    assert 'vllm:kvpact_misses_total{engine="0",model_name="m",reason="no_room"} 4.0' in page
    assert 'vllm:kvpact_used_tokens_total{engine="0",model_name="m"} 128.0' in page
    assert 'vllm:kvpact_leases_held{engine="0",model_name="m"} 1.0' in page
    assert "vllm:kvpact_tier_up{" not in page, "before anything is known of a tier"
    metrics.set("tier_up", 0, "disk")
    collector.collect()
    known = collector.collect()
    assert known is not None
    prom.observe(known.data)
    page = generate_latest(registry).decode()
    assert 'vllm:kvpact_tier_up{engine="0",model_name="m",tier="disk"} 0.0' in page, "the first value, though it is 0"
    assert page.count("vllm:kvpact_tier_up{") == 1
    assert 'vllm:kvpact_tier_info{engine="0",model_name="m",tier="rack",url="redis://***@two"} 1.0' in page
    assert 'vllm:kvpact_lookup_seconds_bucket{engine="0",le="0.005",model_name="m",tier="rack"} 1.0' in page
    assert 'vllm:kvpact_lookup_seconds_count{engine="0",model_name="m",tier="rack"} 2.0' in page
    assert 'vllm:kvpact_lookup_seconds_count{engine="0",model_name="m",tier="redis"} 0.0' in page
    assert "another_release" not in page
    assert modes == {(Counter, None), (Gauge, "mostrecent"), (Histogram, None)}, (
        "or each of several API servers shows a gauge of its own"
    )
