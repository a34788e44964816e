"""vLLM's own tests of its offloading: of its copies, on the device that is played, and of its tiers, with `PactTier`.

Which the first are is in `upstream_tests.toml`; each has a device of its own, which copies late and in any order.
Each of the others has tiers of its own, in the place of vLLM's example of a tier.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from upstream_run import choice, run
from vllm_source import fetch_source, patched

CHOICE = choice()

WORKER = "vllm/v1/kv_offload/cpu/gpu_worker.py"
FENCE = "stream.wait_stream(current_platform.current_stream())"
OF_THE_FENCE = "tests/v1/kv_offload/cpu/test_gpu_worker.py::test_load_waits_for_pending_compute_stream_writes"

TIERING = "tests/v1/kv_offload/tiering/test_tiering_offloading.py"
UNLIKE_THE_EXAMPLE = {
    "TestExampleSecondaryTierManager::test_config_info_keys_match_the_filled_values": "the example's own setting",
    "TestTieringOffloadingManager::test_reset_holds_promotions_until_flushed": "nothing from before a reset is found",
    "TestTieringOffloadingManager::test_tier_filter_allows_matching_secondary[explicit_cpu]": "it is storage",
    "TestTieringOffloadingManager::test_tier_filter_skips_filtered_secondary[non_matching_medium]": "it is storage",
}
"""Tests that ask of a tier what `PactTier` is not -> why."""

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(find_spec("vllm") is None, reason="no engine is installed; `make setup` installs one"),
]


def test_vllms_tests_of_its_copies_pass_on_the_played_device() -> None:
    with patched(fetch_source()) as tree:
        outcomes = run(tree, CHOICE.played, CHOICE.left_out, on_played_device=True)
    assert not str(outcomes)
    assert len(outcomes.named("passed")) == 52


def test_without_vllms_fence_its_own_test_finds_wrong_bytes_there() -> None:
    with patched(fetch_source()) as tree:
        source = (tree / WORKER).read_text()
        assert source.count(FENCE) == 1
        (tree / WORKER).unlink()  # a link to the file of all trees
        (tree / WORKER).write_text(source.replace(FENCE, "pass"))
        outcomes = run(tree, [OF_THE_FENCE], CHOICE.left_out, on_played_device=True)
    assert outcomes.named("failed") == {OF_THE_FENCE}


def test_vllms_tests_of_its_tiering_pass_with_pact_tier() -> None:
    with patched(fetch_source()) as tree:
        outcomes = run(tree, [TIERING], [], with_pact_tier=True)
    assert outcomes.named("failed") == {f"{TIERING}::{name}" for name in UNLIKE_THE_EXAMPLE}
    assert len(outcomes.named("passed")) == 68
