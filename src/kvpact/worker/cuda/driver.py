"""As much of the CUDA driver as copies need: contexts, streams, events, pinned host memory, batches of copies.

Owns the calls into libcuda.so.1, through ctypes; knows no pages, slots or jobs. Every call releases the interpreter's
lock. Importing this module needs neither a GPU nor the library; `CudaDriver` does.

Signatures: CUDA driver API 12.8 and 13 (docs.nvidia.com/cuda/cuda-driver-api).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvpact.errors import ConfigError, KvpactError, PactViolation

Addresses = npt.NDArray[np.uint64]

MAX_BATCH_ENTRIES: Final = 4096
"""Copies in one call. The driver has crashed at 51,828 of them (vllm#49276)."""

LIBRARY = "libcuda.so.1"

_NON_BLOCKING_STREAM: Final = 1
_EVENT_BLOCKING_SYNC: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_HOST_PORTABLE: Final = 1
_HOST_DEVICEMAP: Final = 2
_CAPTURE_RELAXED: Final = 2
_NOT_INITIALIZED: Final = 3
_NOT_READY: Final = 600
_BATCH_VERSION: Final = 12080
"""Of the symbol with nine arguments; 13000 has one fewer."""


class AccessOrder(IntEnum):
    """When a copy of a batch may read its source."""

    STREAM = 1
    """After all that its stream waits for."""
    ANY = 3
    """At any time, before or after the call returns: the source must not change until the copy is done."""


class CudaError(KvpactError):
    """A call of the driver failed. Most errors are sticky: every later call of the process fails like it."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call} failed with CUDA error {code} ({name}): {text}")
        self.call, self.code, self.name = call, code, name


class Driver(Protocol):
    """What copies ask of a device's driver. Streams and events are handles, as integers; 0 is none.

    Every method raises CudaError if the device refuses. A thread of kvpact's own calls `attach` before anything else;
    the engine's thread has the device already, and its capture mode is the engine's.
    """

    def attach(self) -> None:
        """Use the device on the calling thread; pinning and copying there does no harm to a graph capture elsewhere."""

    def create_stream(self) -> int:
        """A stream that waits for no other one by itself."""

    def create_event(self) -> int:
        """An event without timing, on which a thread waits asleep."""

    def destroy_stream(self, stream: int) -> None:
        """Work in it is finished first."""

    def destroy_event(self, event: int) -> None:
        """Streams that wait for it go on waiting."""

    def record(self, event: int, stream: int) -> None:
        """The event is done when all that is in the stream now is done."""

    def stream_wait(self, stream: int, event: int) -> None:
        """What is put into the stream from now on begins after the event's last record. The caller does not wait."""

    def is_done(self, event: int) -> bool:
        """Whether the event's last record is done."""

    def synchronize(self, event: int) -> None:
        """Wait, on the calling thread, for the event's last record."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory: whole pages. Copies read and write it only while it is registered."""

    def unregister(self, address: int) -> None:
        """Unpin what was registered from `address` on, or give back what was allocated there."""

    def allocate(self, num_bytes: int) -> int:
        """The address of new host memory that the driver has pinned. A limit on locked memory may not count it."""

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, order: AccessOrder, stream: int
    ) -> None:
        """Put copies into the stream, at most `MAX_BATCH_ENTRIES`; each is done in any order among them.

        `targets`, `sources` and `sizes`, in bytes, are contiguous arrays of the same length; they may be reused when
        the call returns.
        """


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes_v1`."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


_POINTER, _SIZE, _INT, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_DEVICE_POINTER = ctypes.c_uint64

SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_POINTER,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetName": (_POINTER, _INT, _INT),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuDeviceGetPCIBusId": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
    "cuStreamCreateWithPriority": (_POINTER, _UINT, _INT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _UINT),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventDestroy_v2": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventSynchronize": (_POINTER,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _UINT),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemHostAlloc": (_POINTER, _SIZE, _UINT),
    "cuMemFreeHost": (_POINTER,),
    "cuMemcpyAsync": (_DEVICE_POINTER, _DEVICE_POINTER, _SIZE, _POINTER),
    "cuGetErrorName": (_INT, _POINTER),
    "cuGetErrorString": (_INT, _POINTER),
    "cuGetProcAddress_v2": (ctypes.c_char_p, _POINTER, _INT, ctypes.c_uint64, _POINTER),
}
"""Symbol -> types of its arguments. All return a `CUresult`, an int."""

BATCH_SIGNATURE: Final = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER)
"""Of `cuMemcpyBatchAsync` in version 12.8."""

CAN_USE_HOST_POINTER: Final = 91
"""Device attribute: kernels read registered host memory at the address that the host has for it."""


_opened: Final[weakref.WeakSet[CudaDriver]] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """This process was forked from one that has devices: CUDA works in that one only, and what is pinned is its own."""
    for driver in _opened:
        driver.refuse_all()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class CudaDriver:
    """One device's driver. See `Driver`. In a process that is forked from this one, every call fails."""

    def __init__(self, device: int) -> None:
        """`device` counts those that the process sees. Raises ConfigError if there is no usable driver or device."""
        try:
            loaded = ctypes.CDLL(LIBRARY)
            self._functions = {name: _function(loaded, name, types) for name, types in SIGNATURES.items()}
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f"KV memory on a CUDA device needs NVIDIA's driver library {LIBRARY}, version 12.0 or later: {error}"
            ) from error
        self._library = loaded
        self.device = device
        self._call("cuInit", 0)
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._handle = handle.value
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle)
        self._context = context.value
        self._attached = threading.local()
        self._batch = self._find_batch()
        self._allocated: set[int] = set()
        """Host memory that is the driver's own."""
        self._forked = False
        _opened.add(self)

    def refuse_all(self) -> None:
        """Let every call fail from now on, without a call into the library."""
        self._forked = True
        self._functions = dict.fromkeys(SIGNATURES, _refused)
        self._batch = _refused

    def _call(self, name: str, *arguments: object) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, call: str, code: int) -> CudaError:
        if self._forked:
            return CudaError(call, code, "CUDA_ERROR_NOT_INITIALIZED", "this process was forked from an engine")
        said = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            known = self._functions[name](code, ctypes.byref(text)) == 0 and text.value is not None
            said.append(text.value.decode(errors="replace") if known and text.value is not None else "unknown")
        return CudaError(call, code, *said)

    def _find_batch(self) -> Callable[..., int] | None:
        """`cuMemcpyBatchAsync`, or None: drivers before 12.8 do not have it."""
        pointer, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._functions["cuGetProcAddress_v2"](
            b"cuMemcpyBatchAsync", ctypes.byref(pointer), _BATCH_VERSION, 0, ctypes.byref(status)
        )
        if code or status.value or not pointer.value:
            return None
        return ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_SIGNATURE)(pointer.value)

    @property
    def copies_in_batches(self) -> bool:
        """Whether the driver takes many copies in one call."""
        return self._batch is not None

    @property
    def version(self) -> int:
        """Of CUDA that the driver supports: 12080 is 12.8."""
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value

    @property
    def name(self) -> str:
        """The device's name."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._handle)
        return text.value.decode()

    @property
    def pci_bus_id(self) -> str:
        """As in /sys/bus/pci/devices: "0000:65:00.0"."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._handle)
        return text.value.decode().lower()

    def attribute(self, number: int) -> int:
        """A `CUdevice_attribute` of the device."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._handle)
        return value.value

    def attach(self) -> None:
        """See `Driver`. Costs nothing from the second call of a thread on."""
        if getattr(self._attached, "done", False):
            return
        self._call("cuCtxSetCurrent", self._context)
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        self._attached.done = True

    def create_stream(self) -> int:
        """See `Driver`. The default priority: others do not change the order of copies (vllm#31341)."""
        return self._created("cuStreamCreateWithPriority", _NON_BLOCKING_STREAM, 0)

    def create_event(self) -> int:
        """See `Driver`."""
        return self._created("cuEventCreate", _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)

    def _created(self, name: str, *arguments: int) -> int:
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *arguments)
        if handle.value is None:
            raise PactViolation(f"{name} succeeded and gave no handle")
        return handle.value

    def destroy_stream(self, stream: int) -> None:
        """See `Driver`."""
        self._call("cuStreamDestroy_v2", stream)

    def destroy_event(self, event: int) -> None:
        """See `Driver`."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """See `Driver`."""
        self._call("cuEventRecord", event, stream)

    def stream_wait(self, stream: int, event: int) -> None:
        """See `Driver`."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int) -> bool:
        """See `Driver`."""
        code = self._functions["cuEventQuery"](event)
        if code not in (0, _NOT_READY):
            raise self._error("cuEventQuery", code)
        return code == 0

    def synchronize(self, event: int) -> None:
        """See `Driver`."""
        self._call("cuEventSynchronize", event)

    def register(self, address: int, num_bytes: int) -> None:
        """See `Driver`. Kernels can read it too, in every context."""
        self._call("cuMemHostRegister_v2", address, num_bytes, _HOST_PORTABLE | _HOST_DEVICEMAP)

    def unregister(self, address: int) -> None:
        """See `Driver`."""
        if address in self._allocated:
            self._allocated.remove(address)
            self._call("cuMemFreeHost", address)
        else:
            self._call("cuMemHostUnregister", address)

    def allocate(self, num_bytes: int) -> int:
        """See `Driver`. Kernels can read it too, at the same address."""
        address = self._created("cuMemHostAlloc", num_bytes, _HOST_PORTABLE | _HOST_DEVICEMAP)
        self._allocated.add(address)
        return address

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, order: AccessOrder, stream: int
    ) -> None:
        """See `Driver`. One by one where the driver has no batches: such copies read their source in stream order."""
        count = len(sizes)
        if not len(targets) == len(sources) == count <= MAX_BATCH_ENTRIES or not stream:
            raise PactViolation(
                f"{len(targets)} targets, {len(sources)} sources and {count} sizes into stream {stream}: there must be "
                f"as many of each, at most {MAX_BATCH_ENTRIES}, and a stream of one's own"
            )
        if not count:
            return
        if self._batch is None:
            copy = self._functions["cuMemcpyAsync"]
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                if code := copy(target, source, size, stream):
                    raise self._error("cuMemcpyAsync", code)
            return
        self._copy_in_one_call(self._batch, targets, sources, sizes, order, stream)

    def _copy_in_one_call(
        self, batch: Callable[..., int], targets: Addresses, sources: Addresses, sizes: Addresses,
        order: AccessOrder, stream: int,
    ) -> None:  # fmt: skip
        attributes, first, failed = CopyAttributes(order=order), ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream,
        )  # fmt: skip
        if code:
            raise self._error(f"cuMemcpyBatchAsync, entry {failed.value} of {len(sizes)},", code)

    def close(self) -> None:
        """Give the device's context back. The engine's own use of it is counted apart."""
        with contextlib.suppress(CudaError):  # the device is lost, and the context with it
            self._call("cuDevicePrimaryCtxRelease_v2", self._handle)


def _refused(*_: object) -> int:
    return _NOT_INITIALIZED


def _function(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes, function.restype = types, ctypes.c_int
    return function  # type: ignore[no-any-return]
