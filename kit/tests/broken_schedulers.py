"""Schedulers of vLLM with one mistake each."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class OffersOneBoundaryOff(Scheduler):  # type: ignore[misc]
    """It offers each state as that of the next boundary."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        take = self.kv_cache_manager.take_boundary_state_offloads
        size = self.kv_cache_manager.block_pool.hash_block_size

        def off() -> dict[str, list[tuple[int, int, int]]]:
            return {
                name: [(group, block, tokens + size) for group, block, tokens in states]
                for name, states in take().items()
            }

        self.kv_cache_manager.take_boundary_state_offloads = off
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.kv_cache_manager.take_boundary_state_offloads = take
