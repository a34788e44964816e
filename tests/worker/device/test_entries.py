"""From blocks and slots of any class to entries: where a slot is, what is joined, and what is cut at pinned borders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pytest

from device_beds import SIZED, memory_of
from kvpact.contract import SaveJob
from kvpact.errors import PactViolation
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.extents import Extents, slot_classes
from kvpact.memory.layout import PAGE_BYTES
from kvpact.worker.copy.base import group_classes
from kvpact.worker.device.entries import Entries, JobRuns
from kvpact.worker.paged import PagedKV

pytest.importorskip("torch")

LARGE, MIDDLE, SMALL = range(3)
"""KV cache groups: slots of 6 pages, 2 pages and 1."""


@pytest.fixture(scope="module")
def paged() -> PagedKV:
    return memory_of(*SIZED)[1]


@pytest.fixture(params=[6, 7], ids=["nothing is lost", "a page is lost"])
def segment(request: pytest.FixtureRequest, paged: PagedKV) -> Iterator[ArenaSegment]:
    classes = slot_classes([one.rank_slot_bytes for one in paged.layouts], ranks_differ=False)[1]
    made = ArenaSegment.create_extents(Extents(8, request.param * PAGE_BYTES, classes), 1)
    yield made
    made.close()


class Runs(JobRuns):
    """What copies blocks, in a segment of which so many pages are pinned together."""

    def __init__(self, paged: PagedKV, segment: ArenaSegment, pinned_pages: int) -> None:
        super().__init__(paged, segment, pinned_pages * PAGE_BYTES)

    def of(self, blocks: Sequence[int], slots: Sequence[int], group_id: int) -> Entries:
        return self.entries(group_id, *self.places(SaveJob(1, "r", 0, tuple(slots), tuple(blocks), group_id)))


def slots_of(paged: PagedKV, segment: ArenaSegment, group_id: int, count: int) -> list[int]:
    """The first ones."""
    return list(islice(group_classes(paged, segment.classes)[group_id].numbers(range(8)), count))


def bytes_of(entries: Entries) -> list[tuple[int, int]]:
    """(device address, host address) of every byte."""
    offsets = [np.arange(size) for size in entries.sizes.tolist()]
    return [
        (int(device) + byte, int(host) + byte)
        for device, host, some in zip(entries.device, entries.host, offsets, strict=True)
        for byte in some.tolist()
    ]


@pytest.mark.parametrize("group_id", [LARGE, MIDDLE, SMALL])
@pytest.mark.parametrize("pinned_extents", [1, 2])
def test_a_slot_is_where_the_segment_has_it(
    paged: PagedKV, segment: ArenaSegment, group_id: int, pinned_extents: int
) -> None:
    slots = slots_of(paged, segment, group_id, 5)[::-1]
    extent_pages = segment.classes[0].extent_bytes // PAGE_BYTES
    made = Runs(paged, segment, pinned_extents * extent_pages)
    entries = made.of([4, 9, 1, 6, 3], slots, group_id)
    first_layer = entries.host[:: len(entries) // 5]
    assert [int(at) - segment.mapped_at for at in first_layer] == [
        group_classes(paged, segment.classes)[group_id].start_of(slot) for slot in slots
    ]


def test_neighbours_join_within_what_is_pinned_together(paged: PagedKV, segment: ArenaSegment) -> None:
    slots = slots_of(paged, segment, MIDDLE, 12)
    extent_pages = segment.classes[0].extent_bytes // PAGE_BYTES
    sizes = Runs(paged, segment, 2 * extent_pages).of(range(12), slots, MIDDLE).sizes
    lost = extent_pages % 2
    assert sizes.tolist() == [3 * 2 * PAGE_BYTES] * 4 if lost else [6 * 2 * PAGE_BYTES] * 2


@pytest.mark.parametrize("group_id", [LARGE, MIDDLE, SMALL])
@pytest.mark.parametrize("pinned_pages", [1, 4, 5])
def test_a_run_across_a_pinned_border_is_cut_there(
    paged: PagedKV, segment: ArenaSegment, group_id: int, pinned_pages: int
) -> None:
    slots, blocks = slots_of(paged, segment, group_id, 8), range(8)
    whole = Runs(paged, segment, 8 * 7 * 6).of(blocks, slots, group_id)  # both sizes of extents
    cut = Runs(paged, segment, pinned_pages).of(blocks, slots, group_id)
    assert bytes_of(cut) == bytes_of(whole)
    starts = cut.host - segment.mapped_at
    border = pinned_pages * PAGE_BYTES
    assert (starts // border == (starts + cut.sizes - 1) // border).all()
    assert len(cut) <= len(whole) + int((starts % border == 0).sum()), "nothing is cut elsewhere"


def test_what_is_no_slot_of_the_groups_class_is_refused(paged: PagedKV, segment: ArenaSegment) -> None:
    made = Runs(paged, segment, segment.classes[0].extent_bytes // PAGE_BYTES)
    (large,), (middle,) = (slots_of(paged, segment, one, 1) for one in (LARGE, MIDDLE))
    made.of([0], [large], LARGE)
    for wrong, group_id in ((large + 1, LARGE), (middle + 3, MIDDLE), (middle, LARGE), (large, MIDDLE), (0, MIDDLE)):
        with pytest.raises(PactViolation, match="cannot be copied: there are"):
            made.of([0], [wrong], group_id)
    with pytest.raises(PactViolation, match="cannot be copied: there are"):
        made.of([0], [large + (8 << 24)], LARGE)
