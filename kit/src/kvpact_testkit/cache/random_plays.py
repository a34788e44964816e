"""Random plays, which hypothesis makes and, if one is broken, shrinks to the few calls that it needs.

Owns the chances of each call, and the engines; `operations.py` has the calls and the verification. Needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from kvpact_testkit.cache.engine_harness import HarnessSettings
from kvpact_testkit.cache.group_blocks import row_size
from kvpact_testkit.cache.operations import BrokenPlay, Call, Figures, perform
from kvpact_testkit.cache.subjects import CacheFactory
from kvpact_testkit.engine import EngineQuirks, GroupKind, GroupSet, KVCacheGroup

SHRINK_TRIES = 400
"""Plays to shrink a broken one, at most."""

AT_LEAST_ONE = ("times", "steps", "tenths")
"""Arguments that are at least 1 in a random play; others are at least 0."""


def _chance(name: str, weight: int, **most: int) -> tuple[str, int, dict[str, tuple[int, int]]]:
    """A call's name, its weight, and the bounds of each argument, both included; `most` are the upper ones."""
    return name, weight, {argument: (int(argument in AT_LEAST_ONE), bound) for argument, bound in most.items()}


CHANCES = (
    _chance("step", 100, times=8),
    _chance("arrive", 80, prefix=2, shared=60, tail=12, outputs=6, kind=21, priority=2),
    _chance("cancel", 10, which=11),
    _chance(
        "misbehave", 30, rank=2, copy_after=4, report_after=4, reports=2, pieces=1, fail_at=12, fail_count=3, load=1
    ),
    _chance("silence", 5, rank=2, steps=12),
    _chance("rank_restarts", 2, rank=2),
    _chance("squeeze", 2, leave=6),
    _chance("release", 6),
    _chance("forget_local", 25),
    _chance("wait", 3, tenths=40),
    _chance("stall", 6, steps=30),
    _chance("tier_fault", 8, operation=1, fault=2),
    _chance("tier_crash", 1, after=3),
    _chance("damage", 3, at=999),
    _chance("reset", 1),
    _chance("reset_connector", 1),
    _chance("update_weights", 2, to=2, clear=1),
    _chance("weights_version", 2),
    _chance("restart", 1, crash=1),
)
"""The calls of a random play."""

BOUNDS = {name: bounds for name, _, bounds in CHANCES}
_NAMES = st.sampled_from([None] + [name for name, weight, _ in CHANCES for _ in range(weight)])

WAYS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("silent_aborts", (False, True)),
    ("async_scheduling", (False, True)),
    ("commits_zero", (False, True)),
    ("finishes_before_report", (False, True)),
    ("truncates_at_failure", (False, True)),
    ("probes_after_failed_load", (False, True)),
    ("commits_async_late", (False, True)),
    ("load_failure", ("recompute", "recompute", "fail")),
    ("drops_hit_within_tokens", (0, 0, 12)),
    ("local_tail_tokens", (0, 0, 8)),
    ("rounds_match_to_tokens", (1, 5, 16)),
    ("throttles_prefill_every", (0, 0, 3)),
    ("encoder_tokens_per_step", (None, 8)),
    ("keeps_free_blocks", (0, 0, 2)),
)
"""Differences of engines from their mode: exits and rewrites between a match and its commit, and later events."""

BLOCK_SIZE = 4
"""Tokens of a row of the engines; blocks of KV cache groups are twice or half as large too."""

GROUPS: st.SearchStrategy[list[tuple[GroupKind, int, int, bool]]] = st.lists(
    st.tuples(
        st.sampled_from(GroupKind),
        st.sampled_from((BLOCK_SIZE, BLOCK_SIZE, 2 * BLOCK_SIZE, BLOCK_SIZE // 2)),
        st.sampled_from((10, 7, 16, 24, 5)),
        st.sampled_from((False, False, False, True)),
    ),
    min_size=1,
    max_size=4,
)
"""KV cache groups: kind, tokens of a block, span, and whether each block depends on the token after it."""

SIZES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from((2, 1, 2, 3)),
        "num_slots": st.sampled_from((8, 16, 40)),
        "num_blocks": st.sampled_from((48, 24, 14)),
        "max_tokens_per_step": st.sampled_from((512, 64, 16)),
        "max_running": st.sampled_from((8, 2)),
        "prefix_caching": st.sampled_from((True, True, False)),
        "priority": st.sampled_from((False, False, True)),
        "draft_tokens": st.sampled_from((0, 0, 1, 3)),
        "groups": st.none() | GROUPS,
        "ways": st.none()
        | st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in WAYS}),
    }
)
"""Engines: small, so that everything is scarce; half of them differ from their mode, and half have other groups than
one of full attention."""

