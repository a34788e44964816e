"""Two real vLLM engines and one store: what engine A computed engine B loads, and both write at once without damage.

Runs and judges; `benchmarks/shared_store.py` measures with it, and a test asserts it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from forked_engine import ForkedEngine
from kvpact.tiers.base import UNSEALED
from kvpact.tiers.registry import open_store
from kvpact.tiers.shared.inspection import StoreReport, verify_store
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from servers.mooncake_server import mooncake_pool
from servers.object_server import CREDENTIALS, object_server
from servers.redis_server import redis_cluster, redis_server
from tiny_engine import BLOCK, kvpact_transfer_config, prompt

ONE_AT_A_TIME: Mapping[str, Any] = {"max_num_batched_tokens": BLOCK, "max_num_seqs": 1, "dtype": "float32"}
"""Engine arguments with which each step computes one block of one request, so that answers are equal bit for bit
whatever was reused and whoever asked at the same time; loads of waiting requests still run side by side. bfloat16 is
emulated on processors without AVX-512."""

REST_SECONDS = 30.0
IDLE_SECONDS = 0.1
"""A forked engine without work polls for ten milliseconds, on the core that the other one computes on."""

TOGETHER = 8
GROUP = 4
"""Prompts that A answers before it waits for its writes: what waits to be written stays in memory, and what finds no
room there is dropped. A store's speed at writing is not what is measured."""

FRESH = 4
"""Prompts of a round of `TOGETHER` that no engine has computed yet."""


def _redis_url(directory: Path, stack: ExitStack) -> str:
    options = ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
    return f"redis://{stack.enter_context(redis_server(directory, *options)).address}?timeout=10s"


def _cluster_url(directory: Path, stack: ExitStack) -> str:
    return f"redis+cluster://{stack.enter_context(redis_cluster(directory))[0].address}?timeout=10s"


def _objects_url(directory: Path, stack: ExitStack) -> str:
    return f"s3://bucket/shared?endpoint={stack.enter_context(object_server()).server}&allow_http=true&timeout=10s"


def _directory_url(directory: Path, stack: ExitStack) -> str:
    return f"dir://{directory}?capacity=512MiB"


def _mooncake_url(directory: Path, stack: ExitStack) -> str:
    return stack.enter_context(mooncake_pool(directory, 512)).url("shared")


KINDS: Mapping[str, Callable[[Path, ExitStack], str]] = {
    "redis": _redis_url,
    "redis+cluster": _cluster_url,
    "s3": _objects_url,
    "dir": _directory_url,
    "mooncake": _mooncake_url,
}
"""Starts a store of the kind in an empty directory; its URL."""

PATIENCE = "10s"
"""The prepare deadline: a test server of S3 takes seconds for what S3 does in a tenth of one, and so does any server on
a busy machine."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What one kind of store showed. Times are medians of the time to first token, in seconds."""

    kind: str
    prompts: int
    reusable_tokens: int
    loaded_tokens: int
    not_identical: int
    """Answers of B that are not bit for bit those of A's local prefix hit."""
    cold_seconds: float
    local_hit_seconds: float
    loaded_seconds: float
    both_seconds: float
    both_requests: int
    both_wrong: int
    """Answers, while both wrote, that failed or differ between the engines or from before."""
    records: int
    damaged: int
    leases_left: float
    counts: Mapping[str, float]
    """What kvpact counted in B while it answered A's prompts."""

    @property
    def share(self) -> float:
        return self.loaded_tokens / self.reusable_tokens

    @property
    def kept_its_promises(self) -> bool:
        """At least 95 % loaded, every answer right, no damage, nothing held."""
        return self.share >= 0.95 and not (self.not_identical or self.both_wrong or self.damaged or self.leases_left)


def at_rest(engine: EngineProcess, since: float, seconds: float = REST_SECONDS) -> dict[str, float]:
    """kvpact's counts when nothing is left to write or held, written after `since` (`time.time`).

    Raises TimeoutError with what is still going on.
    """
    transfer: Any = engine.settings.kv_transfer_config
    file = Path(transfer["kv_connector_extra_config"]["stats_file"])
    until = time.monotonic() + seconds
    before: dict[str, float] = {}
    while time.monotonic() < until:
        stats = engine.stats()
        busy = any(value for name, value in stats.items() if name.startswith(("leases_held", "queued_write_bytes")))
        # An engine that is not idle leaves the file as it is.
        if stats and stats == before and not busy and file.stat().st_mtime >= since:
            return stats
        before = stats
        time.sleep(0.25)
    held = {name: value for name, value in before.items() if value and name.startswith(("leases", "queued", "open_"))}
    written = f"written {file.stat().st_mtime - since:.1f} s after the last question" if file.exists() else "missing"
    raise TimeoutError(f"not at rest after {seconds:g} s: {held}, counts {written}")


@contextmanager
def engines(
    model: Path, work: Path, *transfers: Mapping[str, Any] | None, environment: Mapping[str, str] | None = None
) -> Iterator[list[EngineProcess]]:
    """One engine for each configuration, started side by side and asked once, so that none is cold."""
    with ExitStack() as stack:
        running: list[EngineProcess] = []
        for number, transfer in enumerate(transfers):
            settings = EngineSettings(model, transfer, ONE_AT_A_TIME, {**CREDENTIALS, **(environment or {})})
            running.append(ForkedEngine(settings, work / f"engine-{number}.log"))
            stack.callback(running[-1].kill)
        for number, engine in enumerate(running):
            engine.generate([prompt(90_000 + number, 3)])
        yield running


