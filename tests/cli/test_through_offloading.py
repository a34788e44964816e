"""`--through offloading`: kvpact's tiers in vLLM's own OffloadingConnector, from the command line on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpact.cli.vllm_command import refuse_offloading
from kvpact.errors import ConfigError
from kvpact.vllm.offload.settings import tier_settings
from kvpact_command import DISK, END, KVPACT, SECRET, beside, fake_vllm_in, kvpact, refusal, serve, without_settings

OFFLOADING = ("--through", "offloading")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch)


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    return fake_vllm_in(tmp_path, "0.32.0")


def offloading(printed: str) -> dict[str, Any]:
    """The settings of vLLM's own connector for its offloading."""
    given = json.loads(printed)
    assert (given.pop("kv_connector"), given.pop("kv_role")) == ("OffloadingConnector", "kv_both")
    settings: dict[str, Any] = given.pop("kv_connector_extra_config")
    assert given == {}, "it reports no failed load, so no policy for one has a meaning"
    assert settings.pop("spec_name") == "PactTieringSpec"
    return settings


def test_config_through_offloading_has_our_tiers_below_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvpact.toml").write_text('memory = "1GiB"\nprepare_deadline = "50ms"\n')
    monkeypatch.setenv("KVPACT_IO_THREADS", "4")
    urls = [DISK, "redis://cache:6379/0"]
    result = kvpact("config", *OFFLOADING, "--config", tmp_path / "kvpact.toml", *(f"--tier={url}" for url in urls))
    assert result.stderr == f"kvpact: start vLLM with {' '.join(END)} too, as kvpact serve does\n"
    told = {"prepare_deadline": 0.05, "io_threads": 4}
    settings = offloading(result.stdout)
    assert settings == {
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [{"type": "PactTier", "url": url, **told} for url in urls],
    }
    for tier, url in zip(settings["secondary_tiers"], urls, strict=True):
        _, config = tier_settings({key: value for key, value in tier.items() if key != "type"})
        assert ([tier.url for tier in config.tiers], config.prepare_deadline) == ([url], 0.05)
    assert offloading(kvpact("config", *OFFLOADING, "--tier", DISK).stdout)["cpu_bytes_to_use"] == 4 << 30


def test_h85_through_offloading_a_tier_with_a_secret_is_its_number(
    fake_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that number is the tier, in the environment that `config` asks for and that `serve` makes."""
    urls = [DISK, SECRET]
    argv, kept = serve(fake_vllm, "m", *OFFLOADING, *(f"--tier={url}" for url in urls), KVPACT_TIERS="disk:///x")
    monkeypatch.setenv("KVPACT_TIERS", " ".join(urls))
    result = kvpact("config", *OFFLOADING)
    assert "hunter2" not in " ".join([*argv, result.stdout, result.stderr])
    assert "start vLLM with KVPACT_TIERS in its environment" in result.stderr
    assert result.stdout == f"{argv[3]}\n"
    assert kept == {"KVPACT_TIERS": " ".join(urls)}
    open_tier, secret_tier = offloading(argv[3])["secondary_tiers"]
    assert (open_tier["url"], secret_tier) == (DISK, {"type": "PactTier", "number": 1})
    assert tier_settings({"number": 1})[1].tiers[0].url == SECRET
    monkeypatch.delenv("KVPACT_TIERS")
    assert refusal("config", *OFFLOADING, "--tier", SECRET).startswith("--tier redis://***@cache")


@pytest.mark.parametrize("name", ["SAVE=off", "CACHE=a:B", "MATCH_AT=step", "SYNC_LOAD_BUDGET=0", "ADMIT=second-use"])
def test_through_offloading_a_setting_without_a_meaning_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _, value = name.partition("=")
    monkeypatch.setenv(f"KVPACT_{key}", value)
    for command in (["config"], ["serve", "m"]):
        message = refusal(*command, *OFFLOADING, "--tier", DISK)
        assert message.startswith(f"{key.lower()} (KVPACT_{key}) has no meaning with --through offloading")


def test_through_offloading_a_tier_is_needed() -> None:
    for command in (["config"], ["serve", "m"]):
        message = refusal(*command, *OFFLOADING)
        assert message.startswith("--through offloading needs a --tier")
        assert "--kv-offloading-size" in message


def test_serve_through_offloading_names_no_class_of_the_connectors(fake_vllm: Path) -> None:
    argv, _ = serve(fake_vllm, "m", *OFFLOADING, "--memory", "2GiB", "--tier", DISK, "--port", "1")
    assert argv[:3] == ["serve", "m", "--kv-transfer-config"]
    assert argv[3] == kvpact("config", *OFFLOADING, "--memory", "2GiB", "--tier", DISK).stdout.strip()
    assert argv[4:] == [*END, "--port", "1"]
    assert serve(fake_vllm, "m", "--through", "connector")[0] == serve(fake_vllm, "m")[0]


NO_DEVICE = "kvpact: --through offloading needs a GPU (CUDA, ROCm or XPU), and vLLM "
TOO_OLD = "and --through offloading needs 0.32 and later: install one of 0.32 to 0.33, which are tested"
USE_OURS = ": use --through connector, which also runs on a CPU"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.32.0+cpu", f"{NO_DEVICE}0.32.0+cpu is built for CPUs{USE_OURS}"),
        ("0.31.1", f"kvpact: vLLM 0.31.1 is installed, {TOO_OLD}"),
    ],
)
def test_serve_through_offloading_says_where_it_would_not_run_before_vllm_is_imported(
    tmp_path: Path, version: str, words: str
) -> None:
    fake_vllm = fake_vllm_in(tmp_path, version)
    (fake_vllm / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    command = [str(KVPACT), "serve", "m", *OFFLOADING, "--tier", DISK]
    done = subprocess.run(command, env=beside(fake_vllm), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (1, "", [words])


@pytest.mark.parametrize(("kind", "fits"), [("cuda_alike", True), ("xpu", True), ("cpu", False), ("", False)])
def test_vllm_itself_says_whether_it_has_a_device_for_its_offloading(kind: str, fits: bool) -> None:
    kinds = {f"is_{name}": lambda name=name: name == kind for name in ("cuda_alike", "xpu", "cpu")}
    platform = SimpleNamespace(device_name=kind, **kinds)
    if fits:
        refuse_offloading("0.32.0", platform)
        refuse_offloading("0.32.0")
        return
    with pytest.raises(ConfigError) as refused:
        refuse_offloading("0.32.0", platform)
    assert f"kvpact: {refused.value}" == f"{NO_DEVICE}0.32.0 finds {kind or 'no device'} here{USE_OURS}"


def test_vllm_takes_what_config_prints_through_offloading() -> None:
    """Its own classes read the value, and find ours by the names in it, as in an engine that has run the plug-in."""
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvpact.vllm.offload import PactTier, PactTieringSpec
    from kvpact.vllm.plugin import register

    register()
    given = KVTransferConfig(**json.loads(kvpact("config", *OFFLOADING, "--tier", DISK).stdout))
    assert given.is_kv_transfer_instance
    settings = given.kv_connector_extra_config
    assert OffloadingSpecFactory.get_spec_cls(settings) is PactTieringSpec
    assert [SecondaryTierFactory.get_tier_class(tier) for tier in settings["secondary_tiers"]] == [PactTier]
    metrics = PactTieringSpec.build_metric_definitions(settings)
    assert "vllm:kvpact_damaged_records" in metrics
