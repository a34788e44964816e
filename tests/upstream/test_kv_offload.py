"""vLLM's own tests of its copies between a GPU and host memory, on the device that is played.

Which they are is in `upstream_tests.toml`; each has a device of its own, which copies late and in any order.
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

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(find_spec("vllm") is None, reason="no engine is installed; `make setup` installs one"),
]


def test_vllms_tests_of_its_copies_pass_on_the_played_device() -> None:
    with patched(fetch_source(), None) as tree:
        outcomes = run(tree, CHOICE.played, CHOICE.left_out, on_played_device=True)
    assert not str(outcomes)
    assert len(outcomes.named("passed")) == 52


def test_without_vllms_fence_its_own_test_finds_wrong_bytes_there() -> None:
    with patched(fetch_source(), None) as tree:
        source = (tree / WORKER).read_text()
        assert source.count(FENCE) == 1
        (tree / WORKER).unlink()  # a link to the file of all trees
        (tree / WORKER).write_text(source.replace(FENCE, "pass"))
        outcomes = run(tree, [OF_THE_FENCE], CHOICE.left_out, on_played_device=True)
    assert outcomes.named("failed") == {OF_THE_FENCE}
