"""What must be true of a GPU before kvpact serves with it: the user's word, CUDA, and a trial of the copies."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from device_beds import BLOCKS, SIZED, SLOTS, Bed, pinned_bytes
from kvpact.config import KvpactConfig, load_config
from kvpact.errors import ConfigError
from kvpact.memory import numa
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.memory.shared_slots import SharedSlots
from kvpact.testkit.device.hostile_driver import COMPUTING_STREAM, HostileDriver
from kvpact.testkit.device.plays import Play
from kvpact.worker.copy import transfer_engine_for
from kvpact.worker.cuda import pinned
from kvpact.worker.cuda.driver import CudaError
from kvpact.worker.paged import PagedKV
from kvpact.worker.worker import CacheWorker, RankInfo

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
device_module = pytest.importorskip("kvpact.torch_cuda.device")
open_cuda = device_module.open_cuda

ONE_CLASS_AND_SEVERAL = ("inside blocks", *SIZED)
"""Layouts by how many classes their slots have."""

TRUSTING = load_config({"gpu": "unproven"}, {})


class PlayedCuda(HostileDriver):
    """The hostile device behind the names that the real driver has."""

    kv_memory: ClassVar[list[tuple[int, int]]] = []
    opened: ClassVar[list[PlayedCuda]] = []
    refuse: ClassVar[Callable[[str], object]] = str
    """See `HostileDriver.before_call`."""
    name, version, copies_in_batches, pci_bus_id = "Played", 12080, True, "0000:65:00.0"

    def __init__(self, device: int) -> None:
        super().__init__(device + 11)
        self.device, self.before_call = device, self.refuse
        self.closed = False
        self.reads_host_memory = 1
        for memory in PlayedCuda.kv_memory:
            self.add_device_memory(*memory)
        PlayedCuda.opened.append(self)

    def attribute(self, number: int) -> int:
        return self.reads_host_memory

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    """Memory as on a GPU, in the layout of the parameter; the bed's own copies are the CPU's, and not used."""
    made = Bed(getattr(request, "param", "inside blocks"), None)
    storages = (tensor.untyped_storage() for tensor in made.tensors.values())
    monkeypatch.setattr(PlayedCuda, "kv_memory", [*{(one.data_ptr(), one.nbytes()) for one in storages}])
    monkeypatch.setattr(PlayedCuda, "opened", [])
    monkeypatch.setattr(device_module, "CudaDriver", PlayedCuda)
    monkeypatch.setattr(
        device_module.torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=COMPUTING_STREAM)
    )
    monkeypatch.setattr(device_module, "kernel_for", lambda driver: None)
    monkeypatch.setattr(pinned, "CHUNK_BYTES", pinned_bytes(made.segment))
    made.paged = replace(made.paged, device_type="cuda", tensors=(SimpleNamespace(device=torch.device("cuda:2")),))
    yield made
    made.close()


def played(bed: Bed, opened: Any) -> Any:
    """The bed's memory under the copies that were opened."""
    return SimpleNamespace(
        paged=bed.paged,
        segment=bed.segment,
        engine=opened,
        finish=bed.finish,
        write=bed.write,
        read=bed.read,
        beside=bed.beside,
    )


def test_an_engine_on_a_gpu_is_refused_until_the_user_says_otherwise(bed: Bed) -> None:
    with pytest.raises(ConfigError, match=r'have run on no GPU yet.*set "gpu": "unproven"'):
        open_cuda(load_config({}, {}), bed.paged, bed.segment, 0)
    assert PlayedCuda.opened == []


def test_rocm_and_others_are_refused_by_name(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match=r"ROCm.*HIP's counterpart of kvpact\.worker\.cuda\.driver"):
        open_cuda(TRUSTING, bed.paged, bed.segment, 0)
    elsewhere = replace(bed.paged, device_type="xpu")
    with pytest.raises(ConfigError, match="device 'xpu' cannot be copied by this release; supported: 'cpu', 'cuda'"):
        transfer_engine_for(TRUSTING, elsewhere, bed.segment, 0, {"cuda": open_cuda})
    assert PlayedCuda.opened == []


