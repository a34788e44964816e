"""Plays that once broke kvpact, as the soak wrote them down: each finds its fault in the code of its day."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvpact.identity.groups import GroupKind, KVCacheGroup
from kvpact_testkit.cache.engine_harness import HarnessSettings
from kvpact_testkit.cache.operations import Call, perform
from kvpact_testkit.cache.subjects import DISK_SLOTS, lazy_pact_cache, pact_cache, pact_cache_with_all
from kvpact_testkit.engine.quirks import EngineQuirks


def test_h13_what_a_match_needs_is_not_evicted_to_read_the_rest_of_it() -> None:
    """The last row of a chain, which memory had, went to make room for a state on the row before it."""
    settings = HarnessSettings(
        block_size=4,
        num_slots=24,
        num_blocks=42,
        max_tokens_per_step=16,
        max_running=8,
        prefix_caching=False,
        groups=(
            KVCacheGroup(GroupKind.FULL, 4),
            KVCacheGroup(GroupKind.STATE, 4),
            KVCacheGroup(GroupKind.FULL, 8),
        ),
    )
    calls = [
        Call.of("step", times=1),
        Call.of("arrive", prefix=2, shared=38, tail=2, outputs=0, kind=0, priority=0),
        Call.of("arrive", prefix=1, shared=29, tail=0, outputs=6, kind=0, priority=0),
        Call.of("step", times=2),
        Call.of(
            "misbehave", rank=1, copy_after=1, report_after=2, reports=2, pieces=1, fail_at=10, fail_count=1, load=1
        ),
        Call.of("step", times=2),
        Call.of("arrive", prefix=2, shared=55, tail=9, outputs=6, kind=0, priority=0),
        Call.of("step", times=11),
        Call.of("arrive", prefix=2, shared=60, tail=12, outputs=6, kind=21, priority=2),
        Call.of("arrive", prefix=1, shared=60, tail=12, outputs=6, kind=21, priority=2),
    ]
    subject = partial(pact_cache_with_all, sync_load_budget=0, admit="second-use")
    broken = perform(subject, settings, calls)
    assert broken is None, broken


def test_h26_an_engine_block_is_known_by_its_group_too() -> None:
    """The hash of a block of 4 tokens was that of the second of two blocks of 2, which the chain knew there before."""
    settings = HarnessSettings(
        mode="vllm-0.30",
        block_size=2,
        num_slots=16,
        num_blocks=28,
        max_tokens_per_step=16,
        max_running=8,
        quirks=replace(
            EngineQuirks.vllm_0_30(), admits_only_whole_prompts=False, silent_aborts=False, async_scheduling=False
        ),
        groups=(KVCacheGroup(GroupKind.FULL, 2), KVCacheGroup(GroupKind.FULL, 4)),
    )
    calls = [
        Call.of("arrive", prefix=0, shared=42, tail=2, outputs=3, kind=2, priority=0),
        Call.of("misbehave", rank=0, reports=0),
        Call.of("step", times=6),
        Call.of("arrive", prefix=0, shared=45, tail=9, outputs=5, kind=0, priority=0),
        Call.of("step", times=5),
        Call.of("arrive", prefix=2, shared=20, tail=0, outputs=3, kind=4, priority=0),
        Call.of("arrive", prefix=2, shared=59, tail=0, outputs=1, kind=1, priority=0),
        Call.of("forget_local"),
        Call.of("arrive", prefix=0, shared=5, tail=4, outputs=0, kind=0, priority=0),
    ]
    broken = perform(lazy_pact_cache, settings, calls)
    assert broken is None, broken


def test_a_request_that_waits_for_its_load_is_given_the_blocks_of_other_chunks() -> None:
    """The engine computed on top of a late load, and then again in other chunks: a state went to the null block."""
    settings = HarnessSettings(
        block_size=4,
        num_slots=80,
        num_blocks=96,
        max_tokens_per_step=16,
        max_running=8,
        priority=True,
        groups=(KVCacheGroup(GroupKind.FULL, 4), KVCacheGroup(GroupKind.STATE, 2)),
    )
    calls = [
        Call.of("arrive", prefix=2, shared=8, tail=2, outputs=0, kind=0, priority=0),
        Call.of("misbehave", rank=2, copy_after=4, report_after=1, pieces=1, fail_at=12, fail_count=2, load=1),
        Call.of("step", times=1),
        Call.of("arrive", prefix=2, shared=25, tail=3, outputs=0, kind=0, priority=0),
        Call.of("arrive", prefix=1, shared=44, tail=0, outputs=0, kind=0, priority=0),
        Call.of("forget_local"),
        Call.of("step", times=1),
        Call.of("arrive", prefix=0, shared=25, tail=2, outputs=5, kind=15, priority=0),
    ]
    broken = perform(pact_cache, settings, calls)
    assert broken is None, broken


def test_h13_less_of_a_match_is_read_in_whole_blocks_of_every_group() -> None:
    """Memory had room for 5 rows of 2 tokens; the other group's block of 8 tokens ended in a row that nobody knew."""
    settings = HarnessSettings(
        mode="vllm-0.30",
        ranks=2,
        block_size=2,
        num_slots=32,
        num_blocks=95,
        max_tokens_per_step=16,
        max_running=8,
        groups=(KVCacheGroup(GroupKind.FULL, 8), KVCacheGroup(GroupKind.FULL, 2)),
    )
    calls = [
        Call.of("arrive", prefix=0, shared=28, tail=8, outputs=3, kind=4, priority=0),
        Call.of("step", times=1),
        Call.of("stall", steps=1),
        Call.of("stall", steps=25),
        Call.of("tier_fault", operation=0, fault=0),
        Call.of("step", times=1),
        Call.of("misbehave", rank=0, reports=0),
        Call.of("step", times=8),
        Call.of("arrive", prefix=0, shared=29, tail=2, outputs=5, kind=15, priority=0),
        Call.of("arrive", prefix=0, shared=0, tail=0, outputs=0, kind=0, priority=0),
        Call.of("tier_fault", operation=0, fault=0),
        Call.of("step", times=8),
        Call.of("damage", at=0),
        Call.of("release"),
        Call.of("step", times=1),
        Call.of("arrive", prefix=0, shared=17, tail=3, outputs=0, kind=0, priority=0),
        Call.of("step", times=5),
        Call.of("arrive", prefix=0, shared=0, tail=0, outputs=0, kind=0, priority=0),
        Call.of("step", times=4),
        Call.of("forget_local"),
        Call.of("cancel", which=0),
        Call.of("step", times=1),
        Call.of("arrive", prefix=0, shared=0, tail=0, outputs=0, kind=0, priority=0),
        Call.of("step", times=1),
        Call.of("arrive", prefix=2, shared=47, tail=8, outputs=4, kind=4, priority=1),
        Call.of("arrive", prefix=0, shared=36, tail=8, outputs=1, kind=0, priority=0),
    ]
    broken = perform(partial(pact_cache_with_all, sync_load_budget=0, admit="second-use"), settings, calls)
    assert broken is None, broken


