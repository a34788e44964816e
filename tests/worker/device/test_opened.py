"""What must be true of a device before kvpact serves with it: pinned memory, as far as it goes, and a trial."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from device_beds import SIZED, SLOTS, Bed, pinned_bytes
from device_plays import Play
from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.memory import numa
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.memory.shared_slots import SharedSlots
from kvpact.worker.copy import transfer_engine_for
from kvpact.worker.device import opened as opened_module
from kvpact.worker.device import pinned
from kvpact.worker.device.opened import OpenedDevice
from kvpact.worker.round_trip import require_round_trip
from kvpact_testkit.device.hostile_driver import HostileError
from kvpact_testkit.device.played import PlayedDevice
from polling import until

ONE_CLASS_AND_SEVERAL = ("inside blocks", *SIZED)
"""Layouts by how many classes their slots have."""

CONFIG = load_config({}, {})


@pytest.fixture
def bed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    """Memory as on a GPU, in the layout of the parameter; the bed's own copies are the CPU's, and not used."""
    made = Bed(getattr(request, "param", "inside blocks"), None)
    monkeypatch.setattr(pinned, "CHUNK_BYTES", pinned_bytes(made.segment))
    made.paged = replace(made.paged, device_type="cuda")
    yield made
    made.device = None
    made.close()


class Limited(PlayedDevice):
    """A device that pins what lies in front of an address."""

    end = 1 << 62

    def register(self, address: int, num_bytes: int) -> bool:
        return address < self.end and super().register(address, num_bytes)


def device_of(bed: Bed, seed: int = 11) -> Limited:
    made = Limited(seed)
    made.map(*bed.paged.tensors)
    return made


def play(bed: Bed, device: PlayedDevice, engine: OpenedDevice, seed: int, steps: int = 25) -> list[str]:
    """The bed's memory under the copies that were opened."""
    bed.device = device
    bed.streams = {}
    found = Play(
        SimpleNamespace(
            paged=bed.paged,
            segment=bed.segment,
            engine=engine,
            finish=bed.finish,
            write=bed.write,
            read=bed.read,
            beside=bed.beside,
        ),
        seed,
    ).run(steps)
    bed.device = None
    return found + device.driver.violations


