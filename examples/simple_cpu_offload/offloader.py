"""What is copied between the engine's blocks and host blocks, and what is held until the copy has ended.

Owns the promises to waiting requests and the copies under way. Knows the engine by its `SchedulerContext` alone, and no
threads, tensors or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TypeAlias

from kvpact import BlockRange, KVCacheBlockView, SchedulerContext
from kvpact.identity.groups import GroupSet
from simple_cpu_offload.host_pool import HostPool, Pool

Names: TypeAlias = Callable[[int, int], bytes | None]
"""(KV cache group, number of a block of a request) -> the name under which both pools publish it; None if the request
does not have so many full blocks."""

RENEWED_REQUESTS = 8
"""How many of those that wait next keep their blocks from being reused first. Looking them up costs time each step."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A load into the engine's blocks, or a save from them; pairs of blocks at the same place."""

    job_id: int
    request_id: str
    """Who waits for it; "" for a save."""
    engine_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    lost: bool = False
    """Of a load: something that it needs is not there any more. Nothing is copied, and the load has failed."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The host blocks that are held for a request that was asked about."""

    start: int
    """The request's tokens before it, which the engine has."""
    blocks: Mapping[tuple[int, int], int]
    """(group, block of the request) -> host block."""
    names: Names = field(compare=False)


