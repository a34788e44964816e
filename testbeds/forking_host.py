"""`kvpact_testkit.demo.host` with an engine whose processes are forked from it, and find vLLM's modules loaded.

Started by `forked_engine.ForkedEngine`; never imported.
"""

from __future__ import annotations

import gc
import os
from functools import partialmethod
from typing import TYPE_CHECKING, Any

from kvpact_testkit.demo import host
from kvpact_testkit.demo.engine import CORES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

POLL_SECONDS = 0.01
"""Seconds for which a worker or a scheduler without work polls before it sleeps. vLLM's one second is that long without
a core for the other engines of a test."""


def main() -> None:
    """Load what the engine's core and its workers need, then be the host."""
    gc.disable()  # until the host has loaded the rest
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor.multiproc_executor import WorkerProc

    choose_for_cpu, run_worker = CpuPlatform.check_and_update_config, WorkerProc.worker_main

    def choose_fork(config: VllmConfig) -> None:
        """vLLM's choices for CPUs, but for one that is its choice for GPUs."""
        choose_for_cpu(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    def run_worker_on_its_core(*arguments: Any, local_rank: int, **more: Any) -> None:
        """OpenMP was loaded before the fork, and would not read which core is the worker's."""
        os.sched_setaffinity(0, {int(os.environ[CORES].split("|")[local_rank])})
        run_worker(*arguments, local_rank=local_rank, **more)

    SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=POLL_SECONDS)
    CpuPlatform.check_and_update_config = staticmethod(choose_fork)
    WorkerProc.worker_main = staticmethod(run_worker_on_its_core)
    host.main()


if __name__ == "__main__":
    main()
