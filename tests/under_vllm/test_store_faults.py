"""The benchmarks of shared stores on real engines, shorter and in a short form: no fault of a store reaches an answer.

Times are the benchmarks' own business: what a busy machine measures in a few seconds says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import store_failing
import store_sharing
from kvpact_testkit.demo.engine import EngineProcess
from servers.object_server import CREDENTIALS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WARM_WITHIN_S = 20.0
"""Twice what is promised, for a machine that does other work as well."""


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine without kvpact, to compare with."""
    with store_sharing.engines(tiny_model, tmp_path_factory.mktemp("plain"), None) as (engine,):
        yield engine


@pytest.mark.parametrize(
    ("kind", "prompts", "seconds"),
    [
        *(
            pytest.param(kind, 4, 3.0, marks=pytest.mark.proof if kind in ("redis", "s3") else pytest.mark.soak)
            for kind in store_sharing.KINDS
            if kind != "redis+cluster"
        ),
        *(pytest.param(kind, 12, 15.0, marks=pytest.mark.soak) for kind in store_sharing.KINDS),
    ],
)
def test_a_second_engine_loads_what_the_first_computed_and_both_write_without_damage(
    kind: str, tiny_model: Path, tmp_path: Path, prompts: int, seconds: float
) -> None:
    shared = store_sharing.share_store(kind, tiny_model, tmp_path, prompts=prompts, blocks=6, seconds=seconds)
    assert shared.kept_its_promises, str(shared)  # pytest cuts what is no text


@pytest.mark.parametrize(
    ("place", "seconds"),
    [
        pytest.param("redis", 1.5, marks=pytest.mark.proof),
        *(pytest.param(place, 5.0, marks=pytest.mark.soak) for place in store_failing.FAULTS),
    ],
)
def test_h58_no_fault_of_a_store_under_load_costs_more_than_hits(
    place: str, plain: EngineProcess, tmp_path: Path, seconds: float
) -> None:
    places = store_failing.chosen_places(store_failing.PHASES)
    if place not in places:
        pytest.skip("a network can be cut by root only")
    found = store_failing.run_place(place, places[place], plain, tmp_path, seconds, print)
    assert [phase.name for phase in found] == [f"healthy {place}", *places[place]]
    assert any(name.startswith("read_blocks") for phase in found for name in phase.counts), "the store was not used"
    for phase in found:
        assert (phase.wrong, phase.failed, phase.leases_left) == (0, 0, 0), phase
        assert phase.warm_after is not None, phase
        assert phase.warm_after < WARM_WITHIN_S, phase
        assert not phase.counts.get("hook_errors"), phase
