"""The cost of a silent reservation, on vLLM's real scheduler: what lookups pin that vLLM never loads, and for how long.

A naive connector and kvpact on vLLM's own scheduler, and kvpact on its own (`kvpact.vllm.scheduler`), which also says
why a match was not taken. 40 requests of 192 tokens, of which 160 are stored, 24 output tokens each, 16 requests at
once; blocks of 16 tokens. Then how long a lease outlives its match, where nobody will come back for it; and the same
load with six kinds of connectors that lease what a lookup finds (`testbeds/leasing.py`), under three schedulers. No
model and no device is needed. Prints three tables in Markdown.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "testbeds"))

from kvpact_testkit.vllm.adapters import KNOWN_ADAPTERS
from kvpact_testkit.vllm.compat import EngineSettings, release
from kvpact_testkit.vllm.engine import EngineDied, VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt
from kvpact_testkit.vllm.simple_connector import Copy, NaiveConnector
from leasing import KINDS
from leasing_runs import (
    OUTPUT_TOKENS,
    PROMPT_BLOCKS,
    REQUESTS,
    SCHEDULER,
    STORED_BLOCKS,
    Run,
    run_embedded,
    run_on_vllm,
)

HEADER = (
    "connector",
    "KV blocks",
    "steps",
    "preemptions",
    "positive lookups",
    "commits",
    "not committed",
    "leases at most",
    "left pinned",
    "lookups for each commit",
    "not taken, by reason",
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

RUNS = (("naive", ""), ("kvpact", ""), ("kvpact", SCHEDULER))
"""Connector and vLLM's `scheduler_cls`."""


class NaiveConnectorOfTenBlocks(NaiveConnector):
    """Saves the first ten blocks of a prompt and no more, so that a preempted request finds as much as before."""

    def completed(self, request: Any, computed: int) -> list[Copy]:
        """Not what lies behind them."""
        return super().completed(request, min(computed, STORED_BLOCKS * BLOCK))


def held_by(engine: VllmEngine, name: str) -> int:
    """What the connector holds for matches: blocks of the naive one, leases of kvpact."""
    found = KNOWN_ADAPTERS["PactConnector" if name == "kvpact" else "NaiveConnector"]().held(engine.connector)
    return found["leases"] if name == "kvpact" else sum(found.values())


def lookups(engine: VllmEngine, name: str) -> int:
    """Lookups that looked for something; kvpact counts a blocked request's once."""
    if name != "kvpact":
        return len(engine.observed.probes)
    return int(engine.connector.metrics.snapshot()["lookups"])


def run(name: str, scheduler: str, num_blocks: int) -> tuple[str, ...]:
    """One line of the table."""
    settings = EngineSettings(num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=16, scheduler=scheduler)
    engine = VllmEngine(settings, SUBJECTS[name], lambda line: None)
    prompts = [prompt(seed + 1, PROMPT_BLOCKS, tail=0) for seed in range(REQUESTS)]
    for number, tokens in enumerate(prompts):
        engine.add(f"first{number}", tokens[: STORED_BLOCKS * BLOCK + 1], max_tokens=1)
        engine.finish(f"first{number}")
    engine.drain()
    engine.forget_computed()
    before, preempted = engine.observed.steps, engine.observed.preemptions
    for number, tokens in enumerate(prompts):
        engine.add(f"r{number}", tokens, max_tokens=OUTPUT_TOKENS)
    asked, probed, committed = lookups(engine, name), len(engine.observed.probes), len(engine.observed.commits)
    most, end = 0, time.monotonic() + 300.0
    while not all(engine.ended(f"r{number}") for number in range(REQUESTS)):
        if time.monotonic() > end:
            raise SystemExit(f"{name} with {num_blocks} blocks does not end")
        engine.step()
        most = max(most, held_by(engine, name))
    steps = engine.observed.steps - before
    engine.drain()
    time.sleep(0.01)
    positive = sum(bool(probe.answer) for probe in engine.observed.probes[probed:])
    commits = len(engine.observed.commits) - committed
    left, preemptions = held_by(engine, name), engine.observed.preemptions - preempted
    exits = engine.scheduler.exits if scheduler else None
    counted = exits.trackers[0].postponed + exits.trackers[0].ends if exits is not None else {}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counted.items())) or "-"
    each = (lookups(engine, name) - asked) / commits
    engine.close()
    numbers = (num_blocks, steps, preemptions, positive, commits, positive - commits, most, left)
    shown = f"{name}, its own scheduler class" if scheduler else name
    return (shown, *(f"{number:,}" for number in numbers), f"{each:.2f}", reasons)


