"""vLLM's own copies between a device and host memory, on a device that is played.

Owns what that code is told: the platform's streams, torch's events, the copy call and its kernel, what is pinned, and
which tensors are the device's. The copies and the waits between them are those of a `HostileDriver`. For vLLM 0.32 and
later; what of kvpact calls the same runs on it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
import vllm.triton_utils
from torch.overrides import TorchFunctionMode
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu import gpu_worker, host_register, swap_blocks_triton

from kvpact.worker.device.base import MAX_BATCH_ENTRIES
from kvpact_testkit.device.played import PlayedDevice

NO_WORK: Final = {
    "__get__",
    "as_strided",
    "data_ptr",
    "dim",
    "element_size",
    "numel",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
    "view",
}
"""What of a tensor is known without a look at its memory."""

IS_CUDA: Final = torch.Tensor.is_cuda.__get__


class PlayedStream:
    """`torch.cuda.Stream`, as far as copies use it."""

    def __init__(self, device: PlayedDevice, number: int) -> None:
        self._device, self.number = device, number

    def wait_stream(self, other: PlayedStream) -> None:
        """Begin later work of this stream after all that the other stream has now, like torch."""
        self._device.stream_wait(self.number, self._device.record(other.number))

    def wait_event(self, event: PlayedEvent) -> None:
        """Begin later work of this stream after the event, like torch."""
        self._device.stream_wait(self.number, event.number)


class PlayedEvent:
    """`torch.Event`, as far as copies use it."""

    def __init__(self, device: PlayedDevice) -> None:
        self._driver = device.driver
        self.number = self._driver.create_event()
        self.done_at = 0.0

    def record(self, stream: PlayedStream) -> None:
        """Record the event in a stream, like torch, and note when it is done."""
        self._driver.launch(self._note_time, stream.number)
        self._driver.record(self.number, stream.number)

    def _note_time(self) -> None:
        self.done_at = time.monotonic()

    def query(self) -> bool:
        """Whether the event is done, like torch. Does not wait."""
        return self._driver.is_done(self.number)

    def synchronize(self) -> None:
        """Wait until the event is done, like torch."""
        self._driver.synchronize(self.number)

    def elapsed_time(self, end: PlayedEvent) -> float:
        """Milliseconds, as torch's method of this name."""
        return (end.done_at - self.done_at) * 1e3


