"""Three real engines over one Redis server, whose weights are updated one after the other while they answer.

The weights of each word are told apart by the answers: what an engine is given must be what its weights say now.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from trainer import ARGUMENTS, ENVIRONMENT, Trainer

from engines import BLOCK, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings, loading_on_all_cores
from kvpact_testkit.demo.messages import Output
from servers.redis_server import RedisServer, redis_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINES = 3
BLOCKS = 3
ALL = BLOCKS * BLOCK
LONG = 24
"""Blocks of a prompt in which an engine can be killed."""

SALTS = count()
SEEDS = count(40)
"""Of prompts and of weights."""

FILES = "the files"
"""The word for the weights with which all engines start."""

WRITTEN_S, NOT_WRITTEN_S, QUIET_S = 15.0, 1.0, 0.2
"""A write of three blocks to the store takes a few milliseconds, on a busy machine more. What is not shared is not."""


class Member(Trainer):
    """One engine of the fleet."""

    def __init__(self, process: EngineProcess) -> None:
        super().__init__(process)
        self._computed: dict[int, Output] = {}
        """The answers of the weights as they are to the prompts of these seeds."""

    def begin(self, seed: int, blocks: int = BLOCKS) -> None:
        """Ask the prompt of this seed, with nothing in the engine's own prefix cache; `end` gives the answer."""
        self.process.reset_prefix_cache()
        self.process.send_prompts([prompt(seed, blocks)])

    def end(self, seed: int, blocks: int = BLOCKS) -> Output:
        """The answer that was begun, of which nothing comes from other weights."""
        (output,) = self.process.receive_outputs()
        if seed not in self._computed:
            (computed,) = self.process.generate([prompt(seed, blocks)], cache_salt=f"salt {next(SALTS)}")
            assert computed.cached_tokens == 0
            self._computed[seed] = computed
        assert output.same_answer(self._computed[seed]), "a wrong token"
        return output

    def ask(self, seed: int, blocks: int = BLOCKS) -> Output:
        self.begin(seed, blocks)
        return self.end(seed, blocks)

    def reset(self) -> None:
        """vLLM's pause with `clear_cache`, twice in a row."""
        for _ in range(2):
            self.process.reset_prefix_cache(reset_connector=True)

    def update(self, how: str, weights: int) -> None:
        """New weights, without a word; those of the files by `reload_weights`."""
        self._computed.clear()
        if how == "reload_weights":
            self.rpc("reload_weights")
        elif how == "update_weights":
            self.transfer(weights, "layerwise")
        else:
            self.overwrite(weights)

    def update_and_say(self, how: str, weights: int) -> None:
        """New weights, and a word that is theirs."""
        self.update(how, weights)
        self.say(FILES if how == "reload_weights" else f"{how} {weights}")


class Fleet:
    """The engines, each on a core where there are enough, and their store."""

    def __init__(self, settings: EngineSettings, directory: Path, server: RedisServer, left: ExitStack) -> None:
        self._settings, self._directory, self._left = settings, directory, left
        self._store = left.enter_context(server.client())
        self._logs = count()
        processes = [self._start(number) for number in range(ENGINES)]
        with loading_on_all_cores(*processes):
            self.members = [Member(process.wait_ready()) for process in processes]

    def _start(self, number: int) -> EngineProcess:
        cores = sorted(os.sched_getaffinity(0))
        binding = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])}
        settings = replace(self._settings, environment={**self._settings.environment, **binding})
        process = ForkedEngine(settings, self._directory / f"engine-{next(self._logs)}.log")
        self._left.callback(process.discard)
        return process

    def restart(self, number: int) -> None:
        """Begin to start an engine whose processes are gone; `wait_ready` of its process waits for it."""
        self.members[number] = Member(self._start(number))

    def have_weights(self) -> None:
        """All have the same new weights, under a word."""
        weights = next(SEEDS)
        for member in self.members:
            member.update_and_say("overwrite_weights", weights)

    def ask(self, seed: int) -> list[Output]:
        """Every engine, one after the other, so that what one computes the next can find."""
        return [self.ask_one(member, seed) for member in self.members]

    def ask_one(self, member: Member, seed: int) -> Output:
        """One engine. Waits until the store has what it computes."""
        keys = self._store.dbsize()
        output = member.ask(seed)
        if output.cached_tokens == 0:
            self._wait_for(keys + BLOCKS, WRITTEN_S)
        return output

    def shares(self, giver: Member, taker: Member) -> bool:
        """Whether one engine finds what the other has just stored under a prompt that neither has seen."""
        seed, keys = next(SEEDS), self._store.dbsize()
        giver.ask(seed)
        assert giver.ask(seed).cached_tokens == ALL
        self._wait_for(keys + BLOCKS, NOT_WRITTEN_S)
        return taker.ask(seed).cached_tokens == ALL

    def _wait_for(self, keys: int, seconds: float) -> None:
        """Until the store has so many keys and no more come, or for so long."""
        deadline = time.monotonic() + seconds
        while (now := self._store.dbsize()) < keys and time.monotonic() < deadline:
            time.sleep(0.02)
        before = None
        while now != before:
            time.sleep(QUIET_S)
            before, now = now, self._store.dbsize()


