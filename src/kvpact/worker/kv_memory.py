"""KV memory of one rank, which may go away, as in vLLM's sleep mode, and come back elsewhere.

Owns the permission to order copies. While the memory is away none is made: to touch memory that a device has unmapped
would end the engine.
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
    """KV memory of one rank, and the jobs that copy from it and to it. For the computing thread."""

    def __init__(
        self,
        kv_caches: Mapping[str, Any],
        paged: PagedKV,
        transfers: RankTransfers,
        jobs: RankJobs,
    ) -> None:
        """`paged` views `kv_caches` as pages; `jobs` gets the outcome of each ended job."""
        self.kv_caches: Mapping[str, Any] = dict(kv_caches)
        """Layer name -> tensor, as used last."""
        self._paged = paged
        self._jobs = jobs
        self.transfers = transfers
        self.group_bytes = tuple(sum(layout.layer_page_bytes) for layout in paged.layouts)
        """Per KV cache group, bytes of a block on this rank."""
        self.is_there = True
        """True while copies may be ordered."""

    def poll(self) -> None:
        """Pass the outcomes of ended copies to the jobs."""
        for job_id, outcome in self.transfers.poll().items():
            self._jobs.end(job_id, outcome)

    def suspend(self, seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """End all copies before the memory goes away; none is made until `resume`. Idempotent.

        Copies that have not ended after `seconds` are cancelled, and get as long again. Raises KvpactError if one goes
        on even then: the memory must stay, and copies may be ordered as before.
        """
        if not self.is_there:
            return
        if not self._ends(clock() + seconds, clock, sleep):
            self.transfers.cancel_all()
            if not self._ends(clock() + seconds, clock, sleep):
                raise KvpactError(
                    f"copies of KV memory go on {2 * seconds:g} s after the engine began to release it: keep the "
                    "engine awake, and try again later"
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
        """Use the memory again: in these tensors, or in the earlier ones, wherever these lie now. Idempotent.

        Follows `suspend`. Raises ConfigError if its blocks have another layout: nothing is copied from then on.
        """
        if self.is_there:
            return
        tensors = dict(kv_caches or self.kv_caches)
        paged = self._paged.seen_in(tensors)
        if _bytes_of_blocks(paged) != _bytes_of_blocks(self._paged):
            raise ConfigError(
                "the engine's KV memory came back in another layout, which stored blocks do not fit: nothing is loaded "
                "or saved until this engine starts again"
            )
        self.transfers.rebind(paged)
        self.kv_caches = tensors
        self._paged = paged
        self.is_there = True


def _bytes_of_blocks(paged: PagedKV) -> tuple[Any, ...]:
    """Layout facts that determine a block's bytes in its slot, as far as addresses show."""
    layers = [replace(layer, address=0, block_stride=0, chunk_stride=0) for layer in paged.layers]
    return layers, dict(paged.layer_index), paged.cache_groups, paged.num_blocks, paged.device_type
