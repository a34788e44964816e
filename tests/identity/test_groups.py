"""`GroupSet.longest_match` against its definition, tried for every length, and what each kind of group needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.errors import ConfigError
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.ranges import BlockRange

FULL, WINDOW, CHUNK, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNK, GroupKind.STATE

kinds = st.sampled_from(GroupKind)
block_sizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def groups(draw: st.DrawFn) -> KVCacheGroup:
    kind = draw(kinds)
    span = draw(st.integers(1, 20)) if kind.has_span else 0
    return KVCacheGroup(kind, draw(block_sizes), span, draw(st.booleans()))


def longest_by_definition(kept: GroupSet, max_tokens: int, held: list[set[int]]) -> int:
    """Every length from the longest down; for each, every group's every block."""
    for tokens in range(max_tokens - max_tokens % kept.alignment, 0, -kept.alignment):
        if all(set(group.needed(tokens)) <= has for group, has in zip(kept.groups, held, strict=True)):
            return tokens
    return 0


@given(data=st.data(), chosen=st.lists(groups(), min_size=1, max_size=4), alignment=st.sampled_from([1, 2, 3, 6]))
def test_the_longest_match_is_that_of_the_definition_and_asks_each_block_once(
    data: st.DataObject, chosen: list[KVCacheGroup], alignment: int
) -> None:
    kept = GroupSet(tuple(chosen), alignment)
    max_tokens = data.draw(st.integers(0, 100))
    held = []
    for group in chosen:
        blocks = range(max_tokens // group.block_size + 2)
        missing = data.draw(st.sets(st.sampled_from(blocks), max_size=len(blocks) // 2))
        held.append(set(blocks) - missing)
    asked: list[tuple[int, int]] = []

    def first_missing(number: int, blocks: BlockRange) -> int | None:
        for block in blocks:
            asked.append((number, block))
            if block not in held[number]:
                return block
        return None

    assert kept.longest_match(max_tokens, first_missing) == longest_by_definition(kept, max_tokens, held)
    assert len(set(asked)) == len(asked)


@given(group=groups(), tokens=st.integers(0, 200))
def test_what_a_longer_match_reads_begins_no_earlier(group: KVCacheGroup, tokens: int) -> None:
    assert group.first_read(tokens) <= group.first_read(tokens + 1) <= tokens + 1
    assert group.needed(tokens).end == -(-tokens // group.block_size)


@given(size=block_sizes, span=st.integers(1, 40), blocks=st.integers(1, 50))
def test_a_window_at_a_block_border_needs_as_many_blocks_as_the_rest_of_it_fills(
    size: int, span: int, blocks: int
) -> None:
    needed = KVCacheGroup(WINDOW, size, span).needed(blocks * size)
    assert needed.count == min(blocks, -(-(span - 1) // size))


@pytest.mark.parametrize(
    ("group", "tokens", "needed"),
    [
        (KVCacheGroup(FULL, 16), 64, range(4)),
        (KVCacheGroup(WINDOW, 16, 32), 64, range(2, 4)),
        (KVCacheGroup(WINDOW, 16, 33), 64, range(2, 4)),
        (KVCacheGroup(WINDOW, 16, 34), 64, range(1, 4)),
        (KVCacheGroup(WINDOW, 16, 32), 72, range(2, 5)),
        (KVCacheGroup(WINDOW, 16, 1), 64, range(4, 4)),
        (KVCacheGroup(CHUNK, 16, 48), 64, range(3, 4)),
        (KVCacheGroup(CHUNK, 16, 32), 64, range(4, 4)),
        (KVCacheGroup(STATE, 16), 64, range(3, 4)),
        (KVCacheGroup(STATE, 64), 64, range(1)),
        (KVCacheGroup(FULL, 16), 0, range(0)),
        (KVCacheGroup(STATE, 16), 0, range(0)),
    ],
)
def test_what_a_match_needs(group: KVCacheGroup, tokens: int, needed: range) -> None:
    assert list(group.needed(tokens)) == list(needed)


def test_keys_cover_the_next_token_where_a_draft_models_layers_depend_on_it() -> None:
    """vllm#52735: what is stored of a block's last token is right for one next token."""
    plain, draft = KVCacheGroup(FULL, 16), KVCacheGroup(FULL, 16, drops_last=True)
    assert [GroupSet(groups).tokens_ahead for groups in ((plain,), (draft,), (plain, draft))] == [0, 1, 1]
    assert not GroupSet((draft,)).sides
    kept = GroupSet((plain, draft))
    assert kept.longest_match(160, lambda _, blocks: next((block for block in blocks if block >= 4), None)) == 64


def test_a_match_is_whole_blocks_of_every_group() -> None:
    kept = GroupSet((KVCacheGroup(FULL, 16), KVCacheGroup(STATE, 48)), alignment=32)
    assert kept.alignment == 96
    assert kept.longest_match(200, lambda *_: None) == 192


def test_what_no_model_has_is_refused() -> None:
    for kind, size, span in ((FULL, 0, 0), (FULL, 16, 8), (STATE, 16, 8), (WINDOW, 16, 0), (CHUNK, 16, -1)):
        with pytest.raises(ConfigError):
            KVCacheGroup(kind, size, span)
    with pytest.raises(ConfigError):
        GroupSet(())
    with pytest.raises(ConfigError, match="blocks of \\[16, 24\\] tokens"):
        GroupSet((KVCacheGroup(FULL, 16), KVCacheGroup(WINDOW, 24, 100)))


def test_the_chain_is_that_of_the_full_attention_group_with_the_smallest_blocks() -> None:
    kept = GroupSet(
        (KVCacheGroup(WINDOW, 8, 32), KVCacheGroup(FULL, 32), KVCacheGroup(FULL, 16), KVCacheGroup(STATE, 64))
    )
    assert (kept.chain, kept.block_size, kept.sides, kept.alignment) == (2, 16, (0, 1, 3), 64)
    assert [kept.row_of(0, block) for block in range(4)] == [0, 0, 1, 1]
    assert [kept.row_of(1, block) for block in range(2)] == [1, 3]
    assert [kept.row_of(3, block) for block in range(2)] == [3, 7]
    no_full = GroupSet((KVCacheGroup(STATE, 64), KVCacheGroup(WINDOW, 16, 32)))
    assert (no_full.chain, no_full.block_size, no_full.sides) == (None, 16, (0, 1))


def test_blocks_of_two_groups_or_two_parts_of_a_row_never_share_a_name() -> None:
    digests = [bytes([number]) * 32 for number in range(3)]
    kept = GroupSet(
        (
            KVCacheGroup(FULL, 16, digest=digests[0]),
            KVCacheGroup(WINDOW, 8, 32, digest=digests[1]),
            KVCacheGroup(WINDOW, 8, 32, digest=digests[2]),
        )
    )
    row_keys = [bytes([row]) * 32 for row in range(4)]
    names = [
        kept.side_key(row_keys[kept.row_of(number, block)], number, block) for number in (1, 2) for block in range(8)
    ]
    assert len(set(names) | set(row_keys)) == 16 + 4
    turned = GroupSet(kept.groups[:1] + kept.groups[:0:-1])
    assert turned.chain_digest != kept.chain_digest
    assert GroupSet(kept.groups[:1]).chain_digest == bytes(32)
