"""Engines of vLLM's that share a store: what one computed another loads, from every kind, whatever the store does.

The scheduler, the connector, its workers and the servers are real; the model is played by an oracle that answers wrong
if one byte of what it attends to is wrong.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from hook_time import (
    LONG_BLOCKS,
    MAX_RUNS,
    STEP_CPU_SECONDS,
    STEP_WAIT_SECONDS,
    HookTime,
    StepTime,
    no_collections,
)
from kvpact.cache.budget import STEP_BUDGET_SECONDS
from servers.mooncake_server import mooncake_pool
from servers.object_server import CREDENTIALS, Spoil, Spoiled, Traffic, object_server
from servers.redis_server import RedisServer, redis_cluster, redis_server
from vllm_played_engine import BLOCK, PlayedEngine, answer, flush, make_prompt

KINDS = ("dir", "redis", "redis+cluster", "s3", "mooncake")
PROMPTS = [make_prompt(seed, 6) for seed in range(4)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Starts a kind's server when it is first asked for."""
    servers: dict[str, Any] = {}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)

        def get(kind: str) -> Any:
            if kind not in servers:
                directory = tmp_path_factory.mktemp(kind.replace("+", "-"))
                start: dict[str, Callable[[], Any]] = {
                    "redis": lambda: redis_server(directory),
                    "redis+cluster": lambda: redis_cluster(directory),
                    "s3": object_server,
                    "mooncake": lambda: mooncake_pool(directory, 256),
                }
                servers[kind] = stack.enter_context(start[kind]())
            return servers[kind]

        yield get


@pytest.fixture
def store(request: pytest.FixtureRequest, running: Callable[[str], Any], tmp_path: Path) -> str:
    """The URL of an empty store of the kind that the test is for."""
    kind = request.param
    if kind == "dir":
        (tmp_path / "shared").mkdir()
        return f"dir://{tmp_path}/shared?capacity=1GiB"
    server = running(kind)
    if kind == "redis":
        with server.client() as client:
            client.flushall()
        return f"redis://{server.address}?timeout=8s"
    if kind == "redis+cluster":
        return f"redis+cluster://{server[0].address}?timeout=8s"
    if kind == "s3":
        return f"s3://bucket/{tmp_path.name}?endpoint={server.endpoint}&allow_http=true&timeout=8s"
    return str(server.url(f"shared-{tmp_path.name[:20]}", timeout="8s"))


@pytest.fixture
def start(start: Callable[..., PlayedEngine]) -> Callable[..., PlayedEngine]:
    """Starts an engine with these settings, patient ones unless said otherwise: a busy machine is no failure."""
    return partial(start, prepare_deadline="8s")


def ask_all(engine: PlayedEngine) -> int:
    """Right answers to all prompts; how many blocks were not computed."""
    reused = 0
    for prompt in PROMPTS:
        played = engine.generate(prompt)
        assert played.said == answer(prompt, 3)
        assert played.finish_reason
        reused += played.cached_tokens
        engine.forget()
    return reused // BLOCK


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_what_one_engine_computed_every_engine_loads(start: Callable[..., PlayedEngine], store: str) -> None:
    first = start(store)
    assert ask_all(first) == 0
    flush(first)
    second = start(store)
    assert ask_all(second) == 6 * len(PROMPTS)
    counts = second.counts
    assert counts["used_tokens"] == counts["loaded_tokens"] == 6 * len(PROMPTS) * BLOCK
    assert counts["hook_errors"] == 0


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_both_write_at_once_and_nothing_is_damaged(start: Callable[..., PlayedEngine], store: str) -> None:
    engines = [start(store), start(store)]
    prompts = [make_prompt(seed, 4) for seed in range(12)]
    choose = random.Random(1)
    for _ in range(6):
        for engine in engines:
            for prompt in choose.sample(prompts, 4):
                engine.add(prompt)
        for engine in engines:
            engine.run()
            engine.forget()
    for engine in engines:
        flush(engine)
        for played in engine.requests.values():
            prompt = list(played.request.prompt_token_ids or [])
            assert played.said == answer(prompt, 3)
        assert sum(value for name, value in engine.counts.items() if name.startswith("damaged_records")) == 0


