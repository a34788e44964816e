"""Chunks of one number of ranks read by another: vLLM's own workers over a simulated device, and a `PactTier` below."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from offload_bed import Bed, keys_of
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvpact_testkit.vllm.compat import (
    MODEL,
    EngineSettings,
    acting_as,
    make_kv_cache_config,
    make_vllm_config,
    make_worker_connector,
)

HEADS = 4
BLOCKS = 6
SIZE = 16
"""Tokens of a block."""
HEAD_SIZE = 16
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
JOBS = count(1)
TIERS: dict[str, Callable[[Path], dict[str, str]]] = {
    "PactTier": lambda folder: {"model_id": "w", "url": f"disk://{folder}/kv?capacity=1MiB"},
    "fs": lambda folder: {"root_dir": f"{folder}/fs"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_key_value_heads": HEADS}))
    return ModelConfig(str(folder), skip_tokenizer_init=True, dtype="float16", max_model_len=1024, seed=0)


def content(layer: int) -> torch.Tensor:
    """Keys and values of a layer, of all heads: every element of both layers is another number."""
    count = BLOCKS * HEADS * SIZE * 2 * HEAD_SIZE
    return (torch.arange(count, dtype=torch.int16) * 2 + layer).reshape(BLOCKS, HEADS, SIZE, 2 * HEAD_SIZE)


class Ranks(Bed):
    """One engine's manager and its ranks' workers, each with its share of the heads."""

    def __init__(self, model: ModelConfig, ranks: int, folder: Path, *, canonical: bool, kind: str) -> None:
        self.ranks = ranks
        self._contexts = {}
        settings = EngineSettings(ranks=ranks, heads=HEADS, num_blocks=BLOCKS, block_size=SIZE, head_size=HEAD_SIZE)
        extra = {
            "spec_name": "PlayedPactTieringSpec" if kind == "PactTier" else "PlayedTieringSpec",
            "spec_module_path": "kvpact_testkit.vllm.offloading",
            "cpu_bytes_to_use": 1 << 20,
            "seed": ranks,
            "log": str(folder),
            "canonical_layout": canonical,
            "secondary_tiers": [{"type": kind, **TIERS[kind](folder)}],
        }
        transfer = {
            "kv_connector": "OffloadingConnector",
            "engine_id": uuid4().hex,
            "kv_connector_extra_config": extra,
        }
        config = make_vllm_config(settings, transfer, model)
        config.cache_config.kv_cache_layout = "LBHNC"  # the one that OffloadingConnector asks for
        with acting_as(settings, 0), set_current_vllm_config(config):
            self.connector = KVConnectorFactory.create_connector(
                config=config, role=KVConnectorRole.SCHEDULER, kv_cache_config=make_kv_cache_config(settings)
            )
        self.manager = self.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        self.workers = [make_worker_connector(settings, config, rank) for rank in range(ranks)]
        self.kv = [self._memory(rank) for rank in range(ranks)]
        for rank, worker in enumerate(self.workers):
            worker.register_kv_caches(dict(zip(LAYERS, self.kv[rank], strict=True)))

    def _memory(self, rank: int) -> list[torch.Tensor]:
        shape = (BLOCKS, HEADS // self.ranks, SIZE, 2 * HEAD_SIZE)
        return [torch.zeros(shape, dtype=torch.float16) for _ in LAYERS]

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each rank's memory of a layer, as integers, and what it holds of the model."""
        each = HEADS // self.ranks
        for rank, memory in enumerate(self.kv):
            for layer, tensor in enumerate(memory):
                yield tensor.view(torch.int16), content(layer)[:, rank * each : (rank + 1) * each]

    def copy(self, submit: str, blocks: Sequence[int], chunks: Any) -> None:
        """Every rank copies these blocks from or to these chunks, and has done so."""
        job = next(JOBS)
        gpu = GPULoadStoreSpec([*blocks], group_sizes=[len(blocks)], block_indices=[0])
        for worker in self.workers:
            half = worker.connector_worker.worker
            assert getattr(half, submit)(job, *((gpu, chunks) if submit == "submit_store" else (chunks, gpu)))
            half.wait({job})

    def store(self, keys: Sequence[Any]) -> None:
        """The ranks have computed these blocks, and the tier stores them."""
        for tensor, whole in self._parts():
            tensor.copy_(whole)
        output = self.manager.prepare_store(keys, self.request("writer"))
        self.copy("submit_store", range(len(keys)), output.store_spec)
        self.manager.complete_store(keys, self.request("writer"))
        self.rest()

    def wrong_elements(self, keys: Sequence[Any]) -> int:
        """Load these blocks into ranks that have none, and count the elements that are not the model's."""
        self.copy("submit_load", range(len(keys)), self.manager.prepare_load(keys, self.request("reader")))
        self.manager.complete_load(keys, self.request("reader"))
        parts = ((tensor[: len(keys)], whole[: len(keys)]) for tensor, whole in self._parts())
        return sum(int((tensor != whole).sum()) for tensor, whole in parts)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.connector.shutdown()


@contextmanager
def engine_of(
    model: ModelConfig, ranks: int, folder: Path, *, canonical: bool, kind: str = "PactTier"
) -> Iterator[Ranks]:
    made = Ranks(model, ranks, folder, canonical=canonical, kind=kind)
    try:
        yield made
    finally:
        made.close()


KEYS = keys_of(1, BLOCKS)
ELEMENTS = BLOCKS * HEADS * SIZE * 2 * HEAD_SIZE * len(LAYERS)
AS_MANY = [(ranks, ranks, canonical) for ranks in (1, 2, 4) for canonical in (True, False)]
OTHERS = [(1, 2, True), (2, 1, True), (2, 4, True), (4, 2, True)]


@pytest.mark.parametrize(("writers", "readers", "canonical"), AS_MANY + OTHERS)
def test_as_many_ranks_or_in_the_canonical_layout_others_read_what_was_stored(
    model: ModelConfig, writers: int, readers: int, canonical: bool, tmp_path: Path
) -> None:
    with engine_of(model, writers, tmp_path, canonical=canonical) as first:
        first.store(KEYS)
    with engine_of(model, readers, tmp_path, canonical=canonical) as second:
        assert second.find("b", KEYS) == BLOCKS
        assert second.wrong_elements(KEYS) == 0


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 4), (4, 2)])
def test_h33_ranks_of_another_number_find_nothing_in_the_direct_layout(
    model: ModelConfig, writers: int, readers: int, tmp_path: Path
) -> None:
    """vLLM claims that the number decides nothing. Read all the same, most elements would be of other layers."""
    with engine_of(model, writers, tmp_path, canonical=False) as first:
        first.store(KEYS)
    with engine_of(model, readers, tmp_path, canonical=False) as second:
        assert second.find("b", KEYS) == 0


@pytest.mark.parametrize(("canonical", "wrong"), [(True, 0), (False, ELEMENTS // 2)])
def test_vllms_file_tier_gives_ranks_of_another_number_wrong_elements_in_the_direct_layout(
    model: ModelConfig, canonical: bool, wrong: int, tmp_path: Path
) -> None:
    with engine_of(model, 2, tmp_path, canonical=canonical, kind="fs") as first:
        first.store(KEYS)
    with engine_of(model, 4, tmp_path, canonical=canonical, kind="fs") as second:
        assert second.find("b", KEYS) == BLOCKS
        assert second.wrong_elements(KEYS) == wrong