DROPS: Mapping[str, Callable[[VllmEngine], object]] = {
    "the request is cancelled": lambda engine: engine.abort("blocked"),
    "the prefix cache is reset while new requests are paused": lambda engine: engine.reset(
        running=True, connector=False
    ),
}
PATIENCE = 2.0
"""Seconds after which a lease counts as held."""


def outlives(drop: str, scheduler: str) -> str:
    """How long kvpact holds the lease of a match that was dropped."""
    settings = EngineSettings(num_blocks=21, block_size=BLOCK, scheduler=scheduler)
    engine = VllmEngine(settings, SUBJECTS["kvpact"], lambda line: None)
    tokens = prompt(1, STORED_BLOCKS)
    engine.add("first", tokens, max_tokens=1)
    engine.finish("first")
    engine.drain()
    engine.forget_computed()
    engine.add("wall", prompt(2, STORED_BLOCKS), max_tokens=100)
    engine.step()
    engine.add("blocked", tokens, max_tokens=1)
    engine.step(2)
    if not held_by(engine, "kvpact"):
        raise SystemExit("the request has no match")
    engine.pause(True)
    DROPS[drop](engine)
    steps, began = 0, time.monotonic()
    while held_by(engine, "kvpact") and time.monotonic() < began + PATIENCE:
        engine.step()
        steps += 1
    held = held_by(engine, "kvpact")
    engine.close()
    return f"more than {PATIENCE:.0f} s ({steps:,} steps)" if held else f"{steps} steps"


LEASING_HEADER = (
    "connector",
    "scheduler",
    "KV blocks",
    "lookups",
    "found something",
    "commits",
    "ended without a load, by reason",
    "leases of a request at most",
    "leases at the end",
)
SCHEDULERS: Mapping[str, Callable[[str, int], Run]] = {
    "vLLM's": run_on_vllm,
    "kvpact's class": partial(run_on_vllm, scheduler=SCHEDULER),
    "embedded engine": run_embedded,
}


def leasing_row(kind: str, scheduler: str, num_blocks: int) -> tuple[str, ...]:
    """One line of the table of connectors that lease what a lookup finds."""
    subject = (kind, scheduler, f"{num_blocks:,}")
    try:
        found = SCHEDULERS[scheduler](kind, num_blocks)
    except EngineDied as died:
        return (*subject, *("-" * 5), f"the engine dies: {died}")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.aborts.items()) or "-"
    asked, ended = (found.lookups, found.found, found.commits), (found.most, found.left)
    return (*subject, *(f"{number:,}" for number in asked), reasons, *(f"{number:,}" for number in ended))


def main() -> None:
    """Run all with plenty of, little and hardly any KV memory."""
    logging.disable(logging.ERROR)
    sys.path.insert(0, str(Path(__file__).parent))  # vLLM imports the naive connector from here by its name
    rows = [run(*each, blocks) for blocks in (400, 40, 20) for each in RUNS]
    print(f"vLLM {release()}\n")
    show(HEADER, rows)
    print()
    kept = [(drop, outlives(drop, ""), outlives(drop, SCHEDULER)) for drop in DROPS]
    show(("a match is dropped because", "its lease is held for, on vLLM's scheduler", "on kvpact's class"), kept)
    print()
    runs = [(kind, scheduler, blocks) for kind in KINDS for scheduler in SCHEDULERS for blocks in (400, 40, 20)]
    show(LEASING_HEADER, [leasing_row(*each) for each in runs])


def show(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table in Markdown."""
    for row in (header, ("---",) * len(header), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
