"""References to an engine's blocks against a count of each, however they are taken and given back."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpact.block_refs import BlockRefs
from kvpact.errors import PactViolation

NULL = 0
SEQUENCES = st.lists(st.integers(1, 6), max_size=5).map(tuple)


@given(taken=st.lists(SEQUENCES, max_size=8), freed=st.lists(SEQUENCES))
def test_references_are_counted_by_block_whatever_the_sequences(
    taken: list[tuple[int, ...]], freed: list[tuple[int, ...]]
) -> None:
    refs, expected = BlockRefs(NULL), Counter[int]()
    for block_ids in taken:
        refs.take(block_ids)
        expected.update(block_ids)
        assert refs.total == expected.total()
    for block_ids in [*taken[::2], *freed, *taken[1::2]]:
        wanted = Counter(block_ids)
        if wanted <= expected:
            refs.give_back(list(block_ids))
            expected -= wanted
        else:
            with pytest.raises(PactViolation, match="free only what was touched"):
                refs.give_back(block_ids)
        assert refs.total == expected.total()
    assert refs.counts == expected


def test_the_null_block_is_nobodys() -> None:
    refs = BlockRefs(NULL)
    with pytest.raises(PactViolation, match="null block"):
        refs.take([3, NULL])
    assert not refs.total
