"""What a failing store does to a real vLLM engine under load: fault by fault, beside an engine without kvpact.

Runs and judges; `benchmarks/store_faults.py` measures with it, and a test asserts it.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import redis

from kvpact.metrics import STEP_BOUNDS, STEP_SECONDS
from kvpact_testkit.demo.engine import EngineProcess, one_core_each
from kvpact_testkit.demo.messages import Output
from servers.object_server import Spoiled, Traffic, object_server
from servers.redis_server import RedisServer, free_ports, program, redis_server
from store_sharing import IDLE_SECONDS, at_rest, engines
from tiny_engine import kvpact_transfer_config, prompt
from watched_steps import HOOKS

CLIENTS = 8
PROMPTS = 32
BLOCKS = 4
ANSWER_TOKENS = 2
"""Nearly all steps are of prompts then, which is the hardest load. Most steps of engines in life are of answers."""
MEMORY = "64MiB"
"""Of 128 MiB that the prompts have; half of it may be lent to reads, which is what eight clients ask for at once."""

DEADLINE_S = {"s3": 2.0}
"""How long a request may wait for the store; an object store's own answers take a good part of a second here."""

USUAL_DEADLINE_S = 0.5
STEP_LIMIT_S = 1e-3
STOPPED_S = 20.0
DELAY_S = 5.0
GIVE_UP_S = 30.0
"""Without warm speed for so long after the fault, it counts as never."""

FIRST_PASSWORD, NEXT_PASSWORD = "the first password", "the next password"


# What fails


class Proxy:
    """TCP on loopback in front of a server, that delays answers or cuts them in the middle of a value."""

    VALUE_BYTES = 4096
    """So much at once is part of a value, and not of a short answer."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self.cutting = False
        self.cuts = 0
        self._server = port
        self._choose = random.Random(7)
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """What is open is cut with the next byte."""
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server))
                except OSError:
                    client.close()
                    continue
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while (chunk := source.recv(1 << 18)) and not self._ended.is_set():
                if answers and self.delay_s:
                    self._ended.wait(self.delay_s)
                if answers and self.cutting and len(chunk) >= self.VALUE_BYTES and self._choose.random() < 0.3:
                    self.cuts += 1
                    sink.sendall(chunk[: len(chunk) // 2])
                    break
                sink.sendall(chunk)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class FarRedis(RedisServer):
    """A server in a network namespace of its own, so that the network between it and the engine can be cut."""

    namespace: str = ""

    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *super().command()]

    def client(self, **options: Any) -> redis.Redis:
        return super().client(**{"socket_timeout": 5.0} | options)

    def link(self, state: str) -> None:
        """Up, or down: then packets vanish, and nobody is told."""
        _ip("netns", "exec", self.namespace, "ip", "link", "set", "far", state)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def far_redis(directory: Path, password: str) -> Iterator[FarRedis]:
    """A server in a new network namespace. Needs root and `ip`."""
    program("ip", "iproute2")
    name, near, subnet = f"kvpact-{os.getpid()}", f"kvp{os.getpid() % 10**7}", f"10.213.{os.getpid() % 250}"
    _ip("netns", "add", name)
    with ExitStack() as stack:
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", "far", "netns", name)
        _ip("addr", "add", f"{subnet}.1/24", "dev", near)
        _ip("link", "set", near, "up")
        for words in (("addr", "add", f"{subnet}.2/24", "dev", "far"), ("link", "set", "far", "up")):
            _ip("netns", "exec", name, "ip", *words)
        server = FarRedis(directory, free_ports(1)[0], password=password, namespace=name, host=f"{subnet}.2")
        stack.callback(server.stop)
        yield server


@dataclass
class Store:
    """What a fault can get at."""

    server: RedisServer | None = None
    proxy: Proxy | None = None
    traffic: Traffic | None = None
    password_file: Path | None = None

    @property
    def redis(self) -> RedisServer:
        assert self.server is not None
        return self.server


Fault = Callable[[Store, float], None]
"""Does its harm for so many seconds; when it returns the store is well again."""


def healthy(store: Store, seconds: float) -> None:
    time.sleep(seconds)


def killed(store: Store, seconds: float) -> None:
    store.redis.kill()
    time.sleep(seconds)
    store.redis.start()


def stopped(store: Store, seconds: float) -> None:
    store.redis.pause()
    time.sleep(max(seconds, STOPPED_S))
    store.redis.go_on()


def flushed(store: Store, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with store.redis.client() as client:
            client.flushall()
        time.sleep(0.5)


def full(store: Store, seconds: float) -> None:
    with store.redis.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "24mb")
        time.sleep(seconds)
        client.config_set("maxmemory", "0")


def rotated(store: Store, seconds: float) -> None:
    """The server has a new password at once, and the engine's file only when the fault is over."""
    password = NEXT_PASSWORD if store.redis.password == FIRST_PASSWORD else FIRST_PASSWORD
    with store.redis.client() as client:
        client.config_set("requirepass", password)
        client.client_kill_filter(_type="normal", skipme=True)
    store.redis.password = password
    time.sleep(seconds)
    assert store.password_file is not None
    store.password_file.write_text(password)


