"""The cost of a silent reservation, on vLLM's real scheduler: what lookups pin that vLLM never loads.

40 requests of 192 tokens, of which 160 are stored, 24 output tokens each, 16 requests at once; blocks of 16 tokens. No
model and no device is needed. Prints a table in Markdown.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpact.testkit.vllm.adapters import KNOWN_ADAPTERS
from kvpact.testkit.vllm.compat import EngineSettings, release
from kvpact.testkit.vllm.engine import VllmEngine
from kvpact.testkit.vllm.harness import BLOCK, prompt
from kvpact.testkit.vllm.simple_connector import Copy, NaiveConnector

REQUESTS, PROMPT_BLOCKS, STORED_BLOCKS, OUTPUT_TOKENS = 40, 12, 10, 24
HEADER = (
    "connector",
    "KV blocks",
    "steps",
    "preemptions",
    "positive lookups",
    "commits",
    "not committed",
    "left pinned",
)
SUBJECTS: Mapping[str, Mapping[str, Any]] = {
    "naive": {"kv_connector": "NaiveConnectorOfTenBlocks", "kv_connector_module_path": Path(__file__).stem},
    "kvpact": {
        "kv_connector": "PactConnector",
        "kv_connector_module_path": "kvpact.vllm",
        "kv_connector_extra_config": {"memory": "8MiB", "model_id": "benchmark"},
    },
}
"""Name -> fields of `KVTransferConfig`."""


class NaiveConnectorOfTenBlocks(NaiveConnector):
    """Saves the first ten blocks of a prompt and no more, so that a preempted request finds as much as before."""

    def completed(self, request: Any, computed: int) -> list[Copy]:
        """Not what lies behind them."""
        return super().completed(request, min(computed, STORED_BLOCKS * BLOCK))


def run(name: str, transfer: Mapping[str, Any], num_blocks: int) -> tuple[str, ...]:
    """One line of the table."""
    settings = EngineSettings(num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=16)
    engine = VllmEngine(settings, transfer, lambda line: None)
    prompts = [prompt(seed + 1, PROMPT_BLOCKS, tail=0) for seed in range(REQUESTS)]
    for number, tokens in enumerate(prompts):
        engine.add(f"first{number}", tokens[: STORED_BLOCKS * BLOCK + 1], max_tokens=1)
        engine.finish(f"first{number}")
    engine.drain()
    engine.forget_computed()
    before, preempted = engine.observed.steps, engine.observed.preemptions
    for number, tokens in enumerate(prompts):
        engine.add(f"r{number}", tokens, max_tokens=OUTPUT_TOKENS)
    if not engine.finish(seconds=300.0):
        raise SystemExit(f"{name} with {num_blocks} blocks does not end")
    steps = engine.observed.steps - before
    engine.drain()
    time.sleep(0.01)
    positive = sum(bool(probe.answer) for probe in engine.observed.probes)
    commits = len(engine.observed.commits)
    held = KNOWN_ADAPTERS["PactConnector" if name == "kvpact" else "NaiveConnector"]().held(engine.connector)
    preemptions = engine.observed.preemptions - preempted
    engine.close()
    numbers = (num_blocks, steps, preemptions, positive, commits, positive - commits, sum(held.values()))
    return (name, *(f"{number:,}" for number in numbers))


def main() -> None:
    """Run both connectors with plenty of, little and hardly any KV memory."""
    logging.disable(logging.ERROR)
    sys.path.insert(0, str(Path(__file__).parent))  # vLLM imports the naive connector from here by its name
    rows = [run(name, transfer, blocks) for blocks in (400, 40, 20) for name, transfer in SUBJECTS.items()]
    print(f"vLLM {release()}\n")
    for row in (HEADER, ("---",) * len(HEADER), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
