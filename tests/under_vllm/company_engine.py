"""A real `vllm.LLM` in the process of its caller, which can look into its scheduler and its KV memory.

Only loaded in the forks of `scene_host`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from company_answers import Said, Thrice
from vllm import LLM, RequestOutput, SamplingParams
from vllm.platforms.cpu import CpuPlatform

from engines import BLOCK, BLOCK_BY_BLOCK
from kvpact.vllm.compat.objects import connectors_of
from kvpact.vllm.connector import PactConnector
from kvpact_testkit.demo.engine import BASE_ARGUMENTS
from tiny_engine import kvpact_transfer_config

AT_REST_S = 20.0


def schedule_ahead() -> None:
    """Undo what turns asynchronous scheduling off on CPUs, "not required", for all engines of this process."""
    choose_for_cpu = CpuPlatform.check_and_update_config

    def choose(config: Any) -> None:
        choose_for_cpu(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(choose)


class CompanyEngine:
    """The engine. `arguments` are `vllm.LLM`'s over the tiny engine's, `kvpact` settings of its cache."""

    def __init__(
        self,
        model: Path,
        *,
        transfer: dict[str, Any] | None = None,
        kvpact: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.llm = LLM(
            **{
                **BASE_ARGUMENTS,
                **BLOCK_BY_BLOCK,
                "model": str(model),
                "kv_cache_memory_bytes": 1 << 28,
                "worker_cls": "kvpact.vllm.worker.KvpactWorker",
                "kv_transfer_config": transfer or kvpact_transfer_config(**{"memory": "64MiB", **(kvpact or {})}),
                **arguments,
            }
        )
        self.config = self.llm.llm_engine.vllm_config
        client: Any = self.llm.llm_engine.engine_core
        self.core = client.engine_core
        self.scheduler = self.core.scheduler
        self.connector = _pact(self.scheduler.connector)
        self._free_blocks = self.free_blocks

    def sampling(self, **options: Any) -> SamplingParams:
        """Greedy, four tokens, and all of them whatever they are."""
        return SamplingParams(
            **{"temperature": 0.0, "max_tokens": 4, "logprobs": 5, "seed": 0, "ignore_eos": True, **options}
        )

    def ask(self, request: Any, *, lora: Any = None, **options: Any) -> Said:
        """Answer one request: token ids, or any of vLLM's prompts."""
        (output,) = self.llm.generate([prompt_of(request)], self.sampling(**options), use_tqdm=False, lora_request=lora)
        return said(output)

    def ask_thrice(self, request: Any, **how: Any) -> Thrice:
        """See `Thrice`; nothing is left in the engine's own prefix cache."""
        computed, local = self.ask(request, **how), self.ask(request, **how)
        self.forget()
        before = self.counts["loaded_tokens"]
        loaded = self.ask(request, **how)
        loaded_tokens = self.counts["loaded_tokens"] - before
        self.forget()
        return Thrice(computed, local, loaded, int(loaded_tokens) // BLOCK)

    def forget(self) -> None:
        """Drop the engine's own prefix cache, once no save protects a block any more."""
        until = time.monotonic() + AT_REST_S
        while not self.llm.reset_prefix_cache():
            assert time.monotonic() < until, "blocks are still protected"
            self.core.step_fn()

    @property
    def counts(self) -> dict[str, float]:
        """All of kvpact's."""
        return dict(self._mounted.observe())

    @property
    def free_blocks(self) -> int:
        """Of the engine's KV memory."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def _mounted(self) -> Any:
        mounted = self.connector.scheduler_side.mounted
        assert mounted is not None
        return mounted

    def held(self) -> dict[str, int]:
        """What is held by anything when no request is left and the engine has stepped for as long as it wants to."""
        until = time.monotonic() + AT_REST_S
        while self.scheduler.has_requests():
            assert time.monotonic() < until, "the engine wants to step for ever"
            self.core.step_fn()
        cache, context = self._mounted.own, self.connector.scheduler_side.context
        cache.check()
        assert context is not None
        return {
            "leases": int(self.counts["leases_held"]),
            "loads": int(cache.under_way["loads"]),
            "saves": int(cache.under_way["saves"]),
            "protected blocks": int(context.touched_blocks),
            "blocks": self._free_blocks - self.free_blocks,
            "errors": int(self.counts["hook_errors"]),
        }

    def metric(self, name: str) -> float:
        """One of vLLM's own counters."""
        (found,) = [metric for metric in self.llm.get_metrics() if metric.name == name]
        return float(found.value)

    def ask_and_look(self, request: Any) -> tuple[Said, list[int]]:
        """The answer, and the blocks in which its keys and values still lie."""
        front, table, answers = self.llm.llm_engine, [], []
        front.add_request("looked into", prompt_of(request), self.sampling())
        while front.has_unfinished_requests():
            answers += [said(output) for output in front.step() if output.finished]
            for request_id in self.scheduler.requests:
                (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        (answer,) = answers
        return answer, list(table)

    def content(self, blocks: Iterable[int]) -> dict[str, list[str]]:
        """Digests of these blocks of the engine's KV memory, layer by layer in their order."""
        found = {}
        for name, layer in self.config.compilation_config.static_forward_context.items():
            pages = layer.kv_cache
            found[name] = [
                blake2b(pages[block].contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for block in blocks
            ]
        return found

    def close(self) -> dict[str, int]:
        """`held`, once all is written and the engine has shut down in order."""
        held = self.held()
        gc.freeze()  # vLLM collects garbage as it ends, for a second or two
        self.llm.llm_engine.engine_core.shutdown()
        return held


def prompt_of(request: Any) -> Any:
    """vLLM's prompt; token ids are copied, because a streaming session appends to the list that it was given."""
    return {"prompt_token_ids": list(request)} if isinstance(request, list | tuple) else request


def said(output: RequestOutput) -> Said:
    """The plain form of vLLM's answer."""
    parts = []
    for part in output.outputs:
        logprobs = [sorted((token, entry.logprob) for token, entry in place.items()) for place in part.logprobs or ()]
        parts.append((tuple(part.token_ids), tuple(map(tuple, logprobs))))
    cached = output.num_cached_tokens or 0
    assert cached % BLOCK == 0
    return Said(cached // BLOCK, tuple(parts))


def _pact(connector: Any) -> PactConnector:
    (found,) = [one for one in connectors_of(connector) if isinstance(one, PactConnector)]
    return found