def same(given: Sequence[Output], right: Sequence[Output]) -> int:
    """How many answers are not bit for bit the right ones, or no answers at all."""
    return sum(not output.same_answer(other) for output, other in zip(given, right, strict=True))


def first_token(outputs: Sequence[Output]) -> float:
    """Median time to first token."""
    return median(output.first_token_seconds for output in outputs)


def share_store(kind: str, model: Path, work: Path, *, prompts: int, blocks: int, seconds: float) -> Shared:
    """Both engines on a new store of this kind, under `work`, an empty directory."""
    with ExitStack() as stack:
        (work / "store").mkdir()
        url = KINDS[kind](work / "store", stack)
        transfers = [
            kvpact_transfer_config(
                memory="64MiB",
                tiers=[url],
                stats_file=str(work / f"stats-{name}.json"),
                prepare_deadline=PATIENCE,
            )
            for name in "ab"
        ]
        first, second = stack.enter_context(engines(model, work, *transfers))
        asked = [prompt(seed, blocks) for seed in range(prompts)]
        cold: list[Output] = []
        # None is stopped meanwhile: a store would take a client that stands still for a dead one.
        time.sleep(IDLE_SECONDS)
        for at in range(0, prompts, GROUP):
            since = time.time()
            cold += first.generate(asked[at : at + GROUP])
            at_rest(first, since)
        local = first.generate(asked)
        time.sleep(IDLE_SECONDS)
        since = time.time()
        loaded = second.generate(asked)
        stats = at_rest(second, since)
        reference = dict(enumerate(local))
        requests, wrong = both_at_once((first, second), blocks, reference, seconds)
        leases = 0.0
        for engine in (first, second):
            leases += at_rest(engine, since)["leases_held"]
        report = verify(url)
    return Shared(
        kind=kind,
        prompts=prompts,
        reusable_tokens=prompts * blocks * BLOCK,
        loaded_tokens=min(int(stats["loaded_tokens"]), sum(output.cached_tokens for output in loaded)),
        not_identical=same(loaded, local),
        cold_seconds=first_token(cold),
        local_hit_seconds=first_token(local),
        loaded_seconds=first_token(loaded),
        both_seconds=seconds,
        both_requests=requests,
        both_wrong=wrong,
        records=report.records,
        damaged=len(report.damaged),
        leases_left=leases,
        counts={name: count for name, count in stats.items() if count and "_seconds" not in name},
    )


def both_at_once(
    both: tuple[EngineProcess, EngineProcess], blocks: int, known: Mapping[int, Output], seconds: float
) -> tuple[int, int]:
    """Both engines answer the same new and old prompts at once, each in its own order; requests and wrong answers."""
    choose = random.Random(1)
    requests = wrong = 0
    fresh, until = 10_000, time.monotonic() + seconds
    while time.monotonic() < until:
        seeds = [*range(fresh, fresh + FRESH), *choose.sample(sorted(known), TOGETHER - FRESH)]
        fresh += FRESH
        answers: list[dict[int, Output]] = [{}, {}]
        orders = [choose.sample(seeds, len(seeds)) for _ in both]

        def ask(number: int, orders: list[list[int]] = orders, answers: list[dict[int, Output]] = answers) -> None:
            questions = [prompt(seed, blocks) for seed in orders[number]]
            outputs = both[number].generate(questions, together=True)
            answers[number] = dict(zip(orders[number], outputs, strict=True))
            both[number].reset_prefix_cache()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(both))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not all(answers):
            raise RuntimeError("an engine did not answer")
        requests += len(both) * len(seeds)
        wrong += same(list(answers[0].values()), [answers[1][seed] for seed in answers[0]])
        wrong += sum(not its[seed].same_answer(known[seed]) for its in answers for seed in its if seed in known)
    return requests, wrong


def verify(url: str) -> StoreReport:
    """Every record of the store, read as an engine would."""
    store = open_store(parse_tier_url(url))
    try:
        return verify_store(store, UNSEALED, lambda done, total: None)
    finally:
        store.close()


HEADER = (
    "store", "loaded", "answers that differ", "cold", "local hit", "loaded from the store",
    "requests while both write", "wrong", "records", "damaged", "leases held",
)  # fmt: skip


def row(it: Shared) -> tuple[str, ...]:
    """One line of the table."""
    times = (f"{value * 1e3:.0f} ms" for value in (it.cold_seconds, it.local_hit_seconds, it.loaded_seconds))
    return (
        it.kind, f"{it.share:.1%} of {it.reusable_tokens:,} tokens", str(it.not_identical), *times,
        f"{it.both_requests} in {it.both_seconds:.0f} s", str(it.both_wrong), f"{it.records:,}", str(it.damaged),
        f"{it.leases_left:.0f}",
    )  # fmt: skip


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """In Markdown."""
    for line in (header, ("---",) * len(header), *rows):
        print(f"| {' | '.join(line)} |")
