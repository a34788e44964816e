"""What others wrote into a store is shown by kvpact's commands, and never acts on the terminal that shows it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpact.errors import printable
from kvpact.identity.keys import Namespace
from kvpact.tiers.registry import open_store
from kvpact.tiers.urls import parse_tier_url
from servers.object_server import CREDENTIALS, object_server
from servers.redis_server import redis_server

KVPACT = Path(sys.executable).with_name("kvpact")
ACTS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys, or what changes how the rest of a line looks."""

CLEARS, TITLE, TURNS = "\x1b[2J\x1b[1;1H", "\x1b]0;mine\x07", "\u202edneirf\u202c"
LINE = "\nkvpact: all is well"
KEY = "ab" * 32


def kvpact(*arguments: object) -> tuple[str, int]:
    """What the command prints, on both streams, and how many lines that is."""
    done = subprocess.run([KVPACT, *map(str, arguments)], capture_output=True, timeout=60)
    said = (done.stdout + done.stderr).decode("utf-8", "surrogateescape")
    assert "Traceback" not in said, said
    return said, said.count("\n")


def require_harmless(said: str, planted: str) -> None:
    assert not ACTS.search(said), ascii(said)
    assert "\nkvpact: all is well" not in said
    assert planted in said, f"the text is there to be seen: {said!a}"


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, object_server() as traffic:
        for name, text in CREDENTIALS.items():
            patch.setenv(name, text)
        yield f"s3://bucket/planted?endpoint={traffic.server}&allow_http=true&timeout=20s"


@pytest.fixture(params=["dir", "file", "redis", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        with redis_server(tmp_path / "redis") as server:
            yield f"redis://{server.address}?timeout=20s"
    elif request.param == "s3":
        yield request.getfixturevalue("s3_url")
    else:
        (tmp_path / "store").mkdir()
        yield f"{request.param}://{tmp_path}/store" + ("?capacity=1GiB" if request.param == "dir" else "")


def test_h87_what_a_store_holds_does_not_act_on_the_terminal(place: str) -> None:
    """Names of groups, fields of a namespace, reasons: in tables, in errors, in JSON."""
    url = parse_tier_url(place)
    evil = f"{'' if url.scheme in ('s3', 'file') else CLEARS}{TURNS}"  # such an object's name cannot be written
    model = Namespace({"model": f"{TITLE}{LINE}{TURNS}{CLEARS}"})
    group = f"{model.name}{evil}"
    store = open_store(url)
    store.write([f"{group}/{KEY}"], [[b"no record " * 40]])
    store.write([f"{group}/namespace"], [[model.describe().encode()]])
    store.close()
    command: tuple[str, ...]
    for command in (("inspect",), ("verify",), ("gc", "--yes", "--namespace", "nothing-of-it")):
        said, lines = kvpact(*command, place)
        require_harmless(said, "\\u202e")
        assert lines <= 4, said
    assert "\\x1b]0;mine\\x07\\nkvpact" in kvpact("inspect", place)[0]
    for command in (("inspect", "--json"), ("verify", "--json")):
        require_harmless(kvpact(*command, place)[0], "\\u202e")


def test_h87_names_of_files_do_not_act_on_the_terminal(tmp_path: Path) -> None:
    for name in (f"{CLEARS}{TURNS}", "\udcff\udcfe"):
        place = tmp_path / f"cache{name}"
        (place / "kvpact").mkdir(parents=True)
        for folder in (place, place / "kvpact"):
            (folder / f"a{name}.slab").write_bytes(f"{CLEARS}no slab".encode() * 9)
        for command in (("inspect",), ("verify",), ("gc", "--yes", "--namespace", "nothing-of-it")):
            require_harmless(kvpact(*command, place)[0], ascii(name)[1:-1])
    said, _ = kvpact("tiers", f"disk://{tmp_path}/cache{CLEARS}{TURNS}/not/there?capacity=1GiB")
    require_harmless(said, "there is no directory")


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A server that says this to whatever it is asked; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    while connection.recv(1 << 16):
                        connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_h87_what_a_server_answers_does_not_act_on_the_terminal() -> None:
    with answering(f"-ERR {CLEARS}{TURNS}\r\n".encode()) as port:
        for command in ("inspect", "verify", "tiers"):
            said, _ = kvpact(command, f"redis://127.0.0.1:{port}/0?timeout=5s")
            require_harmless(said, "\\x1b[2J")


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界", "a backslash \\ and [bold]"])
def test_h87_text_that_can_be_read_stays_as_it_is(text: str) -> None:
    assert printable(text) == text
