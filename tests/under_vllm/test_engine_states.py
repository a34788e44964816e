"""Models whose layers keep states, without drafts, on real engines: at each boundary the answers of a local hit.

Chunks have a number of tokens that does not divide the align unit, so that a prompt's first steps end inside a unit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from model_families import nemotron_h_like, qwen3_next_like
from spread import answers_apart

from engines import IN_ONE_PROCESS, kvpact_transfer_config
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineSettings
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.model import TINY_SHAPE
from servers.redis_server import redis_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

UNITS = 4
"""Align units of the longest prompt."""
TAIL = 50
"""Tokens of each prompt behind its last boundary."""
CHUNK = 200
"""Tokens that a step computes at most; no align unit is a multiple of it."""
AT_ONCE = 4
MAX_TOKENS = 24
"""Tokens of a client's answer: those whose prompts end a few tokens before a boundary need blocks meanwhile."""
BEFORE_BOUNDARY = 7
ARGUMENTS: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": AT_ONCE, "max_model_len": 2048}
ROUNDING = 2.0**-6
"""Least spread: the distance of two neighbours in bfloat16 from 2 to 4, where the largest logits are."""
AS_RIGHT = 4.0
"""See test_pressure.py."""
FAR = 10.0
"""A wrong answer's least distance, in right ones' largest."""
WRITTEN_S = 1.5


def text(seed: int, tokens: int) -> list[int]:
    """Random tokens; different seeds differ from the first token on."""
    source = random.Random(seed)
    return [source.randrange(1, TINY_SHAPE.vocabulary) for _ in range(tokens)]


@dataclass(frozen=True)
class Family:
    """A model, with the tokens of its align unit, and how many of its groups keep states."""

    make: Callable[[Path, Path], Path]
    unit: int
    state_groups: int
    tight_blocks: int
    """Blocks of an engine that cannot hold the requests of four clients to their ends."""

    @property
    def at_boundaries(self) -> list[list[int]]:
        """One text, cut a little behind each of its boundaries; the longest first."""
        whole = text(5_200, UNITS * self.unit + TAIL)
        return [whole[: units * self.unit + TAIL] for units in range(UNITS, 0, -1)]

    @property
    def clients(self) -> list[list[int]]:
        """Prompts with two beginnings; each ends a few tokens before a boundary, and comes twice."""
        size = self.unit
        stems = [text(5_300 + stem, size) for stem in range(2)]
        tails = [text(5_400 + number, size - BEFORE_BOUNDARY) for number in range(2 * AT_ONCE)]
        return [[*stems[number % 2], *tail] for number, tail in enumerate(tails)]


@dataclass
class Lives:
    """What the engines of one family answered and counted."""

    family: Family
    at_boundaries: dict[str, list[Output]]
    """Answers to `Family.at_boundaries`, by where the prefix came from; "cold" from nowhere."""
    alone: list[Output]
    together: list[Output]
    """Two runs of an engine without kvpact that find nothing in its own cache."""
    crowds: list[list[Output]]
    """Of kvpact's engine, whose blocks are too few: at first, and after a reset of its own cache."""
    metrics: dict[str, float]
    """Of kvpact's engine before it was killed."""
    counts: dict[str, dict[str, Any]]
    """Of the engines after it."""


