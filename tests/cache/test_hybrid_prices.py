"""What a hybrid model's match costs, and whose tokens it is, by the bytes that are read for it (H125)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from group_scenes import BLOCK, GroupScene, asked, full, states, window
from kvpact.cache.totals import Sources, found_in
from kvpact.identity.groups import KVCacheGroup
from kvpact.metrics import MEMORY, MissReason, series
from kvpact.ranges import BlockRange
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from scenes import NAMESPACE, PAGE

ROWS = 62


def shared(store: DictionaryStore) -> SharedTier:
    return SharedTier(store, NAMESPACE, 4 * PAGE)


def stored(groups: Sequence[KVCacheGroup], sizes: Sequence[int], **settings: Any) -> GroupScene:
    """A scene whose tier has all of a prompt, written by another engine."""
    store = DictionaryStore()
    writer = GroupScene(groups, sizes, [shared(store)])
    writer.run_cold(asked("there", ROWS))
    writer.close()
    return GroupScene(groups, sizes, [shared(store)], **settings)


MODELS = {
    "windows alone": ((window(3),), (PAGE,), 3),
    "states alone": ((states(),), (PAGE,), 1),
    "small windows beside large states": ((window(3), states()), (PAGE, 4 * PAGE), 7),
}


@pytest.mark.parametrize("model", MODELS)
def test_h125_a_match_is_priced_as_what_is_read_for_it(model: str) -> None:
    """Computing takes 100 ms, a page 4 ms: the match, not the 62 rows of its chain, is read sooner."""
    groups, sizes, pages = MODELS[model]
    scene = stored(groups, sizes)
    scene.computes(ROWS * BLOCK / 0.1)
    scene.reads(PAGE / 0.004)
    assert scene.serve(asked("again", ROWS)) == ROWS * BLOCK
    assert scene.count(series("read_bytes", scene.clients[0].name)) == pages * PAGE


@pytest.mark.parametrize(("computing", "promised"), [(1.01, ROWS * BLOCK), (0.99, 0)])
def test_h125_the_price_of_a_model_with_states_is_the_bytes_that_are_read(computing: float, promised: int) -> None:
    """As Qwen3-Next: three groups of states. The rows, and of each group one state, although the tier has three."""
    groups = (states(), states(), states(), full())
    store = DictionaryStore()
    writer = GroupScene(groups, (4 * PAGE, 4 * PAGE, 4 * PAGE, PAGE), [shared(store)])
    for rows in (20, 40, ROWS):
        writer.run_cold(asked(f"to {rows}", rows))
    assert writer.count(series("written_bytes", writer.clients[0].name)) == (ROWS + 3 * 3 * 4) * PAGE
    writer.close()
    scene = GroupScene(groups, (4 * PAGE, 4 * PAGE, 4 * PAGE, PAGE), [shared(store)])
    pages = ROWS + 3 * 4
    scene.reads(PAGE / 0.004)
    scene.computes(ROWS * BLOCK / (computing * pages * 0.004))
    assert scene.serve(asked("again", ROWS)) == promised
    read = scene.count(series("read_bytes", scene.clients[0].name))
    assert read == (pages * PAGE if promised else 0)


def with_the_chain_in_memory() -> GroupScene:
    """Memory has the chain of a longer prompt, and the windows at its end; the tier those at the end of `ROWS`."""
    scene = stored((full(), window(3)), (PAGE, 2 * PAGE))
    scene.run_cold(asked("longer", ROWS + 20))
    return scene


def test_h125_a_chain_that_memory_has_costs_nothing() -> None:
    """Three blocks of the window are read in 24 ms, computing takes 100."""
    scene = with_the_chain_in_memory()
    scene.computes(ROWS * BLOCK / 0.1)
    scene.reads(PAGE / 0.004)
    assert scene.serve(asked("again", ROWS)) == ROWS * BLOCK
    assert scene.count(series("read_bytes", scene.clients[0].name)) == 6 * PAGE


def test_h125_what_is_declined_is_counted_as_the_blocks_that_would_be_read() -> None:
    scene = with_the_chain_in_memory()
    scene.computes(ROWS * BLOCK / 0.02)
    scene.reads(PAGE / 0.004)
    assert scene.serve(asked("again", ROWS)) == 0
    assert scene.count(series("misses", MissReason.RECOMPUTE_FASTER)) == 1
    assert scene.count("declined_blocks") == 3


def test_h125_used_tokens_are_shared_out_by_the_bytes_that_each_place_had() -> None:
    """Memory had 62 pages, the tier 6: of 992 tokens 904 and 88, and none is counted twice."""
    scene = with_the_chain_in_memory()
    assert scene.serve(asked("again", ROWS)) == ROWS * BLOCK
    shares = {tier: scene.count(series("used_tokens_from", tier)) for tier in (MEMORY, scene.clients[0].name)}
    assert shares == {MEMORY: 904, scene.clients[0].name: 88}
    assert scene.serve(asked("once more", ROWS)) == ROWS * BLOCK
    assert scene.count(series("used_tokens_from", MEMORY)) == 904 + ROWS * BLOCK, "now memory has all"


def test_h125_bytes_are_counted_as_the_records_have_them() -> None:
    """14 rows of one page and 3 windows of four: 26 pages, not 17 of the largest."""
    groups, sizes, store = (full(), window(3)), (PAGE, 4 * PAGE), DictionaryStore()
    writer = GroupScene(groups, sizes, [shared(store)])
    writer.run_cold(asked("there", 14))
    assert writer.count(series("written_bytes", writer.clients[0].name)) == 26 * PAGE
    assert writer.count(series("written_blocks", writer.clients[0].name)) == 17
    writer.close()
    reader = GroupScene(groups, sizes, [shared(store)])
    assert reader.serve(asked("again", 14)) == 14 * BLOCK
    assert reader.count(series("read_bytes", reader.clients[0].name)) == 26 * PAGE
    assert reader.count(series("read_blocks", reader.clients[0].name)) == 17


TIERS = st.sampled_from((MEMORY, "disk", "store"))


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), TIERS), max_size=4),
    sides=st.dictionaries(TIERS, st.integers(0, 1 << 24), max_size=3),
    row_bytes=st.sampled_from((0, 1, PAGE, 1 << 20)),
    start=st.integers(0, 20),
    used=st.integers(0, 20 * BLOCK),
)
def test_p7_tokens_are_shared_out_whole_and_their_sum_is_what_was_used(
    rows: list[tuple[int, str]], sides: dict[str, int], row_bytes: int, start: int, used: int
) -> None:
    """Each share is a token at most from its part of the bytes; where the chain is all, it is its own tokens."""
    positions = BlockRange(start * BLOCK, used)
    sources = Sources(tuple(rows), row_bytes, tuple(sides.items()), num_rows=20)
    shares = [*found_in(positions, sources, BLOCK)]
    assert sum(tokens for _, tokens in shares) == used
    assert all(tokens > 0 for _, tokens in shares)
    owners, exact = Counter[str](), defaultdict[str, Fraction](Fraction)
    for at in range(positions.start, positions.end):
        owner = next((tier for end, tier in rows if end * BLOCK > at), MEMORY)
        owners[owner] += 1
        exact[owner] += Fraction(row_bytes, BLOCK)
    for tier, nbytes in sides.items():
        exact[tier] += Fraction(used * nbytes, 20 * BLOCK)
    told = Counter[str]()
    for tier, tokens in shares:
        told[tier] += tokens
    if not any(sides.values()):
        assert told == (owners if row_bytes else told)
    elif (whole := sum(exact.values())) > 0:
        entries = Counter(tier for _, tier in rows) + Counter([MEMORY, *sides])
        assert all(abs(told[tier] - used * part / whole) < entries[tier] for tier, part in exact.items())
