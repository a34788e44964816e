"""What a connector shows of its internals: a few lines per connector, to count leaks and inject faults.

Owns the adapters of the connectors known here; an author passes one for another connector. A connector without an
adapter is judged by its behaviour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.cache.cache import PactCache
from kvpact.contract import LoadJob, SaveJob
from kvpact.worker.copy.base import Job
from kvpact_testkit.vllm.faulty_copies import FaultyEngine

if TYPE_CHECKING:
    from kvpact_testkit.vllm.engine import VllmEngine


class ConnectorAdapter:
    """Shows nothing and damages only files. Subclass it for a connector; every method is optional."""

    def held(self, connector: Any) -> Mapping[str, int]:
        """Name -> what the scheduler half holds; without requests each number must be 0."""
        return {}

    def quiet(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The connector's configuration, changed so that the connector holds none of the engine's blocks by itself."""
        return config

    def fail_loads(self, engine: VllmEngine, good_blocks: int) -> bool:
        """Make loads fail from the request's block `good_blocks` on; False if that is not possible."""
        return False

    def fail_blocks(self, engine: VllmEngine, rank: int, *, loads: Collection[int], saves: Collection[int]) -> bool:
        """Make this rank fail to load and save exactly these blocks of any request; False if that is not possible."""
        return False

    def break_hooks(self, engine: VllmEngine) -> Mapping[str, Callable[[], None]]:
        """Hook -> a call that breaks the connector's own code inside it: it raises in its next three calls."""
        return {}

    def damage(self, folder: Path, how: str) -> int:
        """Damage what is stored in `folder` ("flip", "truncate" or "delete"); returns the number of files damaged."""
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
        for path in files:
            if how == "delete":
                path.unlink()
            elif how == "truncate":
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size // 2)
            else:
                _flip(path)
        return len(files)


def _flip(path: Path) -> None:
    """Flip one byte in every 512 of the last three quarters of a file: in bodies, not headers."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for position in range(size // 4, size, 512):
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 0x5A]))


def _raising(method: Callable[..., Any], times: int) -> Callable[..., Any]:
    """`method`, whose first `times` calls raise."""
    left = [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("injected")
        return method(*args, **kwargs)

    return call


def _make_fail(connector: Any, fails: Callable[[Job, int], bool]) -> None:
    """Make a rank fail to copy the blocks for which `fails(job, block)`."""
    transfers = connector.cache_worker.transfers
    engine = transfers.engine
    transfers.engine = FaultyEngine(engine.inner if isinstance(engine, FaultyEngine) else engine, fails)


def _is_synchronous(job: Job) -> bool:
    return isinstance(job, LoadJob) and job.synchronous


class PactAdapter(ConnectorAdapter):
    """kvpact's own connector."""

    def held(self, connector: Any) -> Mapping[str, int]:
        """Plans, leases, index pins, copies under way, protected engine blocks."""
        side = connector.scheduler_side
        if side.cache is None:
            return {}
        cache = side.cache
        counts = {"protected engine blocks": side.context.touched_blocks if side.context is not None else 0}
        if isinstance(cache, PactCache):
            counts |= {
                "open plans": len(cache.ledger.open_plans()),
                "leases": cache.ledger.totals.leases_held,
                "pinned blocks": cache.index.pinned_count,
                **cache.under_way,
            }
        return counts

    def quiet(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The connector saves nothing."""
        return {**config, "save": "off"}

    def fail_loads(self, engine: VllmEngine, good_blocks: int) -> bool:
        """Asynchronous loads fail block by block; a synchronous one fails as a whole, whatever `good_blocks`."""
        for rank in engine.ranks:
            _make_fail(
                rank.connector,
                lambda job, block: isinstance(job, LoadJob) and (job.synchronous or block >= good_blocks),
            )
        return True

    def fail_blocks(self, engine: VllmEngine, rank: int, *, loads: Collection[int], saves: Collection[int]) -> bool:
        """Saves, and loads that are asynchronous."""
        failing = {LoadJob: frozenset(loads), SaveJob: frozenset(saves)}
        connector = engine.ranks[rank].connector
        _make_fail(connector, lambda job, block: not _is_synchronous(job) and block in failing[type(job)])
        return True

    def break_hooks(self, engine: VllmEngine) -> Mapping[str, Callable[[], None]]:
        """The cache's method that each hook calls."""

        def breaking(owner: Any, method: str) -> Callable[[], None]:
            return lambda: setattr(owner, method, _raising(getattr(owner, method), 3))

        cache = engine.connector.scheduler_side.cache
        worker = engine.ranks[0].connector.cache_worker
        return {
            "get_num_new_matched_tokens": breaking(cache, "prepare_external_match"),
            "update_state_after_alloc": breaking(cache, "commit_external_match"),
            "build_connector_meta": breaking(cache, "note_computed"),
            "update_connector_output": breaking(cache, "apply_report"),
            "request_finished": breaking(cache, "request_finished"),
            "start_load_kv": breaking(worker, "start_loads"),
            "wait_for_save": breaking(worker, "start_saves"),
            "get_transfer_results": breaking(worker, "poll"),
        }


class NaiveAdapter(ConnectorAdapter):
    """The naive connector of `simple_connector.py`."""

    def held(self, connector: Any) -> Mapping[str, int]:
        """Pinned blocks."""
        return {"pinned blocks": connector.pinned_blocks}


class OffloadingAdapter(ConnectorAdapter):
    """vLLM's OffloadingConnector with the workers of `offloading.py`."""

    def held(self, connector: Any) -> Mapping[str, int]:
        """How much of host memory transfers pin, by vLLM's own gauge; nothing on releases that have none."""
        manager = connector.connector_scheduler.manager
        statistics = getattr(getattr(manager, "primary_tier", manager), "get_stats", lambda: None)()
        gauges = statistics.data["data"] if statistics is not None else {}
        pinned = sum(gauges.get("vllm:kv_offload_cpu_cache_usage_perc", {}).values())
        return {"percent of host memory pinned": ceil(100 * pinned)}

    def fail_loads(self, engine: VllmEngine, good_blocks: int) -> bool:
        """A load fails as a whole, whatever `good_blocks`."""
        for rank in engine.ranks:
            rank.connector.connector_worker.worker.loads_fail = True
        return True


KNOWN_ADAPTERS: Mapping[str, type[ConnectorAdapter]] = {
    "PactConnector": PactAdapter,
    "NaiveConnector": NaiveAdapter,
    "OffloadingConnector": OffloadingAdapter,
}
"""By the name of the connector's class."""
