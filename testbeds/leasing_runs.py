"""One load, for every kind of connector of `leasing`, under three schedulers: what was asked, taken, ended and left.

40 requests of 192 tokens, of which 160 are stored, 24 output tokens each, 16 requests at once; blocks of 16 tokens.

Usage: python -m leasing_runs [SCHEDULER]; prints in JSON what each kind is left with, see `main`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpact.contract import ExternalMatchExit
from kvpact_testkit.engine import Engine, EngineConfig, Request, V1ConnectorCache, V1ConnectorWorker
from leasing import KINDS, Account, Leasing
from tuple_connector import Key, Store, TupleScheduler, TupleWorker

REQUESTS, PROMPT_BLOCKS, STORED_BLOCKS, OUTPUT_TOKENS, BLOCK = 40, 12, 10, 24, 16
SCHEDULER = "kvpact.vllm.scheduler.pact_scheduler"
STEPS = 20_000
"""A run of more steps does not end."""


@dataclass
class Run:
    """What one run came to."""

    lookups: int
    found: int
    """The lookups that found something."""
    commits: int
    aborts: dict[str, int]
    """Matches that were ended without a load, by the reason that the engine gave."""
    most: int
    """The most leases that one request had after a step."""
    left: int
    """Leases after all requests have ended."""
    mistakes: list[str]


def prompt_of(number: int) -> list[int]:
    """A prompt that shares nothing with others."""
    return [number * 1000 + place for place in range(PROMPT_BLOCKS * BLOCK)]


def _run(
    account: Account, step: Callable[[], object], is_over: Callable[[], bool], ends: Counter[ExternalMatchExit]
) -> Run:
    most = 0
    for _ in range(STEPS):
        if is_over():
            reasons = {str(reason): count for reason, count in sorted(ends.items())}
            return Run(account.lookups, account.found, account.commits, reasons, most, account.left, account.mistakes)
        step()
        most = max(most, account.most)
    raise RuntimeError(f"the run does not end in {STEPS} steps")


def run_on_vllm(kind: str, num_blocks: int, *, scheduler: str = "", **others: Any) -> Run:
    """Under vLLM's own scheduler, or the class of that name."""
    from kvpact_testkit.vllm.compat import EngineSettings
    from kvpact_testkit.vllm.engine import VllmEngine

    settings = EngineSettings(num_blocks=num_blocks, block_size=BLOCK, scheduler=scheduler, **others)
    transfer = {"kv_connector": KINDS[kind].__name__, "kv_connector_module_path": "leasing_on_vllm"}
    engine = VllmEngine(settings, transfer, lambda line: None)
    for number in range(REQUESTS):
        engine.add(f"first{number}", prompt_of(number)[: STORED_BLOCKS * BLOCK + 1], max_tokens=1)
        engine.finish(f"first{number}")
    engine.drain()
    engine.forget_computed()
    account = engine.connector.__dict__["_account"] = Account()
    names = [f"r{number}" for number in range(REQUESTS)]
    for number, name in enumerate(names):
        engine.add(name, prompt_of(number), max_tokens=OUTPUT_TOKENS)
    exits = getattr(engine.scheduler, "exits", None)
    ends: Counter[ExternalMatchExit] = exits.trackers[0].ends if exits is not None and exits.trackers else Counter()
    ends.clear()
    try:
        return _run(account, engine.step, lambda: all(map(engine.ended, names)), ends)
    finally:
        engine.close()


class _TenBlocks(Store):
    def holds(self, key: Key) -> bool:
        """Not what lies behind the tenth block, so that a preempted request finds as much as before."""
        return len(key) <= STORED_BLOCKS * BLOCK + 2 and super().holds(key)


def run_embedded(kind: str, num_blocks: int) -> Run:
    """In the embedded engine, through its adapter for tuple connectors."""
    store = _TenBlocks()
    connector: Leasing = type("Connector", (KINDS[kind], TupleScheduler), {})(store, BLOCK)
    cache = V1ConnectorCache(connector, BLOCK)
    config = EngineConfig(num_blocks=num_blocks, block_size=BLOCK, max_running=16, prefix_caching=False)
    engine = Engine(config, cache=cache, workers=[V1ConnectorWorker(TupleWorker(store, 0))])
    engine.run(
        [Request(f"first{number}", prompt_of(number)[: STORED_BLOCKS * BLOCK + 1], 1) for number in range(REQUESTS)]
    )
    account = connector.__dict__["_account"] = Account()
    cache.matches.ends.clear()
    requests = [
        engine.add_request(Request(f"r{number}", prompt_of(number), OUTPUT_TOKENS)) for number in range(REQUESTS)
    ]
    done = engine.finished
    return _run(account, engine.step, lambda: all(each.request_id in done for each in requests), cache.matches.ends)


def main(scheduler: str) -> dict[str, int | str]:
    """Leases that each kind is left with on 20 blocks, or why the engine dies."""
    from kvpact_testkit.vllm.engine import EngineDied

    left: dict[str, int | str] = {}
    for kind in KINDS:
        try:
            left[kind] = run_on_vllm(kind, 20, scheduler=scheduler).left
        except EngineDied:
            left[kind] = "the engine dies"
    return left


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    print(json.dumps(main(sys.argv[1] if sys.argv[1:] else "")))
