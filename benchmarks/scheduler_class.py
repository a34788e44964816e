"""What a scheduler's step costs with `kvpact.vllm.scheduler` in place of vLLM's own class, with 1,000 waiting requests.

Two situations: the head of the queue is blocked, so that one request is asked for in each step; and a connector asks
the engine to come back later, so that all are. 64 requests run and decode. Both classes take turns over steps of one
kind; prints the median of the pairs' ratios of CPU time, their spread, and how many more Python calls a step makes for
each waiting request.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact_testkit.vllm.compat import EngineSettings, release
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt
from kvpact_testkit.vllm.simple_connector import SimpleConnector

RUNNING, WAITING, PAIRS, STEPS = 64, 1000, 20, 50
SCHEDULERS = ("", "kvpact.vllm.scheduler.pact_scheduler")


class LaterConnector(SimpleConnector):
    """Speaks the pact, and asks the engine to come back later."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Later, but for the request that runs."""
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (None, False) if request.request_id.startswith("waiting") else found

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """The same."""
        num_tokens, _ = LaterConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        return None if num_tokens is None else ExternalKVMatch(num_tokens)

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        """Never called."""
        return num_tokens

    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """Nothing is held."""


SITUATIONS: Mapping[str, Mapping[str, Any]] = {
    "the head of the queue is blocked": {
        "kv_connector": "PactConnector",
        "kv_connector_module_path": "kvpact.vllm",
        "kv_connector_extra_config": {"memory": "8MiB", "model_id": "benchmark"},
    },
    "all are asked to come back later": {
        "kv_connector": LaterConnector.__name__,
        "kv_connector_module_path": Path(__file__).stem,
    },
}
"""Name -> fields of `KVTransferConfig`."""


def crowded(transfer: Mapping[str, Any], scheduler: str) -> VllmEngine:
    """An engine with running requests that leave no room, and others that wait, of which the first has a match."""
    settings = EngineSettings(
        num_blocks=2 * RUNNING + 6, block_size=BLOCK, max_num_seqs=RUNNING + 16, scheduler=scheduler
    )
    engine = VllmEngine(settings, transfer, lambda line: None)
    stored = prompt(1, 10)
    if transfer["kv_connector"] == "PactConnector":
        engine.add("first", stored, max_tokens=1)
        engine.finish("first")
        engine.drain()
        engine.forget_computed()
    for number in range(RUNNING):
        engine.add(f"running{number}", prompt(2 + number, 1), max_tokens=1)
        request = engine.scheduler.requests[f"running{number}"]
        request.max_tokens = request.sampling_params.max_tokens = 10**6
    engine.step()
    for number in range(WAITING):
        engine.add(f"waiting{number}", [*stored, number])
    engine.step(2)
    return engine


def take_back(engine: VllmEngine, output: Any) -> None:
    """Nothing was computed: the next step is as this one."""
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        request = engine.scheduler.requests[request_id]
        request.num_computed_tokens -= num_tokens
        request.num_in_flight_tokens = 0


def step_seconds(engine: VllmEngine) -> float:
    """CPU seconds of `schedule()` in some steps."""
    spent = 0.0
    for _ in range(STEPS):
        began = time.thread_time()
        output = engine.scheduler.schedule()
        spent += time.thread_time() - began
        if len(output.num_scheduled_tokens) != RUNNING:
            raise SystemExit("a waiting request was admitted, or a running one is missing")
        take_back(engine, output)
    return spent


def calls_of_a_step(engine: VllmEngine) -> int:
    """Python calls of one `schedule()`."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    output = engine.scheduler.schedule()
    sys.setprofile(None)
    take_back(engine, output)
    return calls


def main() -> None:
    """Print the table."""
    logging.disable(logging.ERROR)
    sys.path.insert(0, str(Path(__file__).parent))  # vLLM imports the connector from here by its name
    print(f"vLLM {release()}, {RUNNING} running and {WAITING:,} waiting requests, {PAIRS} pairs of {STEPS} steps\n")
    print(
        "| situation | CPU time of a step, ours / vLLM's own (median; 10 % to 90 %) | calls more per waiting request |"
    )
    print("| --- | --- | --- |")
    for situation, transfer in SITUATIONS.items():
        engines = [crowded(transfer, scheduler) for scheduler in SCHEDULERS]
        for engine in engines:
            step_seconds(engine)
        ratios = []
        for pair in range(PAIRS):
            order = engines if pair % 2 else engines[::-1]
            spent = {id(engine): step_seconds(engine) for engine in order}
            ratios.append(spent[id(engines[1])] / spent[id(engines[0])])
        ratios.sort()
        stock, ours = map(calls_of_a_step, engines)
        spread = f"{ratios[PAIRS // 10]:.3f} to {ratios[-1 - PAIRS // 10]:.3f}"
        print(f"| {situation} | {median(ratios):.3f} ({spread}) | {(ours - stock) / WAITING:.3f} |")


if __name__ == "__main__":
    main()
