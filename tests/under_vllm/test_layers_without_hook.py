"""H113: a layer that does not ask for its load may read too early: what it read is computed again, once."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention

from kvpact.config import load_config
from kvpact.contract import LoadJob, SaveJob, StepWork
from kvpact.vllm.compat.objects import layers_without_hook
from kvpact.wire import StepMessage
from kvpact.worker.worker import CacheWorker, RankInfo
from kvpact_testkit.results import Verdict
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.harness import Harness, prompt
from kvpact_testkit.vllm.scenarios import Scenario

BLOCKS, LAYERS = 8, 6


def test_a_layer_with_an_attention_of_its_own_is_found_by_its_forward() -> None:
    class Own(Attention):
        def forward(self, *arguments: Any) -> None: ...

    class Inheriting(MLAAttention):
        pass

    kinds = {"a": Attention, "b": MLAAttention, "c": Own, "d": Inheriting}
    layers = {name: object.__new__(kind) for name, kind in kinds.items()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert layers_without_hook(config, [*kinds, "not there"]) == ["c"]


def test_h113_blocks_of_layers_that_did_not_ask_are_named_and_later_loads_end_before_the_forward_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = CacheWorker(load_config({"memory": "256KiB"}, {}), RankInfo(0, 1, BLOCKS), {})
    tensors = {f"layer.{n}": torch.full((BLOCKS, 16, 8), n + 1, dtype=torch.int8) for n in range(LAYERS)}
    worker.register_kv_caches(tensors)
    try:
        save = StepMessage(StepWork(saves=(SaveJob(1, "r", 0, (0, 1), (2, 3)),)))
        worker.begin_step(save)
        worker.end_forward(save)
        while not worker.report().ranks[0]:
            worker.poll()
        for number, asking in enumerate((LAYERS, LAYERS - 1, 0, 0)):
            for tensor in tensors.values():
                tensor.zero_()
            load = LoadJob(2 + number, "r", 0, (0, 1), (4, 5), synchronous=True)
            message = StepMessage(StepWork(loads=(load,)))
            worker.begin_step(message)
            for layer in range(asking):
                worker.wait_for_layer_load(f"layer.{layer}")
            arrived = all(bool((tensor[4:6] == n + 1).all()) for n, tensor in enumerate(tensors.values()))
            worker.end_forward(message)
            assert worker.poll().invalid_blocks == ({4, 5} if number == 1 else set())
            if number != 1:
                assert arrived, "the last two without any hook"
        assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
    finally:
        worker.shutdown()


def test_h113_under_vllms_scheduler_no_token_is_wrong() -> None:
    """The last layer reads before anything of it has arrived."""

    def situation(harness: Harness) -> None:
        with harness.engine(unhooked_layers=1) as engine:
            for number in range(3):
                (stored,) = harness.store(engine, prompt(number, 10))
                harness.load(engine, f"again{number}", stored)

    config = {"memory": "1MiB", "model_id": "testkit"}
    check = VllmDriver("kvpact.vllm:PactConnector", config).check(Scenario("H113", ("P2", "P9"), "", situation))
    assert check.verdict is Verdict.KEPT, check
