"""Seen from outside: what `kvpact status` and `kvpact why` say of a server is what its clients have counted."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from documents import ROOT
from engines import BLOCK, prompt
from kvpact_command import kvpact, own_sockets
from polling import until
from servers.http_server import Server, tiny_server
from servers.prometheus_server import judge_rules, prometheus_server
from servers.redis_server import RedisServer, free_ports, redis_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROUNDS, REQUESTS, CLIENTS = 5, 100, 6
"""Before each round but the first the engine's own prefix cache is emptied."""

ALERTS = ROOT / "deploy" / "prometheus-alerts.yml"

PREFIXES = [prompt(7_000 + number, 2, tail=0) for number in range(12)]
"""24 blocks, of which kvpact's memory holds some, and the store the others."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@contextmanager
def served(directory: Path, page: str) -> Iterator[str]:
    """The address of a server with this metrics page."""
    (site := directory / "site").mkdir()
    (site / "metrics").write_text(page)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Starts a server with these tiers as a user does it; its socket is where this process looks for sockets."""
    own_sockets(tmp_path, monkeypatch)
    with ExitStack() as servers:

        def serve(*tiers: str) -> Server:
            options = (f"--max-num-seqs={CLIENTS}", *(f"--tier={tier}" for tier in tiers))
            started = tiny_server(tiny_model, tmp_path / "server.log", *options, KVPACT_RECOMPUTE_IF_FASTER="false")
            return servers.enter_context(started).wait_ready()

        yield serve


