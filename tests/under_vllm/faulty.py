"""`FaultyConnector`: kvpact in a real engine, with faults that a test turns on and off from outside the engine.

Name it by `kv_connector_module_path`. The environment variable FAULTY_CONTROL names a directory: the file `faults` in
it lists the methods that raise now, `raised` gets a line for each time, `plans` one for each plan that ended,
`network` one for each use of the network by kvpact, `side_by_side` says how many requests one step computed at most,
and `free_blocks` how many of the engine's blocks were free at the end of its last step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import socket_watch
from kvpact.cache.plan import PlanRecord
from kvpact.contract import LoadJob
from kvpact.vllm import PactConnector
from kvpact.worker.copy.base import Job
from kvpact_testkit.vllm.faulty_copies import FaultyEngine

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

CONTROL = Path(os.environ["FAULTY_CONTROL"])
SLOW, SLOW_SECONDS = "tier.slow", 0.05
"""While this is on, each operation of a tier takes so much longer."""

HANG = "engine.scatter.hang"
"""While this is on, copies into the engine's memory do not end."""

CHECK_EVERY = 25
"""Steps between two looks at all invariants of the cache; one that is broken counts as an error of the hook."""

socket_watch.watch(CONTROL / "network")


class Injected(RuntimeError):
    """What stands where kvpact's own code should be."""


def active() -> set[str]:
    """The faults that are on now."""
    try:
        return set((CONTROL / "faults").read_text().split())
    except FileNotFoundError:
        return set()


def strike(name: str) -> None:
    """Raise if the fault is on."""
    if name in active():
        note(name)
        raise Injected(name)


def note(name: str) -> None:
    """The fault has struck."""
    with (CONTROL / "raised").open("a") as raised:
        raised.write(f"{name}\n")


def wrap(owner: Any, prefix: str, *names: str) -> None:
    """Let these methods of an object raise while their fault is on."""
    for name in names:
        setattr(owner, name, faulty(getattr(owner, name), f"{prefix}.{name}"))


def faulty(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The method, or its fault."""

    def call(*args: Any, **kwargs: Any) -> Any:
        strike(name)
        return method(*args, **kwargs)

    return call


def slowed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A tier's method, which takes longer while that fault is on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if SLOW in active():
            time.sleep(SLOW_SECONDS)
        return method(*args, **kwargs)

    return call


def hanging(method: Callable[..., Any]) -> Callable[..., Any]:
    """A copy that does not end while that fault is on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        while HANG in active():
            time.sleep(0.01)
        return method(*args, **kwargs)

    return call


def checked(end_step: Callable[[], Any], cache: Any) -> Callable[[], Any]:
    """The end of a step, after which all invariants are looked at now and then."""
    steps = 0

    def call() -> Any:
        nonlocal steps
        steps += 1
        if steps % CHECK_EVERY == 0:
            cache.check()
        return end_step()

    return call


class PlanLog:
    """Stands where the ledger keeps its history, and writes a line for each plan that ended."""

    def __init__(self) -> None:
        self._lines = (CONTROL / "plans").open("a", buffering=1)

    def append(self, record: PlanRecord) -> None:
        """A plan has ended."""
        failed = [[blocks.start, blocks.count] for blocks in record.failed.ranges]
        counts = (record.promised_tokens, record.committed_tokens, record.loaded_tokens)
        used = (record.used_tokens, record.used_again_tokens)
        self._lines.write(json.dumps([record.request_id, str(record.state), *counts, *used, failed]) + "\n")


class FaultyConnector(PactConnector):
    """kvpact, with faults.

    "transfer.fault.N" fails asynchronous loads from a request's block N on, "transfer.fault.N-M" those of blocks N to
    M alone; "rank1.transfer.fault.N" and so on does it on rank 1 only, "rank1.save" fails its
    saves. "tier.slow" slows the tiers down.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._side_by_side = self._free_blocks = 0
        if self._scheduler is not None:
            methods = "on_new_request prepare end_step request_finished poll_idle collect_stats"
            wrap(self._scheduler, "scheduler", *methods.split())
        if self._worker is not None:
            wrap(self._worker, "worker", "start_loads", "wait_for_layer_load", "start_saves", "poll", "report")

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The transfer threads are up."""
        super().register_kv_caches(kv_caches)
        transfer: Any = self.cache_worker.transfers
        copier = transfer.engine.copier
        wrap(transfer, "transfer", "start_loads", "wait_for_layer", "wait_for_loads", "start_saves", "poll")
        wrap(copier, "engine", "scatter", "gather")
        copier.scatter = hanging(copier.scatter)
        copier.gather = faulty(copier.gather, f"rank{self.cache_worker.place.rank}.save")
        transfer.engine = FaultyEngine(transfer.engine, self._fails)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """The cache is up."""
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        methods = "prepare_external_match commit_external_match note_computed end_step apply_report request_finished"
        cache: Any = self.scheduler_side.cache
        wrap(cache, "cache", *methods.split())
        cache.ledger.history = PlanLog()
        cache.end_step = checked(cache.end_step, cache)
        for client in cache.tiers.clients:
            tier = client.tier
            for name in ("get", "put", "delete") if tier.exclusive else ("lookup", "get", "put", "delete"):
                setattr(tier, name, slowed(getattr(tier, name)))  # an exclusive tier's lookup touches memory only

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The engine's KV blocks are there."""
        self._count_free_blocks = kv_cache_manager.block_pool.get_num_free_blocks
        super().bind_kv_cache_manager(kv_cache_manager)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's end."""
        requests = len(scheduler_output.num_scheduled_tokens)
        if requests > self._side_by_side:
            self._side_by_side = requests
            (CONTROL / "side_by_side").write_text(str(requests))
        if (free := self._count_free_blocks()) != self._free_blocks:
            self._free_blocks = free
            beside = CONTROL / "free_blocks.new"
            beside.write_text(str(free))
            beside.replace(CONTROL / "free_blocks")
        return super().build_connector_meta(scheduler_output)

    def _fails(self, job: Job, block: int) -> bool:
        """Whether a fault that is on strikes this block of an asynchronous load."""
        if not isinstance(job, LoadJob) or job.synchronous:
            return False
        for name in active():
            place, _, blocks = name.partition("transfer.fault.")
            first, _, last = blocks.partition("-")
            ours = place in ("", f"rank{self.cache_worker.place.rank}.")
            if blocks and ours and int(first) <= block <= int(last or block):
                note(name)
                return True
        return False
