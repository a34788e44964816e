"""A connector's scheduler half under vLLM's own scheduler, with the CPU time of each of its hooks.

Owns the engine without a model: its workers are the connector's own, over KV memory of eight bytes a token, so that
their copies cost next to nothing, and nothing is computed. Only the time that the scheduler's thread spends in the
connector's hooks is counted.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from time import sleep, thread_time
from types import FrameType, SimpleNamespace
from typing import Any

from vllm.config import KVEventsConfig

from kvpact_testkit.vllm.compat import (
    MODEL,
    EngineSettings,
    RequestSettings,
    acting_as,
    block_hasher,
    make_aggregator,
    make_kv_cache_config,
    make_request,
    make_scheduler,
    make_vllm_config,
    make_worker_connector,
    shake_hands,
)
from kvpact_testkit.vllm.model_groups import layers_of_worker
from kvpact_testkit.vllm.oracle import OracleMemory, PageShape
from kvpact_testkit.vllm.rank import OracleLayer

HOOKS = {
    "on_new_request": "prepare",
    "get_num_new_matched_tokens": "prepare",
    "update_state_after_alloc": "order",
    "build_connector_meta": "order",
    "update_connector_output": "report",
    "request_finished": "report",
    "request_finished_all_groups": "report",
    "take_events": "report",
    "get_kv_connector_stats": "report",
    "has_pending_push_work": "report",
}
"""The hooks that vLLM's scheduler calls, and the part of a request's life to which each belongs."""

MAX_STEPS = 20_000
IDLE_SECONDS = 0.0005
"""Seconds of pause after a step that computes nothing, so that the connector's threads can run."""


@cache
def _model(max_model_len: int) -> Any:
    from vllm.config import ModelConfig

    directory = tempfile.TemporaryDirectory(prefix="kvpact-benchmark-")
    atexit.register(directory.cleanup)
    described = json.dumps({**MODEL, "max_position_embeddings": max_model_len})
    Path(directory.name, "config.json").write_text(described, encoding="utf-8")
    return ModelConfig(
        model=directory.name, skip_tokenizer_init=True, dtype="float16", max_model_len=max_model_len, seed=0
    )


@dataclass(slots=True)
class Spent:
    """CPU seconds of the connector's hooks, by part, and of the dearest step."""

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    worst_step: float = 0.0
    steps: int = 0
    each_step: list[float] = field(default_factory=list)
    schedule: list[float] = field(default_factory=list)
    """CPU seconds of `schedule()`, with the hooks in it, by step."""
    ended: dict[str, int] = field(default_factory=dict)
    """Request -> the step in which it ended."""
    engine_hash: float = 0.0
    """Seconds of vLLM's own block hashes; not in a hook, they are made where a request arrives."""

    @property
    def total(self) -> float:
        """All hooks together."""
        return sum(self.parts.values())