@pytest.mark.parametrize("store", ["dir", "redis"], indirect=True)
@pytest.mark.parametrize("other", [{"model_id": "other weights"}, {"record_key_file": "key"}], ids=["weights", "key"])
def test_h23_engines_that_are_not_alike_hit_nothing_of_each_other(
    start: Callable[..., PlayedEngine], store: str, other: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("a secret of one of the two")
    first = start(store)
    ask_all(first)
    flush(first)
    settings = {name: str(tmp_path / value) if name == "record_key_file" else value for name, value in other.items()}
    second = start(store, **settings)
    assert ask_all(second) == 0
    flush(second)
    assert ask_all(start(store, **settings)) == 6 * len(PROMPTS)


@pytest.mark.parametrize("store", ["dir", "redis", "s3"], indirect=True)
def test_h23_engines_of_other_dtype_and_block_size_share_a_store_and_no_block(
    start: Callable[..., PlayedEngine], store: str
) -> None:
    """Blocks of two bytes an element are as long whatever the dtype; two small blocks are as long as a large one."""
    unlike: list[dict[str, Any]] = [
        {},
        {"dtype": "float16"},
        {"block_size": 32},
        {"dtype": "float16", "block_size": 32},
    ]
    for settings in unlike:
        engine = start(store, **settings)
        assert ask_all(engine) == 0
        flush(engine)
    for settings in unlike:
        engine = start(store, **settings)
        assert ask_all(engine) == len(PROMPTS) * (6 * BLOCK // engine.block_size) * engine.block_size // BLOCK
        assert sum(value for name, value in engine.counts.items() if name.startswith("damaged_records")) == 0


@pytest.mark.parametrize("store", ["redis"], indirect=True)
@pytest.mark.parametrize("memory", ["4MiB", "64KiB"], ids=["memory", "staging only"])
@pytest.mark.parametrize("below", ["", "disk", "shared", "disk+shared"])
def test_every_combination_of_tiers_answers_alike_and_counts_what_it_did(
    start: Callable[..., PlayedEngine], store: str, below: str, memory: str, tmp_path: Path
) -> None:
    tiers = [f"disk://{tmp_path}/slabs?capacity=64MiB"] if "disk" in below else []
    tiers += [store] if "shared" in below else []
    engine = start(*tiers, memory=memory)
    assert ask_all(engine) == 0
    flush(engine)
    again = ask_all(engine)
    counts = engine.counts
    room = 24 if memory == "4MiB" else 8
    if below:
        # What does not fit into memory at once is staged prompt by prompt.
        assert again == 6 * len(PROMPTS)
        assert sum(counts.get(f'written_blocks{{tier="{kind}"}}', 0) for kind in ("disk", "redis")) >= 24
        read = sum(counts.get(f'read_blocks{{tier="{kind}"}}', 0) for kind in ("disk", "redis"))
        assert (read == 0) == (room == 24)
        assert not (counts.get('read_blocks{tier="redis"}') and "disk" in below), "the first tier that has it"
    else:
        assert again == (24 if room == 24 else again)
    assert counts["used_tokens"] == again * BLOCK
    assert counts["promised_tokens"] >= counts["committed_tokens"] >= counts["loaded_tokens"] >= counts["used_tokens"]


# Faults under load


class Load:
    """Requests that keep coming, a few at a time, until it is over; every answer is verified."""

    def __init__(self, engine: PlayedEngine, seed: int) -> None:
        self.engine = engine
        self.choose = random.Random(seed)
        self.prompts = [make_prompt(seed, 5) for seed in range(100, 140)]
        self.answers = {tuple(prompt): answer(prompt, 2) for prompt in self.prompts}
        self.verified = 0

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def turn(self) -> int:
        """Eight clients ask at once; the tokens that were not computed."""
        asked = [self.engine.add(prompt, 2) for prompt in self.choose.sample(self.prompts, 8)]
        self.engine.run(seconds=20.0)
        for played in asked:
            assert played.said == self.answers[tuple(played.request.prompt_token_ids or [])]
            assert played.finish_reason not in ("error", "abort")
        self.verified += len(asked)
        self.engine.forget()
        return sum(played.cached_tokens for played in asked)


Trouble = Callable[[RedisServer, threading.Event], None]


def killed_and_restarted(server: RedisServer, over: threading.Event) -> None:
    server.kill()
    over.wait(2.0)
    server.start()


def stopped_and_continued(server: RedisServer, over: threading.Event) -> None:
    server.pause()
    over.wait(3.0)
    server.go_on()


def flushed(server: RedisServer, over: threading.Event) -> None:
    for _ in range(20):
        with server.client() as client:
            client.flushall()
        over.wait(0.1)


def full(server: RedisServer, over: threading.Event) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "1500kb")
        over.wait(2.0)
        client.config_set("maxmemory", "0")


def damaged(server: RedisServer, over: threading.Event) -> None:
    """Every tenth record gets a byte that is not its own."""
    for _ in range(10):
        with server.client() as client:
            for number, name in enumerate(client.scan_iter("kvpact:*", count=1000)):
                if number % 10 == 0 and client.strlen(name) > 8192:
                    client.setrange(name, 4000, b"damage")
        over.wait(0.2)


@pytest.mark.parametrize(
    "trouble", [killed_and_restarted, stopped_and_continued, flushed, full, damaged], ids=lambda it: it.__name__
)
def test_h58_nothing_that_a_store_does_under_load_reaches_an_answer(
    start: Callable[..., PlayedEngine], running: Callable[[str], Any], trouble: Trouble
) -> None:
    server: RedisServer = running("redis")
    with server.client() as client:
        client.flushall()
    engine = start(f"redis://{server.address}?timeout=300ms", memory="192KiB", prepare_deadline="500ms")
    load = Load(engine, seed=len(trouble.__name__))
    load.run(1.5)
    over = threading.Event()
    thread = threading.Thread(target=trouble, args=(server, over), daemon=True)
    thread.start()
    while thread.is_alive():
        load.turn()
    until, reused = time.monotonic() + 10.0, 0
    read = engine.counts['read_blocks{tier="redis"}']
    while engine.counts['read_blocks{tier="redis"}'] < read + 20:
        assert time.monotonic() < until, "10 s after the store is well, nothing is loaded from it"
        reused += load.turn()
    assert reused
    engine.run()
    flush(engine)
    engine.assert_at_rest()
    assert engine.counts["hook_errors"] == 0
    assert load.verified > 50


CONNECTOR_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
    "update_connector_output",
    "build_connector_meta",
)


