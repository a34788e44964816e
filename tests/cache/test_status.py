"""What an engine tells people who ask it, on a socket that is its user's own."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from dictionary_tier import DictionaryTier, Records
from kvpact.cache import status_socket
from kvpact.cache.status import EngineStatus, status_of
from kvpact.cache.status_socket import StatusSocket, answers
from kvpact.errors import DataError
from kvpact.metrics import MEMORY, series
from kvpact.tiers.executor import TierExecutor
from kvpact_command import KVPACT
from polling import until
from scenes import BLOCK_SIZE, NAMESPACE, PAGE, Scene, SceneRequest, open_disk, tokens


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets of this test's engines are."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(status_socket, "places", lambda: [(runtime, "kvpact")])
    return runtime / "kvpact"


@pytest.fixture
def listen() -> Iterator[Callable[[bytes], StatusSocket]]:
    opened: list[StatusSocket] = []

    def start(told: bytes) -> StatusSocket:
        opened.append(StatusSocket(lambda: told))
        until(lambda: told in [said for _, said in answers()])
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_every_engine_of_the_user_answers_and_one_that_ends_leaves_nothing(
    home: Path, listen: Callable[[bytes], StatusSocket]
) -> None:
    first, _ = listen(b"first"), listen(b"second")
    assert sorted(said for _, said in answers()) == [b"first", b"second"]
    paths = [Path(path) for path, _ in answers()]
    assert all(path.parent == home and path.is_socket() for path in paths)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    first.close()
    assert [said for _, said in answers()] == [b"second"]
    assert len(os.listdir(home)) == 1


def test_a_socket_of_an_engine_that_was_killed_is_removed(home: Path) -> None:
    use = (
        "import sys; from kvpact.cache.status_socket import StatusSocket; StatusSocket(lambda: b'x'); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", use], stdin=subprocess.PIPE) as engine:
        try:
            until(lambda: bool(answers()), 60.0)
        finally:
            engine.kill()
    assert len(os.listdir(home)) == 1
    assert answers() == []
    assert os.listdir(home) == []


def test_a_caller_that_does_not_read_keeps_nobody_waiting_for_long(
    home: Path, listen: Callable[[bytes], StatusSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_socket, "CLIENT_SECONDS", 0.3)
    listen(told := b"x" * (4 << 20))
    ((path, _),) = answers()
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.connect(path)
        assert hanging.recv(1) == b"x"
        began = time.monotonic()
        assert [said for _, said in answers()] == [told]
        assert time.monotonic() - began < 5.0


def test_a_folder_of_another_kind_costs_one_line(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.write_text("not a folder")
    StatusSocket(lambda: b"").close()
    (line,) = caplog.messages
    assert line.startswith("kvpact: `kvpact status` cannot find this engine: no socket can be made: ")
    assert answers() == []


def test_h119_what_is_only_named_like_a_socket_hides_no_engine_and_stays(
    home: Path, listen: Callable[[bytes], StatusSocket]
) -> None:
    """A folder, a file and a link to nothing stand before and behind the engines' sockets."""
    listen(b"first")
    strange = [home / f"{place}-{kind}.sock" for place in ("!", "z") for kind in ("folder", "file", "link")]
    for path in strange:
        if "folder" in path.name:
            path.mkdir()
        elif "file" in path.name:
            path.write_text("mine")
        else:
            path.symlink_to("nothing")
    listen(b"second")
    assert sorted(said for _, said in answers()) == [b"first", b"second"]
    assert all(path.is_symlink() or path.exists() for path in strange)


def test_h119_an_engine_that_is_stopped_keeps_neither_a_new_one_nor_the_answers_of_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = (
        "import sys; from kvpact.cache.status_socket import StatusSocket; StatusSocket(lambda: b'x'); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", use], stdin=subprocess.PIPE) as stopped:
        until(lambda: bool(answers()), 60.0)
        stopped.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(status_socket, "ANSWER_SECONDS", 1000.0)  # nobody waits for it
        engine = StatusSocket(lambda: b"well")
        try:
            until(lambda: len(list(home.glob("*.sock"))) == 2)
            monkeypatch.setattr(status_socket, "ANSWER_SECONDS", 0.3)
            assert sorted(said for _, said in answers()) == [b"", b"well"]
        finally:
            stopped.kill()
            engine.close()


