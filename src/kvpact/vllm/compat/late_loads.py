"""How a load that hangs is reported to releases before 0.30, which accept block ids and no request ids.

Owns which blocks are reported for it, so that this report is not mistaken for damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvpact.contract import BlockHolder, LoadJob
from kvpact.vllm.compat.scheduler import TAKES_FAILED_REQUESTS


class LateLoads:
    """The blocks that were chosen to report overdue loads, until vLLM has received the report."""

    def __init__(self) -> None:
        self._named: set[int] = set()

    def name(
        self, jobs: Iterable[LoadJob], context: BlockHolder, table_of: Callable[[str], Sequence[int]]
    ) -> dict[int, tuple[int, ...]]:
        """By job, the blocks to report; empty where vLLM accepts a request id.

        The request's first block is among them, whatever computed it, so that vLLM gives the request other blocks
        (H07): after a partial failure it would compute into those that the copy may still write. Not if another request
        has that block too, which would then have to compute everything again; then the copy may overwrite once what the
        request computes.
        """
        if TAKES_FAILED_REQUESTS:
            return {}
        named: dict[int, tuple[int, ...]] = {}
        for job in jobs:
            first = tuple(table_of(job.request_id)[:1])
            if first and first[0] not in job.block_ids and context.get_block(first[0]).ref_cnt > 1:
                first = ()
            named[job.job_id] = tuple(dict.fromkeys(first + job.block_ids))
            self._named.update(named[job.job_id])
        return named

    def unnamed(self, invalid_block_ids: set[int], *, overdue: bool) -> set[int]:
        """The invalid blocks that were not reported here; `overdue` is whether any load is overdue."""
        doubtful = invalid_block_ids - self._named
        self._named = self._named - invalid_block_ids if overdue else set()
        return doubtful
