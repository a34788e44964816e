"""A real Prometheus scrapes a real engine, and answers every query of docs/metrics.md."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from documents import load_script
from engines import BLOCK, prompt
from kvpact import __version__
from kvpact.metrics import FAMILIES, PREFIX
from polling import until
from servers.http_server import Server, users_environment
from servers.prometheus_server import PrometheusServer, prometheus_server, promtool
from servers.redis_server import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(600)]

WRITER = load_script("scripts/write_metrics.py")

BLOCKS = 3
PROMPTS = [prompt(7_700 + number, BLOCKS) for number in range(12)]

ARGUMENTS = [
    "--dtype=float32", "--enforce-eager", "--max-model-len=2048", "--kv-cache-memory-bytes=67108864",
    f"--max-num-batched-tokens={4 * BLOCK}", "--max-num-seqs=8", "--enable-prompt-tokens-details",
]  # fmt: skip

COMPLAINT = "metric names should not contain ':'"
"""What the checker says of every name: the colon is vLLM's."""


def values(prometheus: PrometheusServer, expression: str) -> dict[str, float]:
    """The numbers that a query has now, by the label that it keeps."""
    found = prometheus.query(expression)
    return {next(iter(labels.values()), ""): value for labels, value in found if not math.isnan(value)}


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Server, PrometheusServer]]:
    """An engine with a directory, a redis server that is away, and little memory; and who scrapes it."""
    (away,) = free_ports(1)
    tiers = [f"dir://{tmp_path / 'near'}?capacity=1GiB&name=near", f"redis://user:secret@127.0.0.1:{away}"]
    environment = {
        **users_environment(),
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "KVPACT_TIERS": " ".join(tiers),
        "KVPACT_MEMORY": "16MiB",
        "KVPACT_RECOMPUTE_IF_FASTER": "false",
    }
    command = [sys.executable, "-m", "kvpact", "serve", str(tiny_model), *ARGUMENTS]
    with ExitStack() as servers:
        server = servers.enter_context(Server(command, tmp_path / "log", environment)).wait_ready()
        target = f"127.0.0.1:{server.port}"
        yield server, servers.enter_context(prometheus_server(tmp_path / "prometheus", target, WRITER.ALERTS))


def test_every_query_has_an_answer_of_a_real_prometheus(served: tuple[Server, PrometheusServer]) -> None:
    server, prometheus = served
    used = f"{PREFIX}used_tokens_total"

    def ask_all() -> int:
        server.post("reset_prefix_cache")
        return sum(server.ask(tokens).cached_tokens for tokens in PROMPTS)

    until(lambda: values(prometheus, f"sum({used})") == {"": 0.0}, 60.0, "a scrape from before: a rate needs one", 0.2)
    assert ask_all() == 0
    server.wait_for(lambda metrics: metrics[f"{PREFIX}written_blocks_total{{near}}"] == BLOCKS * len(PROMPTS))
    supplied = ask_all()
    assert supplied == BLOCKS * BLOCK * len(PROMPTS)
    server.wait_for(lambda metrics: metrics[used] == supplied)
    until(lambda: values(prometheus, f"sum({used})") == {"": supplied}, 60.0, f"{supplied} tokens scraped", 0.2)

    by_tier = values(prometheus, f"sum by (tier) ({PREFIX}used_tokens_from_total)")
    assert by_tier["near"] > 0, "memory is too small for all prompts"
    assert sum(by_tier.values()) == supplied
    unanswered = [query.title for query in WRITER.QUERIES if not values(prometheus, query.expr)]
    assert unanswered == []
    assert 0.3 < values(prometheus, WRITER.QUERIES[0].expr)[""] < 0.7, "each prompt was computed once, and loaded once"
    spared = values(prometheus, f"sum({PREFIX}spared_prefill_seconds_total)")[""]
    assert spared == pytest.approx(supplied / values(prometheus, f"sum({PREFIX}prefill_speed)")[""], rel=0.9)
    told = [labels for labels, _ in prometheus.query(f"{PREFIX}tier_info")]
    assert {labels["tier"] for labels in told} == {"near", "redis"}
    assert not any("secret" in labels["url"] for labels in told)
    assert [labels["version"] for labels, _ in prometheus.query(f"{PREFIX}info")] == [__version__]

    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert [(rule["name"], rule["health"]) for rule in rules] == [(rule.name, "ok") for rule in WRITER.ALERT_RULES]
    raised = {rule.name: values(prometheus, rule.expr) for rule in WRITER.ALERT_RULES if values(prometheus, rule.expr)}
    assert {*raised} <= {"KvpactTierDown", "KvpactWritesDropped"}
    (labels,) = (labels for labels, _ in prometheus.query(WRITER.ALERT_RULES[0].expr))
    assert labels["tier"] == "redis"

    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
        page = answer.read().decode()
    lines = [line for line in page.splitlines(keepends=True) if PREFIX in line]
    helped = {
        line.split()[2].removeprefix(PREFIX).removesuffix("_total") for line in lines if line.startswith("# HELP")
    }
    assert helped - {name for name in helped if name.endswith("_created")} == {metric.name for metric in FAMILIES}
    said = promtool("check", "metrics", page="".join(lines))
    complaints = {line for line in (said.stdout + said.stderr).splitlines() if COMPLAINT not in line}
    assert complaints == set()
