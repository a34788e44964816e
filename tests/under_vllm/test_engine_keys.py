"""Every key that a user may set goes through a file and `kvpact config` into an engine, and is seen to arrive there."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from engines import BLOCK, BLOCK_BY_BLOCK, prompt
from kvpact.config import KvpactConfig
from kvpact.metrics import series
from kvpact_testkit.demo.engine import EngineProcess
from polling import until
from servers.redis_server import redis_server
from user_settings import SECRET, settings_of_a_user
from vllm_played_engine import PlayedEngine, answer, make_prompt

BLOCKS = 4


def configured(file: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What `kvpact config` prints for a file with these settings, and what it says beside."""
    as_toml = {key: json.dumps(value, separators=(", ", " = ")) for key, value in settings.items()}
    file.write_text("".join(f"{key} = {value}\n" for key, value in as_toml.items()))
    program = "from kvpact.cli.app import main; main()"
    said = subprocess.run(
        [sys.executable, "-c", program, "config", "--config", file], capture_output=True, text=True, check=True
    )
    return json.loads(said.stdout), said.stderr


def kvpact_json(*arguments: object) -> dict[str, Any]:
    program = "from kvpact.cli.app import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments), "--json"]
    said: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return said


def told(log: str, half: str) -> str:
    """The settings of this half in the engine's log."""
    mark = f"{half} side: settings "
    [line] = {line.partition(mark)[2] for line in log.splitlines() if mark in line}
    return line


def expected(settings: Mapping[str, Any]) -> set[str]:
    """The words of such a line, without the tiers."""
    config = KvpactConfig(**{key: value for key, value in settings.items() if key != "tiers"})
    return set(config.described().split(", "))


@pytest.mark.engine
@pytest.mark.proof
def test_every_key_arrives_at_both_halves_of_a_real_engine(
    start_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """The tiers hold a password, so the engine gets them from the file, as the command says (H85)."""
    (tmp_path / "record-key").write_text("0123456789abcdef" * 2)
    (tmp_path / "alice").write_text(SECRET)
    with redis_server(tmp_path / "redis", password=SECRET) as server:
        settings = settings_of_a_user(tmp_path, server.address)
        transfer, said = configured(tmp_path / "kvpact.toml", settings)
        assert SECRET not in json.dumps(transfer) + said
        [variable] = re.findall(r"start vLLM with KVPACT_CONFIG=(\S+) in its environment", said)
        engine = start_engine(
            transfer,
            arguments={
                **BLOCK_BY_BLOCK,
                "worker_cls": "kvpact.vllm.worker.KvpactWorker",
                "scheduler_cls": "kvpact.vllm.scheduler.pact_scheduler",
            },
            environment={"KVPACT_CONFIG": variable},
        )
        asked = [prompt(3_100 + number, BLOCKS) for number in range(2)]
        engine.generate(asked)
        local = engine.generate(asked)
        engine.reset_prefix_cache()
        loaded = engine.generate(asked)
        assert [output.cached_tokens for output in loaded] == [BLOCKS * BLOCK] * 2
        assert all(one.same_answer(other) for one, other in zip(loaded, local, strict=True))
        written = [series("written_blocks", "disk"), series("written_blocks", "redis")]
        until(lambda: [engine.stats().get(name) for name in written] == [2 * BLOCKS] * 2)
        stats, log = engine.stats(), engine.log.read_text()
        inspected = kvpact_json("inspect", f"redis://:{SECRET}@{server.address}/0")
    for half in ("scheduler", "worker"):
        line = told(log, half)
        assert expected(settings) <= set(line.split(", ")), line
        assert f"disk://{tmp_path}/slabs" in line
        assert f"redis://***@{server.address}/0" in line
    assert SECRET not in log
    assert stats[series("capacity_blocks", "memory")] == 96
    assert [stats[name] for name in written] == [2 * BLOCKS] * 2, "stats_file, second-use and both tiers"
    [group] = inspected["namespaces"]
    assert (group["blocks"], group["sealed"]) == (2 * BLOCKS, True)
    assert group["fields"]["weights"].endswith("tiny@2026-01")
    [slab] = kvpact_json("inspect", tmp_path / "slabs")["slabs"]
    assert slab["blocks"] == 2 * BLOCKS


def test_what_excludes_match_at_step_arrives_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On vLLM's real scheduler: `save = "lazy"`, with the other keys as before where they go together."""
    caplog.set_level(logging.INFO, logger="kvpact")
    settings = settings_of_a_user(tmp_path, "127.0.0.1:1")
    (tmp_path / "alice").write_text(SECRET)
    for key in ("match_at", "step_deadline", "record_key_file", "require"):
        del settings[key]
    settings |= {"save": "lazy", "tiers": settings["tiers"][:1]}
    transfer, said = configured(tmp_path / "kvpact.toml", settings)
    assert said.startswith("kvpact: start vLLM with --worker-cls ")
    engine = PlayedEngine(tmp_path / "engine", **transfer["kv_connector_extra_config"])
    try:
        asked = make_prompt(1, 6)
        assert engine.generate(asked).said == answer(asked, 3)
    finally:
        engine.close()
    for half in ("scheduler", "worker"):
        assert expected(settings) <= set(told(caplog.text, half).split(", "))
    assert 'save="lazy"' in caplog.text


@pytest.mark.parametrize("place", ["kv_connector_extra_config", "environment"])
def test_h85_what_an_engine_is_told_is_never_logged_in_clear(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store refuses the password, and where it does not answer."""
    caplog.set_level(logging.DEBUG, logger="kvpact")
    with redis_server(tmp_path / "redis", password="another one") as server:
        tiers = [f"redis://kira:{SECRET}@{server.address}/0", f"redis://kira:{SECRET}@127.0.0.1:1/0"]
        settings: dict[str, Any] = {"tiers": tiers}
        if place == "environment":
            monkeypatch.setenv("KVPACT_TIERS", " ".join(tiers))
            settings = {}
        engine = PlayedEngine(tmp_path / "engine", **settings)
        try:
            asked = make_prompt(1, 6)
            assert engine.generate(asked).said == answer(asked, 3)
        finally:
            engine.close()
    assert "redis://***@" in caplog.text
    assert SECRET not in caplog.text
