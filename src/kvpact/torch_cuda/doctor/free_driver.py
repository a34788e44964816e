"""A device's driver without the limits that kvpact keeps: longer batches, and threads that mind captures."""

from __future__ import annotations

from kvpact.worker.cuda.driver import AccessOrder, Addresses, CudaDriver

NOT_SUPPORTED = 801
"""CUDA's error for what a driver does not have."""


class FreeDriver(CudaDriver):
    """See `ExaminedDriver`."""

    def attach_strictly(self) -> None:
        """See `ExaminedDriver`."""
        self._call("cuCtxSetCurrent", self._context)

    def copy_long_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """See `ExaminedDriver`."""
        if self._batch is None:
            raise self._error("cuMemcpyBatchAsync", NOT_SUPPORTED)
        self._copy_in_one_call(self._batch, targets, sources, sizes, AccessOrder.ANY, stream)
