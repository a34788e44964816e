"""A device's driver without the limits that kvpact keeps: longer batches, and threads that mind captures."""

from __future__ import annotations

import ctypes

from kvpact.worker.cuda.driver import AccessOrder, Addresses, CopyAttributes, CudaDriver

NOT_SUPPORTED = 801
"""CUDA's error for what a driver does not have."""


class FreeDriver(CudaDriver):
    """See `ExaminedDriver`."""

    def attach_strictly(self) -> None:
        """See `ExaminedDriver`."""
        self._call("cuCtxSetCurrent", self._context)

    def copy_long_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """See `ExaminedDriver`."""
        attributes, first, failed = CopyAttributes(order=AccessOrder.ANY), ctypes.c_size_t(0), ctypes.c_size_t(0)
        if self._batch is None:
            raise self._error("cuMemcpyBatchAsync", NOT_SUPPORTED)
        arrays = (array.ctypes.data for array in (targets, sources, sizes))
        options = (ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed))
        if code := self._batch(*arrays, len(sizes), *options, stream):
            raise self._error("cuMemcpyBatchAsync", code)
