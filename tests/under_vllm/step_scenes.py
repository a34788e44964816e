"""`StepConnector` on a real engine that lives in this process; the tests judge what is returned.

Run in forks of `scene_host`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from company_engine import prompt_of, schedule_ahead
from step_answers import Seen
from vllm import LLM, SamplingParams

from kvpact_testkit.demo.engine import BASE_ARGUMENTS
from tiny_engine import prompt

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 28,
    "max_model_len": 1 << 12,
    "worker_cls": "kvpact.vllm.worker.KvpactWorker",
    "scheduler_cls": "kvpact.vllm.scheduler.pact_scheduler",
    "kv_transfer_config": {
        "kv_connector": "StepConnector",
        "kv_connector_module_path": "step_connector",
        "kv_role": "kv_both",
    },
}

SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Watched:
    """The engine, and what its scheduler gave out and counted."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.llm = LLM(**arguments)
        self.front: Any = self.llm.llm_engine
        self.scheduler = self.front.engine_core.engine_core.scheduler
        self.steps: list[int] = []
        self.again, self.sources = 0, Counter[str]()
        self._schedule, self._make_stats = self.scheduler.schedule, self.scheduler.make_stats
        self.scheduler.schedule, self.scheduler.make_stats = self._schedule_and_note, self._make_stats_and_note

    def _schedule_and_note(self, *arguments: Any, **named: Any) -> Any:
        step = self._schedule(*arguments, **named)
        self.steps.append(step.total_num_scheduled_tokens)
        return step

    def _make_stats_and_note(self, *arguments: Any, **named: Any) -> Any:
        stats = self._make_stats(*arguments, **named)
        if stats is not None:
            counted = stats.connector_prefix_cache_stats
            self.again += counted.preempted_hits
            self.sources.update({source.value: tokens for source, tokens in counted.hits_by_source.items()})
        return stats

    def ask(self, *requests: list[int], preempted: bool = False) -> list[Any]:
        """The answers to requests that come at once; `preempted`: all are, as soon as one has said something."""
        for number, tokens in enumerate(requests):
            self.front.add_request(str(number), prompt_of(tokens), SAMPLING)
        answers: dict[str, Any] = {}
        while self.front.has_unfinished_requests():
            answers |= {output.request_id: output for output in self.front.step() if output.finished}
            if preempted and any(request.num_output_tokens for request in self.scheduler.running):
                preempted = False
                self.forget(running=True)
        return [answers[str(number)] for number in range(len(requests))]

    def forget(self, *, running: bool) -> None:
        """Empty the engine's own prefix cache; with `running`, preempt all requests before."""
        pool = self.scheduler.kv_cache_manager.block_pool
        with suppress(RuntimeError):  # all are preempted; vLLM does not forget blocks that a step computes
            self.llm.reset_prefix_cache(reset_running_requests=running)
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})

    def metric(self, name: str) -> int:
        """One of vLLM's own counters."""
        (found,) = [metric for metric in self.llm.get_metrics() if metric.name == name]
        return int(found.value)


def hits(model: Path, folder: Path, arguments: dict[str, Any]) -> Seen:
    """A prompt is computed, then found, then found by a request that is preempted while a long one is computed.

    vLLM turns asynchronous scheduling off on CPUs, "not required"; that is undone.
    """
    os.environ["STEP_CONTROL"] = str(folder)
    if arguments.get("async_scheduling"):
        schedule_ahead()
    engine = Watched({**BASE_ARGUMENTS, **ARGUMENTS, "model": str(model), **arguments})
    stored = prompt(951, 3)
    (first,) = engine.ask(stored)
    engine.forget(running=False)
    (second,) = engine.ask(stored)
    engine.forget(running=False)
    third, _ = engine.ask(stored, prompt(952, 12), preempted=True)
    said = [json.loads(line) for line in (folder / "said").read_text().splitlines()]
    return Seen(
        scheduler=type(engine.scheduler).__name__,
        told=[output.num_cached_tokens for output in (first, second, third)],
        hits=engine.metric("vllm:external_prefix_cache_hits"),
        hits_by_source=dict(engine.sources),
        hits_again=engine.again,
        steps=engine.steps,
        wanted=sum(engine.steps),
        computed=sum(line.get("computed", 0) for line in said),
        answers=[tuple(output.outputs[0].token_ids) for output in (first, second, third)],
    )
