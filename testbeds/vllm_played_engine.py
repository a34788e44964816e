"""vLLM's real scheduler and both halves of the real connector in one process; only the model runner is played.

The "model" is an oracle: each token's slot in the KV memory holds a digest of the slot before it and the token, and an
answer is a digest of every slot that attention would read. So one stale, foreign, torn or early byte anywhere changes
the answer, and `answer` says what is right without an engine. The hooks are called by vLLM's own runner mixin. A step
takes a millisecond.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVEventsConfig, ModelConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvpact.cache.cache import PactCache
from kvpact.cache.mounted import MountedCache
from kvpact.config import load_config
from kvpact.vllm.connector import PactConnector
from kvpact.vllm.scheduler import KvpactScheduler
from kvpact_testkit.vllm import compat
from kvpact_testkit.vllm.model_groups import layer_names

BLOCK = 16
LAYERS = 2
SLOT = 256
"""Bytes of one token in one layer; a block of all layers takes 8 KiB."""
VOCABULARY = 512
MODEL = {
    **compat.MODEL,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
}


def write(before: bytes, token: int, layer: int) -> bytes:
    """What the model leaves in the KV memory for a token, given the slot before it."""
    return blake2b(before + token.to_bytes(4, "little") + bytes([layer]), digest_size=64).digest() * (SLOT // 64)


def read(layers: Sequence[bytes]) -> int:
    """The next token, given all that attention reads."""
    digest = blake2b(digest_size=4)
    for memory in layers:
        digest.update(memory)
    return int.from_bytes(digest.digest(), "little") % VOCABULARY


def answer(prompt: Sequence[int], max_tokens: int, adapter: bytes = b"") -> list[int]:
    """What the model says to `prompt` with no cache at all, with an adapter of these weights."""
    tokens, layers = list(prompt), [bytearray() for _ in range(LAYERS)]
    for place in range(len(prompt) + max_tokens - 1):
        for layer, memory in enumerate(layers):
            memory += write(adapter + bytes(memory[-SLOT:]), tokens[place], layer)
        if place >= len(prompt) - 1:
            tokens.append(read([bytes(memory) for memory in layers]))
    return tokens[len(prompt) :]


def make_prompt(seed: int, blocks: int, tail: int = 5, stem: Sequence[int] = ()) -> list[int]:
    """A prompt of `blocks` full blocks and `tail` tokens that begins with `stem` and is unlike that of another seed."""
    length = blocks * BLOCK + tail
    random = np.random.default_rng(seed)
    return [*stem, *(int(token) for token in random.integers(1, VOCABULARY, length - len(stem)))]


def vllm_config(
    directory: Path,
    settings: dict[str, object],
    num_batched_tokens: int,
    transfer: dict[str, Any],
    block_size: int = BLOCK,
    dtype: str = "bfloat16",
) -> Any:
    """A real configuration for a model that is nothing but its `config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(
        model=str(directory), skip_tokenizer_init=True, dtype=dtype, max_model_len=2048, enforce_eager=True
    )
    named = {
        **load_config({}, {}).kv_transfer_config(),
        # The played model computes faster than anything can be loaded.
        "kv_connector_extra_config": {"model_id": "oracle", "recompute_if_faster": False, **settings},
    }
    shape = compat.EngineSettings(block_size=block_size, token_budget=num_batched_tokens, load_format="auto")
    return compat.make_vllm_config(shape, {**named, **transfer}, model)


class PlayedLayer:
    """An attention layer, as far as connectors ask for it."""

    def get_attn_backend(self) -> type[PlayedLayer]:
        """As vLLM's layers."""
        return PlayedLayer

    @staticmethod
    def get_name() -> str:
        """As vLLM's backends."""
        return "PLAYED"


class Published(list[Any]):
    """A publisher of KV events that keeps them, in order."""

    def publish(self, batch: KVEventBatch) -> None:
        """As vLLM's publishers."""
        self.extend(batch.events)

    def shutdown(self) -> None:
        """As vLLM's publishers."""


@dataclass
class PlayedRequest:
    """A request under way and what it has said so far."""

    request: Request
    said: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str = ""
    returned_params: dict[str, Any] | None = None
    """`kv_transfer_params` of its answer."""


class PlayedEngine:
    """One engine: what `vllm.LLM` is to a user, and the steps of its core."""

    def __init__(
        self,
        directory: Path,
        *,
        num_blocks: int = 128,
        num_batched_tokens: int = 4096,
        transfer: dict[str, Any] | None = None,
        zero_new_blocks: bool = False,
        scheduler_class: type[Scheduler] | None = None,
        block_size: int = BLOCK,
        dtype: str = "bfloat16",
        has_events: bool = False,
        **settings: object,
    ) -> None:
        """`settings` are kvpact's, `transfer` other fields of vLLM's `kv_transfer_config`.

        With `"pool": "host"` it meets others of its test.

        With `has_events` it publishes KV events: see `published`.

        The scheduler is vLLM's own; with `match_at` "step", kvpact's.

        With `zero_new_blocks` the state update clears them, as vLLM's runners do for some models.
        """
        settings = {"memory": "4MiB", "pool": "engine", **settings}
        self.config = vllm_config(directory / "model", settings, num_batched_tokens, transfer or {}, block_size, dtype)
        self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=has_events, publisher="null")
        self.block_size = block_size
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.shape = shape = compat.EngineSettings(num_blocks=num_blocks, block_size=block_size, layers=LAYERS)
        names = layer_names(shape)
        self.config.compilation_config.static_forward_context = {name: PlayedLayer() for name in names}
        self.kv = {name: torch.zeros((num_blocks, block_size, SLOT), dtype=torch.uint8) for name in names}
        self.worker: PactConnector = compat.make_worker_connector(shape, self.config, 0)
        self.worker.register_kv_caches(self.kv)
        self.zero_new_blocks = zero_new_blocks
        self.computed_tokens = 0
        """Computed by the played model since it began."""
        self.external_queries = self.external_hits = 0
        """What vLLM adds to its counters `vllm:external_prefix_cache_queries` and `_hits`, in tokens."""
        self.external_hits_again = 0
        """What vLLM counts apart: hits of requests that were preempted before."""
        self.external_hits_by_source = 0
        """What vLLM adds to `vllm:prompt_tokens_cached_by_source` for all external sources together."""
        self.external_sources: Counter[str] = Counter()
        """The same for each of them."""
        if self.worker.before_update_states is not None:
            scheduler_class = scheduler_class or KvpactScheduler
        self.config.scheduler_config.scheduler_cls = scheduler_class
        self.step_hook = compat.step_hook_of(self.worker, self.config)
        self.scheduler = compat.make_scheduler(shape, self.config, compat.make_kv_cache_config(shape), log_stats=True)
        self.published = Published()
        """KV events of the engine and the connector, as they were published."""
        self.scheduler.kv_event_publisher = self.published
        self.connector: PactConnector = self.scheduler.connector
        compat.shake_hands(shape, self.connector, [self.worker])
        self.numbers = count()
        self.requests: dict[str, PlayedRequest] = {}
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_blocks_at_rest = self.pool.get_num_free_blocks()

    # What a user does

    def add(
        self, prompt: Sequence[int], max_tokens: int = 3, extra_args: dict[str, Any] | None = None, **arguments: Any
    ) -> PlayedRequest:
        """A new request. `extra_args` are vLLM's of its sampling, such as `kv_transfer_params`."""
        name = f"request {next(self.numbers)}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args)
        request = Request(
            name, list(prompt), sampling, None, block_hasher=compat.block_hasher(self.block_size), **arguments
        )
        self.requests[name] = PlayedRequest(request)
        self.scheduler.add_request(request)
        return self.requests[name]

    def generate(self, prompt: Sequence[int], max_tokens: int = 3, **arguments: Any) -> PlayedRequest:
        """Answer one prompt, and step on until the copies that it caused are done."""
        played = self.add(prompt, max_tokens, **arguments)
        self.run()
        return played

    def cancel(self, played: PlayedRequest) -> None:
        """The user is gone."""
        self.scheduler.finish_requests([played.request.request_id], RequestStatus.FINISHED_ABORTED)

    def forget(self) -> None:
        """Drop the engine's own prefix cache, once no save protects a block any more."""
        until = time.monotonic() + 5.0
        while not self.scheduler.reset_prefix_cache():
            assert time.monotonic() < until, "blocks are still protected"
            self.step()

    # What an engine does

    def run(self, seconds: float = 10.0) -> None:
        """Step until nothing is left to do."""
        until = time.monotonic() + seconds
        while self.scheduler.has_requests():
            if time.monotonic() > until:
                raise AssertionError(f"the engine still has work after {seconds:g} s: {self.scheduler.requests}")
            if not self.step():
                time.sleep(0.001)

    def step(self, before_update: Callable[[], object] | None = None) -> int:
        """One step, as the engine's core and its runner do it; the number of tokens computed.

        `before_update` runs where the core takes in cancellations: when the step is executed and not yet judged.
        """
        scheduled = self.scheduler.schedule()
        output = self.execute(scheduled)
        if before_update is not None:
            before_update()
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.connector_prefix_cache_stats is not None:
                external = outputs.scheduler_stats.connector_prefix_cache_stats
                self.external_queries += external.queries
                self.external_hits += external.hits
                self.external_hits_again += external.preempted_hits
                self.external_hits_by_source += sum(external.hits_by_source.values())
                self.external_sources.update({source.value: part for source, part in external.hits_by_source.items()})
                counts = (external.queries, external.hits, external.preempted_hits, *external.hits_by_source.values())
                assert min(counts) >= 0, f"a counter would go back: {external}"
            for one in outputs.outputs:
                played = self.requests[one.request_id]
                played.said.extend(one.new_token_ids)
                if one.finish_reason is not None:
                    played.finish_reason = str(one.finish_reason)
                    played.returned_params = one.kv_transfer_params
                if one.prefill_stats is not None:
                    played.cached_tokens = one.prefill_stats.num_cached_tokens
        return int(scheduled.total_num_scheduled_tokens)

    def execute(self, scheduled: Any) -> ModelRunnerOutput:
        """The runner's part of a step."""
        wanted = scheduled
        if self.step_hook is not None:
            scheduled = self.step_hook.apply(wanted)
        if self.zero_new_blocks:
            self._zero(wanted)
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        with (
            compat.acting_as(self.shape, 0, self.worker),
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as output,
        ):
            sampled = self.forward(scheduled.num_scheduled_tokens) if scheduled.num_scheduled_tokens else {}
        if not sampled:
            return ModelRunnerOutput.with_kv_conn_output_only(output)
        places = {name: index for index, name in enumerate(sampled)}
        return ModelRunnerOutput(
            list(sampled), places, sampled_token_ids=list(sampled.values()), kv_connector_output=output
        )

    def _zero(self, scheduled: Any) -> None:
        """Clear the new blocks that the scheduler wants to be computed."""
        for new in scheduled.scheduled_new_reqs:
            self._clear(new.block_ids[0][-(-new.num_computed_tokens // self.block_size) :])
        cached = scheduled.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None and name not in cached.resumed_req_ids:
                self._clear(blocks[0])

    def _clear(self, block_ids: Sequence[int]) -> None:
        for memory in self.kv.values():
            memory[list(block_ids)] = 0

    def forward(self, num_scheduled_tokens: dict[str, int]) -> dict[str, list[int]]:
        """Layer by layer, each waiting for its load: write the slots of the scheduled tokens; then read them all."""
        self.computed_tokens += sum(num_scheduled_tokens.values())
        for layer, name in enumerate(self.kv):
            self.worker.wait_for_layer_load(name)
            for request_id, num_tokens in num_scheduled_tokens.items():
                tokens, slots = self._slots(request_id, name)
                end = self.scheduler.requests[request_id].num_computed_tokens
                for place in range(end - num_tokens, end):
                    before = self.adapter_of(request_id) + (bytes(slots(place - 1)) if place else b"")
                    slots(place)[:] = write(before, tokens[place], layer)
            self.worker.save_kv_layer(name, self.kv[name], None)
        sampled: dict[str, list[int]] = {}
        for request_id in num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            complete = request.num_computed_tokens == request.num_tokens
            memory = [self._memory(request_id, name, request.num_tokens) for name in self.kv]
            sampled[request_id] = [read(memory)] if complete else []
        return sampled

    def adapter_of(self, request_id: str) -> bytes:
        """The weights of the adapter with which the request is computed; for engines that have some."""
        return b""

    def _slots(self, request_id: str, name: str) -> tuple[Sequence[int], Callable[[int], memoryview]]:
        pages = memoryview(self.kv[name].numpy())
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)

        def slot(place: int) -> memoryview:
            start = (table[place // self.block_size] * self.block_size + place % self.block_size) * SLOT
            return pages.cast("B")[start : start + SLOT]

        return self.scheduler.requests[request_id].all_token_ids, slot

    def _memory(self, request_id: str, name: str, num_tokens: int) -> bytes:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return bytes(self.kv[name][list(table)].numpy().tobytes()[: num_tokens * SLOT])

    # What a test asks

    @property
    def counts(self) -> dict[str, float]:
        """All of kvpact's counts as they are now."""
        return self._mounted.observe()

    @property
    def _mounted(self) -> MountedCache:
        mounted = self.connector.scheduler_side.mounted
        assert mounted is not None
        return mounted

    @property
    def cache(self) -> PactCache:
        """kvpact's cache."""
        own = self._mounted.own
        assert own is not None
        return own

    def assert_at_rest(self) -> None:
        """No request, no lease, no block or slot held by anything, every invariant true."""
        cache, context = self.cache, self.connector.scheduler_side.context
        assert context is not None
        cache.check()
        held = {
            "loads": cache.under_way["loads"],
            "saves": cache.under_way["saves"],
            "leases": int(self.counts["leases_held"]),
            "protected blocks": context.touched_blocks,
            "blocks": self.free_blocks_at_rest - self.pool.get_num_free_blocks(),
        }
        assert not any(held.values()), f"the engine is at rest and still holds {held}"

    def close(self) -> None:
        """End both halves."""
        self.scheduler.shutdown()
        self.worker.shutdown()


def flush(engine: PlayedEngine) -> None:
    """Wait until nothing is left to write."""
    until = time.monotonic() + 20.0
    while any(value for name, value in engine.counts.items() if name.startswith("queued_write_bytes")):
        engine.step()
        time.sleep(0.002)
        assert time.monotonic() < until
    engine.run()


def wait_before_loads(engine: PlayedEngine, go_on: threading.Event) -> None:
    """Blocks are loaded once `go_on` is set, or after 10 s."""
    transfers = engine.worker.cache_worker.transfers
    assert transfers is not None
    copier: Any = getattr(transfers.engine, "copier")  # noqa: B009
    scatter = copier.scatter

    def scatter_later(group: int, plan: Any) -> None:
        go_on.wait(10.0)
        scatter(group, plan)

    copier.scatter = scatter_later


def step_until(engine: PlayedEngine, holds: Callable[[], bool]) -> None:
    """Steps without requests, as an engine takes while something is under way."""
    until = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < until
        engine.step()
        time.sleep(0.002)


class HeldCopies:
    """All copies of one direction, "gather" or "scatter", wait until they are let go."""

    def __init__(self, engine: PlayedEngine, direction: str) -> None:
        self.go_on = threading.Event()
        worker: Any = engine.worker.cache_worker
        copier = worker.transfers.engine.copier
        copy = getattr(copier, direction)

        def wait(*arguments: Any) -> None:
            self.go_on.wait(20.0)
            copy(*arguments)

        setattr(copier, direction, wait)
