"""A real Prometheus for tests: on a free port of loopback, with a configuration of its own, ended by its pid."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from servers.redis_server import free_ports, program

PACKAGE = "prometheus"
START_SECONDS = 30.0

CONFIGURATION = """\
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: [RULES]
scrape_configs:
  - job_name: vllm
    static_configs:
      - targets: ["TARGET"]
"""


def promtool(*words: str, page: str = "") -> subprocess.CompletedProcess[str]:
    """What Prometheus' own checker says."""
    command = [program("promtool", PACKAGE), *words]
    return subprocess.run(command, input=page, capture_output=True, text=True, timeout=60)


def judge_rules(directory: Path, page: str, rules: Path, firing: Iterable[tuple[str, str]]) -> str:
    """What Prometheus' own test of rules finds wrong; "" if these alerts fire, each by its name and tier, and no other.

    A server's metrics page is scraped for five simulated minutes, in which nothing on it changes.
    """
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    scraped = {
        f"{each.name}{{{','.join(f'{name}={json.dumps(text)}' for name, text in each.labels.items())}}}": each.value
        for each in samples
        if "le" not in each.labels
    }
    fired = [{"labels": f'{{alertname="{name}",tier="{tier}"}}', "value": 1} for name, tier in firing]
    asked = {
        "expr": 'count by (alertname, tier) (ALERTS{alertstate="firing"})',
        "eval_time": "5m",
        "exp_samples": fired,
    }
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": f"{value:f}x20"} for name, value in scraped.items()],
        "promql_expr_test": [asked],
    }
    document = {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": [test]}
    (path := directory / "rules_test.yml").write_text(json.dumps(document))
    said = promtool("test", "rules", str(path))
    return said.stdout + said.stderr if said.returncode else ""


class PrometheusServer:
    """A Prometheus that scrapes `target`, "host:port", every second, and evaluates the rules in a file."""

    def __init__(self, directory: Path, target: str, rules: Path) -> None:
        directory.mkdir()
        (self.port,) = free_ports(1)
        configuration = directory / "prometheus.yml"
        configuration.write_text(CONFIGURATION.replace("RULES", str(rules)).replace("TARGET", target))
        places = {"config.file": configuration, "storage.tsdb.path": directory / "data"}
        options = places | {"web.listen-address": f"127.0.0.1:{self.port}"}
        command = [program("prometheus", PACKAGE), *(f"--{name}={value}" for name, value in options.items())]
        self.log = directory / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def ask(self, path: str, **parameters: str) -> Any:
        """What the HTTP API answers; its own text if that is an error."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urlencode(parameters)}", timeout=20) as answer:
                return json.load(answer)["data"]
        except HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """The labels and the value of each series that a query has now."""
        found = self.ask("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def wait_ready(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, f"prometheus ended at once: {self.log.read_text()}"
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=20):
                    return
            except OSError:
                assert time.monotonic() < deadline, f"prometheus does not answer: {self.log.read_text()}"
                time.sleep(0.1)

    def stop(self) -> None:
        """End it, by its pid."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def prometheus_server(directory: Path, target: str, rules: Path) -> Iterator[PrometheusServer]:
    """One server, until the block ends."""
    server = PrometheusServer(directory, target, rules)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
