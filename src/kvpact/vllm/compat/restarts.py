"""Requests over blocks that hold something else than they should begin again, whatever steps of theirs are under way.

Owns the block tables of requests that left their blocks while a step was under way. Works by what vLLM does at a reset
of its prefix cache with requests running: they are preempted, and outputs of steps in flight are dropped for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from kvpact.vllm.compat.objects import connectors_of

LOADS = "WAITING_FOR_REMOTE_KVS"
"""The status of a request that waits for an asynchronous load."""

Table = tuple[str, Sequence[int]]
"""A request and its blocks, of all groups one after the other, without null blocks."""


def spread(invalid: set[int], tables: Sequence[Table], *, several: bool) -> set[str]:
    """Add to `invalid` all blocks computed over them: in each table those behind; of `several` groups, the whole table.

    Returns the requests of these tables.
    """
    over: set[str] = set()
    before = -1
    while len(invalid) > before:
        before = len(invalid)
        for request_id, blocks in tables:
            if not invalid.isdisjoint(blocks):
                over.add(request_id)
                first = 0 if several else next(place for place, block in enumerate(blocks) if block in invalid)
                invalid.update(blocks[first:])
    return over


class Restarts:
    """Lets requests of one scheduler begin again whose blocks hold something else than they should."""

    def __init__(self, scheduler: Any) -> None:
        """The connectors with `requests_begin_again` take part."""
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._connectors = [
            each for each in connectors_of(scheduler.connector) if hasattr(each, "requests_begin_again")
        ]
        self.several = bool(self._connectors) and len(scheduler.kv_cache_config.kv_cache_groups) > 1
        """True if blocks of several KV cache groups may be reported, which vLLM's own scheduler does not accept."""
        self.refused: set[int] = set()
        """Blocks of the oldest step under way whose load a connector refused when it was too late."""
        self._left: deque[list[Table]] = deque()
        """For each step under way, what requests held that left their blocks since it was scheduled."""

    def step_begins(self) -> None:
        """A step is scheduled."""
        self._left.append([])

    def step_ends(self) -> None:
        """The oldest step under way is over."""
        self._left.popleft()

    def note_left(self, request_id: str) -> None:
        """A request is about to leave its blocks, because it has ended or is preempted."""
        if self._left:
            self._left[-1] += self._tables([request_id])

    def _tables(self, request_ids: Iterable[str]) -> list[Table]:
        null = self._manager.block_pool.null_block.block_id
        tables = ((name, self._manager.get_block_ids(name)) for name in request_ids)
        return [(name, [block for block in chain(*groups) if block != null]) for name, groups in tables]

    def begin_again(self, reported: Iterable[int]) -> set[str]:
        """Blocks were not loaded on which steps rely: returns the requests whose output of the oldest step counts for
        nothing. With the policy "recompute" they begin again; else the caller ends them.

        An asynchronous load that failed alone is left to vLLM: no step has used its blocks.
        """
        requests = list(self._scheduler.requests.values())
        loading = {one.request_id for one in requests if one.status.name == LOADS}
        held = self._tables(one.request_id for one in requests)
        left = list(chain(*self._left))
        invalid = set(reported).intersection(chain(*(blocks for name, blocks in [*held, *left] if name not in loading)))
        if not invalid or not (self._connectors or self.refused):
            return set()
        over = spread(invalid, [*held, *left], several=self.several)
        self._manager.block_pool.evict_blocks(invalid)
        for connector in self._connectors:
            connector.requests_begin_again(invalid, {name: blocks for name, blocks in [*left, *held] if name in over})
        if self._scheduler.recompute_kv_load_failures:
            for name in over.intersection(self._scheduler.requests):
                self._scheduler.requests[name].drop_stale_output = True  # also of one that vLLM preempted meanwhile
            self._take_blocks({name for name, blocks in held if not invalid.isdisjoint(blocks)})
        return over

    def _take_blocks(self, names: set[str]) -> None:
        scheduler = self._scheduler
        running = [one for one in scheduler.running if one.request_id in names]
        scheduler.running = [one for one in scheduler.running if one.request_id not in names]
        for request in reversed(running):
            scheduler._preempt_request(request, None, drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            if request.prefill_stats is not None:
                request.num_preemptions -= 1  # vLLM shows the user the hits of an admission without one before it
        for request in [scheduler.requests[name] for name in names]:
            request.num_computed_tokens = 0
            if request.status.name == LOADS:
                scheduler.failed_recving_kv_req_ids.add(request.request_id)
            elif not request.is_finished():
                scheduler._free_request_blocks(request)
