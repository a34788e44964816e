"""KV events on vLLM's real schedulers of each release, and as vLLM's own subscriber decodes them from a socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import msgspec
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from kvpact.vllm.connector import PactConnector
from kvpact_testkit.results import Verdict, as_text
from kvpact_testkit.router import ENGINE, RouterModel
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import named, prompt
from kvpact_testkit.vllm.releases import RELEASES, installed_release, run_on_release
from kvpact_testkit.vllm.scenarios_events import EVENTS

zmq: Any = pytest.importorskip("zmq")

CONNECTOR = "kvpact.vllm:PactConnector"
NAMES = [scenario.name for scenario in EVENTS]
CONFIG = {"memory": "160KiB", "model_id": "testkit"}
DISK = {**CONFIG, "tiers": ["disk:///{folder}?capacity=4MiB"]}
LOOKS_AHEAD_FROM = "0.33.0"


@pytest.mark.parametrize("config", [CONFIG, DISK], ids=["memory", "disk"])
def test_h133_events_are_those_of_vllms_own_blocks(config: dict[str, Any]) -> None:
    report = VllmDriver(CONNECTOR, config).run(NAMES)
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


@pytest.mark.parametrize(
    "release", [pytest.param(one, marks=pytest.mark.proof) for one in RELEASES if one != installed_release()]
)
@pytest.mark.timeout(900)
def test_h133_events_are_those_of_each_release(release: str) -> None:
    report = run_on_release(release, CONNECTOR, CONFIG, NAMES)
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)
    fields = report.checks[0].note.partition(": ")[2].split(", ")
    assert {"extra_keys", "group_idx", "locality", "ownership", "session_id"} <= {*fields}
    assert ("lookahead_token_ids" in fields) == (release >= LOOKS_AHEAD_FROM)


def test_h133_a_connector_without_events_is_not_judged() -> None:
    report = VllmDriver(CONNECTOR, {**CONFIG, "save": "off"}).run(NAMES)
    assert {check.verdict for check in report.checks} == {Verdict.NOT_OBSERVABLE}, as_text(report)


def test_h133_vllms_subscriber_decodes_every_event(tmp_path: Path) -> None:
    """vLLM's publisher and socket; the decoder of its example `kv_events_subscriber.py`."""
    settings = EngineSettings(kv_events=True)
    transfer = {**named(PactConnector), "kv_connector_extra_config": CONFIG}
    engine = VllmEngine(settings, transfer, lambda line: None)
    endpoint = f"ipc://{tmp_path}/events"
    publisher = ZmqEventPublisher(0, endpoint=endpoint, topic="kv-events")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        for number in range(6):
            engine.add(f"r{number}", prompt(number, 12))
            assert engine.finish(f"r{number}")
            assert engine.drain()
        sent = engine.observed.events
        batch = KVEventBatch(ts=0.0, events=sent)
        while not socket.poll(100):  # a subscription takes a moment
            publisher.publish(batch)
        _, _, payload = socket.recv_multipart()
    publisher.shutdown()
    engine.close()
    heard = msgspec.msgpack.Decoder(type=KVEventBatch).decode(payload).events
    assert heard == sent
    router = RouterModel()
    router.apply(heard)
    assert router.stored > 60
    assert router.removed
    assert {event.medium for event in heard} == {ENGINE, "CPU"}