@pytest.mark.parametrize("bed", ONE_CLASS_AND_SEVERAL, indirect=True)
def test_what_is_opened_serves_and_leaves_nothing(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    device = device_of(bed)
    with caplog.at_level(logging.INFO):
        engine = OpenedDevice(CONFIG, bed.paged, bed.segment, device)
    assert "copies on a played device, host memory pinned" in caplog.text
    assert bed.segment.usable_slots == SLOTS
    assert play(bed, device, engine, 5) == []
    assert engine.close(10)
    assert device.driver.pinned_bytes == 0


@pytest.mark.parametrize(
    ("bed", "most"), [("inside blocks", 0), *((layout, 6) for layout in ONE_CLASS_AND_SEVERAL)], indirect=["bed"]
)
def test_where_most_memory_cannot_be_pinned_none_is_with_one_warning(
    bed: Bed, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    device = device_of(bed)
    device.end = bed.segment.mapped_at + most * bed.segment.rank_slot_bytes
    engine = OpenedDevice(CONFIG, bed.paged, bed.segment, device)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "cannot be pinned on a played device, so none is: copies to and from it are slower" in warning
    assert "cgroup" in warning
    assert bed.segment.usable_slots == SLOTS
    assert (device.pinned, device.driver.pinned_bytes) == (False, 0)
    assert play(bed, device, engine, 6) == []
    assert engine.close(10)


def test_pinning_goes_on_after_the_start_ahead_of_use(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not anything is used; what is not pinned is not handed out."""
    device, size = device_of(bed), bed.segment.rank_slot_bytes
    monkeypatch.setattr(pinned, "FIRST_BYTES", 3 * size)
    register, seen = device.register, []

    def slow(address: int, num_bytes: int) -> bool:
        seen.append((bed.segment.usable_slots, device.driver.pinned_bytes // size))
        time.sleep(0.02)
        return register(address, num_bytes)

    monkeypatch.setattr(device, "register", slow)
    engine = OpenedDevice(CONFIG, bed.paged, bed.segment, device)
    assert 3 <= bed.segment.usable_slots < SLOTS
    until(lambda: bed.segment.usable_slots >= SLOTS)
    assert len(seen) > 3
    assert all(usable <= pinned for usable, pinned in seen)
    assert device.driver.pinned_bytes == SLOTS * size
    assert engine.close(10)


def test_ranks_with_the_same_slots_try_their_copies_in_turns_and_one_may_be_unable_to_pin(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial writes to slots that all of them have: at the same time each would find the others' bytes."""
    ranks = [bed.segment, *(SharedSlots.attach(bed.segment.address()) for _ in range(2))]
    trying: list[object] = []

    def counted(*arguments: Any) -> None:
        trying.append(arguments)
        assert len(trying) == 1
        time.sleep(0.02)
        require_round_trip(*arguments)
        trying.remove(arguments)

    monkeypatch.setattr(opened_module, "require_round_trip", counted)
    opened, closing = threading.Barrier(4), threading.Barrier(4)
    devices: list[Limited] = []

    def serve(rank: int) -> bool:
        devices.append(device := device_of(bed, rank))
        if rank == 2:
            device.end = 0
        engine = OpenedDevice(CONFIG, bed.paged, ranks[rank], device)
        opened.wait(20)
        closing.wait(20)
        return engine.close(10)

    with ThreadPoolExecutor(3) as threads:
        serving = [threads.submit(serve, rank) for rank in range(3)]
        opened.wait(20)
        arena = Arena([bed.segment], [ArenaSegment.attach(one.address()) for one in ranks[1:]])
        assert [one.usable_slots for one in ranks] == [SLOTS] * 3
        assert arena.usable_slots == SLOTS
        assert sorted(device.pinned for device in devices) == [False, True, True]
        closing.wait(20)
        assert all(one.result() for one in serving)
    assert [device.driver.violations for device in devices] == [[]] * 3
    for one in ranks[1:]:
        one.close()


def test_memory_is_taken_when_its_node_is_known(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the kernel refuses, one line says so."""
    asked: list[tuple[int, int, int]] = []

    def prefer(node: int, address: int, num_bytes: int) -> None:
        asked.append((node, address - bed.segment.mapped_at, os.fstat(bed.segment.descriptor).st_blocks))
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(numa, "prefer", prefer)
    with caplog.at_level(logging.INFO):
        engine = OpenedDevice(CONFIG, bed.paged, bed.segment, device_of(bed), node=3)
    assert asked == [(3, 0, 0)], "before any page was taken"
    assert os.fstat(bed.segment.descriptor).st_blocks > 0
    assert len([line for line in caplog.messages if "the device's node 3: [Errno 1]" in line]) == 1
    assert engine.close(10)


@pytest.mark.parametrize(("asked", "on_gpu", "on_cpu"), [("auto", 0, 1), ("on", 1, 1), ("off", 0, 0)])
def test_huge_pages_are_an_option_on_a_gpu(bed: Bed, asked: str, on_gpu: bool, on_cpu: bool) -> None:
    config = CONFIG.model_copy(update={"huge_pages": asked})
    engine = OpenedDevice(config, bed.paged, bed.segment, device_of(bed))
    assert bed.segment.pages.huge == on_gpu
    assert engine.close(5)
    elsewhere = ArenaSegment.create(1, bed.segment.rank_slot_bytes)
    of_cpu = transfer_engine_for(config, replace(bed.paged, device_type="cpu"), elsewhere, 0, {})
    assert elsewhere.pages.huge == on_cpu
    assert of_cpu.close(5)
    elsewhere.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_forked_from_an_engine_leaves_the_parent_what_it_has(bed: Bed) -> None:
    device = device_of(bed)
    engine = OpenedDevice(CONFIG, bed.paged, bed.segment, device)
    pinned_bytes = device.driver.pinned_bytes
    child = os.fork()
    if not child:
        calls: list[str] = []
        device.driver.before_call = calls.append
        try:
            ended = engine.close(1)
            bed.segment.close()
            os._exit(0 if ended and not calls else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert device.driver.pinned_bytes == pinned_bytes > 0
    assert play(bed, device, engine, 7, steps=10) == []
    assert engine.close(10)
    assert device.driver.pinned_bytes == 0


def test_a_device_whose_copies_are_wrong_is_refused(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of(bed)
    monkeypatch.setattr(device.driver, "copy_batch", lambda *_: None)
    with pytest.raises(ConfigError, match="came back with other bytes"):
        OpenedDevice(CONFIG, bed.paged, bed.segment, device)
    assert device.driver.pinned_bytes == 0


def running() -> set[threading.Thread]:
    """All threads but the one that takes the segment's pages, which ends with the segment."""
    return {thread for thread in threading.enumerate() if thread.name != "kvpact-prefault"}


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_whatever_call_is_refused_at_the_start_nothing_is_left(bed: Bed, for_good: bool) -> None:
    """One call after the other is refused: the start is refused with one message, or goes on without."""
    outcomes, threads = [], running()
    for refused in (*range(1, 12), *range(12, 60, 8)):
        calls, names = itertools.count(), list[str]()
        device = device_of(bed)

        def refuse(
            call: str, refused: int = refused, calls: Any = calls, names: list[str] = names, device: Limited = device
        ) -> None:
            if call != "attach" and next(calls) == refused:
                names.append(call)
                if for_good:
                    device.driver.lose()
                raise HostileError(f"{call}: the device does not like this")

        device.driver.before_call = refuse
        try:
            assert OpenedDevice(CONFIG, bed.paged, bed.segment, device).close(5)
            outcomes.append("opened")
        except ConfigError as error:
            outcomes.append(str(error))
        assert device.driver.pinned_bytes == 0 or for_good or names == ["unregister"]
        assert running() == threads, refused
    assert sum("the device does not like this" in outcome for outcome in outcomes) > 4
    assert not {one for one in outcomes if one != "opened" and "does not like" not in one and "was lost" not in one}
