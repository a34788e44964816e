"""LMCache's L2 adapter `fs` behind `Tier`. For LMCache 0.5.6.

Owns the waiting for the adapter's tasks, as LMCache's own controllers wait. The adapter itself is as it is installed;
LMCache's usage reports are switched off.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # read when LMCache is imported

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import fs_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import Tier
from kvpact_testkit.faults import Faults
from kvpact_testkit.peers.tier import PeerSuite, PeerTier
from kvpact_testkit.tier.conformance import StoreContext


class LMCacheFs(PeerTier):
    """The adapter with its defaults, over `place`. A block is an object of its own, of rank 0 and no salt."""

    def __init__(self, place: StoreContext, faults: Faults) -> None:
        super().__init__("LMCache's fs", place.slot_bytes, faults)
        self._lock = threading.Lock()
        self._model = place.namespace.fields["model"]
        self._memory = torch.frombuffer(self.rows.memory, dtype=torch.uint8)
        self._adapter = FSL2Adapter(FSL2AdapterConfig(str(place.directory)))
        self._stored: dict[int, Any] = {}

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        names = self._names(keys)
        found = self._run(
            lambda: self._adapter.submit_lookup_and_lock_task(names, {}), self._adapter.query_lookup_and_lock_result
        )
        self._adapter.submit_unlock(names)
        return _bits(found, len(keys))

    def load(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        names, objects = self._names(keys), self._objects(rows)
        found = self._run(lambda: self._adapter.submit_load_task(names, objects), self._adapter.query_load_result)
        return _bits(found, len(keys))

    def save(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        """A task for each block, as a task says of all its blocks at once whether they are stored."""
        names, objects = self._names(keys), self._objects(rows)
        with self._lock:
            if self.closed:
                return [False] * len(keys)
            tasks = [
                self._adapter.submit_store_task([name], [memory]) for name, memory in zip(names, objects, strict=True)
            ]

        def ended() -> bool:
            self._stored.update(self._adapter.pop_completed_store_tasks())
            return all(task in self._stored for task in tasks)

        self.until(ended)
        results = [self._stored.pop(task, None) for task in tasks]
        return [result is not None and result.is_successful() for result in results]

    def delete(self, keys: Iterable[BlockKey]) -> int:
        """The adapter does not say how many were there, so it is asked before and after."""
        doomed = list(keys)
        before = self.lookup(doomed)
        with self._lock:
            if not self.closed:
                self._adapter.delete(self._names(doomed))
        return sum(before) - sum(self.lookup(doomed))

    def end(self) -> None:
        with self._lock:
            self._adapter.close()

    def _names(self, keys: Sequence[BlockKey]) -> list[Any]:
        return [ObjectKey(chunk_hash=key, model_name=self._model, kv_rank=0) for key in keys]

    def _objects(self, rows: Sequence[int]) -> list[Any]:
        size = self.rows.row_bytes
        metadata = [MemoryObjMetadata(torch.Size([size]), torch.uint8, row * size, size, 1) for row in rows]
        memory = [self._memory[row * size : (row + 1) * size] for row in rows]
        return [TensorMemoryObj(each, meta, None) for each, meta in zip(memory, metadata, strict=True)]

    def _run(self, submit: Callable[[], int], result: Callable[[int], Any]) -> Any:
        """What `result` says at last of the task that `submit` starts; None if this is closed before."""
        with self._lock:
            if self.closed:
                return None
            task = submit()
        found: list[Any] = []

        def ended() -> bool:
            found[:] = [result(task)]
            return found[0] is not None

        return found[0] if self.until(ended) else None


def _bits(found: Any, count: int) -> list[bool]:
    return [False] * count if found is None else [bool(found.test(index)) for index in range(count)]


class LMCacheFsSuite(PeerSuite):
    """The adapter as configured by `{"type": "fs", "base_path": ...}`: no O_DIRECT, no bound."""

    deletes = True

    def open_tier(self, place: StoreContext) -> Tier:
        return LMCacheFs(place, self.faults)

    def file_of(self, place: StoreContext, key: BlockKey) -> Path:
        return next(place.directory.glob(f"*{key.hex()}.data"))

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        """A file that is opened for reading or writing is the call that fails, on the thread that opens it."""
        self.faults = faults
        opened = fs_l2_adapter.aiofiles.open

        @asynccontextmanager
        async def announced(path: Path, mode: str) -> AsyncIterator[Any]:
            def torn(part: float) -> None:
                path.write_bytes(bytes(int(self.slot_bytes * part)))

            await asyncio.to_thread(faults.before_read if mode == "rb" else partial(faults.before_write, torn=torn))
            async with opened(path, mode) as file:
                yield file

        with mock.patch.object(fs_l2_adapter.aiofiles, "open", announced):
            yield
