"""A real Mooncake pool on loopback for tests: one `mooncake_master`, and hosts that lend it memory.

Owns their processes, which end by their pids with the context.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvpact.tiers.urls import host_and_port

START_SECONDS = 20.0


@dataclass
class MooncakePool:
    """Where the pool is, and its processes."""

    port: int
    metrics_port: int
    log: Path
    master: subprocess.Popen[bytes]
    lenders: list[subprocess.Popen[bytes]]
    host: str = "127.0.0.1"

    def url(self, path: str = "", **options: object) -> str:
        """Of this pool, for a client that lends nothing unless told to."""
        settings = {"segment": 0, "buffer": "64MiB", "metrics": self.metrics_port, **options}
        options_text = "&".join(f"{name}={value}" for name, value in settings.items())
        return f"mooncake://{host_and_port(self.host, self.port)}/{path}?{options_text}"

    def lend(self, megabytes: int) -> None:
        """Another host joins, with so much memory."""
        port = free_port()
        settings = {
            "host": "127.0.0.1",
            "port": port,
            "protocol": "tcp",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": host_and_port(self.host, self.port),
            "global_segment_size": f"{megabytes} MB",
            "local_buffer_size": "16 MB",
        }
        self.lenders.append(_start("mooncake_client", self.log, **settings))
        _wait_for("127.0.0.1", port, self.lenders[-1], self.log)

    def restart_master(self) -> None:
        """As after a crash: on the same ports, and it knows nothing."""
        self.master = _master(self.host, self.port, self.metrics_port, self.log)

    def end(self) -> None:
        for process in (*self.lenders, self.master):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


@contextmanager
def mooncake_pool(
    directory: Path, megabytes: int, *, host: str = "127.0.0.1", **settings: object
) -> Iterator[MooncakePool]:
    """A master with these settings of its own, and one host that lends it so much memory."""
    log = directory / "mooncake.log"
    port, metrics_port = free_port(), free_port()
    pool = MooncakePool(port, metrics_port, log, _master(host, port, metrics_port, log, **settings), [], host)
    try:
        if megabytes:
            pool.lend(megabytes)
        yield pool
    finally:
        pool.end()


def _master(host: str, port: int, metrics_port: int, log: Path, **more: object) -> subprocess.Popen[bytes]:
    settings = {
        "rpc_address": host,
        "rpc_port": port,
        "metrics_host": host,
        "metrics_port": metrics_port,
        **more,
    }
    process = _start("mooncake_master", log, **settings)
    _wait_for(host, port, process, log)
    _wait_for(host, metrics_port, process, log)
    return process


def _start(name: str, log: Path, **settings: object) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).parent / name
    assert program.exists(), (
        f"{program} is missing: pip install mooncake-transfer-engine-non-cuda (and apt-get install libibverbs1)"
    )
    arguments = [f"-{setting}={value}" for setting, value in settings.items()]
    with log.open("ab") as output:
        return subprocess.Popen([program, "-logtostderr", *arguments], stdout=output, stderr=output)


def _wait_for(host: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"{process.args!r} does not listen on port {port}: {log.read_text()[-2000:]}")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