def ask(server: Server, tokens: list[int]) -> tuple[str, int, int]:
    """The id of an answer, and how many tokens its prompt had, in all and from caches."""
    answer = server.client.completions.create(model="tiny", prompt=tokens, max_tokens=1, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.id, answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def prompts_of(number: int) -> list[list[int]]:
    """One round's: most begin like earlier ones, some like none."""
    chance = random.Random(number)
    found = []
    for request in range(REQUESTS):
        prefix = chance.choice(PREFIXES)[: chance.choice((1, 2, 2)) * BLOCK] if chance.random() < 0.8 else []
        found.append([*prefix, *prompt(100 * number + request + 10_000, 0, tail=chance.randrange(5, 60))])
    return found


def status(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what is said of the only engine."""
    result = kvpact("status", *arguments, "--json")
    assert result.stdout, result.output
    (engine,) = json.loads(result.stdout)["engines"]
    return result.exit_code, engine


def once(what: Callable[[], bool], seconds: float = 30.0) -> None:
    """vLLM updates its page with its steps, and once more before it rests."""
    until(what, seconds)


def has_counted(arguments: tuple[str, ...], tokens: int) -> bool:
    """Whether `kvpact status` with these arguments has so many prompt tokens."""
    return bool(status(*arguments)[1]["prompts"]["tokens"] >= tokens)


@pytest.mark.proof
def test_h128_a_healthy_engine_that_nobody_has_asked_is_not_down_and_one_whose_tier_is_away_says_so(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """By the commands that a user types, and by the shipped alerts over the page of five minutes without a request."""
    (away,) = free_ports(1)
    (near := tmp_path / "near").mkdir()
    server = start(f"disk://{near}?capacity=64MiB", f"redis://127.0.0.1:{away}")
    page = f"http://127.0.0.1:{server.port}"
    once(lambda: "DOWN" in kvpact("status", page).stdout)
    for arguments in ((page,), ()):
        told = kvpact("status", *arguments)
        assert told.exit_code == 1, "the redis server is away"
        (disk,) = [line for line in told.stdout.splitlines() if line.startswith(" from disk")]
        assert disk.endswith(", not asked yet"), arguments
        assert "to change          redis is down: " in told.stdout
    healths = [
        {one["tier"]: one["value"] for one in status(*arguments)[1]["metrics"]["tier_up"]}
        for arguments in ((page,), ())
    ]
    assert healths == [{"memory": 1, "redis": 0}] * 2
    scraped = urlopen(f"{page}/metrics", timeout=20).read().decode()
    assert judge_rules(tmp_path, scraped, ALERTS, [("KvpactTierDown", "redis")]) == ""
    healthy = "\n".join(line for line in scraped.splitlines() if 'tier="redis"' not in line)
    assert judge_rules(tmp_path, healthy, ALERTS, []) == ""
    with served(tmp_path, healthy) as url:
        assert kvpact("status", url).exit_code == 0, "an engine with the other tier alone"
    ask(server, prompt(1, 2))
    once(lambda: "not asked yet" not in kvpact("status", page).stdout)
    for arguments in ((page,), ()):
        assert "not asked yet" not in kvpact("status", *arguments).stdout
    with prometheus_server(tmp_path / "prometheus", f"127.0.0.1:{server.port}", ALERTS) as prometheus:
        once(lambda: bool(prometheus.query("ALERTS")))
        found = [(labels["alertname"], labels["tier"]) for labels, _ in prometheus.query("ALERTS")]
    assert found == [("KvpactTierDown", "redis")], "pending: the rule waits for two minutes"


@pytest.mark.proof
def test_the_share_that_status_shows_is_what_the_clients_have_counted(
    start: Callable[..., Server], store: RedisServer
) -> None:
    server = start(f"redis://{store.address}/0")
    page, answers = f"http://127.0.0.1:{server.port}", list[tuple[str, int, int]]()
    with ThreadPoolExecutor(CLIENTS) as clients:
        for number in range(ROUNDS):
            if number:
                server.post("reset_prefix_cache")
            answers += clients.map(lambda tokens: ask(server, tokens), prompts_of(number))
    asked, cached = sum(answer[1] for answer in answers), sum(answer[2] for answer in answers)
    assert len(answers) == ROUNDS * REQUESTS
    for arguments in ((page,), (f"{page}/metrics",), ()):
        once(partial(has_counted, arguments, asked))
        code, seen = status(*arguments)
        done = seen["prompts"]
        assert code == 0
        assert (done["tokens"], done["engine_tokens"] + done["used_tokens"]) == (asked, cached), arguments
        assert min(done["engine_tokens"], done["used_tokens"]) > 5 * BLOCK, "both sources"
    text = kvpact("status", page).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert f"{cached / asked:6.1%} {cached:,} of {asked:,} prompt tokens" in text
    check_requests(answers)
    check_sources(seen, cached)
    store.kill()
    check_a_dead_tier(server, page)
    assert server.stop() == 0
    assert kvpact("status").exit_code == kvpact("status", page).exit_code == 2
    assert not os.listdir(Path(os.environ["XDG_RUNTIME_DIR"], "kvpact"))


def check_requests(answers: list[tuple[str, int, int]]) -> None:
    """Each answer's id leads to what became of its request, and that is what the client saw."""
    for request_id, asked, cached in answers[-20:]:
        (record,) = json.loads(kvpact("why", request_id, "--json").stdout)["requests"]
        assert record["request_id"].startswith(request_id)
        assert (record["prompt_tokens"], record["engine_tokens"] + record["used_tokens"]) == (asked, cached)
    shown = kvpact("why").stdout
    assert len(shown.splitlines()) == 21
    both = [request_id for request_id, _, cached in answers[-100:] if cached == 2 * BLOCK]
    told = [" ".join(kvpact("why", request_id).stdout.split()) for request_id in both]
    assert any("found blocks 0-1 in " in text and f" loaded, {2 * BLOCK} used " in text for text in told)


def check_sources(seen: dict[str, Any], cached: int) -> None:
    """Whatever was not computed came from somewhere, and something came from each place."""
    sources = seen["tokens_by_source"]
    assert sum(sources.values()) == cached
    assert len(sources) == 3
    assert min(sources.values()) > 0


def check_a_dead_tier(server: Server, page: str) -> None:
    """What it would have to be asked for is computed, and whoever asks is told."""
    for number in range(40):
        ask(server, prompt(20_000 + number, 2))
        if status()[0]:
            break
    code, seen = status()
    (tier,) = seen["tiers"]
    assert code == 1
    assert tier["trouble"]
    assert seen["to_change"].startswith(f"{tier['name']} is down")
    assert "DOWN" in kvpact("status").stdout
    once(lambda: kvpact("status", page).exit_code == 1, 10.0)
    assert kvpact("status", page).exit_code == 1
