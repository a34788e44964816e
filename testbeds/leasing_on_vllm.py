"""The connectors of `leasing` for vLLM's schedulers.

Each saves the first ten blocks of a prompt and no more, so that a preempted request finds as much as before.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

import leasing
from kvpact.contract import ExternalKVMatch
from kvpact_testkit.vllm.simple_connector import Copy, SimpleConnector

STORED_BLOCKS = 10


class TenBlocks(SimpleConnector):
    """What lies under each of them."""

    def completed(self, request: Any, computed: int) -> list[Copy]:
        """Not what lies behind the tenth block."""
        return super().completed(request, min(computed, STORED_BLOCKS * self.block_size))


class LeasesAnew(leasing.LeasesAnew, TenBlocks):  # type: ignore[misc]
    pass


class Memoises(leasing.Memoises, TenBlocks):  # type: ignore[misc]
    pass


class HandsResultBack(leasing.HandsResultBack, TenBlocks):  # type: ignore[misc]
    pass


class ReturnsMatch(leasing.ReturnsMatch, TenBlocks):  # type: ignore[misc]
    match_type = getattr(base, "ExternalKVMatch", ExternalKVMatch)
    """vLLM's own where the series has made one."""


class GetsMatchBack(leasing.GetsMatchBack, TenBlocks):  # type: ignore[misc]
    pass


class LeasesByRequest(leasing.LeasesByRequest, TenBlocks):  # type: ignore[misc]
    pass


class PlainTuples(leasing.PlainTuples, TenBlocks):  # type: ignore[misc]
    pass
