"""Hybrid models' KV memory as vLLM lays it out itself: blocks of each group come back, and no other block changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.worker.utils import allocate_kv_cache

from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, SaveJob, StepWork
from kvpact.ranges import RangeSet
from kvpact.wire import StepMessage
from kvpact.worker.worker import CacheWorker, RankInfo

PAGE = 1024
BLOCKS = 10
NAMES = (
    ("model.layers.0.attn", "model.layers.3.attn", "model.layers.6.attn"),
    ("model.layers.1.attn", "model.layers.4.attn"),
    ("model.layers.2.mixer", "model.layers.5.mixer", "model.layers.7.mixer"),
)


def specs() -> tuple[Any, ...]:
    heads = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return (
        interface.FullAttentionSpec(**heads),
        interface.SlidingWindowSpec(**heads, sliding_window=64),
        interface.MambaSpec(
            block_size=64,
            shapes=((3, 32), (4, 8, 4)),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=PAGE,
        ),
    )


def memory_in(layout: Any, kernel_block: int) -> dict[str, Any]:
    """What vLLM registers."""
    groups = [interface.KVCacheGroupSpec(list(names), spec) for names, spec in zip(NAMES, specs(), strict=True)]
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=BLOCKS,
    )
    config = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    made = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, BLOCKS * 3 * PAGE)
    assert made.num_blocks == BLOCKS
    memory: dict[str, Any] = allocate_kv_cache(made, torch.device("cpu"), layout, [kernel_block, 16, 64])
    return memory


def pages(memory: dict[str, Any], group: int, block: int) -> list[Any]:
    """The group's layers of one block, by vLLM's own view of manager blocks."""
    return [interface.group_kernel_blocks(memory[name], BLOCKS)[block] for name in NAMES[group]]


@pytest.fixture(
    params=[("LBNHC", 16), ("LBNHC", 8), ("LBHNC", 16), ("LBHNC", 8), ("BLNHC", 16), ("BLHNC", 16)],
    ids=lambda param: f"{param[0]}, kernel blocks of {param[1]} tokens",
)
def memory(request: pytest.FixtureRequest) -> dict[str, Any]:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    name, kernel_block = request.param
    return memory_in(KVCacheLayout[name], kernel_block)


@pytest.fixture
def copy(memory: dict[str, Any]) -> Iterator[Callable[[LoadJob | SaveJob], JobOutcome]]:
    worker = CacheWorker(load_config({"memory": "1MiB"}, {}), RankInfo(0, 1, BLOCKS, NAMES), {})
    worker.register_kv_caches(memory)
    hello = worker.hello()
    assert hello is not None
    assert hello.group_bytes == (3 * PAGE, 2 * PAGE, 3 * (192 + 512)), "a state's padding is not copied"

    def run(job: LoadJob | SaveJob) -> JobOutcome:
        work = StepWork(loads=(job,)) if isinstance(job, LoadJob) else StepWork(saves=(job,))
        worker.begin_step(StepMessage(work))
        if isinstance(job, LoadJob):
            for name in memory:
                worker.wait_for_layer_load(name)
        worker.end_forward(StepMessage(work))
        until = time.monotonic() + 10
        while time.monotonic() < until:
            worker.poll()
            if outcomes := worker.report().ranks[0]:
                return outcomes[job.job_id]
        raise AssertionError("the job never ends")

    yield run
    worker.shutdown()


def test_blocks_of_each_group_come_back_in_vllms_own_layout(
    memory: dict[str, Any], copy: Callable[[LoadJob | SaveJob], JobOutcome]
) -> None:
    done = JobOutcome(RangeSet.span(0, 1))
    kept = {}
    for group in range(len(NAMES)):
        for number, page in enumerate(pages(memory, group, group + 1)):
            page.copy_(torch.randn(page.shape) * 8 if page.is_floating_point() else torch.full(page.shape, number + 3))
        kept[group] = [page.clone() for page in pages(memory, group, group + 1)]
        assert copy(SaveJob(group, "r", 0, (group,), (group + 1,), group)) == done
    for tensor in memory.values():
        tensor.zero_()
    for group in range(len(NAMES)):
        assert copy(LoadJob(10 + group, "r", 0, (group,), (group + 5,), synchronous=True, group_id=group)) == done
    for group in range(len(NAMES)):
        for page, old in zip(pages(memory, group, group + 5), kept[group], strict=True):
            assert torch.equal(page, old)
        for block in set(range(BLOCKS)) - {5, 6, 7}:
            assert not any(page.any() for page in pages(memory, group, block))
