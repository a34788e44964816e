"""One engine's turn in `e2e.py`, and raw reads of what it read: readings, no judgement over several of them.

Owns which engine runs: all but the one whose turn it is stand still.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.cold_costs import Meter
from benchmarks.e2e_engines import COMPUTING_CORE, hook_times, on_core
from kvpact.tiers.disk.superblock import Superblock
from kvpact_testkit.demo.cpu_time import look_at
from kvpact_testkit.demo.engine import EngineError, EngineProcess, loading_on_all_cores
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.phases import settle

Name = tuple[int, int]
"""Of a prompt."""

BLOCK = 128
"""Tokens in a block of the CPU engine."""

WAKE_UP = list(range(2, 10))
"""A prompt that is shorter than a block of any cache. It is asked before each prompt that is timed, so that all meet an
engine that has just computed something."""

STORES = ("disk", "redis")
"""Where kvpact's warm prompts come from in a new process."""

REST_SECONDS = 0.5
"""After a cold prompt's answer; what a peer's threads do later is not counted."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt `number` of those of nominally `tokens` tokens; it has some more."""

    tokens: int
    number: int
    ids: list[int]

    @property
    def name(self) -> Name:
        """Of this prompt among all."""
        return self.tokens, self.number

    @property
    def blocks(self) -> int:
        """Number of whole blocks."""
        return len(self.ids) // BLOCK


@dataclass(frozen=True, slots=True)
class Cold:
    """A prompt that nothing knew: milliseconds to its first token, and of the CPU in EngineCore's process.

    `share` is kvpact's part of the prompt's CPU time.
    """

    ttft_ms: float
    core_cpu_ms: float
    share: float | None


@dataclass(frozen=True, slots=True)
class Warm:
    """A prompt from the external cache, then from the engine's own; `raw_ms`: a raw read of the same bytes, if any.

    `verdict` says what was wrong with the answer; "" if nothing was.
    """

    ttft_ms: float
    local_ms: float
    cached_tokens: int
    verdict: str
    raw_ms: float | None = None


class Runner:
    """An engine that stands still unless it is its turn. `failure` is what it died of, in one line, or ""."""

    def __init__(self, name: str, source: str, engine: EngineProcess, folder: Path) -> None:
        """`source` is the tier of kvpact from which its warm prompts come, or "memory", or "" for others."""
        self.name, self.source, self.failure = name, source, ""
        self.engine = engine
        hooks = hook_times(folder)
        self._meter = Meter(self.engine, hooks if hooks.exists() else None)
        self._measured = hooks.exists()
        self._still = ExitStack()

    @contextmanager
    def turn(self) -> Iterator[EngineProcess]:
        """This engine runs meanwhile. If it fails it is ended, and `failure` says why; nothing is raised."""
        self._still.close()
        try:
            yield self.engine
        except (EngineError, RuntimeError) as error:
            self.failure = str(error).splitlines()[0][:200]
            self.engine.kill()
        else:
            self._still.enter_context(self.engine.frozen())

    def end(self, *, in_order: bool = False) -> None:
        """End its processes; `in_order`, kvpact finishes its writes first."""
        self._still.close()
        if in_order and not self.failure:
            self.engine.stop()
        else:
            self.engine.kill()

    def ask_cold(self, prompt: Prompt) -> Cold:
        """A prompt that no cache knows. Raises RuntimeError if one does."""
        self.engine.generate([WAKE_UP], max_tokens=1)
        before = self._core_cpu_seconds()
        (cost,) = self._meter.ask([prompt.ids])
        time.sleep(REST_SECONDS)
        core = self._core_cpu_seconds() - before
        share = cost.kvpact_cpu / cost.prompt_cpu if self._measured else None
        return Cold(cost.first_token * 1e3, core * 1e3, share)

    def _core_cpu_seconds(self) -> float:
        looks = look_at(self.engine.processes()).values()
        return sum(look.process_cpu_seconds for look in looks if "EngineCore" in look.process)

    def ask_local(self, prompt: Prompt) -> Output:
        """A prompt that is in the engine's own prefix cache."""
        self.engine.generate([WAKE_UP], max_tokens=1)
        (output,) = self.engine.generate([prompt.ids])
        return output

    def ask_warm(self, prompt: Prompt, reference: Output) -> Warm:
        """A prompt that only the external cache has, then from the engine's own cache.

        `reference` is the answer to compare with.
        """
        self.engine.generate([WAKE_UP], max_tokens=1)
        self.engine.reset_prefix_cache()
        read = self._blocks_read()
        (warm,) = self.engine.generate([prompt.ids])
        settle(self.engine)
        read = self._blocks_read() - read
        local = self.ask_local(prompt)
        verdict = judge(warm, reference)
        if not verdict and local.cached_tokens < warm.cached_tokens:
            verdict = f"the local hit had {local.cached_tokens} tokens only"
        expected = warm.cached_tokens // self.engine.block_size
        if not verdict and self.source in STORES and read < expected:
            verdict = f"{read:.0f} of {expected} blocks were read from {self.source}, the others were in memory"
        return Warm(warm.first_token_seconds * 1e3, local.first_token_seconds * 1e3, warm.cached_tokens, verdict)

    def _blocks_read(self) -> float:
        return float(self.engine.stats().get(f'read_blocks{{tier="{self.source}"}}', 0.0))


