"""An engine of a few parts, as a process of its own, that meets others: index, memory of its ranks, socket, meeting.

`MeetingEngine` is the process as a test has it; what it is asked to do, one line of JSON each, `Parts` does there.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

from kvpact.cache.memory import EngineKV, index_of
from kvpact.cache.mounted import attach_all
from kvpact.cache.status_socket import StatusSocket
from kvpact.errors import KvpactError
from kvpact.identity.groups import one_group
from kvpact.identity.keys import Namespace
from kvpact.index.neighbour import Lease
from kvpact.index.row_locks import MEMFD as LEASES
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.neighbour_slots import NeighbourSlots
from kvpact.pool.meeting import Meeting
from kvpact.pool.neighbours import Neighbours, OtherEngine
from kvpact.pool.own_memory import OwnMemory
from kvpact.wire import WorkerHandshake, encode

PAGE: Final = 4096


def keys_of(prompt: str, blocks: int) -> list[bytes]:
    """Keys of a prompt, equal in each process."""
    return [blake2b(f"{prompt} {block}".encode(), digest_size=32).digest() for block in range(blocks)]


def allow(process: int, descriptors: int | None) -> None:
    """Let a process open so many more descriptors; None: as many as may ever be."""
    _, most = resource.prlimit(process, resource.RLIMIT_NOFILE)
    free = (number for number in count() if not os.path.lexists(f"/proc/{process}/fd/{number}"))
    limit = most if descriptors is None else next(islice(free, descriptors, None))
    resource.prlimit(process, resource.RLIMIT_NOFILE, (limit, most))


def content(key: bytes, rank: int) -> bytes:
    """The bytes of a rank's piece of a block."""
    return blake2b(key + bytes([rank])).digest()


@dataclass
class Parts:
    """Engine in this process."""

    options: dict[str, Any]
    asked: socket.socket
    """Connection on which it is asked."""
    leases: list[tuple[OtherEngine, Lease]] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        ranks = options.get("ranks", 1)
        form = options.get("slots", 64), options.get("bytes", PAGE)
        self.segments = [ArenaSegment.create(*form) for _ in range(ranks)]
        hellos = [WorkerHandshake(rank, segment.address()) for rank, segment in enumerate(self.segments)]
        arena, _ = attach_all(hellos)
        self.neighbours = Neighbours()
        namespace = Namespace({"model": options.get("model", "one")}).digest
        self.index = index_of(arena, EngineKV(namespace, one_group(4), neighbours=self.neighbours))

        def weights(stopped: Callable[[], bool]) -> str:
            if "weights_file" in options:
                return Path(options["weights_file"]).read_text()
            if "weights" in options and options["weights"] is None:
                raise KvpactError("the weights come from anywhere")
            return str(options.get("weights", "equal"))

        self.own = OwnMemory(self.index, arena, hellos, namespace, weights)
        self.meeting = Meeting(self.own, self.neighbours) if options.get("pool", True) else None
        self.status = StatusSocket(lambda: b"status", self.meeting)

    # What can be asked

    def save(self, prompt: str, blocks: int) -> int:
        keys = keys_of(prompt, blocks)
        reservation = self.index.reserve(keys, 0, blocks)
        assert reservation is not None
        for key, slot in zip(keys, reservation.slots, strict=True):
            for rank, segment in enumerate(self.segments):
                data = content(key, rank)
                segment.slot_view(slot)[: len(data)] = data
        self.index.complete(reservation.slots)
        return len(reservation.slots)

    def met(self) -> list[int]:
        return sorted(int(engine.name.split("-")[0]) for engine in self.neighbours.current())

    def facts(self) -> list[dict[str, Any]]:
        return [
            {"slots": one.slots, "bytes": one.num_bytes, "node": one.node, "ranks": len(one.segments)}
            for one in self.neighbours.current()
        ]

    def question(self) -> str:
        """Question of an engine like this one, in hexadecimal; it has no name yet."""
        return encode(self.own.question("")).hex()

    def lease(self, prompt: str, blocks: int) -> int:
        """Blocks leased from the first engine that has any; all their bytes are compared."""
        keys = keys_of(prompt, blocks)
        for engine in self.neighbours.current():
            if (lease := engine.index.lease(keys)) is not None:
                self.leases.append((engine, lease))
                return self.compare(prompt)
        return 0

    def compare(self, prompt: str) -> int:
        """Blocks of the last lease that are right on all ranks, or -1 if one is wrong."""
        engine, lease = self.leases[-1]
        keys = keys_of(prompt, len(lease.slots))
        for rank, address in enumerate(engine.segments):
            with open(f"/proc/{address.pid}/fd/{address.descriptor}", "rb") as file:
                found = os.fstat(file.fileno())
                assert (found.st_dev, found.st_ino) == (address.device, address.inode)
                with closing(NeighbourSlots(file.fileno(), address.classes)) as slots:
                    for key, slot in zip(keys, lease.slots, strict=True):
                        data = content(key, rank)
                        with slots.slot_view(slot) as view:
                            if bytes(view[: len(data)]) != data:
                                return -1
        return len(lease.slots)

    def release(self) -> int:
        while self.leases:
            engine, lease = self.leases.pop()
            engine.index.release(lease)
        return 0

    def most(self) -> int:
        """Rows that may be leased of the first neighbour in one go."""
        for engine in self.neighbours.current()[:1]:
            lease = engine.index.lease(keys_of("long", 1000))
            if lease is not None:
                engine.index.release(lease)
                return len(lease.slots)
        return 0

    def waiting(self) -> int:
        self.index.claim_again()
        return self.index.waiting_slots

    def fill(self) -> int:
        """Save other prompts until each slot was used again, but for those that are leased."""
        index = self.index
        for turn in range(8):
            count = index.reservable(wanted=index.num_slots // 2)
            keys = keys_of(f"fill {turn} {time.monotonic()}", count)
            reservation = index.reserve(keys, 0, count)
            if reservation is not None:
                for slot in reservation.slots:
                    self.segments[0].slot_view(slot)[:PAGE] = bytes(PAGE)
                index.complete(reservation.slots)
        return index.waiting_slots

    def reset(self) -> int:
        self.neighbours.reset()
        return 0

    def end_step(self) -> int:
        """Make good for a reset, as `NeighbourBlocks.end_step`."""
        if self.neighbours.owes_reset:
            self.neighbours.reset()
        return 0

    def descriptors(self) -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def threads(self) -> list[str]:
        return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]

    def is_sealed(self) -> bool:
        again = os.open(f"/proc/self/fd/{self.segments[0].descriptor}", os.O_RDWR)
        try:
            os.pwrite(again, b"x", 0)
        except PermissionError:
            return True
        finally:
            os.close(again)
        return False

    def lock_files(self) -> list[int]:
        """Inodes of this engine's lock file and those of its neighbours."""
        open_files = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return [path.stat().st_ino for path in open_files if path.exists() and LEASES in os.readlink(path)]

    def claims(self) -> bool:
        columns = self.index.columns
        return columns is not None and columns.claims is not None

    def fork(self) -> int:
        """A child that outlives this process, until it is killed; returns its process id."""
        child = os.fork()
        if not child:
            os.close(self.asked.fileno())
            time.sleep(60)
            os._exit(0)
        return child

    def close(self) -> int:
        if self.meeting is not None:
            self.meeting.close()
        self.status.close()
        return 0


