"""What a client of a shared store leaves behind when it is killed, and what it opens to others while it lives.

Real servers of each kind, and a process of its own for the client.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from shared_client import BLOCKS, chain, load, open_client, store

from polling import until
from servers.mooncake_server import mooncake_pool
from servers.object_server import CREDENTIALS, object_server
from servers.redis_server import redis_cluster, redis_server

KINDS = ("dir", "redis", "redis+cluster", "s3", "mooncake")
LEASE_S = 15.0
"""Mooncake keeps what was read for 10 s by default, whatever became of the reader."""


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where an empty store of each kind is."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    if request.param == "dir":
        (tmp_path / "shared").mkdir()
        yield f"dir://{tmp_path}/shared?capacity=1GiB"
    elif request.param == "redis":
        with redis_server(tmp_path) as server:
            yield f"redis://{server.address}?timeout=8s"
    elif request.param == "redis+cluster":
        with redis_cluster(tmp_path) as servers:
            yield f"redis+cluster://{servers[0].address}?timeout=8s"
    elif request.param == "s3":
        with object_server() as server:
            yield f"s3://bucket/clients?endpoint={server.endpoint}&allow_http=true&timeout=8s"
    else:
        with mooncake_pool(tmp_path, 256) as pool:
            yield pool.url("clients", timeout="8s")


@contextmanager
def client(url: str) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own that is in the middle of reading and writing; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("shared_client.py"), url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses at which a process takes connections."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(link))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                address, _, port = local.partition(":")
                words = bytes.fromhex(address)
                packed = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
                found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def test_h12_nothing_that_a_killed_client_held_is_in_anybodys_way(url: str) -> None:
    with closing(open_client(url)) as other:
        for moment in (0.0, 0.5):
            with client(url) as process:
                time.sleep(moment)
                process.kill()
                process.wait()
            assert load(other, 0) == BLOCKS, "what was stored is not there any more"
            for seed in range(1, 8):
                load(other, seed)  # whole or a miss, never half
            until(
                lambda: not (store(other, 3) < BLOCKS or load(other, 3) < BLOCKS),
                LEASE_S,
                what="what the killed client wrote cannot be written by anybody else",
            )
        other.delete(chain(0))
        assert not any(other.lookup(chain(0))), "what the killed client read cannot be deleted"
        other.clear()
        assert not any(any(other.lookup(chain(seed))) for seed in range(8))


def test_h81_a_client_takes_connections_from_this_machine_only_or_says_so(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Mooncake's own transfer engine listens on all interfaces and cannot be told otherwise: the operator is told."""
    with client(url) as process:
        open_to_others = [place for place in listening(process.pid) if not ipaddress.ip_address(place[0]).is_loopback]
    open_client(url).close()
    assert bool(open_to_others) == url.startswith("mooncake://")
    assert bool(open_to_others) == any("on all interfaces" in message for message in caplog.messages)


def test_the_listening_sockets_of_a_process_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("0.0.0.0", 0)) as far:
        found = listening(os.getpid())
        assert near.getsockname() in found
        assert far.getsockname() in found
