"""Two real engines over one Redis server, whose weights are updated one after the other.

The weights of each word are told apart by the answers: what an engine is given must be what its weights say now.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, prompt
from kvpact.demo.engine import EngineProcess, EngineSettings, Output
from servers import redis_server

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(600)]

BLOCKS = 3
ALL = BLOCKS * BLOCK
SALTS = count()
PATIENCE_S = 30.0


class Member:
    """One engine of the fleet."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process

    def ask(self, asked: list[int]) -> Output:
        """The answer, of which nothing comes from the engine's own prefix cache and nothing of other weights."""
        self.process.reset_prefix_cache()
        (output,) = self.process.generate([asked])
        (computed,) = self.process.generate([asked], cache_salt=f"salt {next(SALTS)}")
        assert computed.cached_tokens == 0
        assert output.same_answer(computed), "a wrong token"
        return output

    def ask_until_found(self, asked: list[int]) -> Output:
        """As soon as the other engine's writes have arrived. What it computes itself is given a tail of its own."""
        deadline = time.monotonic() + PATIENCE_S
        while (output := self.ask(asked)).cached_tokens < ALL and time.monotonic() < deadline:
            time.sleep(0.2)
        return output

    def update(self, weights: int, word: str | None, *, clear_cache: bool) -> None:
        """By a method of an extension that kvpact does not know; from the files with `reload_weights` for 0."""
        if clear_cache:
            self.process.reset_prefix_cache(reset_connector=True)
        if weights:
            self.rpc("overwrite_weights", weights)
        else:
            self.rpc("reload_weights")
        if word is not None:
            self.rpc("kvpact_set_weights_version", word)

    def rpc(self, method: str, *arguments: object) -> None:
        self.process.call("collective_rpc", method, None, list(arguments))


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Member, Member]]:
    directory = tmp_path_factory.mktemp("fleet")
    with redis_server(directory) as server:
        settings = EngineSettings(
            tiny_model,
            kvpact_transfer_config(
                memory="64MiB",
                tiers=[f"redis://{server.address}?timeout=20s"],
                weights_version="v1",
                prepare_deadline="20s",
            ),
            {
                **BLOCK_BY_BLOCK,
                "worker_cls": "kvpact.vllm.worker.KvpactWorker",
                "worker_extension_cls": "weights_extension.Overwrites",
            },
            {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])},
        )
        with (
            EngineProcess(settings, directory / "first.log") as first,
            EngineProcess(settings, directory / "second.log") as second,
        ):
            yield Member(first.wait_ready()), Member(second.wait_ready())
            first.kill()  # an orderly end of two engines takes half a minute, and is tested elsewhere
            second.kill()


def shares(giver: Member, taker: Member, seed: int) -> bool:
    """Whether one engine finds what the other has just stored under a prompt that neither has seen."""
    asked = prompt(seed, BLOCKS)
    giver.ask(asked)
    assert giver.ask(asked).cached_tokens == ALL
    time.sleep(1.0)  # the write to the store takes a few milliseconds
    return taker.ask(asked).cached_tokens == ALL


def test_p13_a_rolling_update_of_two_engines_serves_no_wrong_token(fleet: tuple[Member, Member]) -> None:
    """The hit rate falls for the engine that is updated first, and is back when both say the new word."""
    first, second = fleet
    asked = prompt(40, BLOCKS)
    first.ask(asked)
    of_v1 = second.ask_until_found(asked)
    assert of_v1.cached_tokens == ALL
    for weights, word, clear_cache in ((21, "v2", False), (22, "v3", True)):
        before = second.ask(asked)
        first.update(weights, word, clear_cache=clear_cache)
        assert first.ask(asked).cached_tokens == 0, "what it had is of the old weights"
        assert second.ask(asked).cached_tokens == ALL, "nobody has deleted what the other one has"
        second.update(weights, word, clear_cache=clear_cache)
        after = second.ask_until_found(asked)
        assert after.cached_tokens == ALL, "the first one's blocks of the new weights"
        assert not after.same_answer(before), "the weights are the same, so this test tells nothing"
        assert shares(first, second, 100 + weights)
    for member in fleet:  # back to the files: what both stored under the first word is right again
        member.update(0, "v1", clear_cache=False)
    assert first.ask(asked).cached_tokens == ALL
    assert second.ask(asked).same_answer(of_v1)


def test_h37_engines_whose_weights_have_no_word_share_with_nobody(fleet: tuple[Member, Member]) -> None:
    """Two resets in a row on one engine, an update without a word on both."""
    first, second = fleet
    assert shares(first, second, 50)
    for _ in range(2):
        first.process.reset_prefix_cache(reset_connector=True)
    assert not shares(first, second, 51)
    for member in fleet:
        member.update(31, None, clear_cache=True)
    assert not shares(second, first, 52)
    for member in fleet:
        member.rpc("kvpact_weights_changed")
        member.rpc("kvpact_set_weights_version", "v4")
    assert shares(first, second, 53)
    assert shares(second, first, 54)