def lives_of(family: Family, tiny_model: Path, directory: Path) -> Lives:
    """Ask four engines: one is killed, one finds its disk, one its Redis, and one has no kvpact."""
    model = family.make(directory / "model", tiny_model)
    asked = family.at_boundaries
    clients = family.clients
    disk = f"disk://{directory}/slabs?capacity=256MiB"
    time.sleep(0.2)  # an engine that begins within a tick of the clock after its files changed cannot trust them
    with ExitStack() as ended:
        server = ended.enter_context(redis_server(directory)).address
        redis = f"redis://{server}?timeout=5s"
        counts = {}

        def engine(name: str, *tiers: str, **arguments: Any) -> ForkedEngine:
            kvpact = (
                kvpact_transfer_config(memory="64MiB", tiers=tiers, stats_file=f"{directory}/{name}.json")
                if tiers
                else None
            )
            settings = EngineSettings(model, kvpact, {**ARGUMENTS, **arguments}, IN_ONE_PROCESS)
            made = ForkedEngine(settings, directory / f"{name}.log", held=True)
            ended.callback(made.discard)
            return made

        first = engine("first", disk, redis, num_gpu_blocks_override=family.tight_blocks)
        later = {name: engine(name, tier) for name, tier in (("disk", disk), ("redis", redis))}
        plain = engine("plain")
        first.wait_ready()
        found = {name: first.generate(asked) for name in ("cold", "local")}
        first.reset_prefix_cache()
        found["memory"] = first.generate(asked)
        crowds = []
        for _ in range(2):
            first.reset_prefix_cache()
            crowds.append(first.crowd(clients, at_once=AT_ONCE, max_tokens=MAX_TOKENS))
        metrics = first.metrics()
        time.sleep(WRITTEN_S)
        first.kill()
        for name, one in later.items():
            found[name] = one.wait_ready().generate(asked)
            one.stop()
            counts[name] = one.stats()
        plain.wait_ready()
        alone = plain.generate(clients, max_tokens=MAX_TOKENS, cache_salt="alone")
        together = plain.generate(clients, max_tokens=MAX_TOKENS, cache_salt="together", together=True)
        return Lives(family, found, alone, together, crowds, metrics, counts)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Family(qwen3_next_like, 384, 3, 26), marks=pytest.mark.proof, id="delta"),
        pytest.param(Family(nemotron_h_like, 256, 2, 18), marks=pytest.mark.soak, id="spaces"),
    ],
)
def lives(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """The answers of one family's engines."""
    return lives_of(request.param, tiny_model, tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("place", ["cold", "local", "memory", "disk", "redis"])
def test_h132_at_every_boundary_the_answer_is_that_of_a_local_hit(lives: Lives, place: str) -> None:
    unit = lives.family.unit
    boundaries = [unit * units for units in range(UNITS, 0, -1)]
    found = lives.at_boundaries[place]
    local = lives.at_boundaries["local"]
    assert [output.cached_tokens for output in found] == ([0] * UNITS if place == "cold" else boundaries)
    assert all(one.same_answer(other) for one, other in zip(found, local, strict=True))
    assert len({output.logprobs for output in local}) == UNITS


@pytest.mark.parametrize("place", ["disk", "redis"])
def test_h132_a_new_process_reads_one_state_a_group_and_boundary(lives: Lives, place: str) -> None:
    """And the attention blocks of the longest prompt once: memory keeps them for the others."""
    states = lives.family.state_groups * UNITS
    (read,) = [count for name, count in lives.counts[place].items() if name.startswith("read_blocks") and count]
    assert read == UNITS + states
    assert lives.counts[place]["used_tokens"] == sum(range(1, UNITS + 1)) * lives.family.unit
    assert lives.counts[place]["leases_held"] == lives.counts[place]["hook_errors"] == 0


def test_h132_four_clients_at_once_who_are_preempted_get_what_engines_without_a_cache_say(lives: Lives) -> None:
    spread = max(ROUNDING, *map(answers_apart, lives.alone, lives.together))
    assert AS_RIGHT * FAR * spread < min(map(answers_apart, lives.alone, lives.alone[1:])), "a wrong one is far away"
    assert lives.metrics["vllm:num_preemptions"] > 0
    assert sum(output.cached_tokens for output in lives.crowds[1]) > 0, "and load"
    for crowd in lives.crowds:
        assert max(map(answers_apart, crowd, lives.alone)) <= AS_RIGHT * spread
    assert lives.metrics["vllm:kvpact_hook_errors"] == 0
