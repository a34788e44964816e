"""`PactTier` over a disk in the place of vLLM's example of a tier, for vLLM's own tests of its tiering.

Owns what those tests ask of the example besides a tier's methods: jobs that have ended when their submission returns,
`chunks` into which a test puts a key as if it had been stored before, and `completed_jobs`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import count
from mmap import PAGESIZE
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from offload_bed import spec_of
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvpact.vllm.offload import PactTier

NOBODY = ReqContext("an earlier engine")
OF_EARLIER_ENGINES = count(-1, -1)
"""Numbers of jobs, none of which are a manager's."""


class PactAsExample(PactTier):
    """A tier with a folder of its own."""

    def __init__(
        self, offloading_spec: object, primary_kv_view: memoryview, tier_type: str, custom_param: int = 0, **named: Any
    ) -> None:
        """`offloading_spec` is a mock in the tests that use an example, `custom_param` the example's own."""
        self._folder = TemporaryDirectory(prefix="kvpact-example-")
        url = f"disk://{self._folder.name}?capacity=1MiB"
        rows = np.zeros((len(primary_kv_view), PAGESIZE), np.int8).data  # vLLM's have whole pages, a mock's not
        super().__init__(spec_of({"url": url}), rows, tier_type, url=url, model_id="w", **named)
        self.completed_jobs: list[JobResult] = []
        self.chunks = _Chunks(self)

    def submit_store(self, job_metadata: Any) -> None:
        """Write, and wait for it."""
        super().submit_store(job_metadata)
        self.chunks.asked.update(job_metadata.keys)
        self._complete()

    def submit_load(self, job_metadata: Any) -> None:
        """Read, and wait for it."""
        super().submit_load(job_metadata)
        self._complete()

    def _complete(self) -> None:
        self.on_schedule_end(None)
        while self.has_pending_work():
            self.completed_jobs += super().get_finished_jobs()
            time.sleep(0.001)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What has ended since the last call."""
        finished, self.completed_jobs = self.completed_jobs, []
        return finished

    def get_num_chunks(self) -> int:
        """How many chunks are held."""
        return sum(self.lookup(key, NOBODY) is LookupResult.HIT for key in self.chunks.asked)


class _Chunks:
    """What an earlier engine has stored."""

    def __init__(self, tier: PactAsExample) -> None:
        self._tier = tier
        self.asked = set[Any]()
        """All keys that were ever given to the tier."""

    def __setitem__(self, key: Any, is_there: bool) -> None:
        others, self._tier.completed_jobs = self._tier.completed_jobs, []
        job = TransferJob(next(OF_EARLIER_ENGINES), [key], np.zeros(1, np.int64), False, NOBODY)
        self._tier.submit_store(job)
        assert [(one.job_id, one.success) for one in self._tier.completed_jobs] == [(job.job_id, True)]
        self._tier.completed_jobs = others