def live(connection: socket.socket) -> None:
    """Be an engine: do what comes on the connection, line by line."""
    with connection.makefile("rw") as lines:
        options = json.loads(lines.readline())
        os.environ["XDG_RUNTIME_DIR"] = options["folder"]
        logging.basicConfig(level=logging.DEBUG, filename=options["log"], format="%(message)s")
        parts = Parts(options, connection)
        print(os.getpid(), file=lines, flush=True)
        for line in lines:
            name, *arguments = json.loads(line)
            print(json.dumps(getattr(parts, name)(*arguments)), file=lines, flush=True)


def serve(listener: socket.socket) -> None:
    """Fork an engine for each connection: none has to load all modules anew."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive a test that fails
            try:
                live(connection)
            finally:
                os._exit(0)
        connection.close()


class Host:
    """A process that starts engines. `where` stands before its command, as of a namespace of its own."""

    def __init__(self, folder: Path, where: Sequence[str] = ()) -> None:
        self.path = folder / f"host-{time.monotonic_ns()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen()
            self.process = subprocess.Popen(
                [*where, sys.executable, "-m", "meeting_engine", str(listener.fileno())],
                cwd=Path(__file__).parent,
                pass_fds=[listener.fileno()],
            )

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class MeetingEngine:
    """An engine of a `Host`."""

    def __init__(self, host: Host, folder: Path, **options: Any) -> None:
        self.log = folder / f"log-{time.monotonic_ns()}"
        (folder / "run").mkdir(exist_ok=True)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(host.path))
        self._lines = self._connection.makefile("rw")
        self.pid = self._say({**options, "folder": str(folder / "run"), "log": str(self.log)})
        """Process id by which others know it."""

    def _say(self, said: object) -> Any:
        print(json.dumps(said), file=self._lines, flush=True)
        return json.loads(self._lines.readline() or f'"ended, see {self.log}"')

    def ask(self, name: str, *arguments: Any) -> Any:
        """Answer of a method of `Parts`."""
        return self._say([name, *arguments])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def allow(self, descriptors: int | None) -> None:
        """Let it open so many more descriptors; None: as many as it likes."""
        allow(self.pid, descriptors)

    def kill(self) -> None:
        """`kill -9`, if it is there."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
            while True:
                os.kill(self.pid, 0)
                time.sleep(0.002)

    def close(self) -> None:
        """Let it end by itself, if it lives."""
        with suppress(OSError):
            self._lines.close()
        self._connection.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
