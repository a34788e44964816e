"""vLLM's own tiering manager over a `PactTier`, driven as its scheduler drives it: no engine, no device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvpact.vllm import plugin

ROW_BYTES, ROWS, TOKENS = 8192, 64, 16
NO_STEP = ScheduleEndContext((), ())

plugin.register()


def engine(**changes: Any) -> Any:
    """As much of a `VllmConfig` as a tier reads."""
    cache = {"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256", **changes.pop("cache", {})}
    model = {"dtype": "bfloat16", "max_model_len": 4096, "quantization": None, **changes.pop("model", {})}
    return SimpleNamespace(
        **{
            "model_config": SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2}), served_model_name="model", **model
            ),
            "cache_config": SimpleNamespace(**cache),
            "attention_config": SimpleNamespace(compute_hash=lambda: "attention"),
            "lora_config": None,
            **changes,
        }
    )


ATTENTION: Mapping[str, Any] = {"num_kv_heads": 2, "head_size": 16, "dtype": "bfloat16"}
"""What the layers' specification says of a block's bytes."""


def spec_of(
    tier: Mapping[str, Any],
    *,
    name: str = "PactTieringSpec",
    of: Any = None,
    layers: Mapping[str, Any] = ATTENTION,
) -> Any:
    """vLLM's spec with one `PactTier` of these settings; the weights are called "w" unless they say otherwise."""
    settings = {"type": "PactTier", "model_id": "w", **tier}
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=TOKENS, layer_names=("l0", "l1"), group_id=0),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=True,
        extra_config={"spec_name": name, "cpu_bytes_to_use": ROWS * ROW_BYTES, "secondary_tiers": [settings]},
        engine_id=uuid4().hex,
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=True),
        kv_cache_layout="NHD",
    )
    object.__setattr__(config, "kvpact_engine", of or engine())
    members = [SimpleNamespace(kv_cache_spec=SimpleNamespace(**layers))]
    object.__setattr__(config, "kvpact_kv_cache", SimpleNamespace(kv_cache_groups=members))
    return OffloadingSpecFactory.create_spec(config)


def keys_of(prompt: int, chunks: int) -> list[Any]:
    """vLLM's keys of a prompt's chunks."""
    return [make_offload_key(bytes([prompt, at]) * 16, 0) for at in range(chunks)]


class Bed:
    """One manager and its tier; `memory` is vLLM's host memory, a row for each chunk."""

    def __init__(self, tier: Mapping[str, Any], **named: Any) -> None:
        self.spec = spec_of(tier, **named)
        self.manager = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._contexts: dict[str, Any] = {}

    def request(self, name: str, params: dict[str, Any] | None = None) -> Any:
        """The context of a request, which begins with the first call, and its `kv_transfer_params`."""
        if name not in self._contexts:
            self._contexts[name] = ReqContext(name, params)
            self.manager.on_new_request(self._contexts[name])
        return self._contexts[name]

    def finish(self, name: str) -> None:
        self.manager.on_request_finished(self._contexts.pop(name))

    def compute(self, name: str, keys: Sequence[Any], fill: int) -> bool:
        """The engine has computed these chunks, each full of a byte from `fill` on; whether vLLM stores them."""
        context = self.request(name)
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * TOKENS)
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return False
        for at, row in enumerate(output.store_spec.chunk_ids):
            self.memory[row] = fill + at
        self.manager.complete_store(output.keys_to_store, context)
        return True

    def step(self) -> None:
        self.manager.on_schedule_end(NO_STEP)

    def rest(self, seconds: float = 10.0) -> None:
        """Step until nothing is under way."""
        until = time.monotonic() + seconds
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "work does not end"
            self.step()
            time.sleep(0.001)

    def ask(self, name: str, keys: Sequence[Any]) -> list[LookupResult]:
        """What the scheduler is told of each chunk in one step."""
        answers = [self.manager.lookup(key, self.request(name)) for key in keys]
        self.step()
        return answers

    def find(self, name: str, keys: Sequence[Any], seconds: float = 10.0) -> int:
        """Ask, step by step, until the request need not wait; how many chunks in a row are in host memory then."""
        until = time.monotonic() + seconds
        while True:
            found = 0
            waits = False
            for answer in self.ask(name, keys):
                waits |= answer in (LookupResult.RETRY, LookupResult.HIT_PENDING)
                if answer is LookupResult.MISS:
                    break
                found += 1
            if not waits:
                return found
            assert time.monotonic() < until, "the request waits for ever"
            time.sleep(0.001)

    def rows(self, keys: Sequence[Any], name: str = "reader") -> list[int]:
        """The byte that each chunk's row is full of."""
        context = self.request(name)
        spec = self.manager.prepare_load(keys, context)
        rows = [self.memory[row] for row in spec.chunk_ids]
        assert all(row.min() == row.max() for row in rows)
        self.manager.complete_load(keys, context)
        return [int(row[0]) for row in rows]

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()


@contextmanager
def bed(tier: Mapping[str, Any], **named: Any) -> Iterator[Bed]:
    """A bed, and its end as vLLM's connector brings it."""
    made = Bed(tier, **named)
    try:
        yield made
    finally:
        made.close()
