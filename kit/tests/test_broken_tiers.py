"""The suite for tiers finds what it is there to find: each broken tier is caught, under the name of what it breaks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import broken_tiers
from dictionary_suite import DictionarySuite, suite_for
from dictionary_tier import DictionaryTier
from kvpact.tiers.base import Tier
from kvpact_testkit.catalogue import TITLES
from kvpact_testkit.results import Check, ConformanceReport, Verdict, as_text, verdicts
from kvpact_testkit.suite import checks_of, protects, run_suite
from kvpact_testkit.tier.conformance import StoreContext, TierConformance, TierHarness

BROKEN = [
    (broken_tiers.CountsHits, "H20", "leading, with blocks 2 and 3 missing: 6, not 2"),
    (broken_tiers.StopsAtTheHole, "T2", "1, 3 and 5 are held: none, not 3, 5"),
    (broken_tiers.StoresOrphans, "T12", "put behind nothing stores: 4 to 7, not none"),
    (broken_tiers.StoresOrphansUnseen, "T12", "blocks held, once those before are stored: 0 to 7, not 0 to 3"),
    (broken_tiers.ServesDamage, "H22", "block 4 of document was served and is not what was stored: byte 100 of"),
    (broken_tiers.ServesDamageOnce, "H22", "lookup says that blocks 0 to 4 of document are held, get serves 0 to 3"),
    (broken_tiers.ReadsLate, "H21", "was written to after get had returned"),
    (broken_tiers.ReadsAhead, "H21", "was written to after get had returned"),
    (broken_tiers.VisibleTooSoon, "H26", "lookup names block 2 before put has touched its buffer"),
    (broken_tiers.KeepsFailedWrites, "H26", "block 2 of document was served and is not what was stored"),
    (broken_tiers.HasNoBound, "H50", "blocks are held, in a tier with room for 12"),
    (broken_tiers.EvictsHeads, "H54", "of 12 blocks no head is left|which need those before them"),
    (broken_tiers.DropsWrites, "T1", "blocks held: 0 to 3, not 0 to 4"),
    (broken_tiers.DropsWrites, "H31", "blocks held: 0 to 3, not 0 to 4"),
    (broken_tiers.MixesNamespaces, "H23", "blocks that another namespace sees: 0 to 7, not none"),
    (broken_tiers.ClearsTheNeighbours, "H23", "after the other namespace was cleared: none"),
    (broken_tiers.WritesAgain, "T3", "block 2 of document was served and is not what was stored"),
    (broken_tiers.DeletesOneBlock, "T4", "deleted with block 5 of the document: 1, not 3"),
    (broken_tiers.ClearsForNow, "T4", "blocks held after clear and a restart: 17, not 0"),
    (broken_tiers.KeepsWhatIsWrong, "T11", "blocks that the next engine is given: 0 to 7, not none"),
    (broken_tiers.ForgetsOnRestart, "H59", "blocks of document held after a restart: none, not 0 to 7"),
    (broken_tiers.RaisesErrors, "T5", "OSError: .*Input/output error"),
    (broken_tiers.AsksTheStore, "H58", "calls of the store in 60 lookups: 120, not 0"),
    (broken_tiers.SaysNothing, "T6", r"blocks can be looked up, capacity\(\) counts 0"),
    (
        broken_tiers.CallsRefusalsSuccess,
        "H36",
        "blocks 0 to 7 are held, not 0 to 1: delete did not say that the store had failed",
    ),
    (
        broken_tiers.CallsRefusalsSuccess,
        "H66",
        "blocks 0 to 7 are held, not 0 to 1: delete did not say that the store had failed",
    ),
    (broken_tiers.ServesOnWhenClosed, "T7", "lookup after close: 0 to 7, not none"),
    (broken_tiers.ClosesWhenAllIsDone, "H56", "an operation has not ended after"),
    (broken_tiers.WaitsAtTheEnd, "H64", "the process would not end before ThreadPoolExecutor"),
    (broken_tiers.HalfAnswersThreads, "T8", "was served and is not what was stored"),
    (broken_tiers.IgnoresDepth, "T13", "of 12 blocks stored together, those left: .* not 0 to 7"),
    (broken_tiers.ServesANeighbour, "T2", "is not what was stored|3, 5"),
    (broken_tiers.ServesHoles, "T2", "block 0 of separate blocks was served and is not what was stored: nothing was"),
    (broken_tiers.ChainsEverything, "T9", "separate blocks held after a restart: 0 to 1, 3, not 0 to 1, 3, 5"),
    (broken_tiers.ServesAnySize, "T10", "separate block 0 of 8192 bytes is served as one of 0"),
    (broken_tiers.StoresNoEmptyBlocks, "T10", "blocks 0 to 2 of 0 bytes stored: none, not 0 to 2"),
]


@pytest.mark.parametrize(("tier", "name", "seen"), BROKEN, ids=[f"{tier.__name__}-{name}" for tier, name, _ in BROKEN])
def test_a_broken_tier_is_caught_by_name(
    tier: type[DictionaryTier], name: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpact_testkit.background.PATIENCE_S", 1.0)
    suite = suite_for(tier)
    about = [check for check, names in checks_of(suite).items() if name in names and "any_history" not in check]
    found = list(run_suite(suite, "|".join(f"^{check}$" for check in about), parent=tmp_path))
    assert verdicts(found)[name] is Verdict.BROKEN
    broken = [check for check in found if check.verdict is Verdict.BROKEN]
    assert any(re.search(seen, check.violations[0].what) for check in broken), as_text(report(found))
    assert all(check.script for check in broken)
    assert {check.violations[0].broken for check in broken} <= TITLES.keys()


def report(found: list[Check]) -> ConformanceReport:
    return ConformanceReport("a tier", "no engine", tuple(found))


def test_the_sound_tier_keeps_everything(tmp_path: Path) -> None:
    found = list(run_suite(DictionarySuite, "^test_(?!h21|any_history)", parent=tmp_path))
    assert len(found) > 20
    said = {check.verdict for check in found if check.name != "test_processes_may_use_it_at_once"}
    assert said == {Verdict.KEPT}, as_text(report(found))
    assert not list(tmp_path.iterdir()), "scenes leave nothing behind"
    assert json.loads(report(found).to_json())["checks"][0]["meaning"].startswith("What `put` says is stored is served")


@pytest.mark.parametrize(
    ("tier", "longest"),
    [(broken_tiers.CountsHits, 3), (broken_tiers.DeletesOneBlock, 6), (broken_tiers.ServesDamage, 6)],
)
def test_a_random_history_that_fails_is_shrunk_to_a_short_script(
    tier: type[DictionaryTier], longest: int, tmp_path: Path
) -> None:
    suite = suite_for(tier)
    suite.machine_examples = 1000  # which examples come first depends on the modules that happen to be loaded
    (found,) = run_suite(suite, "test_any_history_agrees", parent=tmp_path)
    assert found.verdict is Verdict.BROKEN
    assert found.script[0] == "open(room for 64 blocks)"
    assert len(found.script) <= longest, found.script


def test_what_an_author_does_not_say_is_not_observable_and_he_is_told_why(tmp_path: Path) -> None:
    class TestBare(TierConformance):
        test_blocks_come_back_as_they_were_stored = None  # type: ignore[assignment]  # a check taken out

        def open_tier(self, place: StoreContext) -> Tier:
            return DictionaryTier(place.namespace, place.slot_bytes, place.capacity_blocks)

    found = {check.name: check for check in run_suite(TestBare, "^test_(h22|h26|h59|h20|blocks_come)", parent=tmp_path)}
    assert "test_blocks_come_back_as_they_were_stored" not in found
    assert found["test_h20_leading_counts_the_unbroken_prefix_only"].verdict is Verdict.KEPT
    notes = {name: check.note for name, check in found.items() if check.verdict is Verdict.NOT_OBSERVABLE}
    assert notes["test_h22_damage_is_a_miss_counted_and_dropped"] == "the suite does not override `damage`"
    assert notes["test_h59_a_restart_finds_what_was_stored"].startswith("the suite says `reopens = False`")
    assert notes["test_h26_a_failed_write_is_a_block_not_stored"] == "the suite does not override `store_calls`"


def test_a_check_that_hangs_is_given_up_and_said_so(tmp_path: Path) -> None:
    let_go = threading.Event()

    class Hangs(DictionarySuite):
        @protects("P11")
        def test_nothing(self, scene: TierHarness) -> None:
            let_go.wait(20)

    (found,) = run_suite(Hangs, "^test_nothing$", timeout=0.1, parent=tmp_path)
    assert (found.verdict, found.violations[0].what) == (Verdict.BROKEN, "still running after 0.1 s")
    let_go.set()


def test_a_check_protects_what_has_a_name() -> None:
    with pytest.raises(KeyError):
        protects("H999")


def test_the_suite_of_an_author_runs_under_pytest_and_names_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from broken_tiers import CountsHits\n"
        "from dictionary_suite import DictionarySuite\n\n\n"
        "class TestMine(DictionarySuite):\n"
        "    tier = CountsHits\n"
    )
    here = Path(__file__).parent
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-k",
        "h20_leading or processes",
        tmp_path,
    ]
    path = os.pathsep.join([str(here), *sys.path])
    ran = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 skipped" in ran.stdout, ran.stdout
    assert "H20: a read counts its hits and not the unbroken prefix" in ran.stdout
    assert "leading, with blocks 2 and 3 missing: 6, not 2" in ran.stdout
    assert "    put(document, blocks 4 to 7) -> 4 to 7" in ran.stdout
    assert "the suite says `several_writers = False`" in ran.stdout
