"""An S3 API server on a free loopback port, and in front of it a proxy that counts requests and spoils answers."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, ClassVar

STARTS_WITHIN_S = 60.0
_HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "keep-alive", "expect")

ACCESS_KEY = "AKIAKVPACTTESTS00000"
SECRET_KEY = "never-in-any-message/kvpact"

CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked."""

    method: str
    path: str
    range: str
    """Such as "bytes=0-99"; "" for all."""


@dataclass(frozen=True, slots=True)
class Spoiled:
    """What becomes of an answer."""

    status: int = 0
    """Instead of asking the server, answer with this status."""
    code: str = ""
    """The error's name in that answer."""
    delay_s: float = 0.0
    part: float = 1.0
    """The part of the body that is sent before the connection is cut."""


Spoil = Callable[[Request], Spoiled | None]


@dataclass
class Traffic:
    """What went through the proxy, and what is to become of what goes."""

    port: int
    """Of the server behind the proxy."""
    endpoint: str
    """The proxy's URL."""
    server: str
    """The server's own URL, past the proxy."""
    requests: list[Request] = field(default_factory=list)
    answered_bytes: int = 0
    """In the bodies of all answers."""
    spoil: Spoil = field(default=lambda request: None)
    ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def spoiled(self, spoil: Spoil) -> Iterator[None]:
        self.spoil = spoil
        try:
            yield
        finally:
            self.spoil = lambda request: None

    @contextmanager
    def counted(self) -> Iterator[list[Request]]:
        """The requests that are made within."""
        begin = len(self.requests)
        seen: list[Request] = []
        yield seen
        seen.extend(self.requests[begin:])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    traffic: ClassVar[Traffic]

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client has given up
            self.close_connection = True

    def _serve(self) -> None:
        request = Request(self.command, self.path, self.headers.get("Range", ""))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.traffic.requests.append(request)
        spoiled = self.traffic.spoil(request) or Spoiled()
        if spoiled.delay_s and self.traffic.ended.wait(spoiled.delay_s):
            return
        if spoiled.status:
            # As S3 does: the answer to wrong credentials repeats them.
            text = f"<Error><Code>{spoiled.code}</Code><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId></Error>".encode()
            self._answer(spoiled.status, {"Content-Type": "application/xml"}, text, 1.0)
            return
        server = http.client.HTTPConnection("127.0.0.1", self.traffic.port, timeout=STARTS_WITHIN_S)
        try:
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            headers = {name: text for name, text in answer.getheaders() if name.lower() not in _HOP_BY_HOP}
            self._answer(answer.status, headers, answer.read(), spoiled.part)
        finally:
            server.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, part: float) -> None:
        self.traffic.answered_bytes += len(body)
        self.send_response_only(status)
        for name, text in headers.items():
            self.send_header(name, text)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if part < 1:
            self.close_connection = True
        self.wfile.write(body[: int(len(body) * part)])

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def object_server(tls: tuple[Path, str, str] | None = None) -> Iterator[Traffic]:
    """A server with an empty bucket named "bucket", behind the proxy.

    With `tls`, the files of an authority's certificate and of the server's own and its key, only past the proxy.
    """
    port = _free_port()
    said = tempfile.TemporaryFile()  # noqa: SIM115  # no pipe: nobody reads it, and the server would wait
    words = ["-c", tls[1], "-k", tls[2]] if tls else []
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), *words], stdout=said, stderr=said
    )
    own = f"http{'s' if tls else ''}://127.0.0.1:{port}"

    class Handler(_Handler):
        """Of this server."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    traffic = Handler.traffic = Traffic(port, f"http://127.0.0.1:{proxy.server_address[1]}", own)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), name="object-proxy", daemon=True)
    try:
        _create_bucket(server, port, said, tls[0] if tls else None)
        thread.start()
        yield traffic
    finally:
        traffic.ended.set()
        if thread.is_alive():
            proxy.shutdown()
            thread.join()
        proxy.server_close()
        server.kill()
        server.wait()
        said.close()


def _create_bucket(server: subprocess.Popen[bytes], port: int, said: IO[bytes], authority: Path | None) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        if server.poll() is not None:
            said.seek(0)
            raise RuntimeError(f"moto's S3 server does not start; pip install 'moto[server]': {said.read()[-500:]!r}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        if authority is not None:
            trusted = ssl.create_default_context(cafile=authority)
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=trusted)
        try:
            connection.request("PUT", "/bucket")
            connection.getresponse().read()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        finally:
            connection.close()
