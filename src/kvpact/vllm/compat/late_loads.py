"""How releases of vLLM that take no word of a whole request (before 0.30) are told of a load that hangs: by blocks.

Owns which blocks are named for it, so that the report of them is not taken for damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvpact.contract import BlockHolder, LoadJob
from kvpact.vllm.compat.scheduler import TAKES_FAILED_REQUESTS


class LateLoads:
    """The blocks that are named for overdue loads, until vLLM has heard of them."""

    def __init__(self) -> None:
        self._named: set[int] = set()

    def name(
        self, jobs: Iterable[LoadJob], context: BlockHolder, table_of: Callable[[str], Sequence[int]]
    ) -> dict[int, tuple[int, ...]]:
        """By job, the blocks to be named; nothing where vLLM takes a request's word for it.

        The request's first one is among them, whoever computed it, so that vLLM gives it other blocks (H07): after a
        partial failure it would compute into those that the copy may still write. Not if somebody else has that block
        too, who would have to compute everything again; then the copy may write once more what the request computes.
        """
        if TAKES_FAILED_REQUESTS:
            return {}
        named: dict[int, tuple[int, ...]] = {}
        for job in jobs:
            first = tuple(table_of(job.request_id)[:1])
            if first and first[0] not in job.block_ids and context.get_block(first[0]).ref_count > 1:
                first = ()
            named[job.job_id] = tuple(dict.fromkeys(first + job.block_ids))
            self._named.update(named[job.job_id])
        return named

    def unnamed(self, invalid_block_ids: set[int], *, overdue: bool) -> set[int]:
        """Of blocks that vLLM was told are invalid, those that were not named here; `overdue`: whether a load is."""
        doubtful = invalid_block_ids - self._named
        self._named = self._named - invalid_block_ids if overdue else set()
        return doubtful
