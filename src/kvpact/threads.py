"""Background threads that avoid the CPUs on which the engine computes.

Owns the start of kvpact's threads that move bytes; never touches the engine's own threads or their affinity. Engines
that compute on CPUs pin the thread that calls a connector, a new thread inherits that pin, and copies would then take
turns with the forward pass that should hide them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

COMM_BYTES = 15
"""Bytes of a thread's name that the kernel keeps."""

LOW_PRIORITY = 5
"""Nice value of background threads: 335 of 1024 shares of a CPU."""

_thread = threading.local()
"""`is_background` is set in threads that `start_background` started."""


def spare_cpus() -> frozenset[int]:
    """CPUs that this process may use but the calling thread may not; empty if the caller is not pinned.

    Empty for a background thread too: it runs on the spare CPUs already, and the engine uses the others.

    A pinned thread no longer knows its earlier limit, so the parent process and the other threads are read: a limit
    that the user put on the launching process is kept.
    """
    if getattr(_thread, "is_background", False):
        return frozenset()
    allowed: set[int] = set()
    for task in (os.getppid(), *_threads_of_this_process()):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            allowed |= os.sched_getaffinity(task)
    with contextlib.suppress(OSError):  # a container that does not say
        return frozenset(allowed - os.sched_getaffinity(0))
    return frozenset()


def start_background(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread running `target` on the spare CPUs, or wherever the caller runs if there are none."""
    cpus = spare_cpus()

    def run() -> None:
        _show_name(name)
        _thread.is_background = True
        with contextlib.suppress(OSError):  # a cpuset may forbid it; the thread then stays where it is
            if cpus:
                os.sched_setaffinity(0, cpus)
        try:
            target()
        except Exception:
            logger.exception("kvpact: the thread %s ended with an error; its work stops until a restart", name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def give_way() -> None:
    """Lower the calling thread's priority: it gets a third of the CPU time of a normal thread on the same CPU.

    Not less, because other threads wait for its locks, such as the interpreter's or those on pages that the kernel
    collapses. At the lowest priority, 1.5 percent, copies stopped for seconds on a busy machine.
    """
    with contextlib.suppress(OSError):  # a container may forbid it; the thread then keeps its priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)


def _show_name(name: str) -> None:
    """Set the calling thread's name in the kernel: 15 characters in `top -H` and /proc/*/task/*/comm.

    Python does this from 3.14 on. A new thread has its creator's name until it sets another.
    """
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_bytes(name.encode()[:COMM_BYTES])


def _threads_of_this_process() -> list[int]:
    try:
        return [int(task) for task in os.listdir("/proc/self/task")]
    except OSError:
        return []
