"""Real engines under `kvpact.vllm.scheduler` and pressure: every answer is that of an engine without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from engines import prompt
from scene_host import SceneHost

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

BLOCK = 32
TIE = 1e-3
"""Batches differ, and with them the last bits of a log-probability: where the two best tokens are that close, either
may be said."""

NOTHING = dict.fromkeys(("leases", "loads", "saves", "protected blocks", "blocks", "errors"), 0)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SceneHost]:
    with SceneHost(tmp_path_factory.mktemp("pressure") / "log", ("pressure_scenes",)) as host:
        yield host


def prompts(requests: int) -> list[list[int]]:
    """Prompts of three to five blocks and a bit; eight beginnings, and most prompts come more than once."""
    choose = Random(7)
    beginnings = [prompt(30_000 + number, 2, tail=0)[: 6 * BLOCK] for number in range(8)]
    kinds = [
        [
            *choose.choice(beginnings)[: choose.randrange(3, 6) * BLOCK],
            *prompt(40_000 + number, 0, choose.randrange(1, BLOCK)),
        ]
        for number in range(max(30, requests // 4))
    ]
    return [choose.choice(kinds) for _ in range(requests)]


@pytest.mark.parametrize(
    ("requests", "overlap"),
    [
        pytest.param(200, True, marks=pytest.mark.proof, id="200, asynchronous scheduling"),
        pytest.param(200, False, marks=pytest.mark.soak, id="200, one step at a time"),
        pytest.param(2000, True, marks=pytest.mark.soak, id="2000, asynchronous scheduling"),
        pytest.param(2000, False, marks=pytest.mark.soak, id="2000, one step at a time"),
    ],
)
def test_every_answer_of_a_crowd_is_that_without_a_cache(
    host: SceneHost, tiny_model: Path, requests: int, overlap: bool
) -> None:
    asked = prompts(requests)
    alone, _ = host.run("pressure_scenes:crowd", tiny_model, asked, 1, False, overlap, timeout=1500.0)
    answers, seen = host.run("pressure_scenes:crowd", tiny_model, asked, 1, True, overlap, timeout=1500.0)
    counts = {name: seen["counts"][name] for name in ("promised_tokens", "committed_tokens", "used_tokens")}
    print(f"\n{ {**seen, 'counts': counts} }")
    assert seen["scheduler"] == ("KvpactAsyncScheduler" if overlap else "KvpactScheduler")
    assert seen["held"] == NOTHING
    assert seen["preemptions"] > 0
    assert seen["counts"]["used_tokens"] > 0
    assert seen["dropped"].get("cancelled", 0) + seen["postponed"].get("no_blocks", 0) > 0
    assert "unknown" not in seen["dropped"]
    both = answers.keys() & alone.keys()
    assert len(both) > requests / 2
    ties = 0
    for number in both:
        for (token, logprob, _), (other, its, second) in zip(answers[number], alone[number], strict=True):
            if token != other:
                assert its - second < TIE, (
                    f"request {number}: {token} in place of {other}, which was {its - second} ahead"
                )
                ties += 1
                break  # what follows answers another text
            assert abs(logprob - its) < TIE
    print(f"{len(both)} answers compared token by token, {ties} parted at a tie")
    assert ties < len(both) / 20
