"""The engine's KV memory as one rank copies it: it may go away, as in vLLM's sleep mode, and come back elsewhere.

Owns whether copies may be ordered. While the memory is away none is made: to touch what a device has unmapped would end
the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from kvpact.errors import ConfigError, KvpactError
from kvpact.worker.paged import PagedKV
from kvpact.worker.rank_jobs import RankJobs
from kvpact.worker.transfer import RankTransfers

POLL_SECONDS: Final = 0.001


class KVMemory:
    """The KV memory of one rank, and the jobs that copy from it and to it. For the computing thread."""

    def __init__(
        self,
        kv_caches: Mapping[str, Any],
        paged: PagedKV,
        transfers: RankTransfers,
        jobs: RankJobs,
    ) -> None:
        """`paged` is what `PagedKV` sees in `kv_caches`; `jobs` is told of each job that ended."""
        self.kv_caches: Mapping[str, Any] = dict(kv_caches)
        """Layer -> tensor, as used last."""
        self._paged = paged
        self._jobs = jobs
        self.transfers = transfers
        self.group_bytes = tuple(sum(layout.layer_page_bytes) for layout in paged.layouts)
        """Per KV cache group, bytes of a block on this rank."""
        self.is_there = True
        """Whether copies may be ordered."""

    def poll(self) -> None:
        """Take in what has ended."""
        for job_id, outcome in self.transfers.poll().items():
            self._jobs.end(job_id, outcome)

    def suspend(self, seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """The memory goes away. When this returns, nothing is being copied, and nothing will be. Idempotent.

        Copies that have not ended after `seconds` are cancelled, and get as long again. Raises KvpactError if one goes
        on even then: the memory must stay, and copies may be ordered as before.
        """
        if not self.is_there:
            return
        if not self._ends(clock() + seconds, clock, sleep):
            self.transfers.cancel_all()
            if not self._ends(clock() + seconds, clock, sleep):
                raise KvpactError(
                    f"copies of KV memory go on {2 * seconds:g} s after the engine was to give it up: it must stay, "
                    "and the engine awake; try again later"
                )
        self.is_there = False

    def _ends(self, deadline: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> bool:
        self.poll()
        while self.transfers.under_way:
            self.transfers.submit(computes=False)
            if clock() > deadline:
                return False
            sleep(POLL_SECONDS)
            self.poll()
        return True

    def resume(self, kv_caches: Mapping[str, Any] | None = None) -> None:
        """The memory is there again: in these tensors, or in those of before, wherever these lie now. Idempotent.

        Comes after `suspend`. Raises ConfigError if blocks lie in it in another way: nothing is copied from then on.
        """
        if self.is_there:
            return
        tensors = dict(kv_caches or self.kv_caches)
        paged = self._paged.seen_in(tensors)
        if _bytes_of_blocks(paged) != _bytes_of_blocks(self._paged):
            raise ConfigError(
                "the engine's KV memory came back in another layout, for which nothing that is stored fits: nothing is "
                "loaded or saved until this engine starts again"
            )
        self.transfers.rebind(paged)
        self.kv_caches, self._paged = tensors, paged
        self.is_there = True


def _bytes_of_blocks(paged: PagedKV) -> tuple[Any, ...]:
    """What decides the bytes of a block in its slot, as far as addresses tell."""
    layers = [replace(layer, address=0, block_stride=0, chunk_stride=0) for layer in paged.layers]
    return layers, dict(paged.layer_index), paged.cache_groups, paged.num_blocks, paged.device_type


__all__ = ["KVMemory"]