def damaged(store: Store, seconds: float) -> None:
    """Every tenth record gets bytes that are not its own."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with store.redis.client() as client:
            large = [name for name in client.scan_iter("kvpact:*", count=1000) if client.strlen(name) > 8192]
            for name in large[::10]:
                client.setrange(name, 4000, b"damage")
        time.sleep(1.0)


def partitioned(store: Store, seconds: float) -> None:
    assert isinstance(store.server, FarRedis)
    store.server.link("down")
    time.sleep(seconds)
    store.server.link("up")


def cut(store: Store, seconds: float) -> None:
    assert store.proxy is not None
    store.proxy.cutting = True
    time.sleep(seconds)
    store.proxy.cutting = False
    if not store.proxy.cuts:
        print("cut: no value was cut; the store was not read", file=sys.stderr)


def delayed(store: Store, seconds: float) -> None:
    assert store.proxy is not None
    store.proxy.delay_s = DELAY_S
    time.sleep(seconds)
    store.proxy.delay_s = 0.0


def refused(store: Store, seconds: float, *, status: int, code: str) -> None:
    """More than half of all requests are answered so."""
    assert store.traffic is not None
    choose = random.Random(5)
    spoiled = Spoiled(status=status, code=code)
    with store.traffic.spoiled(lambda request: spoiled if choose.random() < 0.6 else None):
        time.sleep(seconds)


FAULTS: Mapping[str, Mapping[str, Fault]] = {
    "redis": {
        "killed": killed,
        "stopped": stopped,
        "flushed": flushed,
        "full": full,
        "rotated": rotated,
        "damaged": damaged,
    },
    "proxied redis": {"cut": cut, "delayed": delayed},
    "far redis": {"partitioned": partitioned},
    "s3": {
        "s3-500": partial(refused, status=500, code="InternalError"),
        "s3-503": partial(refused, status=503, code="SlowDown"),
    },
}
"""What a phase does, by the place of the store that it is done to; every place is seen in health first."""

PHASES = tuple(name for faults in FAULTS.values() for name in faults)


@contextmanager
def open_place(place: str, directory: Path) -> Iterator[tuple[str, Store]]:
    """A new, empty store in its place, and the URL for an engine."""
    with ExitStack() as stack:
        if place == "s3":
            traffic = stack.enter_context(object_server())
            url = f"s3://bucket/faults?endpoint={traffic.endpoint}&allow_http=true&timeout=1s"
            yield url, Store(traffic=traffic)
            return
        password_file = directory / "password"
        password_file.write_text(FIRST_PASSWORD)
        opening = far_redis if place == "far redis" else redis_server
        store = Store(stack.enter_context(opening(directory, password=FIRST_PASSWORD)), password_file=password_file)
        address = store.redis.address
        if place == "proxied redis":
            store.proxy = Proxy(store.redis.port)
            stack.callback(store.proxy.close)
            address = store.proxy.address
        yield f"redis://{address}?timeout=300ms&password_file={password_file}", store


# Load, and what it saw


@contextmanager
def engines_have_a_core() -> Iterator[None]:
    """All but the engines computes on other cores than their workers, where there are others, and takes none from them.

    Clients and stores are other machines in life; here they would have the scheduler's core in the middle of its steps.
    """
    worker, allowed = int(one_core_each()), os.sched_getaffinity(0)
    _bind_all_but_engines(allowed - {worker} or allowed, niceness=19, policy=os.SCHED_BATCH)
    try:
        yield
    finally:
        with suppress(PermissionError):  # taking back one's own niceness is root's
            _bind_all_but_engines(allowed, niceness=0, policy=os.SCHED_OTHER)


def _bind_all_but_engines(cores: set[int], niceness: int, policy: int) -> None:
    """To these cores. What wakes up as `SCHED_BATCH` does not take the core from who computes, however nice it is."""
    processes = [Path("/proc", str(os.getpid()))]
    for process in processes:
        with suppress(OSError):  # it has just ended
            if "EngineCore" in (process / "cmdline").read_text():
                continue
            for task in (process / "task").iterdir():
                os.sched_setaffinity(int(task.name), cores)
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, int(task.name), niceness)
                processes += [Path("/proc", child) for child in (task / "children").read_text().split()]


@dataclass(frozen=True, slots=True)
class Turn:
    """Eight requests that were asked together."""

    began: float
    outputs: tuple[Output, ...]
    wrong: int
    failed: int

    @property
    def first_token(self) -> float:
        """Median time to first token, in seconds."""
        return median(output.first_token_seconds for output in self.outputs)

    @property
    def cached_tokens(self) -> int:
        return sum(output.cached_tokens for output in self.outputs)


@dataclass
class Pair:
    """The engine without kvpact, the one with it, and the clients of both."""

    plain: EngineProcess
    cached: EngineProcess
    right: Mapping[int, Output]
    """Seed of a prompt -> its answer."""
    answer_tokens: int = ANSWER_TOKENS
    asked: Iterator[int] = field(init=False)
    last: float = 0.0
    """When the engine with kvpact was last asked, as `time.time` has it."""

    def __post_init__(self) -> None:
        self.asked = self._rounds()

    def _rounds(self) -> Iterator[int]:
        choose = random.Random(3)
        while True:
            yield from choose.sample(sorted(self.right), len(self.right))

    def without(self, turns: int) -> list[Turn]:
        """What the engine without kvpact does with the same kind of load."""
        time.sleep(IDLE_SECONDS)
        return [self._turn(self.plain) for _ in range(turns)]

    def turn(self) -> Turn:
        """The engine with kvpact, the other one standing still."""
        with self.plain.frozen():
            self.last = time.time()
            return self._turn(self.cached)

    def read_blocks(self) -> float:
        """What was read from tiers until the engine with kvpact was last idle."""
        stats: dict[str, float] = self.cached.stats()
        return sum(count for name, count in stats.items() if name.startswith("read_blocks"))

    def _turn(self, engine: EngineProcess) -> Turn:
        seeds = list(islice(self.asked, CLIENTS))
        began = time.monotonic()
        prompts = [prompt(seed, BLOCKS) for seed in seeds]
        outputs = engine.generate(prompts, max_tokens=self.answer_tokens, together=True)
        engine.reset_prefix_cache()
        failed = sum(output.finish_reason not in ("length", "stop") for output in outputs)
        wrong = sum(not output.same_answer(self.right[seed]) for seed, output in zip(seeds, outputs, strict=True))
        return Turn(began, tuple(outputs), wrong - failed, failed)


@dataclass(frozen=True, slots=True)
class Warm:
    """What a turn is like while the store is well."""

    cached_tokens: float
    first_token: float

    def again(self, turn: Turn, cold: float) -> bool:
        """Whether a turn reused nearly as much, and was nearer to this time to first token than to the `cold` one.

        Where the store makes nothing faster, as on a machine whose engine is tiny, that it is reused must do.
        """
        limit = max((self.first_token + cold) / 2, 1.25 * self.first_token)
        return turn.cached_tokens >= 0.8 * self.cached_tokens and turn.first_token <= limit


@dataclass(frozen=True, slots=True)
class Phase:
    """What one fault did. Times in seconds; "first token" is the time to it, of all requests during the fault."""

    name: str
    requests: int
    wrong: int
    failed: int
    leases_left: float | None
    """None if kvpact did not come to rest; `trouble` says why."""
    without_p50: float
    without_p99: float
    with_p50: float
    with_p99: float
    warm_after: float | None
    """Seconds from the end of the fault to the start of the first turn that was as in health. A store that lost all its
    blocks has to be filled again before."""
    loading_after: float | None
    """Seconds from the end of the fault to the end of the first turn in which the store was read."""
    reused: float
    """Share of the prompt tokens that were not computed during the fault."""
    steps: int
    slow_steps: int
    """Above `STEP_LIMIT_S` in kvpact, by the histogram in its metrics."""
    slow_alone: int
    """Those that computed or waited for so long themselves: in the others somebody else had the core meanwhile."""
    slow_controls: int
    """So often the control was slow, which ran as often as there were steps; see `watched_steps`."""
    counts: Mapping[str, float]
    deadline: float
    trouble: str = ""

    @property
    def bound(self) -> float:
        """What the 99th percentile may be."""
        return 1.25 * self.without_p99 + self.deadline

    @property
    def broken(self) -> list[str]:
        """The promises that it broke, in words."""
        checks = {
            "wrong answers": self.wrong > 0,
            "failed requests": self.failed > 0,
            "not at rest": self.leases_left != 0,
            "first token too late": self.with_p99 > self.bound,
            "warm too late": self.warm_after is None or self.warm_after > 10.0,
            "errors in hooks": self.counts.get("hook_errors", 0) > 0,
        }
        return [promise for promise, it_is in checks.items() if it_is]


def percentile(seconds: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    return sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]


def first_tokens(turns: Sequence[Turn]) -> list[float]:
    return [output.first_token_seconds for turn in turns for output in turn.outputs]


COUNTED = ("read_blocks", "written_blocks", "damaged_records", "tier_failures", "skipped_lookups", "dropped_writes",
           "dropped_blocks", "hook_errors", "failed_tokens", "declined_blocks", "misses")  # fmt: skip


def steps_within(bound: float, counts: Mapping[str, float]) -> int:
    """How many steps spent at most `bound` seconds in kvpact, one of `STEP_BOUNDS`, by the histogram in `counts`."""
    return int(counts.get(f'{STEP_SECONDS}_bucket{{le="{bound}"}}', 0))


def observe(
    pair: Pair, name: str, store: Store, fault: Fault, seconds: float, warm: Warm | None, deadline: float, slow: Path
) -> Phase:
    """One phase: the fault under load, then load until it is warm again, then rest. `slow` gets slow steps."""
    trouble = []
    known, known_controls = len(slow_steps_in(slow)), len(slow_steps_in(slow, "control"))
    before, _ = _rest(pair)
    without = pair.without(2)
    thread = threading.Thread(target=fault, args=(store, seconds), name=name)
    thread.start()
    turns: list[Turn] = []
    while thread.is_alive() or not turns:
        turns.append(pair.turn())
        if len(turns) % 4 == 0:
            without += pair.without(1)
    over = time.monotonic()
    after: list[Turn] = []
    cold = median(turn.first_token for turn in without)
    warm_after = loading_after = None if warm else 0.0
    read = pair.read_blocks()
    while warm and warm_after is None and time.monotonic() < over + GIVE_UP_S:
        after.append(pair.turn())
        if loading_after is None and pair.read_blocks() > read:
            loading_after = time.monotonic() - over
        if warm.again(after[-1], cold):
            warm_after = after[-1].began - over
    if warm and warm_after is None:
        trouble.append(
            f"after {GIVE_UP_S:g} s {after[-1].cached_tokens} tokens reused, {after[-1].first_token * 1e3:.0f} ms; in"
            f" health {warm.cached_tokens:.0f}, {warm.first_token * 1e3:.0f} ms; cold {cold * 1e3:.0f} ms"
        )
    counts, unrest = _rest(pair)
    trouble += [unrest] if unrest else []
    delta = {key: value - before.get(key, 0) for key, value in counts.items()}
    steps = int(delta.get(f"{STEP_SECONDS}_count", 0))
    seen = [*turns, *after, *without]
    asked = sum(len(turn.outputs) for turn in turns) * BLOCKS * 128
    return Phase(
        name=name,
        requests=sum(len(turn.outputs) for turn in seen),
        wrong=sum(turn.wrong for turn in seen),
        failed=sum(turn.failed for turn in seen),
        leases_left=None if unrest else counts["leases_held"],
        without_p50=percentile(first_tokens(without), 0.5),
        without_p99=percentile(first_tokens(without), 0.99),
        with_p50=percentile(first_tokens(turns), 0.5),
        with_p99=percentile(first_tokens(turns), 0.99),
        warm_after=warm_after,
        loading_after=loading_after,
        reused=sum(turn.cached_tokens for turn in turns) / asked,
        steps=steps,
        slow_steps=steps - steps_within(STEP_LIMIT_S, delta),
        slow_alone=sum(slow_alone(step) for step in slow_steps_in(slow)[known:]),
        slow_controls=len(slow_steps_in(slow, "control")) - known_controls,
        counts={key: value for key, value in delta.items() if value and key.startswith(COUNTED)}
        | {key: value for key, value in delta.items() if value and key.startswith(STEP_SECONDS)},
        deadline=deadline,
        trouble="; ".join(trouble),
    )


def _rest(pair: Pair) -> tuple[dict[str, float], str]:
    """The counts at rest; where it does not come to rest, those of the moment and why."""
    try:
        return at_rest(pair.cached, pair.last), ""
    except TimeoutError as error:
        return dict(pair.cached.stats()), str(error)


def run_place(
    place: str,
    phases: Sequence[str],
    plain: EngineProcess,
    work: Path,
    seconds: float,
    say: Callable[[str], object],
    slow_steps: Path | None = None,
    answer_tokens: int = ANSWER_TOKENS,
) -> list[Phase]:
    """The store in its place and an engine with it, in health and in all chosen phases; slow steps are kept in a file.

    `plain` is the engine without kvpact, one of `store_sharing.engines`, for all places.
    """
    with ExitStack() as stack:
        url, store = stack.enter_context(open_place(place, work))
        deadline = DEADLINE_S.get(place, USUAL_DEADLINE_S)
        transfer = kvpact_transfer_config(
            memory=MEMORY, tiers=[url], prepare_deadline=deadline, stats_file=str(work / "stats.json")
        )
        transfer |= {"kv_connector": "WatchedPactConnector", "kv_connector_module_path": "watched_steps"}
        slow = slow_steps or work / "slow-steps.jsonl"
        of_others = len(slow_steps_in(slow))
        watching = {"PYTHONPATH": str(Path(__file__).parent), "KVPACT_SLOW_STEPS": str(slow)}
        model = plain.settings.model
        (cached,) = stack.enter_context(engines(model, work, transfer, environment=watching))
        stack.enter_context(engines_have_a_core())
        with cached.frozen():
            answers = plain.generate([prompt(seed, BLOCKS) for seed in range(PROMPTS)], max_tokens=answer_tokens)
        pair = Pair(plain, cached, dict(enumerate(answers)), answer_tokens)
        for _ in range(2 * PROMPTS // CLIENTS):
            pair.turn()
        found = [observe(pair, f"healthy {place}", store, healthy, seconds, None, deadline, slow)]
        say(" | ".join(row(found[-1])))
        warm_turns = [pair.turn() for _ in range(4)]
        warm = Warm(median(turn.cached_tokens for turn in warm_turns), median(turn.first_token for turn in warm_turns))
        for name in phases:
            found.append(observe(pair, name, store, FAULTS[place][name], seconds, warm, deadline, slow))
            say(" | ".join(row(found[-1])))
        say(explain_slow_steps(place, slow_steps_in(slow)[of_others:]))
        return found


def slow_steps_in(file: Path, what: str = "step") -> list[dict[str, Any]]:
    """What `watched_steps` has written of slow steps, or of slow runs of its control, so far."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["what"] == what]


