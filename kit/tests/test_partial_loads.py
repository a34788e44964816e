"""Loads that end inside a block, on vLLM's real scheduler (H30): what lies behind their last token is computed."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact_testkit.results import Verdict, as_text
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.harness import BLOCK, Harness, prompt, under_multi_connector
from kvpact_testkit.vllm.scenarios import Scenario

H30 = "h30_load_ends_inside_a_block"
SCENARIOS = [
    H30,
    "chunked_prefill_is_stored_whole",
    "chunk_ends_inside_the_last_block",
    "h29_nothing_is_published_before_it_is_there",
    "h04_fewer_tokens_are_committed",
    "h07_cancelled_while_its_load_runs",
    "preempted_while_it_saves",
    "steps_overlap",
]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_h30_vllm_computes_what_a_load_leaves_of_its_last_block(*, asynchronous: bool) -> None:
    report = VllmDriver("partial_connector:PartialConnector", {"asynchronous": asynchronous}).run(SCENARIOS)
    assert not report.broken, as_text(report)
    (check,) = [check for check in report.checks if check.name == H30]
    assert check.verdict is Verdict.KEPT, as_text(report)
    ended_inside, loads = map(int, re.findall(r"\d+", check.note))
    assert ended_inside > loads / 2 > 5, check.note


@pytest.mark.parametrize("asynchronous", [False, True])
def test_h30_the_end_of_a_block_that_is_taken_as_loaded_is_found(*, asynchronous: bool) -> None:
    report = VllmDriver("partial_connector:RoundsUp", {"asynchronous": asynchronous}, timeout=5.0).run([H30])
    (check,) = report.checks
    assert check.verdict is Verdict.BROKEN, as_text(report)
    assert "P2" in {violation.broken for violation in check.violations}, as_text(report)


def another_connector_fills_blocks_in_part(harness: Harness) -> None:
    """Under MultiConnector the first one's loads end inside blocks; what kvpact saves of such blocks is whole."""
    first: dict[str, Any] = {"kv_connector": "PartialConnector", "kv_connector_module_path": "partial_connector"}
    later = harness.subject.config["sync_load_budget"] == 0
    first["kv_connector_extra_config"] = {"only": "partial", "asynchronous": later}
    with harness.engine(
        under_multi_connector(first, harness.subject.transfer(harness.folder)), num_blocks=129, chunk=7
    ) as engine:
        prompts = [prompt(tail + 1, 2, tail=tail) for tail in range(0, BLOCK, 3)]
        stems = [tokens[: BLOCK + 9] for tokens in prompts]
        harness.store(engine, *stems)
        for number, tokens in enumerate(prompts):
            engine.add(f"partial{number}", tokens, max_tokens=2 * BLOCK)
        harness.finish(engine)
        inside = [commit for commit in engine.observed.commits if commit.num_tokens % BLOCK]
        assert len(inside) == len(prompts), "no load ended inside a block"
        harness.forget(engine)
        for number, tokens in enumerate(prompts):
            engine.add(f"again{number}", [*tokens, *engine.observed.outputs[f"partial{number}"]])
        harness.finish(engine)
        for number in range(len(prompts)):
            assert engine.observed.committed_tokens(f"again{number}") >= 3 * BLOCK, "kvpact has not saved such blocks"


@pytest.mark.parametrize("sync_load_budget", [0, "1GiB"])
def test_h30_blocks_that_another_connector_filled_in_part_are_stored_whole(sync_load_budget: object) -> None:
    config = {"memory": "1MiB", "model_id": "testkit", "sync_load_budget": sync_load_budget}
    scenario = Scenario("h30", ("P8", "H30"), "", another_connector_fills_blocks_in_part)
    check = VllmDriver("kvpact.vllm:PactConnector", config).check(scenario)
    assert check.verdict is Verdict.KEPT, check
