"""Other people's tiers under the kit: served damage is found, and what a tier has no call for is not observable."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from documents import Block, document_blocks
from kvpact.cli.app import app
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import Tier
from kvpact_testkit.faults import Faults
from kvpact_testkit.peers.__main__ import judge
from kvpact_testkit.peers.own import DiskSuite
from kvpact_testkit.peers.registry import peer_named
from kvpact_testkit.peers.tier import PeerSuite, PeerTier
from kvpact_testkit.results import Check, ConformanceReport, Verdict, Violation
from kvpact_testkit.suite import run_suite
from kvpact_testkit.tier.conformance import StoreContext, TierConformance

DAMAGE = "damage_is|damage_while|damage_of"
SERVED = "was served and is not what was stored: byte 100 of 8192"


class FilesOfBytes(PeerTier):
    """A peer whose files are a block's bytes, and a checksum over key and bytes if it is `careful`."""

    def __init__(self, place: StoreContext, faults: Faults, *, careful: bool) -> None:
        super().__init__("files of bytes", place.slot_bytes, faults)
        self.folder = place.directory / place.namespace.name
        self.folder.mkdir(exist_ok=True)
        self.faults = faults
        self.careful = careful

    def path(self, key: BlockKey) -> Path:
        return self.folder / f"{key.hex()}.bin"

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self.path(key).exists() for key in keys]

    def load(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        return [self.read(key, self.rows.view(row)) for key, row in zip(keys, rows, strict=True)]

    def read(self, key: BlockKey, row: memoryview) -> bool:
        path = self.path(key)
        try:
            self.faults.before_read()
            raw = path.read_bytes()
        except OSError:
            return False
        if self.careful and sha256(key + raw[32:]).digest() != raw[:32]:
            path.unlink(missing_ok=True)
            return False
        row[:] = raw[32:] if self.careful else raw
        return True

    def save(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        return [self.write(key, bytes(self.rows.view(row))) for key, row in zip(keys, rows, strict=True)]

    def write(self, key: BlockKey, payload: bytes) -> bool:
        path = self.path(key)
        whole = sha256(key + payload).digest() + payload if self.careful else payload
        new = path.with_name(f"{os.urandom(8).hex()}.new")
        try:
            if not path.exists():
                self.faults.before_write(torn=lambda part: new.write_bytes(whole[: int(len(whole) * part)]))
                new.write_bytes(whole)
                new.replace(path)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Nothing is open."""


class CarefulSuite(PeerSuite):
    careful = True
    machine_examples = 5

    def open_tier(self, place: StoreContext) -> Tier:
        return FilesOfBytes(place, self.faults, careful=self.careful)

    def file_of(self, place: StoreContext, key: BlockKey) -> Path:
        return place.directory / place.namespace.name / f"{key.hex()}.bin"

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        self.faults = faults
        yield


class CarelessSuite(CarefulSuite):
    careful = False


def judged(suite: type[TierConformance], only: str = "") -> dict[str, Check]:
    return {check.name: check for check in run_suite(suite, only)}


def broken(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.violations[0].what for name, check in checks.items() if check.verdict is Verdict.BROKEN}


def test_what_a_peer_has_no_call_for_is_not_observable_and_nothing_is_broken() -> None:
    checks = judged(CarefulSuite)
    assert broken(checks) == {}
    unseen = {name for name, check in checks.items() if check.verdict is Verdict.NOT_OBSERVABLE}
    assert unseen >= {
        "test_deleting_drops_what_is_named",
        "test_clearing_is_for_good",
        "test_what_was_refuted_is_given_to_nobody",
        "test_h36_what_a_store_refuses_to_forget_is_no_success",
        "test_blocks_of_several_sizes_are_served_into_their_own_size_alone",
        "test_scan_names_all_that_is_held",
        "test_nothing_is_counted_as_wrong_that_is_not",
        "test_h50_capacity_is_never_exceeded",
    }
    assert len(checks) - len(unseen) >= 20
    assert all(checks[name].note for name in unseen)


def test_a_peer_without_a_checksum_is_found_to_serve_damage() -> None:
    found = broken(judged(CarelessSuite, DAMAGE))
    assert len(found) == 3
    assert all(SERVED in what for what in found.values())


def test_flipped_bytes_are_served_as_good_by_vllms_fs() -> None:
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    from kvpact_testkit.peers.vllm_tiers import VllmFsSuite

    found = broken(judged(VllmFsSuite, DAMAGE))
    assert len(found) == 3
    assert all(SERVED in what for what in found.values())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of threads that die
def test_vllms_fs_keeps_what_is_undamaged() -> None:
    """Stored blocks come back, a hole costs itself, models share nothing, and a failed write leaves nothing."""
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    from kvpact_testkit.peers.vllm_tiers import VllmFsSuite

    checks = judged(
        VllmFsSuite, "come_back|hole|namespaces|not_written_again|failed_write|failed_read|crash|restart_finds"
    )
    assert broken(checks) == {}
    assert {check.verdict for check in checks.values()} == {Verdict.KEPT}
    assert len(checks) == 8


def of_vllm(page: list[Block]) -> Iterator[tuple[str, str]]:
    """The page's reproductions on vLLM, each behind the lines that stand before it, and what it prints."""
    before = ""
    for block, shown in pairwise(page):
        if "FileSystemTierManager(N(" in block.text:
            before = block.text
        elif "OffloadingConnectorWorker(N(" in block.text:
            yield block.text, shown.text
            return
        elif block.language == "python" and not re.search(r"s3\.|ObjectStore", block.text):
            yield before + block.text, shown.text


def test_what_peers_md_says_of_vllm_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    reproductions = list(of_vllm(document_blocks("docs/peers.md")))
    assert len(reproductions) == 4
    for code, shown in reproductions:
        names: dict[str, Any] = {}
        exec(code, names)
        assert capsys.readouterr().out.endswith(shown)
        if "mkfifo" in code:
            os.close(os.open(names["path"], os.O_WRONLY))  # so that the read ends
            names["closing"].join()


def test_pinned_host_memory_of_vllms_offloading_is_counted() -> None:
    """Two of ten chunks are stored, and one of them is lent to a load that does not end."""
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    from kvpact_testkit.vllm.adapters import KNOWN_ADAPTERS

    manager, context = CPUOffloadingManager(10), ReqContext(req_id="r")
    connector = SimpleNamespace(connector_scheduler=SimpleNamespace(manager=manager))
    adapter = KNOWN_ADAPTERS["OffloadingConnector"]()
    keys = [b"a" * 36, b"b" * 36]
    manager.prepare_store(keys, context)
    assert adapter.held(connector) == {"percent of host memory pinned": 20}
    manager.complete_store(keys, context)
    assert adapter.held(connector) == {"percent of host memory pinned": 0}
    manager.prepare_load(keys[:1], context)
    assert adapter.held(connector) == {"percent of host memory pinned": 10}


def test_no_damage_is_served_by_kvpacts_disk_tier() -> None:
    checks = judged(DiskSuite, DAMAGE)
    assert {check.verdict for check in checks.values()} == {Verdict.KEPT}
    assert len(checks) == 3


@pytest.mark.parametrize("name", ["lmcache-fs", "sglang-file"])
def test_a_peer_that_is_installed_serves_damage_and_keeps_what_is_undamaged(name: str) -> None:
    peer = peer_named(name)
    if not peer.release():
        pytest.skip(f"{name} is not installed; {peer.install}")
    found = broken({check.name: check for check in judge(peer, f"come_back|hole|not_written|failed_write|{DAMAGE}")})
    assert len(found) == 3
    assert all(SERVED in what for what in found.values())


def kvpact(*arguments: str, exit_code: int) -> str:
    result = CliRunner().invoke(app, ["conformance", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def interpreter(folder: Path, script: str) -> Path:
    """A stand-in for the interpreter of a peer's environment."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def reporting(folder: Path, *checks: Check) -> Path:
    """An interpreter whose process reports these checks."""
    report = folder / "report.json"
    report.write_bytes(ConformanceReport("vllm-fs, a tier", "vllm 0.32.0", checks).to_json())
    return interpreter(folder, f'while [ "$1" != --report ]; do shift; done; cp {report} "$2"; exit 1')


def test_each_broken_check_is_one_line_and_one_command_that_repeats_it(tmp_path: Path) -> None:
    kept = Check("test_kept", ("T1",), "", Verdict.KEPT)
    served = Check("test_h22", ("H22",), "", Verdict.BROKEN, (Violation("H22", "block 4 was served"),))
    python = reporting(tmp_path, kept, served)
    lines = kvpact("--peers", "vllm-fs", "--peers-python", f"vllm-fs={python}", exit_code=1).splitlines()
    assert lines == [
        "vllm-fs, a tier, vllm 0.32.0: 1 kept, 1 broken, 0 not observable, 0 s",
        "    H22: test_h22: block 4 was served",
        f"        {python} -m kvpact_testkit.peers vllm-fs '^test_h22$'",
    ]
    [document] = json.loads(kvpact("--peers", "vllm-fs", "--peers-python", f"vllm-fs={python}", "--json", exit_code=1))
    assert document["report"]["checks"][1]["violations"] == [{"broken": "H22", "what": "block 4 was served"}]
    assert document["python"] == str(python)


@pytest.mark.parametrize("script", ["exit 3", "echo \"No module named 'kvpact_testkit'\" >&2; exit 1"])
def test_a_peer_that_is_not_installed_is_one_line_that_says_how_to_install_it(tmp_path: Path, script: str) -> None:
    python = interpreter(tmp_path, script)
    [line] = kvpact("--peers", "sglang-file", "--peers-python", f"sglang-file={python}", exit_code=0).splitlines()
    assert line.startswith(f"sglang-file: not installed for {python}; python3 -m venv sglang-file; ")
    assert "pip install kvpact-testkit sglang==0.5.23" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "nobody"], "there is no peer 'nobody'; there are kvpact-disk, "),
        (["--peers", "--peers-python", "nobody=/bin/true"], "there is no peer 'nobody'"),
        (["--peers", "--peers-python", "vllm-fs"], "write NAME=PATH"),
        (["--peers", "vllm-fs", "--peers-python", "vllm-fs=/bin/false"], "cannot be judged by /bin/false, exit code 1"),
        ([], 'say what to check: "module:Class", or --peers'),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str) -> None:
    shown = kvpact(*arguments, exit_code=2)
    assert words in shown
    assert len(shown.strip().splitlines()) == 1


def test_the_command_that_is_printed_judges_a_peer(tmp_path: Path) -> None:
    """In a process of its own, as `kvpact conformance --peers` runs it."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "kvpact_testkit.peers", "kvpact-disk", "damage_of", "--report", str(report)]
    assert subprocess.run(command, check=False).returncode == 0
    [check] = ConformanceReport.from_json(report.read_bytes()).checks
    assert check.verdict is Verdict.KEPT
    assert subprocess.run(command[:5], capture_output=True, text=True, check=True).stdout.endswith(
        "1 kept, 0 broken, 0 not observable\n"
    )
