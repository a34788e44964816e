"""What an engine's processes import of kvpact: their own half of it, and nothing that they may never need."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

pytest.importorskip("vllm")

from kvpact.tiers.backends import BACKENDS

CONNECTOR = "kvpact.vllm.connector"
SCHEDULER = "kvpact.vllm.scheduler_side"
WORKER = "kvpact.vllm.worker_side"

BROUGHT = {"kvpact", "blake3"}
"""The packages that kvpact may bring into a process in which vLLM's connector base and core are."""

PROGRAM = """
import json, os, sys
from importlib import import_module
import vllm.v1.engine.core, vllm.v1.worker.cpu_worker
import vllm.distributed.kv_transfer.kv_connector.v1.metrics
known = set(sys.modules)
for modules in sys.argv[1:]:
    if os.fork() == 0:
        for module in modules.split():
            import_module(module)
        print(json.dumps(sorted(set(sys.modules) - known)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, modules
"""
"""Each list in a process of its own, forked from one that has loaded vLLM's modules and nothing else."""

PACKAGE = "kvpact.vllm"
LISTS = (PACKAGE, f"{PACKAGE} {CONNECTOR}", f"{PACKAGE} {CONNECTOR} {SCHEDULER}", f"{PACKAGE} {CONNECTOR} {WORKER}")


@cache
def all_brought() -> dict[str, set[str]]:
    """Of each of `LISTS`, the modules that come with them in a fresh process, beyond vLLM's own."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *LISTS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return dict(zip(LISTS, map(set, map(json.loads, ran.stdout.splitlines()[-len(LISTS) :])), strict=True))


def brought_by(*modules: str) -> set[str]:
    """See `all_brought`."""
    return all_brought()[" ".join(modules)]


def test_the_package_alone_brings_next_to_nothing() -> None:
    """vLLM's plugin loader imports it in every process."""
    assert brought_by(PACKAGE) == {"kvpact", "kvpact.vllm"}


def test_the_connector_brings_neither_half() -> None:
    """vLLM's front end imports it, for the layout of KV memory and for metrics."""
    brought = brought_by(PACKAGE, CONNECTOR)
    assert CONNECTOR in brought
    assert {name.partition(".")[0] for name in brought} <= BROUGHT
    assert not brought & {"kvpact.cache.cache", "kvpact.tiers.client", "kvpact.worker.worker", SCHEDULER, WORKER}
    assert not {
        name
        for name in brought
        if name.startswith(("kvpact.vllm.device", "kvpact.cli", "kvpact.worker.c", "kvpact.worker.d"))
    }


@pytest.mark.parametrize(
    ("half", "others"),
    [
        (SCHEDULER, ("kvpact.worker.worker", "kvpact.worker.copy", "kvpact.vllm.device", WORKER)),
        (WORKER, ("kvpact.cache.cache", "kvpact.cache.mounted", "kvpact.vllm.device", SCHEDULER)),
    ],
)
def test_a_half_brings_neither_the_other_nor_the_client_of_a_store(half: str, others: tuple[str, ...]) -> None:
    brought = brought_by(PACKAGE, CONNECTOR, half)
    assert half in brought
    assert {name.partition(".")[0] for name in brought} <= BROUGHT
    assert not brought & set(others)
    opened_by_url = tuple(f"kvpact.tiers.{backend.opener.split('.')[2]}." for backend in BACKENDS)
    assert not {name for name in brought if name.startswith(opened_by_url)}
