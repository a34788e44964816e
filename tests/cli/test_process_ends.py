"""A process ends in bounded time, whatever hangs: a server that takes connections and says nothing or is stopped, a
file that never opens (H64)."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

import kvpact
from kvpact.tiers.base import UNSEALED
from kvpact.tiers.shared.store import group_name, record_name
from kvpact_testkit.sample_blocks import document
from kvpact_testkit.tier.harness import NAMESPACE
from servers.mooncake_server import mooncake_pool
from servers.object_server import CREDENTIALS
from servers.redis_server import redis_server

ENDS_WITHIN_S = 4.0
"""After the last line of the program, on a busy machine; the interpreter's own end takes some 0.2 s."""

CHILD = Path(__file__).parent / "process_child.py"
FIRST = record_name(group_name(NAMESPACE, UNSEALED), document("document", 4).keys[0])


@contextmanager
def silent_s3(directory: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """There is nothing in the bucket, and then it takes connections and never says anything."""
    silent = threading.Event()
    with ExitStack() as taken, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = taken.enter_context(listening.accept()[0])
                    if not silent.is_set():
                        connection.recv(1 << 16)
                        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        port = listening.getsockname()[1]
        yield f"s3://bucket?endpoint=http://127.0.0.1:{port}&allow_http=true&timeout=30s", silent.set
        listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def file_that_never_opens(directory: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Somebody holds a lease on it, and does not give it back when the kernel asks for it: 45 s."""
    path = directory / "kvpact" / FIRST
    with ExitStack() as held:

        def block() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"somebody's")
            file = held.enter_context(path.open("r+b"))
            held.callback(signal.signal, signal.SIGIO, signal.signal(signal.SIGIO, signal.SIG_IGN))
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)

        yield f"file://{directory}?timeout=1s", block


@contextmanager
def shared_file_that_never_opens(directory: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """The file server is away: see `process_child.hang_from`."""
    yield f"dir://{directory}?capacity=64MiB", (directory / "hang").touch


@contextmanager
def stopped_redis(directory: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    with redis_server(directory) as server:
        yield f"redis://{server.address}?timeout=30s", server.pause


@contextmanager
def stopped_mooncake(directory: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    with mooncake_pool(directory, 64) as pool:
        yield pool.url(timeout="30s"), lambda: pool.master.send_signal(signal.SIGSTOP)


KINDS = [silent_s3, file_that_never_opens, shared_file_that_never_opens, stopped_redis, stopped_mooncake]


@pytest.mark.parametrize("how", ["closed", "just ended"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_h64_a_process_ends_in_bounded_time_whatever_hangs(
    kind: Callable[[Path], AbstractContextManager[tuple[str, Callable[[], None]]]], how: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    environment = {**os.environ, **CREDENTIALS, "PYTHONPATH": str(Path(kvpact.__file__).parents[1])}
    with kind(place) as (url, hang):
        child = subprocess.Popen(
            [sys.executable, str(CHILD), url, how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            said = [child.stdout.readline().strip()]
            hang()
            child.stdin.write("\n")
            child.stdin.flush()
            said += [child.stdout.readline().strip() for _ in range(2)]
            begun = time.monotonic()
            _, errors = child.communicate(timeout=4 * ENDS_WITHIN_S)
            assert time.monotonic() - begun < ENDS_WITHIN_S
        finally:
            child.kill()
            child.wait()
        assert said[::2] == ["open", "end"], errors
        assert int(said[1].split()[1]) > 0, "nothing hung"
        assert child.returncode == 0, errors
