"""vLLM's own OffloadingConnector without a GPU: its scheduler, managers and tiers, and one of two workers.

Owns the worker with plain copies, which end when they are ordered. The other one is vLLM's own, over a device that is
played. Nothing of vLLM is changed: the configuration names the specs here. For vLLM 0.32 and later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpact.vllm.offload import PactTieringSpec
from kvpact_testkit.device.played import PlayedDevice
from kvpact_testkit.vllm.played_copies import PlayedWorker

MEMORY = {
    "spec_name": "MemcpySpec",
    "spec_module_path": __name__,
    "cpu_bytes_to_use": 1 << 20,
}
"""`kv_connector_extra_config` for host memory alone."""

FILES = {
    "spec_name": "MemcpyTieringSpec",
    "spec_module_path": __name__,
    "cpu_bytes_to_use": 1 << 20,
    "secondary_tiers": [{"type": "fs", "root_dir": "{folder}", "n_read_threads": 2, "n_write_threads": 2}],
}
"""`kv_connector_extra_config` for host memory and files."""


class MemcpyWorker(OffloadingWorker):
    """Copies blocks of KV memory to chunks of host memory and back; a chunk is one block."""

    def __init__(self, memory: Sequence[Any], chunks: Sequence[Any], close: Callable[[], None] = lambda: None) -> None:
        self.loads_fail = False
        """Whether loads fail, and copy nothing."""
        self._memory = memory
        self._chunks = chunks
        self._close = close
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy to the chunks."""
        for memory, chunks in zip(self._memory, self._chunks, strict=True):
            chunks[dst_spec.block_ids] = memory[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy from the chunks."""
        if not self.loads_fail:
            for memory, chunks in zip(self._memory, self._chunks, strict=True):
                memory[dst_spec.block_ids] = chunks[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, not self.loads_fail))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The results of all copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """A copy has ended when its submission returns."""

    def shutdown(self) -> None:
        """Release shared memory."""
        self._close()


class MemcpySpec(CPUOffloadingSpec):
    """Host memory."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of this rank."""
        memory = [tensor.tensor for tensor in kv_caches.tensors]
        chunks = [torch.zeros((self.num_chunks, tensor.shape[1]), dtype=tensor.dtype) for tensor in memory]
        return MemcpyWorker(memory, chunks)


class MemcpyTieringSpec(TieringOffloadingSpec):
    """Host memory shared with the scheduler's process, and the tiers below it."""

    worker_class = MemcpyWorker

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of this rank."""
        memory = [tensor.tensor for tensor in kv_caches.tensors]
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return self.worker_class(
            memory, [region.create_next_worker_view(tensor.shape[1]) for tensor in memory], region.cleanup
        )


class _NotedWorker(PlayedWorker):
    """A worker whose jobs are noted in a file."""

    def __init__(self, kv_caches: Any, make: Callable[[Any], OffloadingWorker], device: PlayedDevice, jobs: Path):
        super().__init__(kv_caches, make, device)
        self._jobs = jobs

    def _note(self, what: str, blocks: Any) -> None:
        with self._jobs.open("a") as log:
            log.write(f"{what} {len(blocks)}\n")

    def submit_store(self, job_id: int, src_spec: Any, *others: Any, **named: Any) -> bool:
        """See `OffloadingWorker`."""
        self._note("store", src_spec.block_ids)
        return super().submit_store(job_id, src_spec, *others, **named)

    def submit_load(self, job_id: int, src_spec: Any, *others: Any, **named: Any) -> bool:
        """See `OffloadingWorker`."""
        self._note("load", src_spec.block_ids)
        return super().submit_load(job_id, src_spec, *others, **named)


class _OnPlayedDevice:
    """A spec of vLLM's whose own worker copies on a device that is played, beside an engine that computes on the CPU.

    `seed` in its configuration decides when copies are made; each rank has another one. In the folder `log`, `mistakes`
    gets a line for each wait that was missing, `jobs` one for each job: "store" or "load", and its blocks.
    """

    extra_config: dict[str, Any]
    config: Any

    def _uses_shared_region(self) -> bool:
        return True  # as on CUDA

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of this rank."""
        log = Path(self.extra_config["log"])
        device = PlayedDevice(self.extra_config["seed"] + self.config.parallel.rank)
        device.write_mistakes_to(log / "mistakes")
        device.computes_at_once()
        return _NotedWorker(kv_caches, super().get_worker, device, log / "jobs")  # type: ignore[misc]


class PlayedSpec(_OnPlayedDevice, CPUOffloadingSpec):
    """Host memory."""


class PlayedTieringSpec(_OnPlayedDevice, TieringOffloadingSpec):
    """Host memory shared with the scheduler's process, and the tiers below it."""


class PlayedPactTieringSpec(_OnPlayedDevice, PactTieringSpec):
    """A `PlayedTieringSpec` with kvpact's manager, after whose resets no request's older blocks are stored."""