def judge(warm: Output, reference: Output) -> str:
    """What is wrong with an answer that should be the reference; "" if nothing is."""
    if warm.finish_reason not in ("length", "stop"):
        return f"no answer, finish_reason {warm.finish_reason!r}"
    if not warm.cached_tokens:
        return "all tokens were computed again"
    if warm.same_answer(reference):
        return ""
    if warm.tokens != reference.tokens:
        return "other tokens"
    return f"equal tokens, other log-probabilities ({warm.cached_tokens} of {reference.cached_tokens} tokens cached)"


def started(runners: Sequence[Runner], warm_up: Prompt) -> None:
    """Make all engines ready, two at a time; each computes `warm_up` and loads it again, then stands still."""
    with loading_on_all_cores(*(runner.engine for runner in runners)):
        for runner in runners:
            try:
                runner.engine.wait_ready()
            except EngineError as error:
                runner.failure = f"it did not start: {str(error).splitlines()[0][:200]}"
    for runner in runners:
        if not runner.failure:
            with runner.turn() as engine:
                for _ in range(2):
                    engine.generate([warm_up.ids], max_tokens=1)
                    settle(engine)
                    engine.reset_prefix_cache()


class RawDisk:
    """Plain reads of prompts from kvpact's disk file, past the page cache, in blocks as kvpact's, into used memory."""

    def __init__(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        """`prompts` in the order in which they were written. Raises RuntimeError if the file has fewer blocks."""
        (path,) = folder.rglob("*.slab")
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        plain = os.open(path, os.O_RDONLY)
        self._superblock = Superblock.read(plain, path)
        os.close(plain)
        ends = list(accumulate((prompt.blocks for prompt in prompts), initial=0))
        self._slots = {prompt.name: slots for prompt, slots in zip(prompts, pairwise(ends), strict=True)}
        if self._superblock.slots_in(os.fstat(self._descriptor).st_size) < ends[-1]:
            raise RuntimeError(f"{path} has fewer slots than the prompts have blocks, {ends[-1]}")
        size = self._superblock.slot_bytes
        memory = memoryview(mmap.mmap(-1, max(prompt.blocks for prompt in prompts) * size))
        memory[:] = bytes(len(memory))
        self._views = [memory[at : at + size] for at in range(0, len(memory), size)]

    def seconds(self, prompt: Prompt) -> float:
        """How long one reader takes for the prompt's blocks."""
        first, end = self._slots[prompt.name]
        views = self._views[: end - first]
        began = time.perf_counter()
        got = os.preadv(self._descriptor, views, self._superblock.file_bytes(first))
        taken = time.perf_counter() - began
        if got != sum(view.nbytes for view in views):
            raise RuntimeError(f"the disk gave {got} bytes of the prompt's {sum(view.nbytes for view in views)}")
        return taken

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class RawRedis:
    """Plain pipelined reads of prompts' values with redis-py and hiredis, from the core that computes."""

    def __init__(self, client: Any, block_bytes: int) -> None:
        self._client, self._block_bytes, self._known = client, block_bytes, set[bytes]()
        self._keys: dict[Name, list[bytes]] = {}

    def note(self, prompt: Prompt) -> None:
        """What is new on the server since the last call is this prompt's. Raises RuntimeError if blocks are missing."""
        keys = set(self._client.scan_iter(count=1000))
        self._keys[prompt.name] = sorted(keys - self._known)
        self._known = keys
        found = sum(self._client.strlen(key) for key in self._keys[prompt.name])
        if found < prompt.blocks * self._block_bytes:
            raise RuntimeError(f"Redis got {found} bytes of a prompt with {prompt.blocks * self._block_bytes}")

    def seconds(self, prompt: Prompt) -> float:
        """How long one client takes for the prompt's values."""
        with on_core(COMPUTING_CORE):
            calls = self._client.pipeline(transaction=False)
            for key in self._keys[prompt.name]:
                calls.get(key)
            self._client.ping()  # a connection, before the time runs
            began = time.perf_counter()
            values = calls.execute()
            taken = time.perf_counter() - began
        if None in values:
            raise RuntimeError("Redis has forgotten a value")
        return taken
