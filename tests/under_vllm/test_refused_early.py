"""What kvpact refuses is said when vLLM has made its configuration, before any weights, where that alone tells."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from kvpact.errors import ConfigError
from kvpact.memory.limits import total_memory_bytes
from kvpact.vllm import PactConnector, plugin
from kvpact.vllm.checks import check_configuration, let_no_step_wait
from kvpact.vllm.compat.platforms import OUR_CLASSES
from kvpact_testkit.vllm.compat import EngineSettings, make_vllm_config
from kvpact_testkit.vllm.harness import under_multi_connector

PACT = {"kv_connector": "PactConnector", "kv_connector_module_path": "kvpact.vllm"}


def made(**settings: Any) -> Any:
    """vLLM's configuration of an engine with kvpact."""
    return make_vllm_config(EngineSettings(), PACT | {"kv_connector_extra_config": settings})


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in as vLLM's processes have it, for this test."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    decides = "_post_init_kv_transfer_config"
    monkeypatch.setattr(VllmConfig, decides, getattr(VllmConfig, decides))
    monkeypatch.setattr("kvpact.vllm.checks.check_configuration", check_configuration)
    monkeypatch.setattr("kvpact.vllm.checks.let_no_step_wait", let_no_step_wait)
    plugin.register()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ({"kv_role": "kv_producer"}, 'kvpact: kv_role is "kv_producer"; a cache both stores and loads'),
        ({"kv_connector_extra_config": {"memroy": "1GiB"}}, 'kvpact: unknown key "memroy".*did you mean "memory"'),
        (
            {"kv_connector_extra_config": {"require": "all"}},
            "kvpact: this engine was started without kvpact's --worker-cls",
        ),
        ({"kv_connector_extra_config": {"record_key_file": "/nowhere"}}, "kvpact: record_key_file=/nowhere: cannot be"),
        (
            {"kv_connector_extra_config": {"tenants": {"alice": {"salt_file": "/nowhere", "memory": "25%"}}}},
            'kvpact: tenants: "alice": salt_file=/nowhere cannot be read: No such file',
        ),
        ({"kv_connector_extra_config": {"match_at": "step"}}, 'kvpact: match_at="step" needs a worker that asks'),
        (
            {"kv_connector_extra_config": {"memory": "8000TiB"}},
            "kvpact: memory=7.812PiB: this machine or its container has .* in all; set `memory` to",
        ),
        (
            {"kv_connector_extra_config": {"cache": "no_such_module:Cache"}},
            'kvpact: "cache": "no_such_module:Cache" can',
        ),
    ],
)
def test_vllms_configuration_cannot_be_made_with_what_kvpact_refuses(transfer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_vllm_config(EngineSettings(), PACT | transfer)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("settings", "message"),
    [({"memory": "8000TiB"}, "kvpact: memory=7.812PiB"), ({"memroy": 1}, 'kvpact: unknown key "memroy"'), ({}, "")],
)
def test_h129_what_is_refused_of_one_connector_is_refused_of_one_among_several(
    settings: dict[str, Any], message: str
) -> None:
    pact = {**PACT, "kv_role": "kv_both", "kv_connector_extra_config": {"memory": "64MiB", **settings}}
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    several = {"kv_connector": "MultiConnector", "kv_connector_module_path": None}
    transfer = several | {"kv_connector_extra_config": {"connectors": [example, pact]}}
    if not message:
        make_vllm_config(EngineSettings(), transfer)
        return
    with pytest.raises(ValueError, match=message):
        make_vllm_config(EngineSettings(), transfer)


@pytest.mark.usefixtures("registered")
def test_what_can_be_served_is_made() -> None:
    assert made(memory="64MiB").kv_transfer_config.kv_connector == "PactConnector"


EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
WAITS = PACT | {"kv_role": "kv_both", "kv_connector_extra_config": {"memory": "64MiB", "sync_load_budget": "1MiB"}}
WAITS_NOT = WAITS | {"kv_connector_extra_config": {"memory": "64MiB", "sync_load_budget": 0}}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("connectors", "made_of_it", "lines"),
    [
        ([WAITS, EXAMPLE], [WAITS_NOT, EXAMPLE], 1),
        ([WAITS, under_multi_connector(EXAMPLE)], [WAITS_NOT, under_multi_connector(EXAMPLE)], 1),
        ([WAITS_NOT, EXAMPLE], [WAITS_NOT, EXAMPLE], 0),
        ([WAITS], [WAITS], 0),
    ],
    ids=["beside another", "one of them inside another", "none waits as it is", "alone"],
)
def test_h48_beside_a_connector_that_stores_at_once_no_step_waits_and_one_line_says_so(
    connectors: list[Any], made_of_it: list[Any], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_vllm_config(EngineSettings(), under_multi_connector(*connectors))
    made = config.kv_transfer_config.kv_connector_extra_config
    assert made == under_multi_connector(*made_of_it)["kv_connector_extra_config"]
    said = [record.getMessage() for record in caplog.records if "no step waits" in record.getMessage()]
    assert len(said) == lines
    assert all("beside ExampleConnector" in line and "(sync_load_budget=0)" in line for line in said)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("budget", ["1MiB", 0])
def test_h48_beside_a_connector_that_stores_at_once_no_match_is_made_at_a_step(budget: Any) -> None:
    ours = WAITS | {"kv_connector_extra_config": {"match_at": "step", "sync_load_budget": budget}}
    with pytest.raises(ValueError, match='match_at="step" makes steps wait for loads, and ExampleConnector may store'):
        make_vllm_config(EngineSettings(), under_multi_connector(ours, EXAMPLE))


@pytest.mark.usefixtures("registered")
def test_wrong_settings_inside_multi_connector_are_refused_as_early() -> None:
    wrong = WAITS | {"kv_connector_extra_config": {"memroy": "1GiB"}}
    with pytest.raises(ValueError, match='kvpact: unknown key "memroy"'):
        make_vllm_config(EngineSettings(), under_multi_connector(wrong, EXAMPLE))


@pytest.mark.usefixtures("registered")
def test_a_check_that_breaks_stops_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown release may lack what the check asks for; the connector then says what is wrong."""
    monkeypatch.setattr("kvpact.vllm.checks.check_configuration", lambda config, connector: config.no_such_thing)
    made()


def context_parallel(config: Any) -> None:
    config.parallel_config.decode_context_parallel_size = 2


def in_mode_none(config: Any) -> None:
    config.model_config = SimpleNamespace(
        model="m", is_encoder_decoder=False, has_inner_state=True, enable_sleep_mode=False
    )
    config.cache_config.mamba_cache_mode = "none"


def with_drafts(config: Any) -> None:
    in_mode_none(config)
    config.speculative_config = object()
    config.parallel_config.pipeline_parallel_size = 2


def encoder_decoder(config: Any) -> None:
    config.model_config = SimpleNamespace(model="m", is_encoder_decoder=True, enable_sleep_mode=False)


def no_prefix_caching(config: Any) -> None:
    config.cache_config.enable_prefix_caching = False


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (context_parallel, {}, "context parallelism of 2 is not supported"),
        (in_mode_none, {}, 'keeps its states in mode "none"'),
        (with_drafts, {}, "leave --pipeline-parallel-size or --speculative-config out"),
        (encoder_decoder, {}, "an encoder-decoder model is not supported"),
        (no_prefix_caching, {"save": "lazy"}, "add --enable-prefix-caching"),
    ],
)
def test_what_the_configuration_alone_tells_is_refused(
    change: Callable[[Any], None], settings: dict[str, Any], message: str
) -> None:
    config = made(**settings)
    check_configuration(made())
    change(config)
    with pytest.raises(ConfigError, match=message):
        check_configuration(config)


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("cuda", {"gpu": "off"}, 'KV memory on cuda: "gpu": "off" refuses it'),
        ("cuda", {"match_at": "step"}, 'KV memory on cuda: match_at="step" loads while the step waits'),
        ("tpu", {}, "KV memory on tpu: kvpact copies from and to cpu, cuda, xpu"),
    ],
)
def test_a_device_is_refused(
    device: str, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made(**settings)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type=device))
    with pytest.raises(ConfigError, match=message):
        check_configuration(config)


def test_a_release_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = made()
    monkeypatch.setattr("vllm.__version__", "0.29.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.29\.1 is installed, and kvpact serves 0\.30 and later"):
        check_configuration(config)


def test_h129_an_unknown_release_without_what_kvpact_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only its KV cache groups tell is left to the check after the weights."""
    config = made()
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    check_configuration(config, lambda: PactConnector)
    monkeypatch.delattr("vllm.v1.core.block_pool.BlockPool.evict_blocks")
    with pytest.raises(ConfigError, match=r"vLLM 0\.99\.0 is not among .* needs: BlockPool\.evict_blocks"):
        check_configuration(config, lambda: PactConnector)


def test_h129_the_step_hook_is_refused_on_a_release_that_nobody_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(match_at="step")
    config.parallel_config.worker_cls = OUR_CLASSES["--worker-cls"]
    config.scheduler_config.scheduler_cls = OUR_CLASSES["--scheduler-cls"]
    check_configuration(config)
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with pytest.raises(ConfigError, match=r"not known to be right on vLLM 0\.99\.0"):
        check_configuration(config)


def test_h129_engines_of_one_server_share_the_machine() -> None:
    config = made(memory=total_memory_bytes() // 2 + 1)
    check_configuration(config)
    config.parallel_config.data_parallel_size_local = 2
    with pytest.raises(ConfigError, match="for each of 2 engines: this machine or its container has"):
        check_configuration(config)


def test_step_hits_need_a_scheduler_that_begins_again() -> None:
    config = made(match_at="step")
    config.parallel_config.worker_cls = OUR_CLASSES["--worker-cls"]
    with pytest.raises(ConfigError, match="match_at=step needs a scheduler"):
        check_configuration(config)
    config.scheduler_config.scheduler_cls = OUR_CLASSES["--scheduler-cls"]
    check_configuration(config)


def test_weights_that_cannot_be_told_from_others_are_refused(tmp_path: Path) -> None:
    config = made(tiers=[f"disk://{tmp_path}?capacity=1GiB"])
    config.load_config.load_format = "tensorizer"
    with pytest.raises(ConfigError, match="may have them from anywhere"):
        check_configuration(config)
