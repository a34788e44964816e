"""The guide for authors of vLLM connectors is true: each of its examples runs, leaves no lease, and is short."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from documents import ROOT, block_with, document_blocks
from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact.errors import ConfigError
from kvpact.matches.forms import form_of
from leasing_runs import BLOCK, OUTPUT_TOKENS, REQUESTS, SCHEDULER, STORED_BLOCKS, prompt_of

PAGE = "docs/write-a-vllm-connector.md"
FILES = {block.file: block.text for block in document_blocks(PAGE) if block.file}
NAMES = {file: re.findall(r"^class (\w+)\(SimpleConnector\)", text, re.MULTILINE)[0] for file, text in FILES.items()}
CANCEL_EVERY = 50
"""Steps between two cancellations of the request that is next in the queue."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader has written the page's files."""
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def leases_left(file: str, scheduler: str, *, asynchronous: bool) -> int:
    """What the page's connector holds after 40 requests on 20 blocks, of which some are cancelled."""
    from kvpact_testkit.vllm.compat import EngineSettings
    from kvpact_testkit.vllm.engine import VllmEngine

    transfer = {
        "kv_connector": NAMES[file],
        "kv_connector_module_path": file.removesuffix(".py"),
        "kv_connector_extra_config": {"asynchronous": asynchronous},
    }
    engine = VllmEngine(
        EngineSettings(num_blocks=20, block_size=BLOCK, scheduler=scheduler), transfer, lambda line: None
    )
    for number in range(REQUESTS):
        engine.add(f"first{number}", prompt_of(number)[: STORED_BLOCKS * BLOCK + 1], max_tokens=1)
        engine.finish(f"first{number}")
    engine.drain()
    engine.forget_computed()
    names = [f"r{number}" for number in range(REQUESTS)]
    for number, name in enumerate(names):
        engine.add(name, prompt_of(number), max_tokens=OUTPUT_TOKENS)
    cancelled: set[str] = set()
    for step in count(1):
        alive = [name for name in names if not engine.ended(name)]
        if not alive:
            break
        engine.step()
        assert not scheduler or len(engine.connector.leases) <= len(alive)
        if step % CANCEL_EVERY == 0 and len(alive) > 1:
            engine.abort(alive[1])
            cancelled.add(alive[1])
    assert len(cancelled) > 10
    for name in {*names} - cancelled:
        assert engine.observed.outputs[name] == engine.expected(name)
    connector: Any = engine.connector
    if scheduler:
        tracker = engine.scheduler.exits.trackers[0]
        assert tracker.commits == REQUESTS - len(cancelled)
        assert tracker.ends.pop(ExternalMatchExit.CANCELLED) == len(cancelled)
        assert {*tracker.ends} <= {ExternalMatchExit.SUPERSEDED}
    if hasattr(connector, "waits"):
        assert connector.waits[ExternalMatchExit.NO_BLOCKS] > 20
    engine.close()
    return len(connector.leases)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("file", FILES)
def test_h114_each_form_of_the_page_leaves_no_lease(
    file: str, asynchronous: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert leases_left(file, SCHEDULER, asynchronous=asynchronous) == 0
    assert "kvpact" not in caplog.text


def test_without_the_class_they_would(folder: Path) -> None:
    """The test above can fail."""
    assert leases_left("told_connector.py", "", asynchronous=False) > 10


@pytest.mark.parametrize("file", FILES)
def test_each_form_keeps_the_drivers_scenarios(file: str, folder: Path) -> None:
    """As the page has its readers test them; of the scenarios those of matches that are not taken."""
    program = block_with(PAGE, "class Leases").text.replace(
        "planned_connector:PlannedConnector", f"{file.removesuffix('.py')}:{NAMES[file]}"
    )
    names = ["h01_lookups_that_are_not_committed", "cancelled_while_blocked", "preemption_closes_the_queue"]
    scope: dict[str, Any] = {}
    exec(program.replace("print(as_text(driver.run()))", ""), scope)
    report = scope["driver"].run(names)
    assert [check.verdict.value for check in report.checks] == ["kept"] * len(names), scope["as_text"](report)


@pytest.mark.parametrize(
    ("page", "names", "kind", "dropped", "postponed"),
    [
        (PAGE, 0, 1, "yes", "no"),
        ("docs/internals/contract-on-vllm.md", 0, 2, "dropped", "postponed"),
        ("docs/lifecycle.md", 1, 0, "dropped: nobody comes back", "postponed: the request still waits"),
    ],
)
def test_the_pages_tables_have_every_exit_and_say_which_are_dropped(
    page: str, names: int, kind: int, dropped: str, postponed: str
) -> None:
    """`names` and `kind` are columns. Two pages had `unknown`, and not what replaced it."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    kinds = [(row[kind].partition(",")[0], row[names]) for row in rows if len(row) > max(names, kind)]
    found = {
        name: said for said, cell in kinds if said in (dropped, postponed) for name in re.findall(r"`(\w+)`", cell)
    }
    assert found == {each.value: dropped if each.is_dropped else postponed for each in ExternalMatchExit}


def test_what_cannot_be_called_is_refused_as_the_page_says() -> None:
    class Whole:
        def get_num_new_matched_tokens(self, *everything: Any) -> None: ...
        def update_state_after_alloc(self, *everything: Any) -> None: ...
        def prepare_external_match(self, *everything: Any) -> None: ...
        def commit_external_match(self, *everything: Any) -> None: ...
        def abort_external_match(self): ...  # type: ignore[no-untyped-def]

    class Half:
        def prepare_external_match(self, *everything: Any) -> None: ...

    class Endless:
        def get_num_new_matched_tokens(self, *everything: Any) -> ExternalKVMatch: ...  # type: ignore[empty-body]
        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    said = []
    for connector in (Whole, Half, Endless):
        connector.__name__ = "MyConnector"
        with pytest.raises(ConfigError) as refused:
            form_of(connector(), None)
        said.append(f"{refused.value}\n")
    assert "".join(said) in (ROOT / PAGE).read_text(encoding="utf-8")
