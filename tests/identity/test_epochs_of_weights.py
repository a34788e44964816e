"""When an epoch begins, what it is called, and which of the engine's blocks belong to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.errors import WeightsVersionRefused
from kvpact.identity.epochs import EPOCH_BYTES, FIRST_EPOCH, Epoch, Epochs
from kvpact.identity.tags import MAX_ADAPTERS, NO_TAG, BlockTags


def test_an_epoch_is_empty_named_or_drawn() -> None:
    named, drawn = Epoch.of_word("v1"), Epoch.draw()
    assert {len(epoch.value) for epoch in (FIRST_EPOCH, named, drawn)} == {EPOCH_BYTES}
    assert (FIRST_EPOCH.is_drawn, named.is_drawn, drawn.is_drawn) == (False, False, True)
    assert named == Epoch.of_word("v1") != Epoch.of_word("v2")
    assert drawn != Epoch.draw()


def test_until_the_first_reset_the_epoch_is_empty_or_the_configured_word() -> None:
    assert Epochs().current == FIRST_EPOCH
    assert Epochs("v1").current == Epoch.of_word("v1")


def test_h35_every_reset_draws_another_epoch() -> None:
    epochs = Epochs("v1")
    seen = {epochs.current}
    for _ in range(3):
        epochs.reset()
        assert epochs.current.is_drawn
        assert epochs.current not in seen
        seen.add(epochs.current)


def test_a_word_counts_after_a_reset_once_and_not_the_one_from_before() -> None:
    epochs = Epochs("v1")
    with pytest.raises(WeightsVersionRefused, match="comes without a reset"):
        epochs.name("v2")
    epochs.reset()
    with pytest.raises(WeightsVersionRefused, match="'v1' was in force before the last reset"):
        epochs.name("v1")
    with pytest.raises(WeightsVersionRefused, match="is empty"):
        epochs.name("")
    epochs.name("v2")
    assert epochs.current == Epoch.of_word("v2")
    with pytest.raises(WeightsVersionRefused, match="comes without a reset"):
        epochs.name("v3")
    epochs.reset()
    epochs.reset()
    with pytest.raises(WeightsVersionRefused, match="'v2' was in force"):
        epochs.name("v2")
    epochs.name("v1")  # the old weights are loaded again


def test_only_the_last_reset_can_be_taken_back_and_not_behind_a_word() -> None:
    epochs = Epochs("v1")
    assert not epochs.take_back_reset()
    epochs.reset()
    first = epochs.current
    epochs.reset()
    assert epochs.take_back_reset()
    assert epochs.current == first
    assert not epochs.take_back_reset()
    epochs.reset()
    epochs.name("v2")
    assert not epochs.take_back_reset()


STEPS = st.lists(st.sampled_from(["reset", "back", "v1", "v2", "v3"]), max_size=12)


@given(STEPS, st.sampled_from([None, "v1"]))
def test_each_change_is_another_generation_and_a_word_never_names_what_it_named_before(
    steps: list[str], first: str | None
) -> None:
    epochs = Epochs(first)
    last_word, generations = first, {epochs.generation}
    for step in steps:
        before = epochs.generation
        if step == "reset":
            epochs.reset()
        elif step == "back":
            epochs.take_back_reset()
        else:
            try:
                epochs.name(step)
                assert step != last_word
                last_word = step
            except WeightsVersionRefused:
                assert epochs.generation == before
        assert epochs.generation == before or epochs.generation not in generations
        generations.add(epochs.generation)


def test_h38_blocks_are_sound_up_to_the_first_that_somebody_else_filled() -> None:
    tags = BlockTags()
    old, new = tags.tag_of(1, "adapter"), tags.tag_of(2, "adapter")
    assert len({old, new, tags.tag_of(2, ""), NO_TAG}) == 4
    tags.fill([3, 4], old)
    tags.fill([5000, 6], new)
    assert tags.same_prefix([5000, 6, 3], 0, new) == 2
    assert tags.same_prefix([3, 4], 0, new) == 0
    assert tags.same_prefix([3, 4, 9999], 0, old) == 2
    assert tags.same_prefix([7], 0, NO_TAG) == 0, "a block that nobody filled is nobody's"


def test_h67_adapters_without_end_take_no_memory_without_end() -> None:
    tags = BlockTags()
    seen = {tags.tag_of(1, f"adapter {number}") for number in range(3 * MAX_ADAPTERS)}
    assert len(seen) == 3 * MAX_ADAPTERS
    known = [number for number in range(3 * MAX_ADAPTERS) if tags.withdraw(f"adapter {number}") != NO_TAG]
    assert 0 < len(known) <= MAX_ADAPTERS