class PlayedPlatform:
    """The calls of a platform, of torch and of vLLM that reach a device. One for each device."""

    def __init__(self, device: PlayedDevice) -> None:
        self.device = device
        self.kept: list[torch.Tensor] = []
        """Tensors whose memory is the device's, or pinned, as long as there is a device."""
        self.is_computing = False
        """Whether the device does what was launched: torch's calls are then its own."""
        self._within: list[PlayedStream] = []

    def launch(self, work: Callable[[], object]) -> None:
        """Put work into the current stream."""

        def run() -> None:
            self.is_computing = True
            try:
                work()
            finally:
                self.is_computing = False

        self.device.driver.launch(run, self.current_stream().number)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, vLLM's copies, and its tests of them, find this device as the first of CUDA's."""
        with ExitStack() as changed:
            for where, name, instead in self._changes():
                changed.enter_context(patch.object(where, name, instead, create=True))
            changed.enter_context(_Torch(self))
            yield

    def stream(self) -> PlayedStream:
        """A new one."""
        return PlayedStream(self.device, self.device.create_stream())

    def current_stream(self) -> PlayedStream:
        """Return the stream of `on_stream`, or else the calling thread's."""
        return self._within[-1] if self._within else PlayedStream(self.device, self.device.current_stream())

    @contextmanager
    def on_stream(self, stream: PlayedStream) -> Iterator[None]:
        """Within, work goes into this stream."""
        self._within.append(stream)
        try:
            yield
        finally:
            self._within.pop()

    def event(self, **_: bool) -> PlayedEvent:
        """A new one."""
        return PlayedEvent(self.device)

    def swap(self, sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
        """`swap_blocks_batch`: reads its arrays before it returns. vLLM puts no limit on a call, a driver does."""
        copy = self.device.load if is_src_access_order_any else self.device.save
        to, source, size = (one.numpy().view("int64") for one in (targets, sources, sizes))
        for start in range(0, len(sizes), MAX_BATCH_ENTRIES):
            some = slice(start, start + MAX_BATCH_ENTRIES)
            copy(to[some], source[some], size[some], self.current_stream().number)

    def kernel(self, sources: Any, targets: Any, sizes: Any, count: int, **_: int) -> None:
        """`_swap_blocks_kernel`: reads its arrays, and the host's memory, when the stream comes to it."""
        driver = self.device.driver

        def copy() -> None:
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                if not driver.memory_at(target) or not driver.memory_at(source):
                    driver.violations.append(f"a kernel copies {size} bytes that are neither the device's nor pinned")
                driver.copy_kind(target, source, size).run()

        assert len(sizes) == count
        self.launch(copy)

    def _changes(self) -> Sequence[tuple[Any, str, Any]]:
        """(where, name, what stands there meanwhile)."""
        return (
            (current_platform, "Stream", self.stream),
            (current_platform, "current_stream", self.current_stream),
            (current_platform, "stream", self.on_stream),
            (current_platform, "is_cuda_alike", lambda: True),
            (torch, "Event", self.event),
            (torch.cuda, "Stream", self.stream),
            (torch.cuda, "stream", self.on_stream),
            (torch.accelerator, "synchronize", lambda *_: self.device.synchronize()),
            (torch.cuda, "_sleep", lambda _: self.device.driver.starve(self.current_stream().number)),
            (gpu_worker.ops, "swap_blocks_batch", self.swap),
            (swap_blocks_triton, "_swap_blocks_kernel", _Launches(self.kernel)),
            (vllm.triton_utils, "HAS_TRITON", True),
            (gpu_worker, "HAS_TRITON", True),
            (gpu_worker.triton, "next_power_of_2", lambda number: 1 << (number - 1).bit_length()),
            (gpu_worker, "PIN_MEMORY", True),
            (gpu_worker, "host_register", self.device.register),
            (gpu_worker, "host_unregister", self.device.unregister),
            (host_register, "host_register", self.device.register),
            (host_register, "host_unregister", self.device.unregister),
        )


class _Launches:
    """A kernel of Triton's: `kernel[grid](...)`."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._call


class _Torch(TorchFunctionMode):
    """Torch with one device more. What is written there is written when the computing stream comes to it."""

    def __init__(self, platform: PlayedPlatform) -> None:
        super().__init__()
        self._platform, self._device = platform, platform.device

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        named, name = dict(kwargs or {}), call.__name__
        if self._platform.is_computing or (name in NO_WORK and call != IS_CUDA):
            return call(*args, **named)
        if call == IS_CUDA:
            return self._is_here(args[0])
        is_to_be_pinned = named.pop("pin_memory", False)
        place = named.get("device", args[1] if name == "to" and len(args) > 1 else name)
        if str(place).startswith("cuda"):
            named.pop("device", None)
            return self._copied_here(args[0], **named) if name in ("to", "cuda") else self._kept(call(*args, **named))
        if not any(self._is_here(one) for one in args):
            made = call(*args, **named)
            if is_to_be_pinned:
                self._device.register(made.data_ptr(), made.nbytes)
                self._platform.kept.append(made)
            return made
        if name.endswith("_") and not name.startswith("__"):
            self._platform.launch(lambda: call(*args, **named))
            return args[0]
        self._wait()
        if str(place).startswith("cpu"):
            return args[0].clone()
        return self._kept(call(*args, **named))

    def _is_here(self, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and self._device.driver.memory_at(one.data_ptr()) == "device"

    def _copied_here(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        made = self._kept(torch.empty_like(source))
        if self._device.driver.memory_at(source.data_ptr()) != "pinned":
            source = source.clone()  # the runtime does that before it returns
        self._platform.launch(lambda: made.copy_(source))
        if not non_blocking:
            self._wait()
        return made

    def _kept(self, made: Any) -> Any:
        if isinstance(made, torch.Tensor) and not self._is_here(made):
            self._device.map(made)
            self._platform.kept.append(made)
        return made

    def _wait(self) -> None:
        self._device.driver.synchronize(self._device.record(self._platform.current_stream().number))


class PlayedWorker(OffloadingWorker):
    """vLLM's own worker, each of whose calls finds the device."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, make: Callable[[CanonicalKVCaches], Any], device: PlayedDevice
    ) -> None:
        """The one that `make` makes of these caches, whose memory is the device's from now on."""
        self._platform = PlayedPlatform(device)
        device.map(*(one.tensor for one in kv_caches.tensors))
        with self._platform.installed():
            self._worker = make(kv_caches)

    def submit_store(self, *arguments: Any, **named: Any) -> bool:
        """See `OffloadingWorker`."""
        with self._platform.installed():
            return bool(self._worker.submit_store(*arguments, **named))

    def submit_load(self, *arguments: Any, **named: Any) -> bool:
        """See `OffloadingWorker`."""
        with self._platform.installed():
            return bool(self._worker.submit_load(*arguments, **named))

    def get_finished(self) -> list[TransferResult]:
        """See `OffloadingWorker`."""
        with self._platform.installed():
            return list(self._worker.get_finished())

    def wait(self, job_ids: set[int]) -> None:
        """See `OffloadingWorker`."""
        with self._platform.installed():
            self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """See `OffloadingWorker`."""
        with self._platform.installed():
            self._worker.shutdown()