def slow_alone(step: Mapping[str, float]) -> bool:
    """Whether a slow step computed for so long itself, or waited by itself and was slow without what others took."""
    return max(step["cpu_ms"], (step["ms"] - step["delay_ms"]) * bool(step["waits"])) > STEP_LIMIT_S * 1e3


def explain_slow_steps(place: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """Why steps took more than 1 ms in kvpact, as the kernel saw the scheduler's thread."""
    alone = [step for step in steps if slow_alone(step)]
    others = [step for step in steps if not slow_alone(step)]
    given = sum(step["delay_ms"] > (step["ms"] - step["cpu_ms"]) / 2 for step in others)
    hooks = sorted(((sum(step["hooks_ms"].get(hook, 0) for step in alone), hook) for hook in HOOKS), reverse=True)
    most = ", ".join(f"{hook} {ms:.0f} ms" for ms, hook in hooks[:3] if ms)
    return (
        f"{place}: {len(steps)} steps above 1 ms since the start: {len(alone)} computed or waited for so long"
        f" ({most or '-'}); of {given} the kernel gave the core to another thread, of {len(others) - given} the host"
    )


def explain_steps(phases: Sequence[Phase]) -> tuple[str, bool]:
    """How many scheduler steps spent more than 1 ms in kvpact over all phases, and how many runs of the control did.

    Whether the 99.9th percentile is at most 1 ms, by the histogram alone: what explains a slow step excuses nothing.
    """
    steps = max(1, sum(phase.steps for phase in phases))
    slow, alone = sum(phase.slow_steps for phase in phases), sum(phase.slow_alone for phase in phases)
    controls = sum(phase.slow_controls for phase in phases)
    within = {bound: sum(steps_within(bound, phase.counts) for phase in phases) for bound in STEP_BOUNDS}
    p999 = next((bound for bound in STEP_BOUNDS if within[bound] >= 0.999 * steps), math.inf)
    text = (
        f"all phases: of {steps:,} scheduler steps {slow} ({slow / steps:.3%}) took more than 1 ms in kvpact by the"
        f" clock, the 99.9th percentile is at most {p999 * 1e3:g} ms; {alone} ({alone / steps:.3%}) computed or waited"
        f" for so long, while in the others somebody else had the core; useless work as long as a median step, behind"
        f" each of them in the same thread, took more than 1 ms {controls} times ({controls / steps:.3%})"
    )
    return text, p999 <= STEP_LIMIT_S


HEADER = (
    "fault", "requests", "wrong", "failed", "leases held", "first token without kvpact p50 / p99",
    "with kvpact p50 / p99", "allowed p99", "reused", "loading, warm again after",
    "steps above 1 ms, of kvpact's own, of the control's", "broken",
)  # fmt: skip


def row(it: Phase) -> tuple[str, ...]:
    """One line of the table."""

    def shown(*seconds: float) -> str:
        return " / ".join(f"{value * 1e3:.0f}" for value in seconds) + " ms"

    def after(seconds: float | None) -> str:
        return "never" if seconds is None else f"{seconds:.1f} s"

    return (
        it.name, str(it.requests), str(it.wrong), str(it.failed),
        "not at rest" if it.leases_left is None else f"{it.leases_left:.0f}",
        shown(it.without_p50, it.without_p99), shown(it.with_p50, it.with_p99), shown(it.bound), f"{it.reused:.0%}",
        f"{after(it.loading_after)}, {after(it.warm_after)}",
        f"{it.slow_steps} of {it.steps:,}, {it.slow_alone}, {it.slow_controls}",
        ", ".join(it.broken) or "-",
    )  # fmt: skip


def chosen_places(phases: Sequence[str]) -> dict[str, list[str]]:
    """The phases by their place. Without root there is no network to cut, which is said."""
    if "partitioned" in phases and os.geteuid():
        print("partitioned: not run, it needs root for `ip netns`", file=sys.stderr)
        phases = [name for name in phases if name != "partitioned"]
    places = {place: [name for name in phases if name in faults] for place, faults in FAULTS.items()}
    return {place: names for place, names in places.items() if names}
