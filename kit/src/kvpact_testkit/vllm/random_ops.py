"""Random walks through all events of an engine; hypothesis shrinks a broken one to a short script."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from itertools import product

from hypothesis import find, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, Harness, ScenarioOver, prompt
from kvpact_testkit.vllm.scenarios import Scenarios

scenario = WALKS = Scenarios()

ACTIONS = 120
"""Actions of one walk."""
EXAMPLES = 4
"""Walks of each kind of engine; hypothesis begins with the empty one."""
SHRINK_SECONDS = 15.0
"""Seconds spent on shrinking a broken walk."""
SEEDS = st.integers(0, 2**32)
"""Each seed is an action that is valid without those before it; 0 ends the walk."""


@st.composite
def walks(draw: st.DrawFn) -> list[int]:
    """The seeds of a walk's actions."""
    seeds: list[int] = []
    while len(seeds) < ACTIONS and (seed := draw(SEEDS)):
        seeds.append(seed)
    return seeds


def act(engine: VllmEngine, seed: int) -> None:
    """Do one action: a request that shares a prefix with others, a cancellation, reset, pause, delay or step."""
    dice = random.Random(seed)
    choice = dice.random()
    if choice < 0.4:
        special = {"salt": dice.random() < 0.2 and "tenant", "prompt_logprobs": dice.random() < 0.05}
        tokens = prompt(dice.randrange(1, 5), dice.randrange(1, 10), tail=0) + prompt(seed, 0, dice.randrange(1, 40))
        wanted = {name: value for name, value in special.items() if value}
        engine.add(f"r{len(engine.requests)}", tokens, max_tokens=dice.randrange(1, 25), **wanted)
    elif choice < 0.47:
        if alive := [name for name in engine.requests if not engine.ended(name)]:
            engine.abort(dice.choice(alive), during_step=dice.random() < 0.5)
    elif choice < 0.5:
        everything = dice.random() < 0.3
        engine.reset(running=everything, connector=everything)
    elif choice < 0.52:
        engine.pause(dice.random() < 0.5)
    elif choice < 0.54:
        engine.report_delay = [dice.randrange(4) for _ in engine.ranks]
    else:
        engine.journal("step")
        engine.step()


@scenario("P1", "P2", "P8", "P9", "P11")
def everything_at_once(harness: Harness) -> None:
    """Arrivals, cancellations, resets, pauses, delays at random, on one and two ranks, with and without overlap."""
    for number, (overlap, ranks) in enumerate(product((False, True), (1, 2))):
        found = _broken_walk(harness, ranks, overlap, random.Random(number))
        if found is not None:
            harness.journal = found.journal
            harness.violations += found.violations
            raise ScenarioOver


def _broken_walk(harness: Harness, ranks: int, overlap: bool, dice: random.Random) -> Harness | None:
    """The shortest broken walk, or None."""
    found: list[Harness] = []
    end = float("inf")

    def breaks(seeds: list[int]) -> bool:
        nonlocal end
        if time.monotonic() > end:
            return False
        walked = Harness(harness.subject)
        walked.judge(lambda harness: _walk(harness, ranks, overlap, seeds))
        if walked.violations:
            end = min(end, time.monotonic() + SHRINK_SECONDS)
            found.append(walked)
        return bool(walked.violations)

    with suppress(HypothesisException):  # no walk is broken, or the shortest one is not broken again, or not in time
        find(walks(), breaks, settings=settings(max_examples=EXAMPLES, database=None, deadline=None), random=dice)
    return found[-1] if found else None


def _walk(harness: Harness, ranks: int, overlap: bool, seeds: list[int]) -> None:
    with harness.engine(ranks=ranks, overlap=overlap, num_blocks=41, chunk=5 * BLOCK, max_num_seqs=4) as engine:
        for seed in seeds:
            act(engine, seed)
        engine.pause(False)
        harness.finish(engine)