@pytest.mark.parametrize("bed", ONE_CLASS_AND_SEVERAL, indirect=True)
def test_what_is_opened_serves_and_leaves_nothing(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        opened = transfer_engine_for(TRUSTING, bed.paged, bed.segment, 0, {"cuda": open_cuda})
    (driver,) = PlayedCuda.opened
    assert driver.device == 2
    assert "rank 0: copies on Played, driver for CUDA 12080, in batches" in caplog.text
    assert bed.segment.usable_slots == SLOTS
    bed.driver = driver
    try:
        assert Play(played(bed, opened), 5).run(25) == []
        assert opened.close(10)
    finally:
        bed.driver = None
    assert driver.closed
    assert driver.pinned_bytes == 0
    assert driver.violations == []


@pytest.mark.parametrize(
    ("bed", "most"), [("inside blocks", 0), *((layout, 6) for layout in ONE_CLASS_AND_SEVERAL)], indirect=["bed"]
)
def test_where_memory_cannot_be_pinned_a_buffer_serves_with_one_warning(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    pin = PlayedCuda.register

    def register(self: PlayedCuda, address: int, num_bytes: int) -> None:
        if address >= bed.segment.mapped_at + most * bed.segment.rank_slot_bytes and num_bytes < 1 << 20:
            raise CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        pin(self, address, num_bytes)

    monkeypatch.setattr(PlayedCuda, "register", register)
    opened = open_cuda(TRUSTING, bed.paged, bed.segment, 0)
    (driver,) = PlayedCuda.opened
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "cannot be pinned (cuMemHostRegister failed with CUDA error 2" in warning
    assert "a pinned buffer of 48MiB" in warning
    assert bed.segment.usable_slots == SLOTS
    assert driver.pinned_bytes == 48 << 20
    bed.driver = driver
    assert Play(played(bed, opened), 6).run(25) == []
    bed.driver = None
    assert opened.close(10)
    assert driver.pinned_bytes == 0
    assert driver.violations == []


def test_ranks_with_the_same_slots_try_their_copies_in_turns_and_one_may_need_a_buffer(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial writes to slots that all of them have: at the same time each would find the others' bytes."""
    ranks = [bed.segment, *(SharedSlots.attach(bed.segment.address()) for _ in range(2))]
    last = ranks[-1]
    pin, trial = PlayedCuda.register, device_module.require_round_trip
    trying: list[object] = []

    def register(self: PlayedCuda, address: int, num_bytes: int) -> None:
        if last.mapped_at <= address < last.mapped_at + len(last.memory):
            raise CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        pin(self, address, num_bytes)

    def counted(*arguments: Any) -> None:
        trying.append(arguments)
        assert len(trying) == 1
        time.sleep(0.02)
        trial(*arguments)
        trying.remove(arguments)

    monkeypatch.setattr(PlayedCuda, "register", register)
    monkeypatch.setattr(device_module, "require_round_trip", counted)
    opened, closing = threading.Barrier(4), threading.Barrier(4)

    def serve(rank: int) -> bool:
        engine = open_cuda(TRUSTING, bed.paged, ranks[rank], rank)
        opened.wait(20)
        closing.wait(20)
        return bool(engine.close(10))

    with ThreadPoolExecutor(3) as threads:
        serving = [threads.submit(serve, rank) for rank in range(3)]
        opened.wait(20)
        arena = Arena([bed.segment], [ArenaSegment.attach(one.address()) for one in ranks[1:]])
        assert [one.usable_slots for one in ranks] == [SLOTS] * 3
        assert arena.usable_slots == SLOTS
        assert sorted(driver.pinned_bytes > 16 << 20 for driver in PlayedCuda.opened) == [False, False, True]
        closing.wait(20)
        assert all(one.result() for one in serving)
    assert [driver.violations for driver in PlayedCuda.opened] == [[]] * 3
    for one in ranks[1:]:
        one.close()


def test_memory_is_taken_when_its_node_is_known(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker's own order, up to the device; where the kernel refuses, one line says so."""
    asked: list[tuple[int, int, int, int]] = []

    def prefer(node: int, address: int, num_bytes: int) -> None:
        (segment,) = segments
        asked.append((node, address - segment.mapped_at, num_bytes, os.fstat(segment.descriptor).st_blocks))
        raise PermissionError(1, "Operation not permitted")

    def opener(config: KvpactConfig, paged: PagedKV, segment: ArenaSegment, rank: int) -> Any:
        segments.append(segment)
        return open_cuda(config, paged, segment, rank)

    segments: list[ArenaSegment] = []
    monkeypatch.setattr(PagedKV, "from_tensors", lambda *_: bed.paged)
    monkeypatch.setattr(device_module, "near_node", {"0000:65:00.0": 3}.get)
    monkeypatch.setattr(numa, "prefer", prefer)
    config = TRUSTING.model_copy(update={"memory": bed.segment.num_slots * bed.segment.rank_slot_bytes})
    worker = CacheWorker(config, RankInfo(0, 1, BLOCKS), {"cuda": opener})
    with caplog.at_level(logging.INFO):
        worker.register_kv_caches(bed.tensors)
    assert asked == [(3, 0, len(segments[0].memory), 0)], "before any page was taken"
    assert os.fstat(segments[0].descriptor).st_blocks > 0
    assert len([line for line in caplog.messages if "the device's, 3: [Errno 1]" in line]) == 1
    worker.shutdown()


@pytest.mark.parametrize(("asked", "on_gpu", "on_cpu"), [("auto", 0, 1), ("on", 1, 1), ("off", 0, 0)])
def test_huge_pages_are_an_option_on_a_gpu(bed: Bed, asked: str, on_gpu: bool, on_cpu: bool) -> None:
    config = TRUSTING.model_copy(update={"huge_pages": asked})
    opened = open_cuda(config, bed.paged, bed.segment, 0)
    assert bed.segment.pages.huge == on_gpu
    assert opened.close(5)
    elsewhere = ArenaSegment.create(1, bed.segment.rank_slot_bytes)
    of_cpu = transfer_engine_for(config, replace(bed.paged, device_type="cpu"), elsewhere, 0, {})
    assert elsewhere.pages.huge == on_cpu
    assert of_cpu.close(5)
    elsewhere.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_forked_from_an_engine_leaves_the_parent_what_it_has(bed: Bed) -> None:
    opened = open_cuda(TRUSTING, bed.paged, bed.segment, 0)
    (driver,) = PlayedCuda.opened
    pinned_bytes = driver.pinned_bytes
    child = os.fork()
    if not child:
        calls: list[str] = []
        driver.before_call = calls.append
        try:
            ended = opened.close(1)
            bed.segment.close()
            os._exit(0 if ended and not calls and not driver.closed else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert driver.pinned_bytes == pinned_bytes > 0
    bed.driver = driver
    assert Play(played(bed, opened), 7).run(10) == []
    bed.driver = None
    assert opened.close(10)
    assert driver.pinned_bytes == 0


def test_a_device_whose_copies_are_wrong_is_refused(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedCuda, "synchronize", lambda self, event: None)
    monkeypatch.setattr(PlayedCuda, "launch_copies", lambda self, *_: None)
    with pytest.raises(ConfigError, match="came back with other bytes"):
        open_cuda(TRUSTING, bed.paged, bed.segment, 0)
    assert PlayedCuda.opened[0].pinned_bytes == 0


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_whatever_call_is_refused_at_the_start_nothing_is_left(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    """One call after the other is refused: the start is refused with one message, or goes on without."""
    outcomes, threads = [], set(threading.enumerate())
    for refused in (*range(-2, 12), *range(12, 60, 8)):
        calls = itertools.count()

        def refuse(call: str, refused: int = refused, calls: Any = calls) -> None:
            if next(calls) == refused:
                if for_good:
                    PlayedCuda.opened[0].lose()
                raise CudaError(call, 719, "CUDA_ERROR_LAUNCH_FAILED", "the device does not like this")

        monkeypatch.setattr(PlayedCuda, "refuse", staticmethod(refuse))
        PlayedCuda.opened.clear()
        try:
            assert open_cuda(TRUSTING, bed.paged, bed.segment, 0).close(5)
            outcomes.append("opened")
        except ConfigError as error:
            outcomes.append(str(error))
        (driver,) = PlayedCuda.opened
        assert driver.closed, refused
        assert driver.pinned_bytes == 0 or for_good
        assert set(threading.enumerate()) == threads, refused
    assert "opened" in outcomes
    assert sum("the device does not like this" in outcome for outcome in outcomes) > 4
    assert not {outcome for outcome in outcomes if outcome != "opened" and "error 7" not in outcome}


def test_the_kernel_is_used_where_it_can_read_the_hosts_memory(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    PlayedCuda.kv_memory = []
    driver: Any = PlayedCuda(0)
    assert type(device_module.kernel_for(driver)).__name__ == "KernelLoads"
    driver.reads_host_memory = 0
    assert device_module.kernel_for(driver) is None
    PlayedCuda.opened.clear()
