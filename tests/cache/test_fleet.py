"""A fleet gets new weights under traffic, engine by engine: no wrong token, whatever happens to it meanwhile.

Three embedded engines in three processes over one Redis server. The oracle tells weights apart: what came from the
cache must be of the weights that serve now.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from servers.redis_server import RedisServer, redis_server

CHILD = Path(__file__).with_name("fleet_child.py")
ENGINES = 3
ANSWER_S = 60.0


@dataclass
class Figures:
    """What a fleet, or one engine of it, did in a phase."""

    asked: int = 0
    hits: int = 0
    wrong: int = 0
    what: str = ""

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.asked + other.asked, self.hits + other.hits, self.wrong + other.wrong, self.what or other.what
        )

    @property
    def rate(self) -> float:
        return self.hits / max(1, self.asked)


class Engine:
    """One process."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), self.url, str(self.seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the engine ended with {self.process.poll()}"
        return line

    def tell(self, order: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        return self._line()

    def obey(self, order: str) -> None:
        assert self.tell(order) == "done", order

    def phase(self) -> Figures:
        return self._figures(self.tell("phase"))

    def end(self) -> Figures:
        figures = self._figures(self.tell("end"))
        assert self.process.wait(ANSWER_S) == 0
        return figures

    def _figures(self, line: str) -> Figures:
        told = json.loads(line)
        return Figures(told["asked"], told["hits"], told["wrong"], next(iter(told["what"]), ""))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def refusing(server: RedisServer, seconds: float) -> Iterator[None]:
    """The server refuses everything, for at least so long."""
    until = time.monotonic() + seconds
    with server.client() as administrator:
        administrator.execute_command("ACL", "SETUSER", "default", "-@all", "+acl")
        yield
        time.sleep(max(0.0, until - time.monotonic()))
        administrator.execute_command("ACL", "SETUSER", "default", "+@all")


def fleet_phase(name: str, engines: Sequence[Engine], seconds: float) -> Figures:
    """Traffic for so long; what the whole fleet did since the last phase."""
    time.sleep(seconds)
    figures = sum((engine.phase() for engine in engines), Figures())
    print(f"{name}: {figures.asked:,} prompt tokens, {figures.rate:.0%} of them from the cache, {figures.wrong} wrong")
    assert figures.wrong == 0, f"{name}: {figures.what}"
    return figures


def update(engine: Engine, weights: int, clear: int) -> None:
    """Two resets in a row, the new weights with the second, and the word for them; the old word is refused."""
    engine.obey(f"reset {clear}")
    engine.obey(f"update {weights} {clear}")
    if weights > 1:
        assert engine.tell(f"word v{weights - 1}").startswith("refused")
    engine.obey(f"word v{weights}")


def rolling_updates(directory: Path, *, seconds: float, refused_seconds: float, rounds: int) -> list[Figures]:
    """Updates of the fleet with and without cleared caches; the hit rate before, and after each of them."""
    with redis_server(directory) as server, ExitStack() as running:
        engines = [Engine(f"redis://{server.address}?timeout=500ms", seed) for seed in range(ENGINES)]
        for engine in engines:
            running.callback(engine.kill)
        fleet_phase("cold", engines, seconds)
        settled = [fleet_phase("before", engines, seconds)]
        for weights in range(1, rounds + 1):
            clear = weights % 2
            name = f"update to {weights}, clear_cache {'true' if clear else 'false'}"
            update(engines[0], weights, clear)
            fleet_phase(f"{name}: one engine has it", engines, seconds / 2)
            with refusing(server, refused_seconds):
                update(engines[1], weights, clear)
                fleet_phase(f"{name}: two have it, the store refuses everything", engines, seconds / 2)
            fleet_phase(f"{name}: the store is back", engines, seconds / 2)
            engines[1].kill()
            engines[1].start()
            fleet_phase(f"{name}: the second was killed and is back with its files", engines, seconds / 2)
            catch_up(engines[1], weights, clear)
            update(engines[2], weights, clear)
            fleet_phase(f"{name}: all have it", engines, seconds)
            settled.append(fleet_phase(f"{name}: after", engines, seconds))
        for engine in engines:
            assert not engine.end().wrong
    return settled


def catch_up(engine: Engine, weights: int, clear: int) -> None:
    """An engine that was started again gets the fleet's weights."""
    engine.obey(f"update {weights} {clear}")
    engine.obey(f"word v{weights}")


def require_hits(settled: Sequence[Figures]) -> None:
    """After each update the fleet shares as it did before."""
    before, *after = settled
    assert before.rate > 0.3
    for figures in after:
        assert figures.rate > 0.7 * before.rate


@pytest.mark.proof
def test_p13_a_rolling_update_under_traffic_serves_no_wrong_token(tmp_path: Path) -> None:
    require_hits(rolling_updates(tmp_path, seconds=1.5, refused_seconds=2.0, rounds=2))


@pytest.mark.soak
def test_p13_rolling_updates_go_on_and_the_store_refuses_everything_for_ten_seconds(tmp_path: Path) -> None:
    require_hits(rolling_updates(tmp_path, seconds=10.0, refused_seconds=10.0, rounds=4))