def test_h119_on_a_read_only_root_the_one_place_that_can_be_written_is_used(tmp_path: Path) -> None:
    """And where there is none, one line says what to set."""
    (runtime := tmp_path / "runtime").mkdir()
    places = (
        "for place in /tmp /var/tmp /usr/tmp /; do mount --bind $place $place && mount -o remount,ro,bind $place; done"
    )
    mounts = f"{places} 2>/dev/null; mount -t tmpfs none {runtime}; cd /; exec"
    listens = (
        "from kvpact.cache.status_socket import StatusSocket, answers\n"
        "engine = StatusSocket(lambda: b'well')\n"
        "while not (found := answers()): pass\n"
        "print(found); engine.close()"
    )

    def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inside = ["unshare", "-m", "--propagation", "private", "sh", "-c", f'{mounts} "$@"', "sh", *command]
        known = {name: text for name, text in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
        return subprocess.run(inside, env=known | environment, capture_output=True, text=True, timeout=60)

    told = run(sys.executable, "-c", listens, XDG_RUNTIME_DIR=str(runtime))
    assert "b'well'" in told.stdout, told.stderr
    refused = run(str(KVPACT), "status", XDG_RUNTIME_DIR="")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "set XDG_RUNTIME_DIR to one that this user may write" in line


def test_an_error_while_telling_costs_one_line_and_the_next_caller_is_answered(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = iter([b"up", None, None, b"well"])

    def tell() -> bytes:
        if (one := next(said)) is None:
            raise RuntimeError("dictionary changed size")
        return one

    engine = StatusSocket(tell)
    try:
        until(lambda: bool(answers()))
        assert [[said for _, said in answers()] for _ in range(3)] == [[b""], [b""], [b"well"]]
    finally:
        engine.close()
    assert caplog.messages == ["kvpact: cannot send the status: RuntimeError: dictionary changed size"]


def test_the_status_of_a_cache_says_what_is_open_and_what_was(tmp_path: Path) -> None:
    scene = Scene(tiers=[open_disk(tmp_path)])
    scene.run_cold(SceneRequest("cold", tokens(17)))
    scene.prepare(SceneRequest("warm", tokens(17)))
    scene.now += 2.5
    cache = scene.cache
    found = EngineStatus.parse(status_of(cache, cache.metrics, "a/model", BLOCK_SIZE).encoded())
    assert (found.pid, found.model, found.block_size) == (os.getpid(), "a/model", BLOCK_SIZE)
    (lease,) = found.leases
    assert (lease.request_id, lease.state, lease.blocks, lease.tokens) == ("warm", "PLANNED", (0, 4), 16)
    assert lease.seconds == 2.5
    assert [record.request_id for record in found.records] == ["cold", "warm"]
    assert found.metrics["promised_tokens"] == 16, "without a step in which it was collected"
    assert found.metrics[series("held_blocks", MEMORY)] == 4
    assert [tier.trouble for tier in found.tiers] == [""]
    assert (found.prompts.requests, found.prompts.tokens) == (1, 17)


def test_engines_in_two_containers_whose_processes_have_one_id_are_told_apart() -> None:
    here = status_of(None, Scene().cache.metrics, "a/model", BLOCK_SIZE)
    there = [msgspec.structs.replace(here, pid_namespace=f"pid:[{number}]") for number in (1, 2)]
    assert here.title == f"a/model, process {os.getpid()}"
    assert [each.title for each in there] == [f"{here.title} of pid:[1]", f"{here.title} of pid:[2]"]
    assert msgspec.structs.replace(here, pid_namespace="").title == here.title, "of an older release"


def test_whatever_the_engine_does_meanwhile_its_status_is_told() -> None:
    """The socket's thread walks over what the scheduler's changes: here once between each two lines of the walk.

    A tier opens late, and a request uses tokens of it, the first that anybody does.
    """
    records: Records = {}
    scene = with_tier(Scene(), records)
    scene.run_cold(SceneRequest("cold", tokens(17)))
    scene.settle_tiers()
    scene.close()
    lines = 0
    while told_while_engine_works(records, lines) >= lines:
        lines += 1
    assert lines > 40


def with_tier(scene: Scene, records: Records) -> Scene:
    """The scene with a late tier over these records."""
    scene.cache.open_tiers([TierExecutor(DictionaryTier(NAMESPACE, PAGE, 64, records), 1, 1 << 20)])
    return scene


def told_while_engine_works(records: Records, line: int) -> int:
    """Make a status; before this line of the walk the engine works. Returns the number of lines."""
    scene, seen, folder = Scene(), count(), str(Path(status_socket.__file__).parent)
    request = SceneRequest("warm", tokens(17))

    def between_lines(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line" and next(seen) == line:
            sys.settrace(None)
            scene.load(request, with_tier(scene, records).prepare(request))
            sys.settrace(between_lines)
        return between_lines

    sys.settrace(between_lines)
    try:
        found = status_of(scene.cache, scene.cache.metrics, "a/model", BLOCK_SIZE)
    finally:
        sys.settrace(None)
    assert found.metrics["used_tokens"] in (0, 16)
    found = status_of(scene.cache, scene.cache.metrics, "a/model", BLOCK_SIZE)
    assert found.metrics.get(series("used_tokens_from", "dictionary"), 0) == found.metrics["used_tokens"]
    scene.close()
    return next(seen) - 1


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "has not answered in time"),
        (b'{"version": 2}', "another release of kvpact"),
        (b'{"version": 1, "pid": "x"}', "no status of an engine"),
    ],
)
def test_what_is_no_status_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(DataError, match=why):
        EngineStatus.parse(raw)


def test_an_engine_that_does_not_answer_in_time_is_named(
    home: Path, listen: Callable[[bytes], StatusSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    listen(b"well")
    silent = home / "1-silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(silent))
        listener.listen()
        monkeypatch.setattr(status_socket, "ANSWER_SECONDS", 0.1)
        assert sorted(said for _, said in answers()) == [b"", b"well"]
