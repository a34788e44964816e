"""`PactConnector` on the other releases: each from its wheel's Python files, in its own process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact_testkit.results import Verdict, as_text
from kvpact_testkit.vllm.driver import SCENARIOS
from kvpact_testkit.vllm.releases import RELEASES, engine_of, installed_release, run_on_release

# Small matches are loaded inside the step, larger ones later, and most come from disk: every path of the connector.
CONFIG = {
    "memory": "160KiB",
    "model_id": "testkit",
    "sync_load_budget": "32KiB",
    "plan_lifetime": "20ms",
    "tiers": ["disk:///{folder}?capacity=1MiB"],
}


FIRST_WITH = {
    "window_is_computed_again": "0.31.0",
    "commits_come_with_the_next_output": "0.33.0",
}
"""The scenarios that need something of vLLM's scheduler, and the first release that has it."""


def not_there(release: str) -> set[str]:
    """What the release's scheduler cannot do yet."""
    return {name for name, first in FIRST_WITH.items() if release < first}


OTHERS = [release for release in RELEASES if release != installed_release()]
ENDS = (OTHERS[0], OTHERS[-1])
"""Those between are run in the soak, and all on vLLM's own scheduler."""

CLASS = "kvpact.vllm.scheduler.pact_scheduler"


@pytest.mark.parametrize(
    ("release", "scheduler"),
    [
        pytest.param(release, scheduler, marks=pytest.mark.proof if scheduler and release in ENDS else pytest.mark.soak)
        for scheduler, releases in (("", OTHERS), (CLASS, RELEASES))
        for release in releases
    ],
)
@pytest.mark.timeout(900)
def test_every_scenario_is_kept(release: str, scheduler: str) -> None:
    """On vLLM's own scheduler, and on kvpact's class.

    The first run fetches the release, the first import compiles it; then it takes half a minute. What a scenario is
    about may not come to pass where a disk answers late, on a busy machine; so it gets a second try.
    """
    for _ in range(2):
        report = run_on_release(release, "kvpact.vllm:PactConnector", CONFIG, scheduler=scheduler)
        assert report.engine == f"vLLM {release}"
        assert len(report.checks) == len(SCENARIOS)
        assert not report.broken, as_text(report)
        unseen = {check.name for check in report.checks if check.verdict is Verdict.NOT_OBSERVABLE}
        if unseen == not_there(release):
            break
    assert unseen == not_there(release), as_text(report)


def test_the_other_process_finds_kvpact_and_an_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder inside kvpact on its path would hide the engine: kvpact has a package named `vllm` too."""
    started: list[dict[str, Any]] = []

    def fails(*_: object, **named: Any) -> subprocess.CompletedProcess[str]:
        started.append(named)
        return subprocess.CompletedProcess([], 1)

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(RuntimeError, match="ended with 1"):
        run_on_release(installed_release(), "kvpact.vllm:PactConnector")
    first, *others = started[0]["env"]["PYTHONPATH"].split(os.pathsep)
    assert Path(first, "kvpact_testkit", "__init__.py").is_file()
    assert any(Path(folder, "kvpact", "__init__.py").is_file() for folder in others)


def test_an_engine_of_a_release_has_its_python_files_and_the_installed_compiled_parts(tmp_path: Path) -> None:
    """A made-up release in the folder of releases: nothing is fetched, and nothing of it stays."""
    package = tmp_path / "9.9.0" / "vllm"
    (package / "below").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "below" / "__init__.py").write_text("")
    seen = (
        "import vllm.below, importlib.metadata as m; from kvpact_testkit.vllm.releases import installed_release; "
        "print(vllm.__path__[0], m.version('vllm'), installed_release())"
    )
    with engine_of("9.9.0", tmp_path) as environment:
        done = subprocess.run([sys.executable, "-c", seen], env=environment, capture_output=True, text=True, check=True)
        place, version, release = done.stdout.split()
        assert Path(place) == Path(environment["PYTHONPATH"].split(os.pathsep)[0], "vllm")
        assert (version, release) == ("9.9.0+cpu", "9.9.0")  # the tests' vLLM is the CPU build everywhere
        assert Path(place, "_C.abi3.so").stat().st_size > 1 << 20
    assert not Path(place).exists()
