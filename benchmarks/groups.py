"""What a request costs the cache's own calls, of CPU time, for a model of one KV cache group and for one of two.

The caller is the scheduler: it hands the cache its block tables and reports every copy as made. "cold" is a new prompt
that is saved, "hit" the same prompt from a new request. `cpu_us` is that of all calls, from arrival to the last
report. The second group is a sliding window of `--window` tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import thread_time

from benchmarks.needs import find_testbeds
from benchmarks.table import spread
from kvpact import (
    EngineKV,
    JobOutcome,
    LoadJob,
    Namespace,
    PactCache,
    RangeSet,
    RequestIdentity,
    SaveJob,
    StepWork,
    WorkerReport,
    load_config,
)
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.memory.arena import Arena, ArenaSegment

find_testbeds()

SLOT_BYTES = 4096


@dataclass
class Request:
    """A request as the cache sees it."""

    request_id: str
    token_ids: list[int]
    identity: RequestIdentity = field(default_factory=RequestIdentity)
    may_load: bool = True


def obey(work: StepWork) -> WorkerReport:
    """The report of a rank that has made every copy."""
    jobs: list[LoadJob | SaveJob] = [*work.loads, *work.saves]
    return WorkerReport({0: {job.job_id: JobOutcome(RangeSet.of(job.blocks)) for job in jobs}})


class Scene:
    """One cache and the calls that an engine makes for a request."""

    def __init__(self, groups: GroupSet, block_size: int, slots: int) -> None:
        from inert_blocks import InertBlocks

        self.groups = groups
        self.block_size = block_size
        self.blocks = InertBlocks()
        self.segment = ArenaSegment.create(slots, SLOT_BYTES)
        self.cache = PactCache(
            load_config({"weights_version": "1"}, {}),
            EngineKV(Namespace({"model": "benchmark"}).digest, groups),
            arena=Arena([self.segment]),
            clock=time.monotonic,
        )
        self.cache.bind_scheduler_context(self.blocks)

    def serve(self, name: str, tokens: list[int]) -> float:
        """Serve one request; returns the CPU seconds of the cache's calls."""
        request, cache, size = Request(name, tokens), self.cache, self.block_size
        count = -(-len(tokens) // size)
        tables = [tuple(range(1 + at * count, 1 + (at + 1) * count)) for at, _ in enumerate(self.groups.groups)]
        self.blocks.tables[name] = tables
        began = thread_time()
        cache.on_new_request(request)
        match = cache.prepare_external_match(request, 0)
        found = match.num_tokens if match is not None else 0
        if match is not None and found:
            cache.commit_external_match(request, match, found, tables[0])
            report = obey(cache.end_step())
            cache.apply_report(report)
        cache.note_computed(request, len(tokens), lambda: tables[0])
        while cache.under_way["saves"] or found >= 0:
            found = -1
            cache.apply_report(obey(cache.end_step()))
        cache.request_finished(name)
        spent = thread_time() - began
        del self.blocks.tables[name]
        return spent

    def close(self) -> None:
        self.cache.shutdown()


def rows(
    tokens: Sequence[int] = (1024, 32768), block_size: int = 16, rounds: int = 20, window: int = 1024
) -> Iterator[dict[str, object]]:
    """One row for each number of groups, length and state."""
    chance = random.Random(1)
    full, other = KVCacheGroup(GroupKind.FULL, block_size), KVCacheGroup(GroupKind.WINDOW, block_size, window)
    for groups in ((full,), (full, other)):
        for length in tokens:
            slots = (rounds + 3) * 2 * -(-length // block_size)
            scene, spent = Scene(GroupSet(groups), block_size, slots), {"cold": list[float](), "hit": list[float]()}
            for number in range(rounds + 1):
                prompt = [chance.randrange(100_000) for _ in range(length + 1)]
                for state in spent:
                    spent[state].append(scene.serve(f"{number} {state}", prompt))
            scene.close()
            for state, seconds in spent.items():
                times = [each * 1e6 for each in seconds[1:]]
                yield {"groups": len(groups), "tokens": length, "state": state, **spread("cpu_us", times)}