STATES_AND_DRAFTS: st.SearchStrategy[dict[str, Any]] = st.builds(
    lambda sizes, others, state, drafts: {
        **sizes,
        "groups": [(GroupKind.FULL, BLOCK_SIZE, 0, drafts % 2 > 0), *others, (GroupKind.STATE, state, 0, False)],
        "draft_tokens": 1 + drafts // 2,
    },
    SIZES,
    GROUPS.map(lambda groups: [group for group in groups if group[0].has_span][:2]),
    st.sampled_from((BLOCK_SIZE, 2 * BLOCK_SIZE)),
    st.integers(0, 5),
)
"""Engines with drafts, of models with full attention, states, and most of them a third kind."""


def engine_settings(mode: str, sizes: dict[str, Any]) -> HarnessSettings:
    """An engine of `mode` with some `SIZES`."""
    others = {**sizes}
    ways = others.pop("ways")
    if drawn := others.pop("groups"):
        groups = GroupSet(tuple(_group(number, *parts) for number, parts in enumerate(drawn)))
        sizes_of_states = [group.block_size for group in groups.groups if group.kind is GroupKind.STATE]
        others["draft_tokens"] = min([others["draft_tokens"], *(size - 1 for size in sizes_of_states)])
        others |= {"groups": groups.groups, "block_size": row_size(groups)}
        others |= {name: others[name] * len(drawn) for name in ("num_slots", "num_blocks")}
    quirks = replace(EngineQuirks.presets()[mode], **ways) if ways else None
    return HarnessSettings(mode, quirks=quirks, **others)


def _group(number: int, kind: GroupKind, block_size: int, span: int, drops_last: bool) -> KVCacheGroup:
    return KVCacheGroup(kind, block_size, kind.has_span * span, drops_last and kind is not GroupKind.STATE)


@st.composite
def random_call(draw: st.DrawFn) -> Call | None:
    """A call, or None: the end of a play. All arguments are drawn as one number, which shrinks in few tries."""
    name = draw(_NAMES)
    if name is None:
        return None
    bounds = BOUNDS[name]
    number = draw(st.integers(0, prod(most - least + 1 for least, most in bounds.values()) - 1))
    arguments = {}
    for argument, (least, most) in bounds.items():
        number, above = divmod(number, most - least + 1)
        arguments[argument] = least + above
    return Call.of(name, **arguments)


class _Short(BaseException):
    """A play is short enough."""


def random_play(
    factory: CacheFactory,
    first_seed: int,
    num_calls: int,
    *,
    plays: int = 1,
    mode: str | None = None,
    figures: Figures | None = None,
    parent: Path | None = None,
    sizes: st.SearchStrategy[dict[str, Any]] = SIZES,
) -> BrokenPlay | None:
    """Run `plays` plays of `num_calls` random calls, or more and shorter ones; returns a broken one, shrunk, or None.

    The engines are of `sizes`. A seed repeats the same plays in the same process. Adds to `figures`, except while
    shrinking.
    """
    modes = [mode] if mode else [*EngineQuirks.presets()]
    found: BrokenPlay | None = None
    tries = 0

    @seed(first_seed)
    @settings(
        max_examples=2 * plays + 1,  # the first one is empty, and many are short
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.builds(engine_settings, st.sampled_from(modes), sizes), st.data())
    def play(engine: HarnessSettings, data: st.DataObject) -> None:
        nonlocal found, tries
        tries += found is not None
        if tries > SHRINK_TRIES:
            raise _Short
        calls: list[Call] = []

        def drawn() -> Iterator[Call]:
            while len(calls) < num_calls and (call := data.draw(random_call())) is not None:
                calls.append(call)
                yield call

        broken = perform(factory, engine, drawn(), parent, figures if found is None else None)
        if broken is not None and (found is None or broken.protects == found.protects):
            this = BrokenPlay(broken, engine, calls)
            found = this if found is None or len(calls) <= len(found.calls) else found
            raise this

    with suppress(BrokenPlay, Flaky, _Short):
        play()
    return found
