"""A TCP proxy on a free loopback port that flips bytes of a server's answers on their way, or holds one up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random

CHUNK_BYTES = 1 << 16
LATER_BYTES = 30_000


@dataclass
class DamagingProxy:
    """What goes through. An answer is what comes from the server after something was asked on its connection."""

    server_port: int
    listener: socket.socket
    share: float = 0.1
    """Of the answers, so many are damaged: one byte of each."""
    holds_up: float = 0.0
    """Seconds for which the next answer is held up; it is 0 afterwards."""
    answers: int = 0
    damaged: int = 0
    chance: Random = field(default_factory=lambda: Random(7))
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server_port))
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                asked = threading.Event()
                for way, answers in (((client, server, asked), False), ((server, client, asked), True)):
                    threading.Thread(
                        target=self._pass_on, args=way, kwargs={"answers": answers}, name="damaging-proxy", daemon=True
                    ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, asked: threading.Event, *, answers: bool) -> None:
        place = None
        """Bytes from here on until the one that is flipped."""
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                if not answers:
                    asked.set()
                elif asked.is_set():
                    asked.clear()
                    time.sleep(self._pause())
                    place = self._place_to_spoil(len(data))
                if place is not None:
                    if place < len(data):
                        data = self._spoilt(data, place)
                    place = place - len(data) if place >= len(data) else None
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _pause(self) -> float:
        """Seconds for which the answer that begins is held up."""
        with self.lock:
            pause, self.holds_up = self.holds_up, 0.0
        return pause

    def _place_to_spoil(self, length: int) -> int | None:
        """Where an answer that begins with so many bytes is damaged: in them, or somewhere behind if it is longer."""
        with self.lock:
            self.answers += 1
            if self.chance.random() >= self.share:
                return None
            return self.chance.randrange(max(length, LATER_BYTES) if self.chance.random() < 0.5 else length)

    def _spoilt(self, data: bytes, place: int) -> bytes:
        with self.lock:
            self.damaged += 1
            return data[:place] + bytes([data[place] ^ self.chance.randrange(1, 256)]) + data[place + 1 :]


@contextmanager
def damaging_proxy(server_port: int) -> Iterator[DamagingProxy]:
    """A proxy in front of a server on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = DamagingProxy(server_port, listener)
        thread = threading.Thread(target=proxy.serve, name="damaging-proxy", daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    thread.join(10.0)
