"""The queue of announcements: in order, bounded, and no removal is ever dropped."""

from __future__ import annotations

import numpy as np

from kvpact.events.queue import (
    MEMORY_PLACE,
    MOST_BLOCKS,
    MOST_ENTRIES,
    MOST_WAITING,
    EventQueue,
    Gone,
    PlaceEvents,
    Stored,
)
from kvpact.index.key_table import Names
from kvpact.metrics import Metrics


def names(count: int, first: int = 1) -> Names:
    return np.arange(first, first + count, dtype=np.uint64).reshape(-1, 1)


class Prompt:
    def names(self, first: int, end: int) -> Names:
        return names(end - first, 1 + first)


def blocks(entries: list[Stored | Gone]) -> int:
    return sum(len(entry.names) for entry in entries)


def test_a_step_takes_so_many_blocks_and_the_rest_waits_in_order() -> None:
    metrics = Metrics()
    queue = EventQueue(metrics)
    place = PlaceEvents(queue, MEMORY_PLACE)
    assert place.stored(Prompt(), 3, names(MOST_BLOCKS + 10)) == MOST_BLOCKS + 10
    place.gone(names(MOST_BLOCKS, 5))
    (first,) = queue.take()
    assert isinstance(first, Stored)
    assert (len(first.names), first.first) == (MOST_BLOCKS, 3)
    rest, gone = queue.take()
    assert isinstance(rest, Stored)
    assert (rest.first, rest.names[:, 0].tolist()) == (3 + MOST_BLOCKS, [*range(MOST_BLOCKS + 1, MOST_BLOCKS + 11)])
    assert isinstance(gone, Gone)
    assert blocks([rest, gone]) == MOST_BLOCKS
    assert blocks(queue.take()) == 10
    assert queue.take() == []
    assert metrics.snapshot()["events_sent"] == 2 * MOST_BLOCKS + 10


def test_stores_beyond_the_bound_are_dropped_and_counted_and_removals_never() -> None:
    metrics = Metrics()
    queue = EventQueue(metrics)
    place = PlaceEvents(queue, MEMORY_PLACE)
    assert place.stored(Prompt(), 0, names(MOST_WAITING - 5)) == MOST_WAITING - 5
    for _ in range(3):
        place.gone(names(MOST_WAITING))
    assert place.stored(Prompt(), 0, names(20)) == 5
    assert place.stored(Prompt(), 0, names(20)) == 0
    assert metrics.snapshot()["events_late"] == 35
    taken = []
    while found := queue.take():
        taken += found
    assert sum(len(entry.names) for entry in taken if isinstance(entry, Gone)) == 3 * MOST_WAITING
    assert place.stored(Prompt(), 0, names(20)) == 20


def test_a_step_takes_so_many_entries() -> None:
    queue = EventQueue(Metrics())
    for _ in range(MOST_ENTRIES + 1):
        queue.stored(Stored(MEMORY_PLACE, names(1), Prompt(), 0))
    assert len(queue.take()) == MOST_ENTRIES
    assert len(queue.take()) == 1


def test_what_waits_is_dropped_when_routers_have_forgotten_everything() -> None:
    queue = EventQueue(Metrics())
    place = PlaceEvents(queue, MEMORY_PLACE)
    place.stored(Prompt(), 0, names(MOST_WAITING))
    place.gone(names(3))
    queue.clear()
    assert queue.take() == []
    assert place.stored(Prompt(), 0, names(20)) == 20