@contextmanager
def settled_garbage() -> Iterator[None]:
    """Within, nothing is collected: an engine freezes what it started with, here the benchmark's own objects would be
    walked through."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class SchedulerHalf:
    """One engine: vLLM's scheduler, the connector's scheduler half, and one worker half."""

    def __init__(
        self,
        transfer: Mapping[str, Any],
        has_events: bool = False,
        /,
        *,
        tokens: int,
        block_size: int,
        chunk: int,
        requests: int,
    ) -> None:
        """Room for `requests` prompts of `tokens` tokens at once; `chunk` tokens a step, 0: all those in one step.

        With `has_events` the engine publishes KV events, to nobody.
        """
        blocks = requests * (-(-tokens // block_size) + 2) + 8
        self.settings = EngineSettings(
            num_blocks=blocks,
            block_size=block_size,
            layers=1,
            heads=1,
            head_size=2,
            max_num_seqs=requests,
            token_budget=chunk or requests * (tokens + 64),
        )
        self.vllm_config = make_vllm_config(self.settings, transfer, _model(max(8192, tokens + 64)))
        self.vllm_config.kv_events_config = KVEventsConfig(enable_kv_cache_events=has_events, publisher="null")
        cache_config = self.vllm_config.cache_config
        if getattr(cache_config, "kv_cache_layout", "") is None:
            cache_config.kv_cache_layout = "LBNHC"  # as an engine's core does
        self.worker = make_worker_connector(self.settings, self.vllm_config, 0)
        layers = layers_of_worker(self.settings, 0)
        memory = OracleMemory.of(layers, PageShape(blocks, 1, block_size, 8), 0).tensors
        self.vllm_config.compilation_config.static_forward_context.update(
            {name: OracleLayer(tensor) for name, tensor in memory.items()}
        )
        with self._acting():
            self.worker.register_kv_caches(memory)
        self.scheduler = make_scheduler(self.settings, self.vllm_config, make_kv_cache_config(self.settings))
        self.connector = self.scheduler.connector
        shake_hands(self.settings, self.connector, [self.worker])
        self._aggregator = make_aggregator(self.connector, 1)
        self.spent, self._step = Spent(), 0.0
        for name, part in HOOKS.items():
            if hasattr(self.connector, name):
                setattr(self.connector, name, self._measured(getattr(self.connector, name), part))
        self._depth = self._calls = 0
        self._counting = False

    def _acting(self) -> Any:
        return acting_as(self.settings, 0, self.worker)

    def _measured(self, hook: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(hook)
        def measured(*arguments: Any, **named: Any) -> Any:
            if self._depth:
                return hook(*arguments, **named)
            self._depth, began = 1, thread_time()
            if self._counting:
                sys.setprofile(self._count)
            try:
                return hook(*arguments, **named)
            finally:
                if self._counting:
                    sys.setprofile(None)
                seconds = thread_time() - began
                self._depth = 0
                self.spent.parts[part] += seconds
                self._step += seconds

        return measured

    def request(self, request_id: str, prompt: list[int], max_tokens: int = 1) -> Any:
        """vLLM's request; its block hashes are made here, and timed."""
        wanted = RequestSettings(prompt=prompt, max_tokens=max_tokens)
        request = make_request(request_id, wanted, self.settings.block_size)
        request.block_hashes = []
        began = thread_time()
        hashes = block_hasher(self.settings.block_size)(request)
        self.spent.engine_hash += thread_time() - began
        request.block_hashes = hashes
        return request

    def serve(self, prompts: Mapping[str, list[int]]) -> Spent:
        """All prompts arrive before one step; what they cost until each is answered and every report is in."""
        self.spent = Spent()
        requests = [self.request(name, prompt) for name, prompt in prompts.items()]
        self._step = 0.0
        with settled_garbage():
            for request in requests:
                self.scheduler.add_request(request)
            while self.scheduler.has_requests():
                self.step()
                if self.spent.steps > MAX_STEPS:
                    raise SystemExit(f"{len(self.scheduler.requests)} requests have not ended after {MAX_STEPS} steps")
        return self.spent

    def computed_of_cache(self, prompts: Mapping[str, list[int]]) -> tuple[Spent, int]:
        """As `serve`, and how many tokens the connector brought."""
        found: dict[str, int] = {}
        commit = self.connector.update_state_after_alloc

        def noted(request: Any, blocks: Any, num_tokens: int, *others: Any) -> Any:
            found[request.request_id] = max(found.get(request.request_id, 0), num_tokens)
            return commit(request, blocks, num_tokens, *others)

        self.connector.update_state_after_alloc = noted
        try:
            return self.serve(prompts), sum(found.values())
        finally:
            self.connector.update_state_after_alloc = commit

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """A request arrives that is to get so many tokens."""
        self.scheduler.add_request(self.request(request_id, prompt, max_tokens))

    def measured_steps(self, number: int) -> list[tuple[float, float]]:
        """So many steps: the CPU seconds of the hooks in each, and those of `schedule()`."""
        self.spent = Spent()
        with settled_garbage():
            for _ in range(number):
                self.step()
        return [*zip(self.spent.each_step, self.spent.schedule, strict=True)]

    def calls_in_step(self) -> int:
        """One step; returns how many functions of Python the hooks call in it."""
        self._counting, self._calls = True, 0
        self.step()
        self._counting = False
        return self._calls

    def calls_of(self, prompts: Mapping[str, list[int]]) -> int:
        """As `serve`; returns how many functions of Python the hooks call until every report is in."""
        self._counting, self._calls = True, 0
        self.serve(prompts)
        self._counting = False
        return self._calls

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self._calls += event == "call"

    def step(self) -> None:
        """One step of the scheduler and of the worker half."""
        began = thread_time()
        output = self.scheduler.schedule()
        self.spent.schedule.append(thread_time() - began)
        answer = self._execute(output)
        results = self.scheduler.update_from_output(output, answer)
        self.spent.steps += 1
        self.spent.each_step.append(self._step)
        for one in (one for client in results.values() for one in client.outputs if one.finish_reason is not None):
            self.spent.ended[one.request_id] = self.spent.steps
        self.spent.worst_step = max(self.spent.worst_step, self._step)
        self._step = 0.0
        if not output.total_num_scheduled_tokens:
            sleep(IDLE_SECONDS)

    def _execute(self, output: Any) -> Any:
        """The worker half's calls in vLLM's order, around a forward pass that does nothing."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Runner

        scheduled = output.num_scheduled_tokens
        with self._acting():
            self.worker.handle_preemptions(output.kv_connector_metadata)
            if not scheduled:
                answer = Runner.kv_connector_no_forward(output, self.vllm_config)
                result = ModelRunnerOutput([], {}, kv_connector_output=answer.kv_connector_output)
                return self._aggregator.aggregate([result])
            layers = layers_of_worker(self.settings, 0)
            metadata = {layer: SimpleNamespace(slot_mapping=None) for layer in layers}
            around = Runner.maybe_get_kv_connector_output(output)
            with set_forward_context(metadata, self.vllm_config, slot_mapping={}), around as connector_output:
                for layer in layers:
                    self.worker.wait_for_layer_load(layer)
        requests = self.scheduler.requests
        sampled = [[1] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in scheduled]
        places = {name: index for index, name in enumerate(scheduled)}
        result = ModelRunnerOutput(
            list(scheduled), places, sampled_token_ids=sampled, kv_connector_output=connector_output
        )
        return self._aggregator.aggregate([result])

    def probe_seconds(self, prompt: list[int], times: int) -> float:
        """Seconds of one of many repeated probes of a waiting request; the first one, in a new step, does not count."""
        self.spent = Spent()
        self.scheduler.schedule()
        request = self.request("probed", prompt)
        probe = self.connector.get_num_new_matched_tokens
        inner = getattr(probe, "__wrapped__", probe)
        if hasattr(self.connector, "on_new_request"):
            self.connector.on_new_request(request)
        inner(request, 0)
        began = thread_time()
        for _ in range(times):
            inner(request, 0)
        seconds = (thread_time() - began) / times
        self.connector.request_finished(request, [])
        return seconds

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        if not self.scheduler.reset_prefix_cache():
            raise SystemExit("vLLM's prefix cache cannot be emptied: something holds blocks")

    def close(self) -> None:
        """End both halves."""
        self.scheduler.shutdown()
        with self._acting():
            self.worker.shutdown()
