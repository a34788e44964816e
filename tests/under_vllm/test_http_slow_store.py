"""Seen from outside: a store that is slow once costs a prompt its hit, and is used again (H120)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from engines import prompt
from kvpact_command import kvpact, own_sockets
from servers.damaging_proxy import DamagingProxy, damaging_proxy
from servers.http_server import Server, tiny_server
from servers.redis_server import redis_server

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(900)]

PROMPTS = [prompt(9_000 + number, 3) for number in range(40)]
"""More than memory holds: asked about in turn, each is in the store alone."""
SLOW_SECONDS = 8.0
AGAIN_SECONDS = 30.0
WAITED_FOR_SECONDS = 120.0


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[DamagingProxy]:
    with redis_server(tmp_path / "redis") as store, damaging_proxy(int(store.address.rpartition(":")[2])) as proxy:
        proxy.share = 0.0
        yield proxy


@pytest.fixture
def server(proxy: DamagingProxy, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    own_sockets(tmp_path, monkeypatch)
    tier = f"--tier=redis://127.0.0.1:{proxy.port}/0?timeout=20s"
    with tiny_server(tiny_model, tmp_path / "server.log", tier, KVPACT_PREPARE_DEADLINE="20s") as started:
        yield started.wait_ready()


def ask(server: Server, number: int) -> float:
    """Seconds that an answer takes, of which the engine's own prefix cache has nothing."""
    server.post("reset_prefix_cache")
    began = time.monotonic()
    tokens = PROMPTS[number % len(PROMPTS)]
    server.client.completions.create(model="tiny", prompt=tokens, max_tokens=1, temperature=0)
    return time.monotonic() - began


def status() -> dict[str, Any]:
    (engine,) = json.loads(kvpact("status", "--json").stdout)["engines"]
    return dict(engine)


def from_store() -> int:
    """Tokens that came from the store, as the engine counts them."""
    sources: dict[str, int] = status()["tokens_by_source"]
    return sum(tokens for source, tokens in sources.items() if source not in ("engine", "memory"))


def test_h120_a_store_that_is_slow_once_gives_hits_again_within_thirty_seconds(
    proxy: DamagingProxy, server: Server
) -> None:
    for number in range(2 * len(PROMPTS)):
        ask(server, number)
    assert from_store() > 0, "the store is used"
    slow: list[float] = []
    until = time.monotonic() + WAITED_FOR_SECONDS
    while not slow:
        assert time.monotonic() < until, "no prompt waits for a slow answer"
        proxy.holds_up = SLOW_SECONDS  # the answer to a write or a probe may be the one held up: nobody waits for that
        times = [ask(server, number) for number in range(len(PROMPTS))]
        slow = [seconds for seconds in times if seconds > SLOW_SECONDS / 2]
    assert len(slow) == 1, f"one prompt waits for the slow answer: {slow}"
    before, began, slowest = from_store(), time.monotonic(), 0.0
    while from_store() == before:
        assert time.monotonic() < began + AGAIN_SECONDS, (status()["tiers"], kvpact("why").stdout)
        for number in range(len(PROMPTS)):
            slowest = max(slowest, ask(server, number))
    assert slowest < SLOW_SECONDS / 2, "nobody waits for the probe"
    assert [tier["trouble"] for tier in status()["tiers"]] == [""]
