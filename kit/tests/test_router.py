"""A router that hears the events of an index: senders that are broken are found, and a right one never misleads it."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plays import (
    DISK,
    LONG,
    MEMORY,
    AllBlocksCleared,
    BlockRemoved,
    IndexPlay,
    PactSender,
    Prompt,
    broken_play,
    keys_of,
    name_of,
    names_of,
    stored,
)
from kvpact.events import queue
from kvpact.events.queue import EventQueue, Gone, PlaceEvents
from kvpact.index import announced
from kvpact.index.block_index import BlockIndex
from kvpact.index.key_table import Names
from kvpact_testkit.results import Broken
from kvpact_testkit.router import LOCAL, Place, RouterModel

STORE = Place("STORAGE", "REMOTE", "redis")
PROMPT = Prompt("abIc", "tenant", "adapter")
NAMES = names_of(PROMPT)


def heard(*events: Any) -> RouterModel:
    """A router that has heard these events."""
    router = RouterModel(name_of=name_of)
    router.apply(events)
    return router


def removed(number: int, place: Place = MEMORY, **others: Any) -> BlockRemoved:
    said = {"medium": place.medium, "locality": place.locality, "ownership": place.ownership, **others}
    return BlockRemoved([NAMES[number]], **said)


def test_places_stand_apart_and_nothing_is_counted() -> None:
    router = heard(stored(PROMPT, 0, 4, MEMORY), stored(PROMPT, 0, 4, DISK), stored(PROMPT, 1, 3, STORE))
    router.apply([removed(3), removed(3), removed(2, DISK, ownership=None), removed(1, STORE)])
    assert router.places == {MEMORY: {*NAMES[:3]}, DISK: {*NAMES} - {NAMES[2]}, STORE: {NAMES[2]}}
    assert (router.stored, router.removed) == (10, 4)
    assert router.prefix(NAMES) == 4
    router.apply([AllBlocksCleared()])
    assert router.places == {}
    assert router.prefix(NAMES) == 0


EVENT = stored(PROMPT, 0, 2, MEMORY)


@pytest.mark.parametrize(
    "event",
    [
        removed(0, medium=None),
        removed(0, ownership="memory"),
        removed(0, group_idx=1),
        stored(PROMPT, 2, 4, MEMORY),
        stored(PROMPT, 0, 2, Place("cpu", LOCAL)),
        stored(PROMPT, 0, 2, MEMORY, group_idx=1),
        stored(PROMPT, 0, 2, MEMORY, kv_cache_spec_kind="sliding_window"),
        stored(PROMPT, 0, 2, MEMORY, token_ids=[]),
        stored(PROMPT, 0, 2, MEMORY, token_ids=[*range(4)]),
        stored(PROMPT, 0, 2, MEMORY, extra_keys=[None]),
        stored(PROMPT, 0, 2, MEMORY, extra_keys=None),
        stored(PROMPT, 0, 2, MEMORY, block_hashes=[]),
        stored(PROMPT, 0, 2, MEMORY, block_hashes=NAMES[2:]),
        object(),
    ],
)  # fmt: skip
def test_h133_an_event_that_says_too_little_is_refused(event: Any) -> None:
    with pytest.raises(Broken, match="H133"):
        heard(event)


def test_h133_two_events_must_say_the_same_of_a_block() -> None:
    heard(EVENT, stored(PROMPT, 0, 2, DISK))
    for others in ({"lora_name": None}, {"lora_id": 2}, {"lookahead_token_ids": [[1], [2]]}):
        with pytest.raises(Broken, match=next(iter(others))):
            heard(EVENT, stored(PROMPT, 0, 2, DISK, **others))
    with pytest.raises(Broken, match="second time"):
        heard(EVENT, EVENT)


class StoresEarly(PactSender):
    """Announces what not all ranks have saved."""

    def ask(self, prompt: Prompt, epoch: int) -> None:
        with mock.patch.object(BlockIndex, "held_prefix", lambda index, keys, end=None: index.known_prefix(keys)):
            super().ask(prompt, epoch)


class Late(PlaceEvents):
    """Says of what is gone nothing before the next block comes; the slot is another block's by then."""

    def __init__(self, queue: EventQueue, place: queue.Place) -> None:
        super().__init__(queue, place)
        self.waiting: list[Names] = []

    def stored(self, prompt: announced.Prompt, first: int, names: Names) -> int:
        while self.waiting:
            super().gone(self.waiting.pop(0))
        return super().stored(prompt, first, names)

    def gone(self, names: Names) -> None:
        self.waiting.append(names)