@pytest.mark.parametrize("hangs", [False, True], ids=["it answers", "it hangs"])
def test_h58_no_step_of_the_scheduler_does_a_stores_work_or_waits_for_it(
    start: Callable[..., PlayedEngine], running: Callable[[str], Any], *, hangs: bool
) -> None:
    """Prompts of 2,000 tokens. Of some lives of an engine the one counts whose most expensive step cost least.

    A step here stores 125 blocks in memory as well, so it may cost twice what a lookup may; a call to the store would
    sleep for its answer.
    """
    server: RedisServer = running("redis")
    with server.client() as client:
        client.flushall()
    url, prompts = f"redis://{server.address}?timeout=300ms", [make_prompt(seed, LONG_BLOCKS, 0) for seed in range(3)]
    first = start(url)
    for prompt in prompts:
        first.generate(prompt)
    flush(first)

    def is_quick(step: StepTime) -> bool:
        return step.cpu <= 2 * STEP_CPU_SECONDS and step.slept <= STEP_WAIT_SECONDS

    def live() -> StepTime:
        engine = start(url, prepare_deadline="300ms" if hangs else "8s")
        hooks = HookTime(engine.connector, [name for name in CONNECTOR_HOOKS if hasattr(engine.connector, name)])
        if hangs:
            server.pause()
        try:
            with no_collections():
                for prompt in prompts:
                    engine.add(prompt)
                    engine.run(20.0)
        finally:
            server.go_on()
        assert (engine.counts["loaded_tokens"] > 0) == (not hangs)
        return hooks.worst

    lives: list[StepTime] = []
    while len(lives) < MAX_RUNS and not any(map(is_quick, lives)):
        lives.append(live())
    assert any(map(is_quick, lives)), lives


