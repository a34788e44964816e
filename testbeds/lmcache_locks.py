"""Locks that connectors of others leave behind, on vLLM's real scheduler: 40 matches that are not taken.

40 requests of 192 tokens are looked up while another request has the KV blocks. The subjects:

    vllm     vLLM's own `LMCacheMPConnector`. lmcache is not installed: the modules that it imports are stubs, and its
             server is one dictionary, which has 160 tokens of each prompt and gives a lock for each chunk of 16 that a
             lookup finds. Nothing is loaded or stored.
    lmcache  LMCache's own connector, where its package can be imported, over the same server.
    simple   vLLM's `SimpleCPUOffloadConnector`, which has stored all prompts before. Its locks are the references to
             blocks of its memory.

Usage: python -m lmcache_locks SUBJECT [SCHEDULER]; prints what is locked at the end of each scene of `SCENES` in JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

REQUESTS, PROMPT, HIT, CHUNK = 40, 192, 160, 16
LOCKS: Counter[tuple[str, str]] = Counter()
"""The server's locked chunks, by request and salt."""


class Adapter:
    """The scheduler's half of LMCache's client, over `LOCKS`."""

    lmcache_tokens_per_chunk = CHUNK

    def __init__(self, *places: Any, **settings: Any) -> None:
        self.found: dict[str, int] = {}

    def num_blocks_per_chunk(self) -> int:
        return 1

    def maybe_submit_lookup_request(
        self, request_id: str, token_ids: list[int], cache_salt: str = "", **settings: Any
    ) -> None:
        if request_id not in self.found:
            self.found[request_id] = HIT if len(token_ids) == PROMPT else 0
            LOCKS[request_id, cache_salt] += self.found[request_id] // CHUNK

    def check_lookup_result(self, request_id: str) -> int | None:
        return self.found.get(request_id)

    def cleanup_lookup_result(self, request_id: str) -> None:
        self.found.pop(request_id, None)

    def free_lookup_locks(
        self, token_ids: Any, start: int, end: int, request_id: str, cache_salt: str = "", **settings: Any
    ) -> None:
        LOCKS[request_id, cache_salt] -= min(LOCKS[request_id, cache_salt], (end - start) // CHUNK)

    def end_session(self, request_id: str) -> None:
        """Frees no locks, as LMCache's says."""

    def report_block_allocations(self, records: Any) -> None:
        pass

    def reset_cache(self) -> bool:
        """Clears what nobody has locked, as LMCache's says."""
        return True

    def shutdown(self) -> None:
        """Tells the server nothing, as LMCache's."""


class Anything:
    """Stands for what is made and not looked at: the worker's half."""

    def __init__(self, *values: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *values: Any, **named: Any) -> None:
        pass


def stub(name: str, **names: Any) -> None:
    """Put a module of lmcache where an import finds it."""
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(names, __path__=[])


def load_nothing(connector: Any) -> None:
    """Leave out the worker's half of a connector."""
    connector.start_load_kv = connector.wait_for_save = lambda self, *values, **named: None
    connector.get_finished = lambda self, finished, *values, **named: (set(finished) or None, None)
    connector.get_block_ids_with_load_errors = lambda self: set()


def vllms() -> None:
    """Put vLLM's class over the stubs."""
    for package in ("", ".integration", ".integration.vllm", ".v1", ".v1.multiprocess"):
        stub(f"lmcache{package}")
    stub("lmcache.utils", init_logger=logging.getLogger)
    stub("lmcache.integration.vllm.utils", mla_enabled=lambda model_config: False)
    stub("lmcache.v1.multiprocess.custom_types", RequestAllocationRecord=Anything, BlockAllocationRecord=Anything)
    client = {"LMCacheMPWorkerAdapter": Anything, "LoadStoreOp": Anything, "ParallelStrategy": Anything}
    stub("lmcache.integration.vllm.vllm_multi_process_adapter", LMCacheMPSchedulerAdapter=Adapter, **client)
    os.environ["LMCACHE_USE_UPSTREAM_MP"] = "1"
    from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector as upstream

    load_nothing(upstream.LMCacheMPConnector)


def lmcaches() -> None:
    """Put LMCache's class over the dictionary."""
    from lmcache.integration.vllm import lmcache_mp_connector as own

    vars(own).update(LMCacheMPSchedulerAdapter=Adapter, LMCacheMPWorkerAdapter=Anything)
    load_nothing(own.LMCacheMPConnector)


def references(engine: Any) -> int:
    """References to blocks of vLLM's `SimpleCPUOffloadConnector`."""
    blocks = engine.scheduler.connector.scheduler_manager.cpu_block_pool.blocks
    return sum(block.ref_cnt for block in blocks if not block.is_null)


def abort(engine: Any, names: list[str]) -> None:
    """All users leave before blocks are allocated."""
    for name in names:
        engine.abort(name)


def reset(engine: Any, names: list[str]) -> None:
    """The prefix cache is emptied while all wait."""
    engine.reset(running=False, connector=True)


def shut_down(engine: Any, names: list[str]) -> None:
    """The engine ends while all wait, as after a fault: no request is finished first."""
    engine.scheduler.shutdown()


def take_nothing(engine: Any, names: list[str]) -> None:
    """The scheduler admits all, and takes no token of what was found: they want their prompts' log-probabilities."""
    engine.abort("wall")
    if not engine.finish(*names):
        raise RuntimeError("not all requests end")


@dataclass(frozen=True, slots=True)
class Scene:
    """How the requests' matches end."""

    end: Callable[[Any, list[str]], None]
    salt: str | None = None
    prompt_logprobs: bool = False


SCENES = {
    "aborted before allocation": Scene(abort),
    "aborted, with a salt": Scene(abort, "tenant"),
    "nothing taken, with a salt": Scene(take_nothing, "tenant", prompt_logprobs=True),
    "after a reset": Scene(reset),
    "after a shutdown": Scene(shut_down),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A connector, and how its locks are counted."""

    transfer: dict[str, Any]
    install: Callable[[], None] = lambda: None
    locked: Callable[[Any], int] = lambda engine: sum(LOCKS.values())
    stores: bool = False


LMCACHE = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
SIMPLE = {
    "kv_connector": "MemcpySimpleCPUOffloadConnector",
    "kv_connector_module_path": "kvpact_testkit.vllm.simple_offloading",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24},
}

SUBJECTS = {
    "vllm": Subject(LMCACHE, vllms),
    "lmcache": Subject(LMCACHE, lmcaches),
    "simple": Subject(SIMPLE, locked=references, stores=True),
}


def left(subject: Subject, scheduler: str, scene: Scene) -> int:
    """Chunks or blocks of the requests that are locked at a scene's end."""
    from kvpact_testkit.vllm.compat import EngineSettings
    from kvpact_testkit.vllm.engine import VllmEngine

    LOCKS.clear()
    settings = EngineSettings(num_blocks=32, block_size=CHUNK, scheduler=scheduler, max_num_seqs=2 * REQUESTS)
    engine = VllmEngine(settings, subject.transfer, lambda line: None)
    prompts = [[*range(1000 * number, 1000 * number + PROMPT)] for number in range(REQUESTS)]
    for number, tokens in enumerate(prompts if subject.stores else ()):
        engine.add(f"stored{number}", tokens, max_tokens=1, salt=scene.salt)
        if not engine.finish(f"stored{number}"):
            raise RuntimeError("a prompt is not stored")
    engine.drain()
    engine.evict_computed()
    engine.add("wall", [*range(10**6, 10**6 + 352)], max_tokens=140)
    engine.step()
    names = [f"r{number}" for number in range(REQUESTS)]
    for name, tokens in zip(names, prompts, strict=True):
        # Only the head of the queue is looked up: each comes before those that wait already.
        engine.add(name, tokens, max_tokens=1, salt=scene.salt, prompt_logprobs=scene.prompt_logprobs)
        queue = engine.scheduler.waiting
        queue.remove(request := engine.scheduler.requests[name])
        queue.prepend_request(request)
        engine.step()
    is_found = subject.locked(engine) >= REQUESTS or (subject.stores and scene.prompt_logprobs)
    if not is_found or engine.observed.commits:
        raise RuntimeError("not all requests are looked up and wait")
    scene.end(engine, names)
    return subject.locked(engine)


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    subject = SUBJECTS[sys.argv[1]]
    subject.install()
    print(json.dumps({name: left(subject, "".join(sys.argv[2:]), scene) for name, scene in SCENES.items()}))
