"""What a match needs, as linked and loose runs: against a brute-force model, and what failures cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.match import Needs
from kvpact.cache.needs.owed import Owed
from kvpact.cache.needs.runs import NO_BLOCK, Has, Run, Supply, linked, loose
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup, one_group
from kvpact.identity.keys import BlockKey
from kvpact.ranges import BlockRange, RangeSet

ROWS = 12
CHAIN = [b"%032d" % row for row in range(ROWS)]
FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE
SETS = (
    (KVCacheGroup(FULL, 4),),
    (KVCacheGroup(FULL, 4), KVCacheGroup(WINDOW, 4, 10)),
    (KVCacheGroup(WINDOW, 8, 17), KVCacheGroup(FULL, 4), KVCacheGroup(STATE, 4)),
    (KVCacheGroup(FULL, 4), KVCacheGroup(FULL, 8)),
    (KVCacheGroup(WINDOW, 4, 10), KVCacheGroup(WINDOW, 4, 6)),
)


def engine_groups(groups: Sequence[KVCacheGroup]) -> EngineGroups:
    named = [KVCacheGroup(one.kind, one.block_size, one.span, digest=bytes([n]) * 32) for n, one in enumerate(groups)]
    return EngineGroups(GroupSet(tuple(named)))


def place(keys: set[BlockKey]) -> Has:
    """A place that holds these; of a chain what comes before the first that it lacks."""
    return Has(
        lambda chain: next((at for at, key in enumerate(chain) if key not in keys), len(chain)), keys.__contains__
    )


def needed_keys(groups: EngineGroups, needs: Needs, rows: int) -> set[BlockKey]:
    return {key for run in needs.runs(rows) if run.group >= 0 for key in run.keys}


@pytest.mark.parametrize("groups", SETS)
@pytest.mark.parametrize("seed", range(60))
def test_the_longest_match_is_the_longest_of_which_a_place_has_all(groups: Sequence[KVCacheGroup], seed: int) -> None:
    chance, of = Random(seed), engine_groups(groups)
    start = chance.choice((0, 0, 2, 4))
    needs = Needs(of, CHAIN, start, {})
    everything = {key for rows in range(start + 1, ROWS + 1) for key in needed_keys(of, needs, rows)} | {*CHAIN}
    memory, tier = ({key for key in everything if chance.random() < chance.choice((0.7, 0.98))} for _ in range(2))
    held = place(memory).count(CHAIN) if of.row_bytes else ROWS

    def longest(keys: set[BlockKey], most: int) -> int:
        whole = [rows for rows in range(start + 1, most + 1) if not rows % of.match_rows or not of.groups.sides]
        found = [rows for rows in whole if needed_keys(of, needs, rows) - {*CHAIN} <= keys]
        if not of.row_bytes:
            found = [rows for rows in found if needed_keys(of, needs, rows)]
        return max(found, default=0)

    resident, by_tier = needs.available(place(memory), [place(tier)])
    if of.groups.sides:
        assert resident == longest(memory, held)
        supplied = max(place(tier).count(CHAIN) if of.row_bytes else ROWS, held)
        assert max(resident, *by_tier) == max(resident, longest(memory | tier, supplied))
    else:
        assert (resident, by_tier) == (held, (place(tier).count(CHAIN),))
    end = max(resident, *by_tier)
    missing = needs.missing(end, place(memory))
    lacks = {key for run in missing.loose for key in run.keys} | {*missing.linked.keys}
    assert lacks.difference(CHAIN if not of.row_bytes else CHAIN[:start]) == {
        key for key in needed_keys(of, needs, end) if key not in memory or (key in CHAIN and CHAIN.index(key) >= held)
    }


def test_a_part_has_its_own_place_and_knows_what_it_needs() -> None:
    run = Run(0, 2, CHAIN[2:6], CHAIN, range(2, 6), slots=range(10, 14), block_ids=(1, 2, 3, 4))
    part = run.part(1, 3)
    assert (part.start, part.keys, part.rows, part.slots) == (3, CHAIN[3:5], range(3, 5), range(11, 13))
    assert (part.block_ids, part.needed, part.before) == ((2, 3), CHAIN[2], CHAIN[:3])
    assert (part.names, part.kept_by) == (CHAIN[:5], [CHAIN[4]])
    assert run.part(0, 0).kept_by == [CHAIN[1]]
    assert linked(CHAIN).needed == NO_BLOCK
    beside = Run(1, 0, [b"a", b"b"], CHAIN, (3, 5), is_linked=False, block_ids=(7, 8))
    assert (beside.needed, beside.parents, beside.kept_by) == (CHAIN[5], [CHAIN[3], CHAIN[5]], [b"a", b"b"])
    assert beside.before is None
    assert [*beside.places()] == [(3, (7,)), (5, (8,))]


def test_what_fails_costs_a_chain_what_comes_after_it_and_others_all() -> None:
    match, failed = BlockRange(2, 4), RangeSet.span(3, 4)
    run = Run(0, 2, CHAIN[2:6], CHAIN, range(2, 6), block_ids=(1, 2, 3, 4))
    failure = run.failure(failed, match)
    assert failure is not None
    assert (failure.keys, failure.tops, failure.row) == (CHAIN[3:6], CHAIN[3:4], 3)
    assert (run.lost(failed, match), run.spoilt(3)) == (failed, (2, 3, 4))
    beside = Run(1, 2, [b"a", b"b"], CHAIN, (2, 3), is_linked=False, block_ids=(7, 8))
    failure = beside.failure(failed, match)
    assert failure is not None
    assert (failure.keys, failure.tops, failure.row) == ([b"b"], [b"b"], 2)
    assert (beside.lost(failed, match), beside.spoilt(2)) == (RangeSet.of(match), (7, 8))
    assert run.failure(RangeSet(), match) is beside.failure(RangeSet(), match) is None
    assert run.good(RangeSet.of(BlockRange(2, 1), BlockRange(4, 2)), 99) == [True, False, False, False]
    assert run.good(RangeSet.span(2, 6), 4) == [True, True, False, False]
    assert beside.good(RangeSet.span(2, 4), 3) == [True, False]


@pytest.mark.parametrize("seed", range(40))
def test_each_block_is_supplied_by_the_first_place_that_can(seed: int) -> None:
    chance = Random(seed)
    ends = [chance.randrange(ROWS + 1) for _ in range(3)]
    has = [{key for key in CHAIN if chance.random() < 0.5} for _ in range(3)]
    supplies = [Supply(end, keys.__contains__) for end, keys in zip(ends, has, strict=True)]

    def first(can: Callable[[int], bool]) -> int | None:
        return next((at for at in range(3) if can(at)), None)

    found = {key: at for at, part in linked(CHAIN, 2).split(supplies) for key in part.keys}
    assert found == {
        CHAIN[row]: first(lambda at, row=row: ends[at] > row)  # type: ignore[misc]
        for row in range(2, max(2, *ends))
    }
    beside = Run(1, 0, CHAIN, CHAIN, range(ROWS), is_linked=False)
    found = {key: at for at, part in beside.split(supplies) for key in part.keys}
    wanted = {key: first(lambda at, key=key: key in has[at]) for key in CHAIN}  # type: ignore[misc]
    assert found == {key: at for key, at in wanted.items() if at is not None}


def test_a_place_answers_for_a_linked_run_by_a_count() -> None:
    """No call for each of its blocks, however many they are."""
    asked = list[int]()

    def count(keys: Sequence[BlockKey]) -> int:
        asked.append(len(keys))
        return 7

    has = Has(count, lambda key: pytest.fail("a block of a linked run was asked for by itself"))
    needs = Needs(EngineGroups(one_group(4)), CHAIN, 0, {})
    assert needs.available(has, [has]) == (7, (7,))
    assert needs.missing(ROWS, has).linked.keys == CHAIN[7:]
    assert linked(CHAIN, 3).held(has).names == CHAIN[:7]
    assert linked(CHAIN, 3).lacked(has).keys == CHAIN[7:]
    assert asked == [ROWS] * 4
    beside = loose(CHAIN)
    assert beside.held(place({CHAIN[1], CHAIN[5]})).keys == [CHAIN[1], CHAIN[5]]
    assert beside.lacked(place({*CHAIN[1:]})).keys == CHAIN[:1]


def test_what_there_is_no_room_for_is_not_held_and_leaves_in_turn() -> None:
    run = Run(0, 0, CHAIN[:4], CHAIN, range(4), block_ids=(5, 6, 7, 8))
    owed = Owed("r", run, frozenset((6, 8)), is_held=True)
    assert owed.in_turn == ([7, 5], [8, 6])
    less = owed.part(2)
    assert (less.run.block_ids, less.leaving, less.is_held) == ((5, 6), frozenset((6,)), False)
    assert (less.run.stored(1).keys, loose(CHAIN[:2]).stored(1).keys) == (CHAIN[:1], CHAIN[:2])
