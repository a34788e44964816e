"""Opens the worker's half of the connector: where its rank stands, and what copies on the rank's device.

A process has this half or the scheduler's, and imports that one alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvpact.config import KvpactConfig
from kvpact.memory.arena import ArenaSegment
from kvpact.vllm.compat.configuration import ranks_with_same_kv
from kvpact.vllm.groups import EngineGroups
from kvpact.worker.copy.base import TransferEngine
from kvpact.worker.paged import PagedKV
from kvpact.worker.segment import Sharing
from kvpact.worker.worker import CacheWorker, RankInfo


def open_worker(config: KvpactConfig, vllm_config: Any, kv_cache_config: Any, groups: EngineGroups) -> CacheWorker:
    """Open the rank's half of the connector. Raises ConfigError like `CacheWorker`."""
    opened = partial(_open, str(vllm_config.model_config.model))
    return CacheWorker(config, rank_info(vllm_config, kv_cache_config, groups), {"cuda": opened, "xpu": opened})


def _open(model: str, config: KvpactConfig, paged: PagedKV, segment: ArenaSegment, rank: int) -> TransferEngine:
    from kvpact.vllm.device import open_device

    return open_device(config, paged, segment, model)


def rank_info(vllm_config: Any, kv_cache_config: Any, groups: EngineGroups) -> RankInfo:
    """Return the worker's rank and the number of ranks; pipeline stages are counted before tensor-parallel ranks.

    Of tensor-parallel ranks that hold the same keys and values, the first shares the place where it stores them.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    parallel = vllm_config.parallel_config
    rank = get_pp_group().rank_in_group * parallel.tensor_parallel_size + get_tp_group().rank_in_group
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    same_kv = ranks_with_same_kv(vllm_config, kv_cache_config)
    return RankInfo(
        rank=rank,
        world_size=ranks,
        num_blocks=int(kv_cache_config.num_blocks),
        sharing=Sharing(
            rank,
            ranks,
            same_kv,
            get_tp_group().broadcast_object if same_kv > 1 else None,
            stages=int(parallel.pipeline_parallel_size),
        ),
        groups=groups.layers if groups.several else (),
    )
