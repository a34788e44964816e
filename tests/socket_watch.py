"""Sees, or forbids, every use of the network that Python code of kvpact makes, through the interpreter's audit events.

What an engine does itself (its own sockets between its processes) is not looked at: an event counts if code of the
package is on the stack.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
import traceback
from pathlib import Path

import kvpact

PACKAGE = str(Path(kvpact.__file__).parent)
DRIVER = str(Path(PACKAGE, "demo"))
"""Starts engines, which open their own sockets under it."""
EVENTS = ("socket.", "urllib.", "http.", "ftplib.", "smtplib.")


def watch(record: Path) -> None:
    """Append a line to `record` for each use of the network by kvpact, in this process, from now on."""

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if _uses_network(event, arguments) and _is_ours():
            with record.open("a") as file:
                file.write(f"{os.getpid()} {event} {arguments!r}\n" + "".join(traceback.format_stack(limit=8)))

    sys.addaudithook(look)


def forbid() -> None:
    """Let any use of the network in this process, by whomever, fail from now on."""

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if _uses_network(event, arguments):
            raise PermissionError(f"the network is not to be used: {event} {arguments!r}")

    sys.addaudithook(look)


def _is_ours() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.startswith(DRIVER):
            return True
        frame = frame.f_back
    return False


def _uses_network(event: str, arguments: tuple[object, ...]) -> bool:
    """Making a socket sends nothing yet, and a unix socket never leaves the machine."""
    if not event.startswith(EVENTS) or event == "socket.__new__":
        return False
    first = arguments[0] if arguments else None
    return not (isinstance(first, socket.socket) and first.family == socket.AF_UNIX)
