"""Connectors that break every rule cost themselves their hits: no engine dies, nothing stays open, nothing ends twice.

vLLM's schedulers are real, under `kvpact.vllm.scheduler`; the workers are played (docs/internals/vllm-driver.md).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release, releases_folder
from unruly_on_vllm import FORMS, play

TESTBEDS = Path(__file__).parents[2] / "testbeds"
OTHERS = [release for release in RELEASES if release != installed_release()]
IN_PROOFS = OTHERS[-1]
"""The newest of the others; those before are run in the soak."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of tracebacks, which are what the plays are for."""
    log = logging.getLogger("kvpact.matches.tracker")
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(logging.NOTSET)


@pytest.mark.parametrize("form", range(len(FORMS)), ids=FORMS)
def test_h114_no_rule_that_a_connector_breaks_is_paid_by_others(form: int) -> None:
    leases = 0
    for seed in range(form, 24 * len(FORMS), len(FORMS)):
        done = play(seed)
        assert done.is_sound, (seed, done)
        leases += done.leases
    assert leases > 20


def test_h114_also_with_drafts_and_two_stages() -> None:
    for seed in range(12):
        assert play(seed, {"draft_tokens": 2}).is_sound
        assert play(seed, {"stages": 2}).is_sound


def run(first: int, plays: int, *path: str) -> dict[str, int]:
    """Plays in a process of their own."""
    places = [*path, str(TESTBEDS), *(entry for entry in sys.path if entry)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "VLLM_LOGGING_LEVEL": "CRITICAL"}
    command = [sys.executable, "-m", "unruly_on_vllm", str(first), str(plays)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "release",
    [pytest.param(each, marks=pytest.mark.proof if each == IN_PROOFS else pytest.mark.soak) for each in OTHERS],
)
def test_ten_seeds_on_another_release(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(releases_folder() / f"{release}-cache"))
    assert run(100, 10, str(fetch_release(release)))["leases"] > 20


@pytest.mark.soak
def test_twenty_thousand_plays() -> None:
    print(run(1000, 20_000))
