"""vLLM's device, as kvpact's copies use it: vLLM's own copy call, streams and events.

Owns nothing but the calls. Whatever vLLM offloads from is served by them: what is known of a device is what its trial
and its checks find.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import vllm
from vllm.platforms import current_platform

from kvpact.config import KvpactConfig
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.numa import near_node
from kvpact.vllm.checks import refuse_device_settings
from kvpact.vllm.compat.device import copy_call, pin, small_page_call, unpin, use_on_this_thread
from kvpact.worker.device.base import Addresses, Event, Stream
from kvpact.worker.device.opened import OpenedDevice
from kvpact.worker.paged import PagedKV

Result = TypeVar("Result")

NVIDIA = Path("/proc/driver/nvidia/version")


class VllmDevice:
    """vLLM's device as a `kvpact.worker.device.base.Device`."""

    pinned = True
    """True if the host memory of copies is pinned."""
    timed = False
    """True if events know their time."""

    def __init__(self, device: torch.device, page_bytes: int) -> None:
        """`page_bytes` are those of the largest page."""
        self._device = torch.device(device.type, device.index or 0)
        self.name = f"{current_platform.get_device_name(self._device.index)}{_driver()}, {_libraries()}"
        self._pointers = np.dtype(np.uint64 if current_platform.is_xpu() else np.int64)
        self._copy = copy_call()
        self._small_pages = small_page_call(page_bytes)

    def attach(self) -> None:
        """Use the device on the calling thread."""
        use_on_this_thread(self._device)

    def create_stream(self) -> Stream:
        """Create a stream of copies."""
        return current_platform.Stream()

    def current_stream(self) -> Stream:
        """Stream that the engine computes on, for the calling thread."""
        return current_platform.current_stream()

    def record(self, stream: Stream) -> Event:
        """Record an event behind all work of the stream so far."""
        event = torch.Event(enable_timing=self.timed)
        event.record(stream)
        return event

    def stream_wait(self, stream: Stream, event: Event) -> None:
        """Make the stream's later work wait for the event."""
        stream.wait_event(event)

    def is_done(self, event: Event) -> bool:
        """True if all work before the event is done."""
        return bool(event.query())

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Device's time between two `timed` events."""
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.accelerator.synchronize(self._device)

    def load(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
        """Copy into the device. A kernel copies small pages, in one number of entries so that it is compiled once."""
        by_kernel, call = self._by_kernel(targets, sources, sizes)
        with current_platform.stream(stream):
            if by_kernel:
                small = slice(by_kernel)
                self._swap(call, sources[small], targets[small], sizes[small], is_src_access_order_any=True)
            if by_kernel < len(sizes):
                others = slice(by_kernel, None)
                self._swap(self._copy, sources[others], targets[others], sizes[others], is_src_access_order_any=True)

    def _by_kernel(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> tuple[int, Any]:
        """Number of entries that the kernel copies, and the kernel."""
        if self._small_pages is None or not self.pinned:
            return 0, None
        call, threshold, multiple = self._small_pages
        if sizes.max() >= threshold or ((targets | sources | sizes) % 8).any():
            return 0, None
        return len(sizes) // multiple * multiple, call

    def save(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
        """Copy out of the device, each source read in the order of the stream."""
        with current_platform.stream(stream):
            self._swap(self._copy, sources, targets, sizes, is_src_access_order_any=False)

    def _swap(self, copy: Any, *arrays: Addresses, is_src_access_order_any: bool) -> None:
        tensors = [torch.from_numpy(np.ascontiguousarray(one).view(self._pointers)) for one in arrays]
        copy(*tensors, is_src_access_order_any=is_src_access_order_any)

    def run(self, stream: Stream, work: Callable[[], Result]) -> Result:
        """Run `work` with the stream as the current one."""
        with current_platform.stream(stream):
            return work()

    def register(self, address: int, num_bytes: int) -> bool:
        """Pin host memory; returns False where that cannot be."""
        return pin(address, num_bytes)

    def unregister(self, address: int) -> None:
        """Unpin the host memory from `address` on."""
        unpin(address)


def _driver() -> str:
    """The release of NVIDIA's kernel module, such as ", driver 580.65.06"; empty where there is none."""
    text = NVIDIA.read_text(errors="replace") if NVIDIA.is_file() else ""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return f", driver {found[1]}" if found else ""


def _libraries() -> str:
    """Versions of the callers of the driver, such as "torch 2.11.0+cu130, CUDA 13.0, vLLM 0.33.0"."""
    runtimes = (("CUDA", torch.version.cuda), ("HIP", torch.version.hip), ("XPU", torch.version.xpu))
    runtime = "".join(f"{kind} {release}, " for kind, release in runtimes if release)
    return f"torch {torch.__version__}, {runtime}vLLM {vllm.__version__}"


def _node_of(device: torch.device) -> int | None:
    """Memory node near a CUDA device; None where the machine does not report it."""
    if device.type != "cuda":
        return None
    known: Any = torch.cuda.get_device_properties(device)
    try:
        return near_node(f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0")
    except AttributeError:  # a torch that does not report a device's place
        return None


def open_device(config: KvpactConfig, paged: PagedKV, segment: ArenaSegment, model: str = "a model") -> OpenedDevice:
    """The copies of a rank whose KV memory is on a device; `model` names what it is of.

    Raises ConfigError for any reason not to use them.
    """
    device = paged.tensors[0].device
    refuse_device_settings(config, device.type)
    largest = max(layer.chunk_bytes for layer in paged.layers)
    used = VllmDevice(device, largest)
    used.timed = config.timeline is not None
    return OpenedDevice(config, paged, segment, used, _node_of(device), model)
