"""vLLM's secondary tiers behind `Tier`: its `fs`. For vLLM 0.32 and later.

Owns the order in which a scheduler calls such a tier: a request asks until it is answered, then a job for each block.
The tier itself is as it is installed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs import manager

from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.base import Tier
from kvpact_testkit.faults import Crash, Faults
from kvpact_testkit.peers.tier import ROWS, PeerSuite, PeerTier
from kvpact_testkit.tier.conformance import StoreContext


def offloading_spec(namespace: Namespace, row_bytes: int) -> Any:
    """What vLLM tells a tier of an engine: the namespace's model, one rank, one KV cache group, blocks of 16 tokens."""
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=True)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=row_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(namespace.fields["model"], namespace.fields["dtype"]),
        cache=OffloadingCacheConfig(16, 1),
        parallel=parallel,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


class VllmTier(PeerTier):
    """One of vLLM's secondary tiers, made by its factory from `config`.

    vLLM calls a tier on one thread, so a lock is held in each call, and not while a job is under way.
    """

    def __init__(self, config: dict[str, Any], place: StoreContext, faults: Faults) -> None:
        super().__init__(f"vLLM's {config['type']}", place.slot_bytes, faults)
        view = self.rows.memory.cast("B", (ROWS, place.slot_bytes))
        spec = offloading_spec(place.namespace, place.slot_bytes)
        self._tier = SecondaryTierFactory.create_secondary_tier(config, view, spec)
        self._lock = threading.Lock()
        self._numbers = count()
        self._done: dict[int, bool] = {}

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        wanted = [make_offload_key(key, 0) for key in keys]
        with self._lock:
            context = ReqContext(req_id=str(next(self._numbers)))
            self._tier.on_new_request(context)

        def ask() -> bool:
            said = [self._tier.lookup(key, context) for key in wanted]
            self._tier.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
            held[:] = [answer is LookupResult.HIT for answer in said]
            return LookupResult.RETRY not in said

        held = [False] * len(keys)
        if not self._until(ask):
            return [False] * len(keys)
        with self._lock:
            self._tier.on_request_finished(context)
        return held

    def load(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        return self._jobs(self._tier.submit_load, keys, rows, is_promotion=True)

    def save(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        return self._jobs(self._tier.submit_store, keys, rows, is_promotion=False)

    def end(self) -> None:
        with self._lock:
            self._tier.shutdown()

    def _jobs(
        self, submit: Callable[[Any], None], keys: Sequence[BlockKey], rows: Sequence[int], *, is_promotion: bool
    ) -> list[bool]:
        """A job for each block, as a job ends at its first block that fails."""
        with self._lock:
            if self.closed:
                return [False] * len(keys)
            numbers = [next(self._numbers) for _ in keys]
            context = ReqContext(req_id=str(next(self._numbers)))
            for number, key, row in zip(numbers, keys, rows, strict=True):
                chunk = np.array([row], dtype=np.int32)
                submit(TransferJob(number, [make_offload_key(key, 0)], chunk, is_promotion, context))

        def ended() -> bool:
            for result in self._tier.get_finished_jobs():
                self._done[result.job_id] = result.success
            return all(number in self._done for number in numbers)

        self._until(ended)
        return [self._done.pop(number, False) for number in numbers]

    def _until(self, answered: Callable[[], bool]) -> bool:
        """Call `answered` as a scheduler would in each step; False if the tier is closed before it returns True."""

        def in_turn() -> bool:
            with self._lock:
                return answered()

        return self.until(in_turn)


class VllmFsSuite(PeerSuite):
    """vLLM's file system tier with its defaults: 16 threads that read, 16 that write, no bound."""

    def open_tier(self, place: StoreContext) -> Tier:
        return VllmTier({"type": "fs", "root_dir": str(place.directory)}, place, self.faults)

    def file_of(self, place: StoreContext, key: BlockKey) -> Path:
        return next(place.directory.rglob(f"{key.hex()}.bin"))

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        """A death ends the thread that writes, and the adapter then raises `Crash`."""
        self.faults = faults
        load, store = manager.batch_load_block, manager.batch_store_block

        def announced_load(paths: list[str], view: memoryview, offsets: list[int], *rest: Any) -> None:
            with _thread_that_may_die():
                faults.before_read()
            load(paths, view, offsets, *rest)

        def announced_store(paths: list[str], view: memoryview, offsets: list[int], size: int, *rest: Any) -> None:
            def torn(part: float) -> None:
                path = Path(f"{paths[0]}_1.tmp")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(view.cast("B")[offsets[0] :][: int(size * part)])

            with _thread_that_may_die():
                if not os.path.exists(paths[0]):  # otherwise it writes nothing
                    faults.before_write(torn=torn)
            store(paths, view, offsets, size, *rest)

        with (
            mock.patch.object(manager, "batch_load_block", announced_load),
            mock.patch.object(manager, "batch_store_block", announced_store),
        ):
            yield


@contextmanager
def _thread_that_may_die() -> Iterator[None]:
    try:
        yield
    except Crash as crash:
        raise SystemExit from crash  # of a thread: it ends without a word
