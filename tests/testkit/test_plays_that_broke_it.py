"""Plays that once broke kvpact, as the soak wrote them down: each finds its fault in the code of its day."""

from __future__ import annotations

from functools import partial

from kvpact.identity.groups import GroupKind, KVCacheGroup
from kvpact.testkit.cache.engine_harness import HarnessSettings
from kvpact.testkit.cache.operations import Call, perform
from kvpact.testkit.cache.subjects import pact_cache_with_all


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
            "misbehave",
            rank=1,
            copy_after=1,
            report_after=2,
            reports=2,
            pieces=1,
            fail_at=10,
            fail_count=1,
            load=1,
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