class Offloader:
    """One engine's blocks in host memory. With `look_ahead` 0 what was computed is saved at once (eager); otherwise
    when it is among so many blocks that the engine reuses next (lazy)."""

    def __init__(
        self, engine: SchedulerContext, host: HostPool, groups: GroupSet, *, ranks: int = 1, look_ahead: int = 0
    ) -> None:
        self.engine, self.host, self.groups = engine, host, groups
        self.pools: tuple[Pool, Pool] = (engine, host)
        self.ranks, self.look_ahead = ranks, look_ahead
        self.promises: dict[str, Promise] = {}
        self.jobs: dict[int, Copy] = {}
        """Copies that not all ranks have reported."""
        self.requests: dict[str, tuple[Names, int]] = {}
        """Of every request that is alive: how its blocks are named, and how many tokens it arrived with."""
        self.distrusted: set[str] = set()
        """Requests whose load failed: they compute for themselves."""
        self._reported: dict[int, set[int]] = {}
        self._failed: set[int] = set()
        self._names: dict[int, tuple[bytes, ...]] = {}
        """Save -> the names of its blocks; none if it began before a reset, so that it comes to nothing."""
        self._saving: set[bytes] = set()
        self._offered: dict[str, list[int]] = {}
        """Eager: request -> how many of its blocks in each group are saved, being saved, or of no use."""
        self._loads: list[Copy] = []
        self._job_ids = count(1)

    # What a request is promised, and takes

    def begin(self, request_id: str, names: Names, num_tokens: int) -> None:
        """A request arrived."""
        self.requests[request_id] = names, num_tokens

    def promise(self, request_id: str, start: int, max_tokens: int) -> int:
        """How many tokens after the first `start` can be loaded, of `max_tokens` in all. They stay loadable until
        `load` or `forget`, however often this is asked; another answer replaces the first."""
        names, _ = self.requests[request_id]
        end = 0 if request_id in self.distrusted else self._longest_match(names, start, max_tokens)
        held = self._found(names, start, end)
        new, old = Promise(start, held, names), self.promises.get(request_id)
        if new != old:
            self.host.touch([*held.values()])
            self._withdraw(request_id)
            if held:
                self.promises[request_id] = new
        return max(0, end - start)

    def load(self, request_id: str, num_tokens: int) -> None:
        """The engine gave the request blocks, and takes so many of the tokens promised. The load begins."""
        promise = self.promises.get(request_id)
        if promise is None or num_tokens == 0:
            self._withdraw(request_id)
            return
        tables, pairs, lost = self.engine.get_block_ids(request_id), [], False
        for group, block in self._needed(promise.start, promise.start + num_tokens):
            engine_block = tables[group][block]
            # A window that ends earlier than promised may begin earlier, too.
            host_block = promise.blocks.get((group, block)) or self._find(promise.names, group, block)
            if host_block is None:
                lost = True
            else:
                pairs.append((engine_block, host_block))
        engine_blocks, host_blocks = zip(*pairs, strict=True) if pairs else ((), ())
        load = Copy(next(self._job_ids), request_id, engine_blocks, host_blocks, lost=lost)
        for pool, blocks in zip(self.pools, (engine_blocks, host_blocks), strict=True):
            pool.touch(blocks)
        self._withdraw(request_id)
        self.jobs[load.job_id] = load
        self._loads.append(load)

    def forget(self, request_id: str) -> None:
        """The request has ended. Its copies go on, and what they hold is held until they are over."""
        self._withdraw(request_id)
        self.requests.pop(request_id, None)
        self._offered.pop(request_id, None)
        self.distrusted.discard(request_id)

    # What a step copies

    def order_step(self, scheduled: Iterable[str]) -> tuple[list[Copy], list[Copy]]:
        """The loads and saves of a step in which these requests compute. Saves come after it, loads at any time."""
        waiting = self.engine.waiting_requests()
        for request_id in waiting:  # preempted ones are offered anew: their blocks may have been reused meanwhile
            self._offered.pop(request_id, None)
        views = self._next_to_be_reused() if self.look_ahead else self._computed(scheduled)
        loads, self._loads = self._loads, []
        if not views:
            return loads, []
        for request_id in waiting[:RENEWED_REQUESTS]:
            self._renew(request_id)
        engine_blocks, names = [view.block_id for view in views], [view.block_hash or b"" for view in views]
        host_blocks = self.host.take(view.group_id for view in views)
        self.engine.touch(engine_blocks)
        save = Copy(next(self._job_ids), "", tuple(engine_blocks), tuple(host_blocks))
        self.jobs[save.job_id] = save
        self._names[save.job_id] = tuple(names)
        self._saving.update(names)
        return loads, [save]

    def _computed(self, scheduled: Iterable[str]) -> list[KVCacheBlockView]:
        """Eager: blocks of these requests that the engine has published, and so are full when the step is over."""
        found: dict[bytes, KVCacheBlockView] = {}
        for request_id in scheduled:
            offered = self._offered.setdefault(request_id, [0] * len(self.groups.groups))
            for group, table in enumerate(self.engine.get_block_ids(request_id)):
                for block_id in table[offered[group] :]:
                    view = self.engine.get_block(block_id)
                    if view.is_null:  # it left a window, and was offered before that
                        offered[group] += 1
                        continue
                    if view.block_hash is None or len(found) == self.host.num_free:
                        break
                    if self._is_new(view):
                        found.setdefault(view.block_hash, view)
                    offered[group] += 1
        return [*found.values()]

    def _next_to_be_reused(self) -> list[KVCacheBlockView]:
        """Lazy: what the engine is about to reuse. A walk begins at the queue's head, so it has no place to lose; the
        blocks are touched when it is over, because a touched block leaves the queue."""
        room = min(self.host.num_free, self.look_ahead - sum(len(job.engine_blocks) for job in self.jobs.values()))
        ahead = islice(self.engine.iter_free_blocks(), self.look_ahead)
        return [*islice((view for view in ahead if self._is_new(view)), max(0, room))]

    def _is_new(self, view: KVCacheBlockView) -> bool:
        """Whether the block has a name, and nothing of this name is in host memory or on the way there."""
        name = view.block_hash
        return name is not None and name not in self._saving and self.host.find(name, view.group_id) is None

    def _renew(self, request_id: str) -> None:
        """What this waiting request will ask for is reused last."""
        if request_id in self.requests and request_id not in self.promises:
            names, num_tokens = self.requests[request_id]
            found = [*self._found(names, 0, self._longest_match(names, 0, num_tokens)).values()]
            self.host.touch(found)
            self.host.free_blocks(found[::-1])

    # What has become of it

    def settle(self, done: Mapping[int, AbstractSet[int]], failed: AbstractSet[int]) -> None:
        """Ranks have ended copies: job -> those ranks. A copy is over when all have said so; twice is not more."""
        for job_id, ranks in done.items():
            copy = self.jobs.get(job_id)
            if copy is None:  # over already
                continue
            reported = self._reported.setdefault(job_id, set())
            reported |= ranks
            if job_id in failed:
                self._failed.add(job_id)
            if len(reported) == self.ranks:
                del self.jobs[job_id], self._reported[job_id]
                self._end(copy, failed=job_id in self._failed)
                self._failed.discard(job_id)

    def _end(self, copy: Copy, *, failed: bool) -> None:
        is_save, names = not copy.request_id, self._names.pop(copy.job_id, ())
        self._saving.difference_update(names)
        if not failed:
            for engine_block, host_block, name in zip(copy.engine_blocks, copy.host_blocks, names, strict=False):
                # The engine withdraws the name of a block that turns out to be wrong.
                if self.engine.get_block(engine_block).block_hash == name:
                    self.host.publish(host_block, name)
        elif not is_save:
            self.host.unpublish(copy.host_blocks)
            if copy.request_id in self.requests:
                self.distrusted.add(copy.request_id)
        self.engine.free_blocks(copy.engine_blocks, evict_first=is_save and self.look_ahead > 0)
        self.host.free_blocks(copy.host_blocks[::-1], evict_first=failed)  # of a prompt the last block is reused first

    def reset(self) -> None:
        """Nothing that is stored, or being saved, is served from now on. Copies under way keep what they hold."""
        for request_id in [*self.promises]:
            self._withdraw(request_id)
        self.host.unpublish_all()
        self._names.clear()
        self._saving.clear()
        self._offered.clear()

    # Matches

    def _longest_match(self, names: Names, start: int, max_tokens: int) -> int:
        def first_missing(group: int, wanted: BlockRange) -> int | None:
            first = max(wanted.start, start // self.groups.block_size)  # the engine has what comes before
            blocks = range(first, wanted.end)
            return next((block for block in blocks if self._find(names, group, block) is None), None)

        return self.groups.longest_match(max_tokens, first_missing)

    def _needed(self, start: int, end: int) -> Sequence[tuple[int, int]]:
        """The blocks that a load of these tokens copies: (group, block of the request)."""
        first = start // self.groups.block_size
        needed = [(number, group.needed(end)) for number, group in enumerate(self.groups.groups)] if end > start else []
        return [(number, block) for number, blocks in needed for block in range(max(first, blocks.start), blocks.end)]

    def _find(self, names: Names, group: int, block: int) -> int | None:
        name = names(group, block)
        return None if name is None else self.host.find(name, group)

    def _found(self, names: Names, start: int, end: int) -> dict[tuple[int, int], int]:
        """Those of the needed blocks that are in host memory."""
        found = {(group, block): self._find(names, group, block) for group, block in self._needed(start, end)}
        return {place: block for place, block in found.items() if block is not None}

    def _withdraw(self, request_id: str) -> None:
        promise = self.promises.pop(request_id, None)
        if promise is not None:
            self.host.free_blocks([*promise.blocks.values()][::-1])

    def check(self) -> None:
        """Raise PactViolation or AssertionError if what is held is not what promises and copies account for."""
        promised = sum(len(promise.blocks) for promise in self.promises.values())
        copied = sum(len(copy.host_blocks) for copy in self.jobs.values())
        assert self.host.held == promised + copied, f"{self.host.held} held, {promised} promised, {copied} under copy"
        assert self._reported.keys() | self._names.keys() <= self.jobs.keys()
        assert self._failed <= self.jobs.keys()
        self.host.check()
