"""`docs/internals/contract-on-vllm.md` names scenarios that there are, and its example shows what it says."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.contract import ExternalMatchExit
from kvpact_testkit.vllm.driver import SCENARIOS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "internals" / "contract-on-vllm.md").read_text(encoding="utf-8")


def test_every_scenario_that_the_page_names_is_there() -> None:
    rows = [line for line in PAGE[PAGE.index("## Every way") :].splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+){2,})`", row)}
    named -= {"skip_reading_prefix_cache", "kv_load_failure_policy", "num_cached_tokens", "used_again_tokens"}
    named -= {*map(str, ExternalMatchExit), "reset_prefix_cache", "lookahead_token_ids"}
    assert len(named) > 20
    assert named <= {scenario.name for scenario in SCENARIOS}


def test_the_example_ends_every_promise_and_holds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "contract_on_vllm.py"), run_name="__main__")
    said = capsys.readouterr().out
    for end in ("LOADED", "SHORT", "ABORTED"):
        assert end.lower() in said.lower()
    assert said.count("answer: as without a cache") == 4
    assert "promised 160, committed 96, loaded 96, used 96" in said
    assert "promised 160, committed 160, loaded 112, used 64" in said
    assert "held in the end: 0 leases, 0 of the engine's blocks" in said
