"""Sleep mode: KV memory goes away and comes back, under vLLM's scheduler. Where it cannot be served it is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvpact.errors import ConfigError
from kvpact.vllm import checks
from kvpact.vllm.compat.platforms import BASE_WORKERS, KVPACT_WORKER
from kvpact_testkit.results import Verdict
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import Harness, prompt
from kvpact_testkit.vllm.scenarios import Scenario
from vllm_played_engine import vllm_config

DRIVER = VllmDriver("kvpact.vllm:PactConnector", {"memory": "1MiB", "model_id": "testkit"})


def keep(situation: Any) -> str:
    """Run a situation under vLLM's scheduler; every rule of the kit must be kept. Returns its notes."""
    check = DRIVER.check(Scenario("sleep", ("P2", "P9"), "", situation))
    assert check.verdict is Verdict.KEPT, check
    return check.note


def move(engine: VllmEngine, shape: Any = None) -> None:
    """Every rank sleeps, and wakes with its KV memory elsewhere; what was in it is gone."""
    for rank in engine.ranks:
        connector: Any = rank.connector
        with rank.acting():
            connector.unregister_kv_caches()
            connector.unregister_kv_caches()
            rank.memory = rank.new_memory()
            tensors = dict(rank.memory.tensors)
            connector.register_kv_caches({name: shape(one) if shape else one for name, one in tensors.items()})
            connector.restore_kv_caches()


def test_what_was_stored_before_a_sleep_is_loaded_into_the_memory_after_it() -> None:
    def situation(harness: Harness) -> None:
        with harness.engine(ranks=2) as engine:
            (tokens,) = harness.store(engine, prompt(1, 10))
            move(engine)
            harness.load(engine, "again", tokens, max_tokens=4)
            harness.notes.append(str(engine.observed.committed_tokens("again")))

    assert keep(situation) == "160"


def test_memory_in_another_layout_is_left_alone_and_the_engine_serves_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def situation(harness: Harness) -> None:
        with harness.engine() as engine:
            (tokens,) = harness.store(engine, prompt(1, 10))
            move(engine, lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2))
            for name in ("again", "once more"):
                harness.serve(engine, name, tokens, max_tokens=4)
                harness.forget(engine)
            harness.notes.append(str(sum(bool(probe.answer) for probe in engine.observed.probes)))

    monkeypatch.setattr(logging.getLogger("kvpact"), "propagate", True)
    with caplog.at_level(logging.ERROR, "kvpact"):
        assert keep(situation) == "0"
    (said,) = [record.message for record in caplog.records if "came back as" in record.message]
    assert said.endswith("This engine goes on without a cache")


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("worker", [BASE_WORKERS["cuda"], KVPACT_WORKER, "theirs.Worker"])
def test_sleep_mode_is_refused_where_nobody_would_say_that_it_begins(
    worker: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config(tmp_path / "model", {}, 4096, {})
    config.model_config.enable_sleep_mode = True
    config.parallel_config.worker_cls = worker
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
    groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["one"], spec)])
    monkeypatch.setattr(checks, "TELLS_OF_SLEEP", told)
    if worker == BASE_WORKERS["cuda"] and not told:
        with pytest.raises(ConfigError, match=r"--worker-cls kvpact\.vllm\.worker\.KvpactWorker, or leave"):
            checks.check_engine(config, groups)
    else:
        checks.check_engine(config, groups)