def found(outputs: Iterable[Output]) -> list[int]:
    return [output.cached_tokens // BLOCK for output in outputs]


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    with redis_server(directory) as server, ExitStack() as left:
        transfer = kvpact_transfer_config(
            memory="64MiB",
            tiers=[f"redis://{server.address}?timeout=20s"],
            weights_version=FILES,
            prepare_deadline="20s",
        )
        yield Fleet(EngineSettings(tiny_model, transfer, ARGUMENTS, ENVIRONMENT), directory, server, left)


@pytest.mark.parametrize(
    ("how", "clear_cache"),
    [
        pytest.param("update_weights", False, marks=pytest.mark.proof),
        pytest.param("update_weights", True, marks=pytest.mark.soak),
        pytest.param("reload_weights", False, marks=pytest.mark.soak),
        pytest.param("reload_weights", True, marks=pytest.mark.proof),
        pytest.param("overwrite_weights", False, marks=pytest.mark.proof),
        pytest.param("overwrite_weights", True, marks=pytest.mark.soak),
    ],
)
def test_p13_a_rolling_update_serves_no_wrong_token(fleet: Fleet, how: str, clear_cache: bool) -> None:
    """By vLLM's transfer, by its reload, by an extension's method. Only the first one to be updated finds nothing."""
    asked, weights = next(SEEDS), next(SEEDS)
    fleet.have_weights()
    before = fleet.ask(asked)
    assert found(before) == [0, BLOCKS, BLOCKS]
    first, _, third = fleet.members
    during = []
    for member in fleet.members:
        others = [other for other in fleet.members if other is not member]
        for other in others:
            other.begin(asked)
        if clear_cache:
            member.reset()
        member.update_and_say(how, weights)
        assert found(other.end(asked) for other in others) == [BLOCKS, BLOCKS], "nobody deletes what others have"
        during.append(fleet.ask_one(member, asked))
    assert found(during) == [0, BLOCKS, BLOCKS], "the first one's blocks of the new weights"
    for old, new in zip(before, during, strict=True):
        assert not new.same_answer(old), "the weights are the same, so this test tells nothing"
        assert new.same_answer(during[0])
    after = fleet.ask(asked)
    assert found(after) == [BLOCKS] * ENGINES
    assert fleet.shares(third, first)


@pytest.mark.proof
def test_p13_an_engine_crashes_in_a_rolling_update(fleet: Fleet) -> None:
    """In the middle of its transfer, with a request that runs. It starts again with the files' weights."""
    asked, of_files, unfinished, weights = next(SEEDS), next(SEEDS), next(SEEDS), next(SEEDS)
    for member in fleet.members:
        member.update_and_say("reload_weights", 0)
    fleet.ask(of_files)
    fleet.have_weights()
    fleet.ask(asked)
    first, second, third = fleet.members
    first.update_and_say("update_weights", weights)
    assert found(fleet.ask(asked)) == [0, BLOCKS, BLOCKS]
    second.start_transfer("in place")
    second.deliver(weights, parts=2)
    second.process.call("enqueue", [{"prompt_token_ids": prompt(unfinished, LONG)}])
    second.wait_until_computing(3 * BLOCK)
    second.process.kill()
    fleet.restart(1)
    assert found([first.ask(asked), third.ask(asked)]) == [BLOCKS, BLOCKS]
    assert third.ask(unfinished, LONG).cached_tokens == 0, "what was computed with half of the new weights"
    third.update_and_say("update_weights", weights)
    assert first.ask(unfinished, LONG).cached_tokens == 0
    assert found([first.ask(asked), third.ask(asked)]) == [BLOCKS, BLOCKS]
    _, second, _ = fleet.members
    second.process.wait_ready()
    assert found([second.ask(asked), second.ask(of_files)]) == [0, BLOCKS], "its weights are those of the first word"
    second.update_and_say("update_weights", weights)
    assert found(fleet.ask(asked)) == [BLOCKS] * ENGINES
    assert fleet.shares(second, first)
    assert fleet.shares(third, second)


@pytest.mark.proof
def test_h37_engines_whose_weights_have_no_word_share_with_nobody(fleet: Fleet) -> None:
    """Two resets in a row on one engine, then an update without a word on all."""
    fleet.have_weights()
    first, second, third = fleet.members
    first.reset()
    assert not fleet.shares(first, second)
    assert fleet.shares(second, third)
    weights = next(SEEDS)
    for member in fleet.members:
        member.reset()
        member.update("overwrite_weights", weights)
    assert not fleet.shares(second, third)
    assert not fleet.shares(third, first)
    for member in fleet.members:
        member.rpc("kvpact_weights_changed")
        member.say(f"at last {weights}")
    assert fleet.shares(first, second)
    assert fleet.shares(second, third)
    assert fleet.shares(third, first)
