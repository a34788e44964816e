"""The calls into NVIDIA's driver: argument layouts, flags, errors, against a library compiled from NVIDIA's header."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvpact.errors import ConfigError, PactViolation
from kvpact.worker.cuda import driver as driver_module
from kvpact.worker.cuda.driver import MAX_BATCH_ENTRIES, AccessOrder, CudaDriver, CudaError

free_driver = importlib.import_module("kvpact.torch_cuda.doctor.free_driver")

SOURCE = Path(__file__).with_name("stand_in_libcuda.c")


def headers() -> Path | None:
    """The folder of NVIDIA's cuda.h, which Triton's package brings."""
    triton = importlib.util.find_spec("triton")
    found = [Path(place) / "backends/nvidia/include" for place in (triton and triton.submodule_search_locations) or ()]
    return next((folder for folder in found if (folder / "cuda.h").exists()), None)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, compiled."""
    folder, compiler = headers(), shutil.which("gcc")
    if folder is None or compiler is None:
        pytest.skip("needs gcc and the cuda.h of Triton's package")
    built = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    subprocess.run(
        [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-I", folder, "-o", built, SOURCE], check=True, timeout=60
    )
    return built


class StandIn:
    """What the library was told, and how it is to behave."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.stand_in_notes.restype = ctypes.c_char_p
        self._library.stand_in_context.restype = ctypes.c_size_t
        self.forget, self.is_old = self._library.stand_in_forget, self._library.stand_in_is_old
        self.capture_mode, self.context = self._library.stand_in_capture_mode, self._library.stand_in_context

    def calls(self) -> list[str]:
        """Since the last time."""
        notes = self._library.stand_in_notes().decode().splitlines()
        self.forget()
        return notes

    def fail(self, call: str, code: int) -> None:
        self._library.stand_in_fail(call.encode(), code)


@pytest.fixture
def stand_in(library: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(driver_module, "LIBRARY", str(library))
    one = StandIn(library)
    one.fail("", 0)
    one.is_old(0)
    one.forget()
    return one


@pytest.fixture
def driver(library: Path, stand_in: StandIn) -> CudaDriver:
    made = CudaDriver(1)
    made.attach()
    stand_in.forget()
    return made


def arrays(*columns: list[int]) -> list[np.ndarray]:
    return [np.array(column, np.uint64) for column in columns]


def test_the_device_is_opened_once_and_each_thread_attaches_once(library: Path, stand_in: StandIn) -> None:
    driver = CudaDriver(1)
    assert stand_in.calls() == [
        "cuInit 0",
        "cuDeviceGet 1",
        "cuDevicePrimaryCtxRetain 71",
        "cuGetProcAddress cuMemcpyBatchAsync 12080 0",
    ]
    driver.attach()
    driver.attach()
    assert stand_in.calls() == ["cuCtxSetCurrent 192", "cuThreadExchangeStreamCaptureMode 2"]
    seen: list[tuple[int, int, int, int]] = []

    def elsewhere() -> None:
        before = (stand_in.capture_mode(), stand_in.context())
        driver.attach()
        seen.append((*before, stand_in.capture_mode(), stand_in.context()))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(0, 0, 2, 192)], "the capture mode and the context belong to the thread"
    driver.close()
    assert stand_in.calls()[-1] == "cuDevicePrimaryCtxRelease 71"


def test_what_the_device_is(driver: CudaDriver) -> None:
    assert (driver.name, driver.version, driver.pci_bus_id) == ("Stand-in 71", 12080, "0000:6a:00.0")
    assert driver.attribute(91) == 1
    assert driver.attribute(90) == 0
    assert driver.copies_in_batches


def test_streams_events_and_pinning(driver: CudaDriver, stand_in: StandIn) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    driver.record(event, stream)
    driver.stream_wait(stream, event)
    assert driver.is_done(event)
    driver.synchronize(event)
    driver.register(4096, 1 << 33)
    driver.unregister(4096)
    driver.unregister(driver.allocate(8192))
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    assert stand_in.calls() == [
        "cuStreamCreateWithPriority 1 0",
        "cuEventCreate 3",
        f"cuEventRecord {event} {stream}",
        f"cuStreamWaitEvent {stream} {event} 0",
        f"cuEventQuery {event}",
        f"cuEventSynchronize {event}",
        f"cuMemHostRegister 4096 {1 << 33} 3",
        "cuMemHostUnregister 4096",
        "cuMemHostAlloc 8192 3",
        "cuMemFreeHost",
        "cuEventDestroy",
        "cuStreamDestroy",
    ]


@pytest.mark.parametrize("old", [False, True], ids=["batches", "one by one"])
def test_copies_arrive_in_batches_or_one_by_one(library: Path, stand_in: StandIn, old: bool) -> None:
    stand_in.is_old(old)
    driver = CudaDriver(0)
    assert driver.copies_in_batches is not old
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    here, there = source.ctypes.data, target.ctypes.data
    stand_in.forget()
    copies = arrays([there + 200, there], [here, here + 10], [16, 100])
    driver.copy_batch(*copies, AccessOrder.ANY, stream=7)
    assert (target[200:216] == source[:16]).all()
    assert (target[:100] == source[10:110]).all()
    assert not target[100:200].any()
    each = [f"cuMemcpyAsync {to} {of} {size} 7" for to, of, size in zip(*(one.tolist() for one in copies), strict=True)]
    batch = ["cuMemcpyBatchAsync 2 order=3 flags=0 hints=0,0,0,0 indexes=0,1 7"]
    assert stand_in.calls() == (each if old else batch)
    driver.copy_batch(*copies, AccessOrder.STREAM, stream=7)
    assert stand_in.calls() == (each if old else [batch[0].replace("order=3", "order=1")])
    driver.copy_batch(*arrays([], [], []), AccessOrder.STREAM, stream=7)
    assert stand_in.calls() == [], "a batch of none is no call: the driver would refuse it"


def test_an_examined_driver_does_what_kvpact_never_asks(library: Path, stand_in: StandIn) -> None:
    driver = free_driver.FreeDriver(1)
    stand_in.forget()
    driver.attach_strictly()
    assert stand_in.calls() == [f"cuCtxSetCurrent {0xC0}"]
    count = MAX_BATCH_ENTRIES + 1
    source, target = np.arange(count, dtype=np.uint8), np.zeros(count, np.uint8)
    places = [memory.ctypes.data + np.arange(count, dtype=np.uint64) for memory in (target, source)]
    driver.copy_long_batch(*places, np.ones(count, np.uint64), 9)
    assert (target == source).all()
    assert "cuMemcpyBatchAsync" in stand_in.calls()[0]
    stand_in.fail("cuMemcpyBatchAsync", 719)
    with pytest.raises(CudaError, match="719"):
        driver.copy_long_batch(*places, np.ones(count, np.uint64), 9)


def test_batches_that_the_driver_would_not_survive_are_refused(driver: CudaDriver, stand_in: StandIn) -> None:
    many = arrays(*[[1] * (MAX_BATCH_ENTRIES + 1)] * 3)
    with pytest.raises(PactViolation, match="at most 4096"):
        driver.copy_batch(*many, AccessOrder.ANY, stream=7)
    with pytest.raises(PactViolation, match="stream 0"):
        driver.copy_batch(*arrays([1], [1], [1]), AccessOrder.ANY, stream=0)
    with pytest.raises(PactViolation, match="2 targets"):
        driver.copy_batch(*arrays([1, 2], [1], [1]), AccessOrder.ANY, stream=7)
    assert stand_in.calls() == []


FAILING: dict[str, Callable[[CudaDriver], object]] = {
    "cuCtxSetCurrent": lambda driver: on_a_new_thread(driver.attach),
    "cuThreadExchangeStreamCaptureMode": lambda driver: on_a_new_thread(driver.attach),
    "cuStreamCreateWithPriority": lambda driver: driver.create_stream(),
    "cuEventCreate": lambda driver: driver.create_event(),
    "cuEventRecord": lambda driver: driver.record(1, 2),
    "cuEventQuery": lambda driver: driver.is_done(1),
    "cuEventSynchronize": lambda driver: driver.synchronize(1),
    "cuStreamWaitEvent": lambda driver: driver.stream_wait(1, 2),
    "cuMemHostRegister": lambda driver: driver.register(4096, 4096),
    "cuMemHostUnregister": lambda driver: driver.unregister(4096),
    "cuMemHostAlloc": lambda driver: driver.allocate(4096),
    "cuMemFreeHost": lambda driver: driver.unregister(driver.allocate(4096)),
    "cuMemcpyBatchAsync": lambda driver: driver.copy_batch(*arrays([1], [1], [1]), AccessOrder.ANY, 7),
}


def on_a_new_thread(call: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except CudaError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


@pytest.mark.parametrize("call", FAILING)
def test_an_error_is_raised_with_its_name(call: str, driver: CudaDriver, stand_in: StandIn) -> None:
    stand_in.fail(call, 700)
    with pytest.raises(
        CudaError, match=rf"{call}.* CUDA error 700 \(CUDA_ERROR_ILLEGAL_ADDRESS\): an illegal"
    ) as raised:
        FAILING[call](driver)
    assert raised.value.code == 700


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_calls_nothing_and_the_parent_goes_on(driver: CudaDriver, stand_in: StandIn) -> None:
    child = os.fork()
    if not child:
        try:
            refusals = 0
            for call in FAILING.values():
                with contextlib.suppress(CudaError):
                    call(driver)
                    refusals -= 1
                refusals += 1
            with pytest.raises(CudaError, match=r"error 3 .*this process was forked"):
                driver.unregister(4096)
            driver.close()
            os._exit(0 if refusals == len(FAILING) and stand_in.calls() == [] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    driver.register(4096, 4096)
    assert stand_in.calls() == ["cuMemHostRegister 4096 4096 3"]


def test_an_event_that_is_not_done_is_no_error(driver: CudaDriver, stand_in: StandIn) -> None:
    stand_in.fail("cuEventQuery", 600)
    assert not driver.is_done(5)


def test_an_unknown_error_has_its_number(driver: CudaDriver, stand_in: StandIn) -> None:
    stand_in.fail("cuEventRecord", 999)
    with pytest.raises(CudaError, match=r"CUDA error 999 \(unknown\)"):
        driver.record(1, 2)


def test_a_machine_without_the_library_is_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    with pytest.raises(ConfigError, match=r"needs NVIDIA's driver library .*libcuda\.so\.1"):
        CudaDriver(0)


def test_importing_needs_neither_the_library_nor_torch() -> None:
    code = "import sys, kvpact.worker.cuda.driver; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
