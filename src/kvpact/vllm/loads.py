"""The engine's committed loads until their end, and what the workers must report of those that could not be ordered.

Owns which loads the engine relies on. A broken load is reported as failed; what its request computes until the engine
has received that report is worthless.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass
from itertools import chain

from kvpact.contract import LoadJob, LoadSettlement
from kvpact.ranges import num_blocks_for
from kvpact.vllm.hit_accounting import HitCredit
from kvpact.vllm.request_identity import OfferedMatch, VllmRequest
from kvpact.wire import AdapterUsed, UnorderedLoad


@dataclass(slots=True)
class CommittedLoad:
    """A committed match until its settlement."""

    view: VllmRequest
    order: UnorderedLoad
    """The load as the workers report it if its order never reaches them."""
    block_ids: tuple[int, ...]
    """The request's blocks, from the first one that the load fills."""
    epochs: int
    """The value of `WeightsWatch.epochs` when it was committed."""
    job: LoadJob | None = None
    """The order, once the cache has given it; None for a synchronous load."""
    is_broken: bool = False
    """True if it is to be reported as failed, and the engine has not received the report yet."""


class CommittedLoads:
    """All committed loads of one engine, by request."""

    def __init__(self, credit: HitCredit, block_size: int, *, whole_requests: bool) -> None:
        """With `whole_requests`, of several KV cache groups, a load is used or lost as a whole."""
        self._credit = credit
        self._block_size = block_size
        self.whole_requests = whole_requests
        self._loads: dict[str, CommittedLoad] = {}
        self._ordered: list[CommittedLoad] = []
        """The loads ordered in the running step."""
        self.ordered_at: tuple[int, ...] = ()
        """Changes of each rank's weights so far when the first of `_ordered` was committed."""
        self.broken: list[UnorderedLoad] = []
        """Loads that the workers are to report as failed."""
        self._adapters: dict[str, AdapterUsed] = {}
        """Request id -> the adapter for which its blocks were loaded, until a step has run with them."""
        self.ended: set[str] = set()
        """Requests whose asynchronous load has ended, as the engine knows, until a step computes them."""
        self.must_step_aside = False
        """True if the next step computes nothing unless the engine looks past every request it asks about.

        Before 0.31 vLLM notices that a load has ended only when it comes to the request in its queue, and stops at the
        first one for which it has no blocks. So one that had to ask again later stops the queue for good if those
        loaded after it hold the blocks it needs.
        """

    # The scheduler's step

    def admit(
        self,
        view: VllmRequest,
        answer: OfferedMatch,
        num_tokens: int,
        tables: Sequence[Sequence[int]],
        epochs: int,
        found: Sequence[tuple[str, int]] = (),
    ) -> CommittedLoad:
        """The engine relies on `num_tokens` tokens of the match, in these of its blocks, one sequence per group.

        `found`: where, as vLLM names places.
        """
        start = answer.start_block
        synchronous = not answer.match.load_kv_async
        if self.whole_requests:
            blocks = tuple(chain.from_iterable(tables))
            named = blocks if synchronous else ()
        else:
            blocks = tuple(tables[0][start:])
            named = blocks[: num_blocks_for(num_tokens, self._block_size)]
        order = UnorderedLoad(view.request_id, named, synchronous)
        load = self._loads[view.request_id] = CommittedLoad(view, order, blocks, epochs)
        self._credit.admit(view.request, num_tokens, synchronous=synchronous, found=found)
        return load

    def order(self, load: CommittedLoad, num_tokens: int, changes: tuple[int, ...]) -> None:
        """The cache orders `num_tokens` of the load in this step. `changes`: how often each rank's weights changed."""
        self._credit.load_failed(load.view.request_id, num_tokens)
        self._ordered.append(load)
        self.ordered_at = self.ordered_at or changes
        if (used := load.view.adapter_in_use) is not None:
            self._adapters[load.view.request_id] = AdapterUsed(*used, load.order.block_ids or load.block_ids)

    def fail(self, load: CommittedLoad, order: UnorderedLoad | None = None) -> None:
        """The workers will report the load as failed; nothing that its request computes until then is stored."""
        self.broken.append(order or load.order)
        load.is_broken = load.view.load_broken = True

    def refuse(self, load: CommittedLoad) -> None:
        """The engine knows that nothing of the load will come, and does not wait for it."""
        self._credit.load_failed(load.view.request_id, 0)
        del self._loads[load.view.request_id]

    def fail_step(self) -> None:
        """None of the loads ordered with this step will happen."""
        for load in self._ordered:
            self.fail(load)

    def is_distrusted(self, request_id: str) -> bool:
        """True if the request's load is broken and the engine has not received the report yet."""
        load = self._loads.get(request_id)
        return load is not None and load.is_broken

    @property
    def any_distrusted(self) -> bool:
        """True if `is_distrusted` is true of any request."""
        return bool(self._loads) and any(load.is_broken for load in self._loads.values())

    def begin_jobs(self, jobs: Iterable[LoadJob]) -> None:
        """Take in the cache's load orders of this step."""
        for job in jobs:
            if not job.synchronous and (load := self._loads.get(job.request_id)) is not None:
                load.job = job

    def scheduled(self, request_ids: KeysView[str]) -> None:
        """A step is scheduled that computes these requests. Called in every step, also where nothing is loaded."""
        self.ended -= request_ids
        self.must_step_aside = bool(self.ended and not request_ids and not self.must_step_aside)

    def run(self, request_ids: KeysView[str]) -> tuple[AdapterUsed, ...]:
        """The adapters that must be in use for those of these requests that now run with loaded blocks for the first
        time."""
        return tuple(map(self._adapters.pop, self._adapters.keys() & request_ids))

    def end_step(self) -> None:
        """The workers have got the step's message; the next step begins empty."""
        self.broken.clear()
        self._ordered.clear()
        self.ordered_at = ()

    # Reports

    def invalid_with(self, invalid_block_ids: set[int]) -> set[int]:
        """Subtract the hits on invalid blocks; returns these blocks and those after them in the requests that loaded
        them."""
        invalid = set(invalid_block_ids)
        for request_id, load in list(self._loads.items()):
            blocks = load.block_ids
            first = next((place for place, block in enumerate(blocks) if block in invalid_block_ids), None)
            if first is not None:
                invalid.update(blocks[first:])
                self._credit.load_failed(request_id, first * self._block_size)
                if load.is_broken:
                    self._credit.step_reported(request_id)
                    del self._loads[request_id]
        return invalid

    def lost(self, request_id: str) -> None:
        """Nothing was loaded for the request, as the engine knows, which begins it again in other blocks."""
        self._credit.load_failed(request_id, 0)
        if self.is_distrusted(request_id):
            del self._loads[request_id]

    def settle(self, settlement: LoadSettlement, epochs: int, *, is_alive: bool) -> None:
        """Settle a load; if its weights have changed meanwhile, the next report to the engine names it as failed."""
        request_id = settlement.request_id
        load = self._loads.get(request_id)
        if load is not None and not load.is_broken:
            is_stale = settlement.asynchronous and bool(settlement.loaded.ranges) and load.epochs != epochs
            if is_alive and is_stale and self.whole_requests:
                load.is_broken = load.view.load_broken = True  # too late to report it to vLLM
            elif is_alive and is_stale:
                block_ids = load.job.block_ids if load.job is not None else load.block_ids
                self.fail(load, UnorderedLoad(request_id, block_ids, synchronous=True))
            else:
                del self._loads[request_id]
        self._credit.step_reported(request_id)

    def request_finished(self, request_id: str) -> None:
        """No step will run with the blocks that were loaded for this request."""
        self._adapters.pop(request_id, None)
        self.ended.discard(request_id)
        if self.whole_requests and self.is_distrusted(request_id):
            del self._loads[request_id]
