"""Engines restarted over their own stores: what is left of the cache, how fast, how right, and what a hang costs.

Random Llama, the same prompts for all, each engine on one core; all but one stand still. One life of each computes the
prompts ("cold", over the engine without a cache) and reads them again ("warm"). All engines and servers end in order
and start anew over the same stores, with host memory for the longest prompt. "restart" is a prompt from the store,
whose files are not in the page cache; "page cache", where they are. Both are ratios to a local prefix hit of the same
process; `over_enough` is the median over that of an engine with KV memory for all. `hits`: the share of tokens that the
first round after the restart did not compute. A store that has lost them has that round's times only.

In a third life a share of all bits in the stores' files is flipped while the engine is down; `wrong` answers have other
tokens than the engine without a cache. Then the store hangs: a server is stopped, a disk answers no read. `failed`: of
the same prompts, those with no answer after `--patience` seconds, when the engine is ended with all that waits in it.
`leases`: what is held of the cache when nothing runs, where it can be seen.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.e2e import SHORTEST, Asked, Comparison, run_of, say
from benchmarks.e2e_engines import NO_CACHE, WAYS_TO_GET, Run, Subject, engines_with_room
from benchmarks.e2e_runs import WAKE_UP, Cold, Name, Prompt, Runner, Warm
from benchmarks.needs import find_testbeds, require_known, require_vllm
from benchmarks.restart_stores import (
    BOUNDED,
    PEERS,
    STORES,
    Life,
    absent,
    answer,
    bound_bytes,
    can_hang,
    children,
    flip_bits,
    folder_of,
    hanging,
    subjects,
    wait_written,
)
from benchmarks.table import percentile, spread
from kvpact_testkit.compare.stores import disk_bytes
from kvpact_testkit.demo.engine import EngineError
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.phases import drop_page_cache, settle

find_testbeds()

FLIPPED = 1e-6
"""Share of all bits: about 34 in each block of 4 MiB, some in exponents, so that a store that serves them is seen."""
WARM_UP = Prompt(SHORTEST, -1, [*range(20, 300)])
PINNED = "vllm:kv_offload_cpu_cache_usage_perc"


@dataclass(slots=True)
class Readings:
    """All of one engine."""

    cold: Sequence[float] = ()
    beside: Sequence[float] = ()
    """Milliseconds of the same cold prompts in the engine without a cache."""
    warm: Sequence[Warm] = ()
    first: Sequence[Warm] = ()
    """The first round after the restart."""
    restart: list[Warm] = field(default_factory=list)
    cached: list[Warm] = field(default_factory=list)
    bytes_on_disk: int | None = None
    leases: float | None = None
    wrong: int | None = None
    failed: int | None = None
    notes: tuple[str, ...] = ()


class Restart:
    """All lives of all engines."""

    def __init__(self, run: Run, asked: Asked, peers: Sequence[str], patience: float) -> None:
        self._run, self._asked, self._peers, self._patience = run, asked, peers, patience
        self._answers: dict[Name, Output] = {}
        self.local_ms: list[float] = []
        """Local prefix hits of the engine without a cache in its second life."""
        self.found = {name: Readings() for name in (NO_CACHE.name, *(STORES[peer][0] for peer in peers))}

    def compute(self) -> None:
        """A first life: the prompts are computed, read again, and written."""
        with ExitStack() as stack:
            runners, lives = self._begin(stack, "first", subjects(self._peers, Life(first=True)))
            lives.ask_cold(runners, None)
            lives.ask_warm(runners, {})
            none = self._cold(lives, NO_CACHE.name)
            for runner in runners:
                found, cold = self.found[runner.name], self._cold(lives, runner.name)
                found.cold = [one.ttft_ms for one in cold.values()]
                found.beside = [none[name].ttft_ms for name in cold]
                found.warm = self._warm(lives, runner)
                store = folder_of(self._run, self._peer(runner.name))
                if runner.name != NO_CACHE.name and not runner.failure:
                    with runner.turn():
                        wait_written(runner.engine, store)
                runner.end(in_order=True)
                found.bytes_on_disk = disk_bytes(store) if store.exists() else None

    def read(self, rounds: int) -> None:
        """A second life over the same stores, in turns: half of the rounds from the disk, half from the page cache."""
        with ExitStack() as stack:
            runners, lives = self._begin(stack, "second", subjects(self._peers, Life()))
            lives.ask_cold(runners[:1], None)
            cold = [Warm(one.ttft_ms, 0.0, 0, "") for one in self._cold(lives, NO_CACHE.name).values()]
            self.found[NO_CACHE.name].first = cold[-len(self._asked.again) :]
            for number in range(rounds):
                say(f"after the restart, round {number + 1} of {rounds}")
                if not number % 2:
                    self._drop_page_cache()
                lives.warm.clear()
                lives.ask_warm(runners, {})
                for runner in runners[1:]:
                    found, warm = self.found[runner.name], self._warm(lives, runner)
                    found.first = found.first or list(warm)
                    (found.cached if number % 2 else found.restart).extend(warm)
            self.local_ms = list(lives.local[self._asked.again[0].tokens])
            for runner in runners:
                if not runner.failure:
                    with runner.turn():
                        self._look(runner)
                runner.end(in_order=True)

    def _look(self, runner: Runner) -> None:
        """What the answers should be, or what is held at rest."""
        if runner.name == NO_CACHE.name:
            self._answers = {prompt.name: runner.ask_local(prompt) for prompt in self._asked.again}
        elif self._peer(runner.name) == "kvpact":
            self.found[runner.name].leases = settle(runner.engine)["leases_held"]
        elif self._peer(runner.name) == "fs":
            pinned = [value for name, value in runner.engine.metrics().items() if name.startswith(PINNED)]
            self.found[runner.name].leases = sum(pinned) if pinned else None

    def damage(self) -> None:
        """A third life of each, alone, over flipped bits; then its store hangs."""
        for at, subject in enumerate(subjects(self._peers, Life(alone=True))[1:]):
            found, store = self.found[subject.name], folder_of(self._run, subject.peer)
            flips = flip_bits(store, FLIPPED)
            say(f"{subject.name}: {flips} flipped bits")
            folder = self._run.folder / f"third-{at}"
            folder.mkdir()
            with ExitStack() as stack:
                try:
                    self._third_life(subject, store, folder, stack, flips=flips)
                except (EngineError, RuntimeError, OSError) as error:
                    found.notes += (f"third life: {str(error).splitlines()[0][:160]}",)

    def _third_life(self, subject: Subject, store: Path, folder: Path, stack: ExitStack, *, flips: int) -> None:
        found, prompts, before = self.found[subject.name], self._asked.again, children()
        settings = subject.configure(self._run, stack, folder)
        servers = children() - before
        engine = subject.kind(self._run)(settings, folder / "log")
        stack.callback(engine.kill)
        engine.wait_ready()
        self._drop_page_cache()
        engine.generate([WAKE_UP], max_tokens=1)
        answers = [answer(engine, prompt) for prompt in prompts]
        if flips:
            right = [self._answers[prompt.name].tokens for prompt in prompts]
            found.wrong = sum(one is None or one.tokens != other for one, other in zip(answers, right, strict=True))
        settle(engine)
        wait_written(engine, store)
        engine.reset_prefix_cache()
        if not can_hang(subject.peer):
            found.notes += ("this machine cannot make a disk hang: it takes root and cgroup v1",)
            return
        self._drop_page_cache()
        answered, began = 0, time.monotonic()
        with hanging(subject.peer, store, engine, servers):
            try:
                for prompt in prompts:
                    answer(engine, prompt, self._patience)
                    answered += 1
            except EngineError as error:
                found.notes += (f"hang: {str(error).splitlines()[0].partition(';')[0][:80]}",)
        found.failed = len(prompts) - answered
        say(f"{subject.name}: {answered} of {len(prompts)} answered in {time.monotonic() - began:.1f} s of a hang")

    def _begin(self, stack: ExitStack, life: str, which: Sequence[Subject]) -> tuple[list[Runner], Comparison]:
        run = replace(self._run, folder=self._run.folder.with_name(life))
        run.folder.mkdir()
        lives = Comparison(run, self._asked, WARM_UP, 1, stack)
        runners = lives.start(which)
        for name, why in lives.failures.items():
            self.found[name].notes += (f"{life} life: {why}",)
        return runners, lives

    def _drop_page_cache(self) -> None:
        for peer in self._peers:
            if (store := folder_of(self._run, peer)).exists():
                drop_page_cache(store)

    def _cold(self, lives: Comparison, name: str) -> dict[Name, Cold]:
        return lives.cold[self._asked.again[0].tokens, name]

    def _warm(self, lives: Comparison, runner: Runner) -> list[Warm]:
        return lives.warm.get((self._asked.again[0].tokens, runner.name, runner.source), [])

    def _peer(self, name: str) -> str:
        return next((peer for peer, (other, _) in STORES.items() if other == name), "none")


def row(name: str, tokens: int, found: Readings, local_ms: Sequence[float], bound: int | None) -> dict[str, Any]:
    """What was seen of one engine; `local_ms` are prefix hits of the engine without a cache."""
    shown: dict[str, Any] = {"what": name, "tokens": tokens}
    if found.cold:
        shown["cold_ms"] = round(median(found.cold), 1)
    if name == NO_CACHE.name:
        times = [one.ttft_ms for one in found.first]
        shown |= times_of(times) | {"local_ms": round(median(local_ms), 1), "hits": 0.0}
        shown |= spread("restart_over_local", [one / median(local_ms) for one in times])
    else:
        if found.cold:
            shown |= spread("cold_over", [one / other for one, other in zip(found.cold, found.beside, strict=True)])
        if found.warm:
            shown |= spread("warm_over_local", [one.ttft_ms / one.local_ms for one in found.warm])
        hits = sum(one.cached_tokens for one in found.first) / max(1, tokens * len(found.first))
        restart = found.restart if hits else found.first
        if restart:
            shown |= times_of([one.ttft_ms for one in restart])
            shown |= {"local_ms": round(median(one.local_ms for one in restart), 1), "hits": round(min(hits, 1.0), 3)}
            shown |= spread("restart_over_local", [one.ttft_ms / one.local_ms for one in restart])
        if found.cached and hits:
            shown |= spread("page_cache_over_local", [one.ttft_ms / one.local_ms for one in found.cached])
        wrong = [one.verdict for one in (*restart, *found.cached) if one.verdict and hits]
        total = len(restart) + len(found.cached)
        shown["answers"] = f"{len(wrong)} of {total}: {wrong[0]}" if wrong else "equal"
    if "restart_p50_ms" in shown:
        shown["over_enough"] = round(shown["restart_p50_ms"] / median(local_ms), 2)
    shown |= {"wrong": found.wrong, "failed": found.failed}
    if found.bytes_on_disk is not None:
        shown |= {"disk_mib": round(found.bytes_on_disk / 2**20), "bound_mib": bound and round(bound / 2**20)}
    return shown | {"leases": found.leases, "note": "; ".join(found.notes)}


def times_of(milliseconds: Sequence[float]) -> dict[str, Any]:
    """The columns of prompts after a restart."""
    p50, p99 = round(median(milliseconds), 1), round(percentile(milliseconds, 99), 1)
    return {"readings": len(milliseconds), "restart_p50_ms": p50, "restart_p99_ms": p99}


def _run(
    folder: Path,
    tokens: int,
    prompts: int,
    rounds: int,
    peers: Sequence[str],
    python: str,
    patience: int,
    *,
    fork: bool,
) -> Iterator[dict[str, Any]]:
    asked = Asked.of((tokens,), 2 * prompts, prompts)
    run, _ = run_of(folder, (tokens,), [*asked.once, *asked.again], python, fork=fork)
    run = replace(run, folder=folder / "third")
    run.folder.mkdir()
    if (room := engines_with_room(run)) <= len(peers):
        raise SystemExit(f"memory is free for {room} engines, it takes {1 + len(peers)}: fewer --peers or --tokens")
    lives = Restart(run, asked, peers, patience)
    lives.compute()
    lives.read(rounds)
    lives.damage()
    for name, found in lives.found.items():
        bound = bound_bytes(run) if name in {STORES[peer][0] for peer in BOUNDED} else None
        yield row(name, tokens, found, lives.local_ms, bound) | {"asked": prompts}


def rows(
    tokens: int = 2048,
    prompts: int = 4,
    rounds: int = 16,
    peers: tuple[str, ...] = PEERS,
    peer_python: Path | None = None,
    patience: int = 60,
    fork: bool = False,
) -> list[dict[str, Any]]:
    """A row of each engine; what is not there has one that says how to get it.

    Twice as many prompts as `prompts` are computed, and the later half is asked again in each of `rounds` after the
    restart. `peer_python` is an interpreter that has vLLM and the packages of peers, by default this one. `patience`:
    seconds that a request may take while its store hangs. With `fork` engines start three times as fast: for tests.
    """
    require_known("--peers", peers, PEERS)
    if tokens < SHORTEST or prompts < 2 or rounds < 2:
        raise SystemExit(f"--tokens from {SHORTEST} on, --prompts and --rounds from 2 on")
    require_vllm()
    python = str(peer_python or sys.executable)
    missing = absent(peers, python)
    there = [peer for peer in PEERS if peer in peers and peer not in missing]
    found: list[dict[str, Any]] = []
    if there:
        with tempfile.TemporaryDirectory(prefix="kvpact-restart-") as folder:
            found += _run(Path(folder), tokens, prompts, rounds, there, python, patience, fork=fork)
    return [*found, *({"what": STORES[peer][0], "note": f"not there: {WAYS_TO_GET[peer]}"} for peer in missing)]