@pytest.mark.proof
def test_an_object_store_that_fails_and_slows_down_costs_hits_and_nothing_else(
    start: Callable[..., PlayedEngine], running: Callable[[str], Any]
) -> None:
    traffic: Traffic = running("s3")
    url = f"s3://bucket/faults?endpoint={traffic.endpoint}&allow_http=true&timeout=1s"
    engine = start(url, memory="192KiB", prepare_deadline="2s")
    load = Load(engine, seed=3)
    load.run(2.0)
    flush(engine)
    choose = random.Random(5)
    spoils = [
        Spoiled(status=500, code="InternalError"),
        Spoiled(status=503, code="SlowDown"),
        Spoiled(delay_s=5.0),
        Spoiled(part=0.5),
    ]

    def often(spoil: Spoiled) -> Spoil:
        return lambda request: spoil if choose.random() < 0.6 else None

    for spoil in spoils:
        with traffic.spoiled(often(spoil)):
            load.run(1.5)
    until, read = time.monotonic() + 15.0, engine.counts['read_blocks{tier="object"}']
    while engine.counts['read_blocks{tier="object"}'] < read + 10:
        assert time.monotonic() < until, "the store is well again, and nothing is loaded from it"
        load.turn()
    flush(engine)
    engine.assert_at_rest()
    assert engine.counts["hook_errors"] == 0


@pytest.mark.parametrize("store", ["dir"], indirect=True)
def test_p11_requests_that_come_at_once_are_prepared_over_several_steps(
    start: Callable[..., PlayedEngine], store: str
) -> None:
    """Where each step has spent its time already, one new request is prepared a step; all get their turn."""
    ask_all(first := start(store))
    flush(first)
    second = start(store)
    cache: Any = second.connector.scheduler_side.cache
    budget, prepared = second.connector.guard.budget, list[tuple[str, int]]()
    prepare = cache.prepare_external_match

    def costly(view: Any, num_computed_tokens: int) -> Any:
        prepared.append((view.request_id, cache.ledger.step))
        budget.charged += 2 * STEP_BUDGET_SECONDS
        return prepare(view, num_computed_tokens)

    cache.prepare_external_match = costly
    played = [second.add(prompt) for prompt in PROMPTS]
    second.run()
    for one, prompt in zip(played, PROMPTS, strict=True):
        assert one.said == answer(prompt, 3)
        assert one.cached_tokens == 6 * BLOCK
    first_probes: dict[str, int] = {}
    for request_id, step in prepared:
        first_probes.setdefault(request_id, step)
    assert len(set(first_probes.values())) == len(PROMPTS), f"several were prepared in one step: {first_probes}"


@pytest.mark.parametrize("store", ["dir"], indirect=True)
def test_p11_tiers_are_woken_when_a_step_is_over_and_never_in_its_middle(
    start: Callable[..., PlayedEngine], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wakes up may have the core of the scheduler's thread; the step's time is measured by then."""
    engine = start(store)
    mounted = engine.connector.scheduler_side.mounted
    assert mounted is not None
    (queue,) = mounted.queues
    told: list[str] = []
    end_step, flush_queue = engine.connector.guard.end_step, queue.flush
    build, under_way = engine.connector.build_connector_meta, []

    def flush() -> None:
        told.append("over")
        under_way.append(queue.under_way)
        flush_queue()

    def build_and_tell(output: Any) -> Any:
        built = build(output)
        told.append("ended")
        return built

    def tell_and_end() -> None:
        told.append("measured")
        end_step()

    monkeypatch.setattr(engine.connector, "build_connector_meta", build_and_tell)
    monkeypatch.setattr(engine.connector.guard, "end_step", tell_and_end)
    monkeypatch.setattr(queue, "flush", flush)
    ask_all(engine)
    assert any(under_way), "no tier had anything to do"
    follows = {"ended": "measured", "measured": "over", "over": "ended"}
    for before, what in pairwise(["ended", *told]):
        assert what == follows[before], f"{what} came after {before}"
    monkeypatch.undo()


def test_where_no_tier_is_shared_a_request_waits_for_the_next_step_at_most(start: Callable[..., PlayedEngine]) -> None:
    """A step that has cost far too much already answers the first that waits; the next one has time for the others."""
    engine = start()
    budget = engine.connector.guard.budget
    played = [engine.add(prompt) for prompt in PROMPTS]

    def begun() -> list[bool]:
        requests = (engine.scheduler.requests.get(one.request.request_id) for one in played)
        return [request is None or request.num_computed_tokens > 0 for request in requests]

    budget.charged += 1000.0
    engine.step()
    assert begun() == [True] + [False] * (len(PROMPTS) - 1)
    engine.step()
    assert all(begun())
    engine.run()
