"""The counts: a fixed set of series, that only grow, and that explain why nothing hits."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpact
from kvpact.cache.ledger import Ledger
from kvpact.contract import ExternalMatchExit
from kvpact.errors import PactViolation
from kvpact.metrics import (
    MEMORY,
    METRICS,
    MISS_HINTS,
    MOST_SAMPLES,
    STEP_BOUNDS,
    STEP_SECONDS,
    EndReason,
    Metrics,
    MissReason,
    explain_misses,
    lost_blocks,
    series,
    tiers_in,
)


def test_a_snapshot_holds_plain_numbers_under_documented_names() -> None:
    metrics = Metrics()
    metrics.use_tiers(["disk"])
    metrics.add("promised_tokens", 160)
    metrics.add("read_bytes", 4096, "disk")
    metrics.set("leases_held", 3)
    shot = metrics.snapshot()
    assert (shot["promised_tokens"], shot['read_bytes{tier="disk"}'], shot["leases_held"]) == (160, 4096, 3)
    assert type(shot["promised_tokens"]) is int
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shot), type=dict[str, float]) == shot
    assert all(metric.meaning and metric.unit for metric in METRICS)


def test_why_nothing_is_found_that_others_have_stored_is_said() -> None:
    shot = Metrics().snapshot() | {"lookups": 4, 'misses{reason="not_stored"}': 4, "saved_blocks": 9}
    assert "kvpact_set_weights_version" in explain_misses(shot | {"unnamed_weights": 1})
    assert "kvpact_set_weights_version" not in explain_misses(shot)


def test_h51_no_series_is_added_while_running() -> None:
    metrics = Metrics()
    metrics.use_tiers(["disk", "redis-2"])
    before = set(metrics.snapshot())
    for reason in MissReason:
        metrics.add("lookups")
        metrics.add("misses", 1, reason)
    for seconds in (0.0, 1e-6, 0.5, 100.0):
        metrics.observe(STEP_SECONDS, seconds)
    for wrong in ("misses", "no_such_metric"):
        with pytest.raises(PactViolation, match="METRICS"):
            metrics.add(wrong, 1, "request-17")
    with pytest.raises(PactViolation, match="METRICS"):
        metrics.observe("lookup_seconds", 1.0, "redis")
    assert set(metrics.snapshot()) == before
    metrics.check()


def test_h71_a_count_that_would_go_back_is_refused_and_named() -> None:
    metrics = Metrics()
    metrics.add("saved_blocks", 5)
    metrics.raise_to("used_tokens", 100)
    metrics.check()
    metrics.add("saved_blocks", -7)
    metrics.raise_to("used_tokens", 99)
    metrics.set("open_plans", -1)
    metrics.set("open_plans", math.nan)
    metrics.observe(STEP_SECONDS, -0.1)
    shot = metrics.snapshot()
    assert (shot["saved_blocks"], shot["used_tokens"], shot["open_plans"], shot["refused_counts"]) == (5, 100, 0, 5)
    assert all(value >= 0 for value in shot.values())
    with pytest.raises(PactViolation, match="saved_blocks was to grow by -7"):
        metrics.check()


def test_a_counter_is_not_a_gauge() -> None:
    with pytest.raises(PactViolation, match="saved_blocks is a counter, not a gauge"):
        Metrics().set("saved_blocks", 1)
    with pytest.raises(PactViolation, match="open_plans is a gauge, not a counter"):
        Metrics().add("open_plans")


def test_more_misses_than_lookups_are_found_by_check() -> None:
    metrics = Metrics()
    metrics.add("misses", 1, MissReason.NOT_STORED)
    with pytest.raises(PactViolation, match="0 lookups hit and 1 missed of 0 made"):
        metrics.check()


def test_step_times_fall_into_cumulative_buckets() -> None:
    metrics = Metrics()
    for seconds in (STEP_BOUNDS[0], 0.0003, 1.0):
        metrics.observe(STEP_SECONDS, seconds)
    shot = metrics.snapshot()
    assert shot['step_seconds_bucket{le="1e-05"}'] == 1
    assert shot['step_seconds_bucket{le="0.0005"}'] == 2
    assert shot['step_seconds_bucket{le="0.1"}'] == 2
    assert shot['step_seconds_bucket{le="+Inf"}'] == shot["step_seconds_count"] == 3
    assert shot["step_seconds_sum"] == pytest.approx(1.00031)


def test_few_times_are_kept_for_another_process_drawn_evenly_and_all_are_in_the_buckets() -> None:
    metrics = Metrics()
    for _ in range(200):
        for number in range(320):
            metrics.observe("load_seconds", number / 100)
        (samples,) = metrics.collect_samples().values()
        assert len(samples) == MOST_SAMPLES
        assert sum(late := [second >= 1.6 for second in samples]) > 0, late
    assert metrics.snapshot()["load_seconds_count"] == 64_000
    assert metrics.collect_samples() == {}
    drawn = [0] * 10
    for _ in range(500):
        for number in range(320):
            metrics.observe("save_seconds", float(number))
        for second in metrics.collect_samples()["save_seconds"]:
            drawn[int(second) // 32] += 1
    assert all(1_400 < count < 1_800 for count in drawn), "1,600 of each tenth"


def test_the_sentences_name_their_unit() -> None:
    for metric in METRICS:
        assert metric.meaning[0].isupper(), metric
        assert metric.meaning.endswith("."), metric
        assert metric.unit in metric.meaning.lower(), metric


def test_prometheus_is_not_imported_until_it_is_wanted() -> None:
    code = "import sys, kvpact.metrics; assert not [name for name in sys.modules if name.startswith('prometheus')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("reason", MissReason)
def test_h72_a_cache_that_never_hits_says_why(reason: MissReason) -> None:
    metrics = Metrics()
    metrics.add("lookups", 1234)
    metrics.add("misses", 1200, reason)
    metrics.add("misses", 34, MissReason.TOO_SHORT if reason is not MissReason.TOO_SHORT else MissReason.NO_ROOM)
    line = explain_misses(metrics.snapshot())
    assert line.startswith("0 of 1,234 lookups hit; most misses (1,200 ")
    assert MISS_HINTS[reason] in line
    assert "\n" not in line


def test_h72_a_cold_a_small_and_an_unused_cache_are_told_apart() -> None:
    metrics = Metrics()
    assert explain_misses(metrics.snapshot()) == "no lookups yet: the engine is starting, or has had no prompt"
    metrics.add("lookups", 10)
    assert explain_misses(metrics.snapshot()) == "10 of 10 lookups hit"
    metrics.add("misses", 10, MissReason.NOT_STORED)
    assert "nothing was saved yet" in explain_misses(metrics.snapshot())
    metrics.add("saved_blocks", 100)
    assert "new prompts always miss the first time" in explain_misses(metrics.snapshot())
    metrics.add("evicted_blocks", 90, MEMORY)
    assert "90 of 100 saved blocks are stored nowhere now" in explain_misses(metrics.snapshot())


BLOCKS = st.frozensets(st.integers(0, 15))


@given(BLOCKS, BLOCKS, st.lists(st.tuples(BLOCKS, BLOCKS), max_size=2))
def test_lost_is_at_most_what_no_place_holds(
    saved: frozenset[int], kept: frozenset[int], tiers: list[tuple[frozenset[int], frozenset[int]]]
) -> None:
    """Exactly that where memory is the only place. A tier holds some of the blocks that were written to it."""
    metrics, names = Metrics(), [f"tier-{number}" for number in range(len(tiers))]
    metrics.use_tiers(names)
    holds = [(MEMORY, saved, saved & kept)]
    holds += [(name, saved & w, saved & w & h) for name, (w, h) in zip(names, tiers, strict=True)]
    metrics.add("saved_blocks", len(saved))
    for name, given_to_it, held in holds:
        metrics.set("held_blocks", len(held), name)
        metrics.add("evicted_blocks", len(given_to_it) - len(held), name)
        metrics.add("written_blocks", len(given_to_it) if name != MEMORY else 0, name)
    lost = len(saved.difference(*(held for _, _, held in holds)))
    told = lost_blocks(metrics.snapshot())
    assert 0 <= told <= lost <= len(saved)
    assert told == lost or tiers


def test_series_names_are_those_of_the_snapshot() -> None:
    metrics = Metrics()
    metrics.use_tiers(["disk"])
    metrics.set_info("tier_info", "disk", 'disk:///a"b')
    shot = metrics.snapshot()
    assert series("hook_errors") in shot
    assert series("damaged_records", "disk") in shot
    assert series("tier_info", "disk", "disk:///a%22b") == 'tier_info{tier="disk",url="disk:///a%22b"}' in shot
    assert tiers_in(shot) == ["memory", "disk"]
    assert series("misses", MissReason.DISABLED) == 'misses{reason="disabled"}'


def test_h72_prompts_that_need_no_lookup_are_told_beside_the_hits() -> None:
    metrics = Metrics()
    metrics.add("lookups", 16)
    metrics.add("misses", 4, MissReason.NOT_STORED)
    metrics.add("spared_lookups", 224)
    metrics.check()
    line = explain_misses(metrics.snapshot())
    assert line.startswith("12 of 16 lookups hit (224 more prompts needed none: the engine itself had every block that")
    assert "most misses (4 not_stored)" in line


def test_h72_nothing_saved_yet_sends_a_person_to_what_the_store_holds_for_others() -> None:
    metrics = Metrics()
    metrics.add("lookups")
    metrics.add("misses", 1, MissReason.NOT_STORED)
    assert "of another model, dtype, block size or layout do not fit, see `kvpact inspect`" in explain_misses(
        metrics.snapshot()
    )


def product_code() -> list[ast.AST]:
    """Every node of the product's code outside `metrics.py`."""
    product = Path(kvpact.__file__).parent
    paths = [path for path in product.rglob("*.py") if path.name != "metrics.py"]
    return [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def test_h74_something_produces_every_reason_every_tier_and_every_metric() -> None:
    code = product_code()
    named = {ast.unparse(node) for node in code if isinstance(node, ast.Attribute)}
    said_by_engines = {EndReason(way_out) for way_out in ExternalMatchExit}
    own = [reason for reason in EndReason if reason not in said_by_engines]
    assert [reason for reason in own if f"EndReason.{reason.name}" not in named] == []
    assert {reason.name for reason in said_by_engines} == {way_out.name for way_out in ExternalMatchExit}
    assert [reason for reason in MissReason if f"MissReason.{reason.name}" not in named] == []
    names = {node.id for node in code if isinstance(node, ast.Name)}
    assert {"MEMORY", "tier_labels"} <= names, "the arena's label; those of all other tiers"
    calls = [node for node in code if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args]
    ends = tuple(f"metrics.{how}" for how in ("add", "raise_to", "set", "set_info", "observe"))
    counting = [call.args[0] for call in calls if ast.unparse(call.func).endswith(ends)]
    counted = {ast.literal_eval(name) for name in counting if isinstance(name, ast.Constant)}
    counted |= {STEP_SECONDS} & {vars(kvpact.metrics).get(ast.unparse(name)) for name in counting}
    counted |= {name for name, *_ in Ledger[str, None](str, plan_lifetime_seconds=1.0).totals.counts()}
    assert [metric.name for metric in METRICS if metric.name not in counted] == ["refused_counts"]
