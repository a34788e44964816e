"""vLLM's own copies between host memory and a device, and what differs between releases there.

The copy call, the streams and the events are the same in all; from 0.32 on vLLM pins host memory by a function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from vllm import _custom_ops
from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary
from vllm.platforms import current_platform

Swap = Callable[..., None]
"""`swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any)`, into the current stream."""

RELAXED: Final = 2
"""`cudaStreamCaptureModeRelaxed`: calls of this thread do no harm to a graph that another one captures."""


def copy_call() -> Swap:
    """The batched copy that vLLM's own offloading makes."""
    call: Swap = _custom_ops.swap_blocks_batch
    return call


def small_page_call(page_bytes: int) -> tuple[Swap, int, int] | None:
    """vLLM's kernel for loads of small pages of at most `page_bytes`, for pinned memory.

    With the kernel: entries have fewer bytes than the first number, and are a multiple of the second. None where it
    cannot read the host's memory.
    """
    if current_platform.is_xpu() or current_platform.is_rocm():
        return None
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return None
    from vllm.v1.kv_offload.cpu import swap_blocks_triton as kernel

    chunk = min(1 << max(3, (page_bytes - 1).bit_length()), 8192)

    def call(source: Any, target: Any, sizes: Any, *, is_src_access_order_any: bool) -> None:
        kernel.swap_blocks_batch(source, target, sizes, is_src_access_order_any, bytes_per_chunk=chunk)

    return call, int(kernel.THRESHOLD_BYTES), int(kernel.MIN_N)


def use_on_this_thread(device: torch.device) -> None:
    """The calling thread works on the device, and does no harm to a graph that another thread captures."""
    current_platform.set_device(device)
    if current_platform.is_cuda():
        CudaRTLibrary().lib.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))


def pin(address: int, num_bytes: int) -> bool:
    """Pin host memory; False where that cannot be, as on ROCm, where vLLM itself leaves it."""
    if current_platform.is_rocm():
        return False
    try:
        from vllm.v1.kv_offload.cpu.host_register import host_register
    except ImportError:
        return _pin_by_runtime(address, num_bytes)
    return bool(host_register(address, num_bytes))


def _pin_by_runtime(address: int, num_bytes: int) -> bool:
    if not current_platform.is_cuda():
        return False
    runtime = CudaRTLibrary().lib
    code = runtime.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(0))
    if code:
        runtime.cudaGetLastError()  # else the engine's next call finds this one's error
    return bool(code == 0)


def unpin(address: int) -> None:
    """Unpin host memory that was pinned from `address` on."""
    try:
        from vllm.v1.kv_offload.cpu.host_register import host_unregister
    except ImportError:
        CudaRTLibrary().lib.cudaHostUnregister(ctypes.c_void_p(address))
    else:
        host_unregister(address)
