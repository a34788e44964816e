"""Pinned slots: in the background, low ones first, in chunks of whole slots; what a limit leaves is used."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest

from at_the_end import at_the_end
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.extents import Extents
from kvpact.memory.prefault import HUGE_BYTES
from kvpact.worker.device import pinned
from kvpact.worker.device.pinned import PinnedSlots
from kvpact_testkit.device.played import PlayedDevice

SLOTS, SLOT_BYTES = 10, 8192


class Limited(PlayedDevice):
    """A device that pins so many bytes, and takes its time."""

    def __init__(self, most: int = 1 << 40, seconds: float = 0.0) -> None:
        super().__init__(1)
        self.most, self.seconds = most, seconds
        self.registered: list[tuple[int, int]] = []

    def register(self, address: int, num_bytes: int) -> bool:
        time.sleep(self.seconds)
        pinned = self.driver.pinned_bytes + num_bytes <= self.most and super().register(address, num_bytes)
        if pinned:
            self.registered.append((address, num_bytes))
        return pinned


def chunked(chunk_bytes: int, device: PlayedDevice, segment: ArenaSegment) -> PinnedSlots:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "CHUNK_BYTES", chunk_bytes)
        slots = PinnedSlots(device, segment)
    at_the_end(slots.close)
    return slots


@pytest.fixture
def segment() -> ArenaSegment:
    return opened(ArenaSegment.create(SLOTS, SLOT_BYTES))


def opened(segment: ArenaSegment) -> ArenaSegment:
    """The segment, to be closed with the test, when nothing of it is pinned any more."""
    at_the_end(segment.close)
    return segment


def test_low_slots_are_pinned_first_in_chunks_of_whole_slots(segment: ArenaSegment) -> None:
    device, told = Limited(), list[int]()
    slots = chunked(3 * SLOT_BYTES + 100, device, segment)
    assert (slots.chunk_bytes, slots.usable) == ([3 * SLOT_BYTES], 0)
    slots.start(told.append)
    assert slots.wait_for_first(5)
    assert told == [3, 6, 9, 10]
    start = segment.mapped_at
    assert device.registered == [
        (start, 3 * SLOT_BYTES),
        (start + 3 * SLOT_BYTES, 3 * SLOT_BYTES),
        (start + 6 * SLOT_BYTES, 3 * SLOT_BYTES),
        (start + 9 * SLOT_BYTES, SLOT_BYTES),
    ]
    slots.close()
    slots.close()
    assert device.driver.pinned_bytes == 0
    assert device.driver.violations == []


def test_classes_that_share_extents_are_pinned_extent_by_extent() -> None:
    segment = opened(ArenaSegment.create_extents(Extents(5, 3 * 4096, (4096, 3 * 4096)), 1))
    device, told = Limited(), list[int]()
    slots = chunked(6 * 4096, device, segment)
    slots.start(told.append)
    assert slots.wait_for_first(5)
    assert told == [2, 4, 5]
    sizes = [2 * 3 * 4096, 2 * 3 * 4096, 3 * 4096]
    assert [size for _, size in device.registered] == sizes, "memory of two classes was pinned twice"


def test_an_extent_that_is_too_large_is_pinned_in_several_chunks() -> None:
    segment = opened(ArenaSegment.create_extents(Extents(2, 5 * 4096, (4096, 5 * 4096)), 1))
    device, told = Limited(), list[int]()
    slots = chunked(2 * 4096, device, segment)
    slots.start(told.append)
    assert slots.wait_for_first(5)
    assert told == [0, 0, 1, 1, 2], "an extent is usable when all of it is pinned"
    assert [size for _, size in device.registered] == 5 * [2 * 4096]


def test_an_engine_waits_longer_for_the_extents_that_its_trial_needs() -> None:
    segment = opened(ArenaSegment.create_extents(Extents(8, 2 * 4096, (4096, 2 * 4096)), 1))
    slots = chunked(2 * 4096, Limited(seconds=0.05), segment)
    slots.start(lambda usable: None)
    assert not slots.wait_for_first(0.001)
    assert 3 <= slots.usable < 8, "three slots of the larger class"


def test_what_an_engine_has_waited_for_was_told(segment: ArenaSegment) -> None:
    """Else a start may find that no slot is usable, although all are pinned."""
    told = []

    def tell(usable: int) -> None:
        time.sleep(0.02)
        told.append(usable)

    slots = chunked(SLOTS * SLOT_BYTES, Limited(), segment)
    slots.start(tell)
    assert slots.wait_for_first(5)
    assert told == [SLOTS]


def test_pages_are_taken_before_the_driver_pins_them() -> None:
    """Else the driver stalls other calls while the kernel looks for memory."""
    segment = opened(ArenaSegment.create(4, HUGE_BYTES))
    taken: list[int] = []
    device = Limited()
    device.driver.before_call = lambda call: taken.append(os.fstat(segment.descriptor).st_blocks * 512)
    slots = chunked(2 * HUGE_BYTES, device, segment)
    slots.start(lambda usable: None)
    assert slots.wait_for_first(5)
    assert taken == [0, 2 * HUGE_BYTES, 4 * HUGE_BYTES], "before it is attached, and before each chunk"


def test_an_engine_waits_for_the_first_bytes_and_no_longer(
    segment: ArenaSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "FIRST_BYTES", 2 * SLOT_BYTES)
    slots = chunked(SLOT_BYTES, Limited(seconds=0.1), segment)
    slots.start(lambda usable: None)
    assert slots.wait_for_first(5)
    assert 2 <= slots.usable < SLOTS
    slots.close()
    late = chunked(SLOT_BYTES, Limited(seconds=0.3), segment)
    late.start(lambda usable: None)
    began = time.monotonic()
    assert not late.wait_for_first(0.05)
    assert time.monotonic() - began < 0.25


@pytest.mark.parametrize("most", [6, 8])
def test_a_containers_limit_leaves_what_it_allows_and_is_named(
    segment: ArenaSegment, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    device, told = Limited(most * SLOT_BYTES), list[int]()
    slots = chunked(2 * SLOT_BYTES, device, segment)
    with caplog.at_level(logging.WARNING):
        slots.start(told.append)
        assert slots.wait_for_first(5)
        assert not caplog.records
        assert slots.suffice()
    assert slots.usable == most
    assert (told or [0])[-1] == most
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"only {most * SLOT_BYTES >> 10}KiB of 80KiB can be pinned" in warning
    assert "cgroup" in warning
    slots.close()
    assert device.driver.violations == []


@pytest.mark.parametrize("most", [0, 4])
def test_less_than_half_is_not_enough_and_says_nothing(
    segment: ArenaSegment, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    slots = chunked(2 * SLOT_BYTES, Limited(most * SLOT_BYTES), segment)
    slots.start(lambda usable: None)
    assert slots.wait_for_first(5)
    assert not slots.suffice()
    assert not caplog.records


def test_a_limit_that_is_met_after_the_start_leaves_what_there_is(
    segment: ArenaSegment, caplog: pytest.LogCaptureFixture
) -> None:
    slots = chunked(2 * SLOT_BYTES, Limited(2 * SLOT_BYTES, seconds=0.05), segment)
    slots.start(lambda usable: None)
    assert not slots.wait_for_first(0.01)
    assert slots.suffice()
    assert slots.wait_for_first(5)
    slots.close()
    assert "only 16KiB of 80KiB can be pinned" in caplog.text


def test_processes_that_pin_the_same_pages_take_turns(segment: ArenaSegment) -> None:
    """Each has a driver and a mapping of its own; the lock is on the file that both have."""
    pinning, most = [], []

    class Counting(Limited):
        def register(self, address: int, num_bytes: int) -> bool:
            pinning.append(self)
            most.append(len(pinning))
            pinned = super().register(address, num_bytes)
            pinning.remove(self)
            return pinned

    other = opened(ArenaSegment.attach(segment.address()))
    both = [chunked(SLOT_BYTES, Counting(seconds=0.005), one) for one in (segment, other)]
    for slots in both:
        slots.start(lambda usable: None)
    assert all(slots.wait_for_first(10) for slots in both)
    assert max(most) == 1
    assert len(most) == 2 * SLOTS


def test_pinning_while_a_graph_is_captured_does_no_harm(segment: ArenaSegment) -> None:
    device = Limited()
    device.driver.capturing = True
    slots = chunked(SLOT_BYTES, device, segment)
    slots.start(lambda usable: None)
    assert slots.wait_for_first(5)
    assert device.driver.violations == []
    device.driver.capturing = False
    slots.close()
    assert threading.active_count() == 1 or device.driver.pinned_bytes == 0
