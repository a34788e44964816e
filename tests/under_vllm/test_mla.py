"""A model with multi-head latent attention, like DeepSeek's, on two ranks: what both hold is stored once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from model_families import LATENT, MLA_LAYERS, deepseek_like

from engines import kvpact_transfer_config, leases_when
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineSettings
from leftovers import named_shared_memory, orphaned_shared_memory, shared_memory, slabs_still_locked
from polling import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 16
"""vLLM's CPU kernels for latent attention have no other."""
BLOCKS = 6
CHECKED = 2
"""Jobs of each kind that a played device's engine checks."""
ASKED = [[(7 * token + 11 * number + 3) % 500 + 5 for token in range(BLOCKS * BLOCK + 4)] for number in range(3)]
SLOT_BYTES = -(-MLA_LAYERS * BLOCK * LATENT * 2 // 4096) * 4096
"""Of the latent vectors and rotated keys of a block, in bfloat16, whatever the number of ranks."""


@pytest.fixture(scope="module")
def mla_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the model."""
    return deepseek_like(tmp_path_factory.mktemp("mla") / "model", tiny_model)


def start(model: Path, folder: Path, ranks: int, environment: Mapping[str, str], *, played: bool) -> ForkedEngine:
    """A life of the engine on the folder's slab; `played`: its KV memory counts as a device's, see `played`."""
    transfer = kvpact_transfer_config(
        memory="16MiB",
        tiers=[f"disk://{folder / 'slabs'}?capacity=64MiB"],
        stats_file=str(folder / f"stats-{ranks}.json"),
    )
    if played:
        transfer |= {"kv_connector": "PlayedConnector", "kv_connector_module_path": "played"}
        environment = {**environment, "PLAYED_LOG": str(folder), "PLAYED_FIRST": str(CHECKED)}
    arguments: dict[str, Any] = {
        "tensor_parallel_size": ranks,
        "worker_extension_cls": "kv_digest.KVDigests",
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 1 << 24,
    }
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    settings = EngineSettings(model, transfer, arguments, {"PYTHONPATH": path, **environment})
    engine = ForkedEngine(settings, folder / f"engine-{ranks}.log")
    return engine.wait_ready()


def blocks_of(engine: ForkedEngine, folder: Path, ranks: int) -> set[str]:
    """Digests of the blocks in the engine's KV memory, which are the same on all ranks."""
    engine.call("collective_rpc", "write_kv_digests", None, [str(folder)])
    said = [folder.joinpath(f"rank-{rank}").read_text() for rank in range(ranks)]
    assert len(set(said)) == 1
    return set(said[0].split())


@pytest.mark.parametrize(
    "played",
    [
        pytest.param(False, marks=pytest.mark.soak, id="cpu"),
        pytest.param(True, marks=pytest.mark.proof, id="played device"),
    ],
)
def test_two_ranks_store_once_die_and_one_rank_loads_it(mla_model: Path, tmp_path: Path, *, played: bool) -> None:
    """vLLM's CPU build has no prefix caching for such models, and computes the rest of a prompt by another kernel than
    a whole one: what is compared are the bytes of the blocks, and answers that were computed in the same way."""
    before = shared_memory()
    engine = start(mla_model, tmp_path, 2, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, played=played)
    try:
        assert [engine.generate([tokens], max_tokens=6)[0].cached_tokens for tokens in ASKED] == [0] * len(ASKED)
        computed = blocks_of(engine, tmp_path, 2)
        assert len(computed) > BLOCKS
        assert leases_when(engine, "saved_blocks", len(ASKED) * BLOCKS) == 0
        loaded = [[engine.generate([tokens], max_tokens=6)[0] for tokens in ASKED] for _ in range(2)]
        for answers in loaded:
            assert [answer.cached_tokens for answer in answers] == [BLOCKS * BLOCK] * len(ASKED)
            assert all(one.same_answer(other) for one, other in zip(answers, loaded[0], strict=True))
        assert len(computed & blocks_of(engine, tmp_path, 2)) >= BLOCKS, "the last prompt's, on both ranks"
        log = engine.log.read_text()
        assert "ranks 0 to 1 hold the same keys and values: stored once, by rank 0" in log
        assert f"16MiB of memory for {(16 << 20) // SLOT_BYTES * BLOCK:,} tokens, tiers below: " in log
        assert leases_when(engine, "used_tokens", 2 * len(ASKED) * BLOCKS * BLOCK) == 0
        if played:  # rank 1 makes no saves: its loads prove it
            jobs = Counter((tmp_path / "jobs").read_text().splitlines())
            assert jobs[f"load {BLOCKS} checked"] == 2 * CHECKED
            assert jobs[f"step load {BLOCKS} checked"] == 2 * CHECKED
            assert jobs[f"step load {BLOCKS} believed"] > 0
        (storing,) = [pid for pid, name in engine.processes().items() if "TP0" in name]
        of_vllm = named_shared_memory(engine.processes())
        os.kill(storing, signal.SIGKILL)
        until(lambda: len(engine.processes()) <= 1)
    finally:
        engine.kill()
    assert engine.processes() == {}
    for path in of_vllm:
        path.unlink(missing_ok=True)
    assert orphaned_shared_memory(before) == set()
    assert slabs_still_locked(tmp_path / "slabs") == []
    engine = start(mla_model, tmp_path, 1, {"VLLM_CPU_OMP_THREADS_BIND": "0"}, played=played)
    try:
        again = [engine.generate([tokens], max_tokens=6)[0] for tokens in ASKED]
        assert [answer.cached_tokens for answer in again] == [BLOCKS * BLOCK] * len(ASKED)
        assert len(computed & blocks_of(engine, tmp_path, 1)) >= BLOCKS, "what two ranks computed, bit for bit"
        assert "hold the same keys and values" not in engine.log.read_text()
        assert leases_when(engine, "used_tokens", len(ASKED) * BLOCKS * BLOCK) == 0
        assert not (tmp_path / "wrong").exists()
    finally:
        engine.kill()
