"""The driver on the vLLM that is installed: `PactConnector` keeps every scenario, broken connectors are caught."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.contract import LoadJob
from kvpact.errors import ConfigError
from kvpact.vllm.compat.objects import connectors_of
from kvpact_testkit.results import Check, ConformanceReport, Verdict, as_text
from kvpact_testkit.vllm import offloading, simple_offloading
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.driver import SCENARIOS, VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.faulty_copies import FaultyEngine
from kvpact_testkit.vllm.harness import FOLDER, Harness, named, prompt, under_multi_connector
from kvpact_testkit.vllm.scenarios import Scenario
from kvpact_testkit.vllm.scenarios_context import CONTEXTS
from kvpact_testkit.vllm.scenarios_loads import h09_load_that_always_fails
from kvpact_testkit.vllm.scenarios_promises import reset_while_requests_run
from kvpact_testkit.vllm.simple_offloading import MemcpySimpleCPUOffloadConnector

PACT = "kvpact.vllm:PactConnector"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "synchronous": {"memory": "1MiB", "model_id": "testkit"},
    "asynchronous": {"memory": "1MiB", "model_id": "testkit", "sync_load_budget": 0},
    "disk": {"memory": "256KiB", "model_id": "testkit", "tiers": ["disk:///{folder}?capacity=4MiB"]},
    "short of everything": {
        "memory": "160KiB",
        "model_id": "testkit",
        "sync_load_budget": "32KiB",
        "plan_lifetime": "20ms",
        "tiers": ["disk:///{folder}?capacity=1MiB"],
    },
}
"""The testkit's blocks are 4 KiB a rank, so that 1 MiB holds 256 of them."""

NEEDS_A_TIER = {
    "h22_flipped_bytes_are_not_served",
    "h22_truncated_files_are_a_miss",
    "h22_missing_files_are_a_miss",
    "restart_finds_what_was_stored",
}
NEEDS_ASYNCHRONOUS_LOADS = {
    "h07_cancelled_while_its_load_runs",
    "h41_each_rank_fails_another_block",
    "h43_one_rank_loads_all_and_the_other_nothing",
}
NEEDS_SYNCHRONOUS_LOADS = {"draft_model_wants_the_rest_of_the_prompt"}
"""An asynchronous load is taken whatever the step computes."""
NEEDS_ANOTHER_RELEASE = {"commits_come_with_the_next_output"}
"""0.33; see `test_vllm_releases.py`."""
NOT_OBSERVABLE = {
    "synchronous": NEEDS_ANOTHER_RELEASE | NEEDS_A_TIER | NEEDS_ASYNCHRONOUS_LOADS,
    "asynchronous": NEEDS_ANOTHER_RELEASE | NEEDS_A_TIER | NEEDS_SYNCHRONOUS_LOADS,
    "disk": NEEDS_ANOTHER_RELEASE | NEEDS_ASYNCHRONOUS_LOADS,
    "short of everything": NEEDS_ANOTHER_RELEASE,
}


def _said(check: Check) -> str:
    return as_text(ConformanceReport(PACT, "", (check,)))


def _test_of(scenario: Scenario) -> Callable[[str], None]:
    @pytest.mark.parametrize("configuration", CONFIGURATIONS)
    def test(configuration: str) -> None:
        check = VllmDriver(PACT, CONFIGURATIONS[configuration]).check(scenario)
        unseen = scenario.name in NOT_OBSERVABLE[configuration]
        assert check.verdict is (Verdict.NOT_OBSERVABLE if unseen else Verdict.KEPT), _said(check)

    test.__doc__ = scenario.meaning
    return test


for _scenario in (
    one for one in SCENARIOS if one not in CONTEXTS
):  # those about the context: `test_scheduler_context.py`
    globals()[f"test_{_scenario.name}"] = _test_of(_scenario)

