"""The benchmarks of shared stores on real engines, in a short form: no fault of a store's reaches an answer.

Times are the benchmarks' own business: what a busy machine measures in a few seconds says nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import shared_store
import store_faults

from object_server import CREDENTIALS

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(1800)]

WARM_WITHIN_S = 20.0
"""Twice what is promised, for a machine that does other work as well."""


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("kind", shared_store.KINDS)
def test_a_second_engine_loads_what_the_first_computed_and_both_write_without_damage(
    kind: str, tiny_model: Path, tmp_path: Path
) -> None:
    shared = shared_store.share_store(kind, tiny_model, tmp_path, prompts=12, blocks=6, seconds=15.0)
    assert shared.kept_its_promises, shared


@pytest.mark.parametrize("place", store_faults.FAULTS)
def test_h58_no_fault_of_a_store_under_load_costs_more_than_hits(place: str, tiny_model: Path, tmp_path: Path) -> None:
    places = store_faults.chosen_places(store_faults.PHASES)
    assert place in places, "a network can be cut by root only"
    for phase in store_faults.run_place(place, places[place], tiny_model, tmp_path, 5.0, print):
        assert (phase.wrong, phase.failed, phase.leases_left) == (0, 0, 0), phase
        assert phase.warm_after is not None, phase
        assert phase.warm_after < WARM_WITHIN_S, phase
        assert not phase.counts.get("hook_errors"), phase
