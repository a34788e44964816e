"""vLLM's offloading with its own tiers or kvpact's below it, whose worker copies plainly and says how long that takes.

Owns what stands for a device's copies: on a GPU they are its copy engine's, and no part of what a tier takes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker

from kvpact.vllm.offload import PactTieringSpec
from kvpact_testkit.vllm.offloading import MemcpyTieringSpec, MemcpyWorker


class _TimedWorker(MemcpyWorker):
    """Each load adds a line with its seconds to a file."""

    loads: Path

    def submit_load(self, *arguments: Any, **named: Any) -> bool:
        """See `MemcpyWorker`."""
        began = time.perf_counter()
        done = super().submit_load(*arguments, **named)
        with self.loads.open("a") as file:
            file.write(f"{time.perf_counter() - began}\n")
        return done


class TimedTieringSpec(MemcpyTieringSpec):
    """vLLM's manager; `loads` in its configuration is the file for the seconds."""

    worker_class = _TimedWorker

    def _uses_shared_region(self) -> bool:
        return True  # as on CUDA

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of this rank."""
        worker = super().get_worker(kv_caches)
        assert isinstance(worker, _TimedWorker)
        worker.loads = Path(self.extra_config["loads"])
        return worker


class TimedPactTieringSpec(TimedTieringSpec, PactTieringSpec):
    """The same with kvpact's manager."""