# What each broken connector is caught with: the scenario, the property that is named, and its configuration.
LATER = {"asynchronous": True}
BROKEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "NaiveConnector": ("h01_lookups_that_are_not_committed", "P1", {}),
    "MatchesTheWholePrompt": ("h06_match_of_the_whole_prompt", "H13", {}),
    "DecidesAfterThePromise": ("h05_small_matches_are_loaded", "P2", {}),
    "KeepsItsFirstPlan": ("h03_local_hit_changes_between_lookups", "P2", {}),
    "IgnoresSmallerCommits": ("h04_fewer_tokens_are_committed", "H13", LATER),
    "IgnoresTenants": ("h24_tenants_share_nothing", "P2", {}),
    "IgnoresSkipReading": ("h04_prompt_logprobs_need_the_whole_prompt", "P4", {}),
    "IgnoresThePrefix": ("h20_same_tokens_behind_another_prefix", "P2", {}),
    "TrustsTheFirstRank": ("h40_silent_rank_saves_nothing", "P2", {}),
    "SavesWhatIsNotComputed": ("chunked_prefill_is_stored_whole", "P2", {}),
    "ServesOldWeights": ("h32_new_weights_make_old_blocks_useless", "P2", {}),
    "ForgetsRequestsThatEnd": ("h44_report_of_a_request_that_just_ended", "H44", {}),
    "ReportsTwice": ("h08_loads_are_reported_once", "H13", LATER),
    "NeverReports": ("stores_and_loads", "P11", LATER),
    "AsksForMoreTime": ("stores_and_loads", "P11", {}),
    "ReportsEarly": ("h29_nothing_is_published_before_it_is_there", "P2", LATER),
    "FailsForEver": ("stores_and_loads", "P11", LATER),
    "Raises": ("cancelled_before_it_is_seen", "H13", {}),
    "HoldsBlocks": ("stores_and_loads", "P1", {}),
    "NeverRests": ("stores_and_loads", "P11", {}),
    "DamagesBlocks": ("stores_and_loads", "P2", {}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_connectors_are_caught_by_name(name: str) -> None:
    """Each mistake is found, under the property that it breaks, with a script."""
    scenario, broken, config = BROKEN[name]
    report = VllmDriver(f"broken_connectors:{name}", config, timeout=5.0).run([scenario])
    (check,) = report.checks
    assert check.verdict is Verdict.BROKEN, as_text(report)
    assert broken in {violation.broken for violation in check.violations}, as_text(report)
    assert check.script


@pytest.mark.proof
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_simple_connector_breaks_nothing(asynchronous: bool) -> None:
    """What the broken connectors are made of is right: the mistake that is found is the one that was made."""
    config = {"asynchronous": asynchronous}
    report = VllmDriver("kvpact_testkit.vllm.simple_connector:SimpleConnector", config).run()
    assert not report.broken, as_text(report)
    assert sum(check.verdict is Verdict.KEPT for check in report.checks) >= 30


def another_connector_loses_a_block(harness: Harness) -> None:
    """Under MultiConnector the first one loads, and fails; what the engine computed from that is in its blocks."""
    first = {"kv_connector": "LosesOnce", "kv_connector_module_path": "broken_connectors"}
    with harness.engine(under_multi_connector(first, harness.subject.transfer(harness.folder))) as engine:
        tokens = prompt(1, 10)
        harness.store(engine, tokens)
        engine.connector.reset_cache()  # kvpact forgets it as well; the first one is to have it again alone
        harness.store(engine, prompt(2, 1))
        (_, losing, _) = connectors_of(engine.connector)
        losing.generation -= 1
        engine.add("again", [*tokens, *prompt(3, 4)])
        harness.finish(engine)
        assert engine.observed.committed_tokens("again")
        harness.forget(engine)
        engine.add("after", [*tokens, *prompt(3, 4), 5])
        harness.finish(engine)
        harness.require_promise(engine, "after")


@pytest.mark.parametrize("configuration", ["synchronous", "asynchronous"])
def test_h48_garbage_of_another_connector_is_not_stored(configuration: str) -> None:
    scenario = Scenario("h48", ("P9", "H48"), "", another_connector_loses_a_block)
    check = VllmDriver(PACT, CONFIGURATIONS[configuration]).check(scenario)
    assert check.verdict is Verdict.KEPT, _said(check)


VLLM = "vllm.distributed.kv_transfer.kv_connector.v1"
STORE_AT_ONCE: dict[str, dict[str, Any]] = {
    "example": {
        "kv_connector": "ExampleConnector",
        "kv_connector_module_path": f"{VLLM}.example_connector",
        "kv_connector_extra_config": {"shared_storage_path": FOLDER},
    },
    "offloading": {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": f"{VLLM}.offloading_connector",
        "kv_connector_extra_config": offloading.MEMORY,
    },
    "simple": {**named(MemcpySimpleCPUOffloadConnector), "kv_connector_extra_config": simple_offloading.MEMORY},
}
"""vLLM's connectors that note in a step, as computed, what it computes: docs/compatibility.md names all."""


def all_loads_fail_beside(other: Mapping[str, Any], harness: Harness) -> None:
    """kvpact, before another connector under MultiConnector, loses a load; then that one alone has the prompt."""
    sibling = json.loads(json.dumps(other).replace(FOLDER, str(harness.folder)))
    with harness.engine(under_multi_connector(harness.subject.transfer(harness.folder), sibling)) as engine:
        tokens = prompt(1, 10)
        harness.store(engine, tokens)
        (_, ours, theirs) = connectors_of(engine.connector)
        theirs.reset_cache()
        for rank in engine.ranks:
            transfers = connectors_of(rank.connector)[1].cache_worker.transfers
            transfers.engine = FaultyEngine(transfers.engine, lambda job, block: isinstance(job, LoadJob))
        engine.add("again", [*tokens, *prompt(3, 4)])
        harness.finish(engine)
        assert engine.observed.committed_tokens("again")
        assert engine.observed.invalid_blocks
        harness.rest(engine)
        ours.reset_cache()
        harness.forget(engine)
        harness.serve(engine, "after", [*tokens, *prompt(3, 4)])
        harness.require_promise(engine, "after")


@pytest.mark.parametrize(
    ("configuration", "other", "broken"),
    [
        *(("asynchronous", other, set()) for other in STORE_AT_ONCE),
        ("synchronous", "example", {"P2", "P8", "P9"}),
        ("synchronous", "offloading", {"P2", "P8", "P9"}),
        ("synchronous", "simple", {"H13"}),
    ],
)
def test_h48_what_kvpact_fails_to_load_is_stored_by_others_only_if_the_step_waits_for_it(
    configuration: str, other: str, broken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is why none does beside another connector: `test_refused_early.py`."""
    monkeypatch.setattr("kvpact.vllm.checks.let_no_step_wait", lambda settings: None)  # the plug-in may be loaded
    harness = Harness(VllmDriver(PACT, CONFIGURATIONS[configuration]).subject)
    harness.judge(partial(all_loads_fail_beside, STORE_AT_ONCE[other]))
    assert {violation.broken for violation in harness.violations} == broken, harness.violations


def test_two_pact_connectors_in_one_engine_are_refused() -> None:
    """MultiConnector gives both the first one's arena: the second would store that one's bytes under its own keys."""
    child = {
        "kv_connector": "PactConnector",
        "kv_connector_module_path": "kvpact.vllm",
        "kv_connector_extra_config": CONFIGURATIONS["synchronous"],
        "kv_role": "kv_both",
    }
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [child, child]}}
    with pytest.raises(ConfigError, match="this engine has a PactConnector already"):
        VllmEngine(EngineSettings(), transfer, lambda line: None)


def test_another_connectors_handshake_is_a_clear_error() -> None:
    """MultiConnector hands the first handshake to all: behind a connector that shakes hands kvpact cannot start."""
    connector = VllmEngine(
        EngineSettings(),
        {
            "kv_connector": "PactConnector",
            "kv_connector_module_path": "kvpact.vllm",
            "kv_connector_extra_config": CONFIGURATIONS["synchronous"],
        },
        lambda line: None,
    ).connector
    with pytest.raises(ConfigError, match="put PactConnector before the other connectors"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("connector", [PACT, "kvpact_testkit.vllm.simple_connector:SimpleConnector"])
def test_h107_a_step_that_computes_during_a_reset_is_no_connectors_fault(connector: str, drafts: int) -> None:
    """vLLM refuses a reset while a step is in flight, with any connector, and frees that step's blocks after it."""
    config = CONFIGURATIONS["synchronous"] if connector == PACT else {}
    harness = Harness(VllmDriver(connector, config, timeout=5.0).subject)

    def situation(harness: Harness) -> None:
        with harness.engine(overlap=True, draft_tokens=drafts) as engine:
            reset_while_requests_run(harness, engine)

    harness.judge(situation)
    assert not harness.violations


@pytest.mark.parametrize("scheduler", ["", "kvpact.vllm.scheduler.pact_scheduler"])
def test_h09_a_load_that_fails_beside_a_step_in_flight_changes_no_token(scheduler: str) -> None:
    """vLLM's own scheduler would deliver what the step in flight made of the missing blocks: there no step waits."""
    harness = Harness(VllmDriver(PACT, CONFIGURATIONS["synchronous"], scheduler=scheduler).subject)

    def situation(harness: Harness) -> None:
        with harness.engine(overlap=True) as engine:
            h09_load_that_always_fails(harness, engine, 0)

    harness.judge(situation)
    allowed = {"P2"} if scheduler else set()  # the class lets it read them, and drops what it says
    assert {violation.broken for violation in harness.violations} <= allowed, harness.violations