def test_h32_what_an_engine_block_holds_is_noted_again_if_another_request_had_it_meanwhile() -> None:
    """The monitor's fault: a preempted request got its old blocks back, and the monitor kept another one's content."""
    settings = HarnessSettings("native", num_slots=16, num_blocks=14, max_running=8)
    calls = [
        Call.of("arrive", prefix=2, shared=52, outputs=4, tail=0),
        Call.of("step", times=2),
        Call.of("tier_crash", after=0),
        Call.of("misbehave", rank=0, copy_after=0, report_after=0, reports=0),
        Call.of("step", times=21),
        Call.of("arrive", shared=47, tail=10, outputs=6, kind=20, priority=1),
        Call.of("arrive", prefix=2, shared=25, tail=7, outputs=2),
        Call.of("misbehave", rank=0, copy_after=0, report_after=0, reports=0),
        Call.of("misbehave", rank=0, copy_after=1, report_after=1, reports=0, fail_at=1),
        Call.of("arrive", shared=32, outputs=1, tail=0),
        Call.of("step", times=1),
        Call.of("misbehave", rank=0, copy_after=3, report_after=3, reports=0, pieces=1),
        Call.of("step", times=14),
        Call.of("arrive", prefix=1, shared=18, tail=1, outputs=0),
        Call.of("step", times=18),
        Call.of("misbehave", rank=0, copy_after=0, report_after=2, reports=0, pieces=1, fail_at=11),
        Call.of("forget_local"),
        Call.of("arrive", prefix=2, shared=46, tail=4, outputs=5),
        Call.of("step", times=7),
        Call.of("squeeze", leave=6),
        Call.of("arrive", shared=17, tail=6, outputs=1),
        Call.of("step", times=17),
        Call.of("arrive", prefix=1, shared=17, tail=8, outputs=5, kind=9),
        Call.of("arrive", tail=0, outputs=0),
        Call.of("arrive", tail=0, outputs=0),
        Call.of("reset_connector"),
        Call.of("arrive", shared=27, tail=11, outputs=0),
    ]
    broken = perform(partial(lazy_pact_cache, disk_slots=DISK_SLOTS, sync_load_budget=0), settings, calls)
    assert broken is None, broken
