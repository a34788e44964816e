"""The unix socket on which an engine answers people of its own user, and how its callers find it.

Owns the place of the sockets, who may use them and the thread that answers. A caller connects, says that it asks
nothing, reads one document and is served no more; whatever it does costs the engine no step. Who asks something is
another engine, for the meeting of the engines of this host. A socket that cannot be made costs one line in the log.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

from kvpact.errors import reason_of
from kvpact.index.row_locks import close_in_children
from kvpact.own_files import OWN_FOLDER, PRIVATE, NotOurs, OwnFolder
from kvpact.pool.meeting import REFUSAL, Meeting
from kvpact.threads import start_background
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

CLIENT_SECONDS: Final = 2.0
"""Seconds that a caller may take to ask, and to read; one of an older release says nothing, and is answered then."""

MOST_ASKED_BYTES: Final = 1 << 16
"""Most bytes of a question."""

ANSWER_SECONDS: Final = 10.0
"""Seconds that an engine may take to answer: its thread waits while the engine's own holds the interpreter."""

MOST_ASKED: Final = 16
"""Engines that are asked at once."""

RETRY_SECONDS: Final = 0.2

CLOSE_SECONDS: Final = 1.0
"""Seconds that a shutdown waits at most for the thread."""


NO_PLACE: Final = "no folder is there for temporary files; set XDG_RUNTIME_DIR to one that this user may write"


def places() -> list[tuple[Path, str]]:
    """Where sockets may be, the best place first: a folder of this user's own, by its parent and its name."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [(Path(runtime), OWN_FOLDER)] if os.path.isdir(runtime) else []
    with suppress(OSError):  # on a root that is read-only there may be no folder for temporary files
        found.append((Path(tempfile.gettempdir()), f"{OWN_FOLDER}-{os.geteuid()}"))
    return found


class StatusSocket:
    """Answers every caller with what `tell` returns, on a thread of its own; other engines meet by `meeting`."""

    def __init__(self, tell: Callable[[], bytes], meeting: Meeting | None = None) -> None:
        self._tell = tell
        self._meeting = meeting
        self._told = LogOnce(logger)
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._closed = threading.Event()
        self._thread = start_background("kvpact-status", self._run)

    def close(self) -> None:
        """Remove the socket and end the thread."""
        with self._lock:
            self._closed.set()
            if self._listener is not None:
                with suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        refused = NO_PLACE
        for parent, name in places():
            try:
                with OwnFolder.make(parent, PRIVATE, name) as folder:
                    for path in _sockets_in(folder):
                        _ask(path, 0.0)  # those of dead engines go
                    self._listen(folder)
                return
            except (OSError, NotOurs) as error:
                refused = reason_of(error)
        nor = ", and its memory is its own alone" if self._meeting is not None else ""
        logger.warning("kvpact: `kvpact status` cannot find this engine%s: no socket can be made: %s", nor, refused)

    def _listen(self, folder: OwnFolder) -> None:
        """Answer callers until the end. The socket gets its name once it listens: before, it would look dead."""
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        hidden = folder.held / f".{name}"
        path = folder.held / f"{name}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ExitStack() as made:
            listener.bind(str(hidden))
            made.callback(hidden.unlink, missing_ok=True)
            os.chmod(hidden, 0o600)
            listener.listen()
            os.rename(hidden, path)
            made.callback(path.unlink, missing_ok=True)
            close_in_children(listener)  # what a forked child keeps open would look alive
            if self._meeting is not None:
                self._meeting.begin(name, partial(_sockets_in, folder))
            with self._lock:
                self._listener = listener
            while not self._closed.is_set():
                try:
                    self._answer(listener.accept()[0])
                except OSError:  # the end, a caller that has left, or no descriptor is free
                    self._closed.wait(RETRY_SECONDS)

    def _answer(self, caller: socket.socket) -> None:
        caller.settimeout(CLIENT_SECONDS)
        question = b""
        with suppress(OSError):
            question = caller.recv(MOST_ASKED_BYTES)
        if question and self._meeting is not None:
            self._meeting.hear(caller, question)
            return
        with caller:
            try:
                caller.sendall(REFUSAL if question else self._tell())
            except OSError:
                pass  # it has left, or does not read
            except Exception as error:
                self._told.log("tell", logging.WARNING, "kvpact: cannot send the status: %s", reason_of(error))


def answers() -> list[tuple[str, bytes]]:
    """Answers of all live engines of this user, each with the path of its socket; sockets of dead engines are removed.

    One that does not answer in time says b"". All are asked at once.
    """
    found: list[tuple[str, bytes]] = []
    for parent, name in places():
        with suppress(OSError, NotOurs), OwnFolder.again(parent, PRIVATE, name) as folder:
            paths = _sockets_in(folder)
            with ThreadPoolExecutor(MOST_ASKED) as threads:
                replies = [*threads.map(partial(_ask, seconds=ANSWER_SECONDS), paths)]
            names = (str(folder.path / path.name) for path in paths)
            found += [(name, said) for name, said in zip(names, replies, strict=True) if said is not None]
    return found


def _sockets_in(folder: OwnFolder) -> list[Path]:
    """Sockets of engines, alive or dead. Raises OSError, which `Path.glob` hides in some releases of Python."""
    paths = [folder.held / name for name in sorted(os.listdir(folder.held)) if name.endswith(".sock")]
    return [path for path in paths if path.is_socket()]


def _ask(path: Path, seconds: float) -> bytes | None:
    """Answer of an engine within `seconds`, or b""; None, and its socket is removed, if it has ended.

    To connect takes no time: the socket has a place for it, or refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(seconds)
        try:
            asked.connect(str(path))
            asked.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: asked.recv(1 << 16), b"")) if seconds else b""
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        except OSError as error:
            logger.debug("kvpact: %s: %s", path, reason_of(error))
            return b""