class RemovesLate(PactSender):
    subscriber = Late


class StoresTwice(PactSender):
    """Announces a prompt's blocks each time that it is asked for."""

    def ask(self, prompt: Prompt, epoch: int) -> None:
        self.index.forget_announced()
        super().ask(prompt, epoch)


class Parentless(PlaceEvents):
    """Says nothing of the first block of a chain."""

    def stored(self, prompt: announced.Prompt, first: int, names: Names) -> int:
        if first or len(names) == 1:
            return super().stored(prompt, first, names)
        return 1 + super().stored(prompt, 1, names[1:])


class LosesTheParent(PactSender):
    subscriber = Parentless


class OfAWindow(Prompt):
    """Names of another group's blocks: what lies at the same place of the prompt."""

    def names(self, first: int, end: int) -> Names:
        return super().names(first, end) + 1


class NamesAnotherGroup(PactSender):
    def ask(self, prompt: Prompt, epoch: int) -> None:
        self.index.announce(keys_of(prompt, epoch), len(prompt.letters), OfAWindow(*prompt))


class SaysNoMedium(PlaceEvents):
    """A removal names no medium."""

    def gone(self, names: Names) -> None:
        self.queue.gone(Gone(self.place._replace(medium=""), names))


class RemovesEverywhere(PactSender):
    subscriber = SaysNoMedium


class StaysSilent(PactSender):
    """What routers were told once is not told them again."""

    def forget(self) -> None:
        pass


BROKEN_SENDERS = {
    StoresEarly: "cannot be loaded",
    RemovesLate: "cannot be loaded",
    StoresTwice: "second time",
    LosesTheParent: "was never told",
    NamesAnotherGroup: "not the hash",
    RemovesEverywhere: "or for none",
    StaysSilent: "was not told",
}


@pytest.mark.parametrize("sender", BROKEN_SENDERS, ids=lambda sender: sender.__name__)
def test_h133_a_sender_that_misleads_routers_is_found(sender: type[PactSender]) -> None:
    broken = broken_play(100, sender, random.Random(1).randrange)
    assert broken is not None
    assert BROKEN_SENDERS[sender] in broken.explanation, broken


@pytest.mark.parametrize("each", [1, LONG])
@settings(max_examples=50)
@given(data=st.data())
def test_h133_a_router_knows_what_an_index_serves(data: st.DataObject, each: int) -> None:
    def choose(end: int) -> int:
        return data.draw(st.integers(0, end - 1))

    IndexPlay(choose, PactSender, each=each).run()


@pytest.mark.parametrize(
    ("plays", "each"),
    [
        (300, 1),
        (60, LONG),
        pytest.param(80_000, 1, marks=pytest.mark.soak),
        pytest.param(20_000, LONG, marks=pytest.mark.soak),
    ],
)
def test_h133_a_router_knows_what_an_index_serves_in_random_plays(plays: int, each: int) -> None:
    dice = random.Random(plays)
    stored_blocks = removed_blocks = 0
    for _ in range(plays):
        play = IndexPlay(dice.randrange, PactSender, each=each)
        play.run()
        stored_blocks += play.stored
        removed_blocks += play.removed
    print(f"{plays} plays, {stored_blocks} blocks stored and {removed_blocks} removed")
    assert min(stored_blocks, removed_blocks) > plays
