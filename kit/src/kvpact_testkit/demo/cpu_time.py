"""CPU seconds and page faults of an engine's threads, kvpact's threads apart from the engine's.

Owns the reading of /proc. CPU time excludes the time that a busy machine gives to others, which a clock includes. Knows
kvpact's threads by the names they show to the kernel; Python's hooks on the engine's own threads are not seen here.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvpact.memory.prefault import THREAD as TAKES_PAGES

OURS = "kvpact"
"""The prefix of the names of kvpact's threads."""

ENDED = "ended threads"


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread now: the name the kernel shows, CPU seconds and minor page faults since it began."""

    name: str
    cpu_seconds: float
    minor_faults: int


@dataclass(frozen=True, slots=True)
class Use:
    """CPU use between two looks by thread name; all threads that ended are under `ENDED`."""

    cpu_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    minor_faults: Counter[str] = field(default_factory=Counter)

    def of_engine(self) -> float:
        """CPU seconds of the living threads that are not kvpact's."""
        return sum(seconds for name, seconds in self.cpu_seconds.items() if name != ENDED and not name.startswith(OURS))

    def of_kvpact(self) -> float:
        """CPU seconds of kvpact's living threads."""
        return sum(seconds for name, seconds in self.cpu_seconds.items() if name.startswith(OURS))


@dataclass(frozen=True, slots=True)
class Look:
    """The threads of a process at one moment, and the CPU seconds of the whole process, ended threads included."""

    process: str
    """The name that the process gives itself."""
    threads: dict[int, Thread]
    process_cpu_seconds: float

    @classmethod
    def at(cls, pid: int, process: str) -> Look:
        """The process as it is now. Raises OSError if there is none."""
        return cls(process, dict(_threads(pid)), time.clock_gettime(~pid << 3 | _SCHEDULED))

    @property
    def computes(self) -> bool:
        """Whether this is a worker, which computes prompts."""
        return "Worker" in self.process

    def since(self, earlier: Look) -> Use:
        """The use between the two looks."""
        use = Use()
        nothing = Thread("", 0.0, 0)
        for tid, thread in self.threads.items():
            before = earlier.threads.get(tid, nothing)
            use.cpu_seconds[thread.name] += thread.cpu_seconds - before.cpu_seconds
            use.minor_faults[thread.name] += thread.minor_faults - before.minor_faults
        whole = self.process_cpu_seconds - earlier.process_cpu_seconds
        use.cpu_seconds[ENDED] = max(0.0, whole - sum(use.cpu_seconds.values()))
        return use


def look_at(processes: Mapping[int, str]) -> dict[int, Look]:
    """A look at each of an engine's processes that schedule or compute, by process id."""
    return {pid: Look.at(pid, name) for pid, name in processes.items() if "Worker" in name or "EngineCore" in name}


def computed(before: Mapping[int, Look], after: Mapping[int, Look]) -> float:
    """CPU seconds of the workers' own threads between two looks; an engine without workers computes in its core."""
    computing = [pid for pid, look in after.items() if look.computes] or list(after)
    return sum(after[pid].since(before[pid]).of_engine() for pid in computing)


def spent_by_kvpact(before: Mapping[int, Look], after: Mapping[int, Look]) -> float:
    """CPU seconds of kvpact's threads between two looks, in all processes; threads that ended count as kvpact's."""
    uses = [look.since(before[pid]) for pid, look in after.items()]
    return sum(use.of_kvpact() + use.cpu_seconds[ENDED] for use in uses)


def spent_on_pages(before: Mapping[int, Look], after: Mapping[int, Look]) -> float:
    """CPU seconds of the threads that take pages of memory from the machine between two looks, in all processes."""
    return sum(look.since(before[pid]).cpu_seconds[TAKES_PAGES] for pid, look in after.items())


_SCHEDULED = 2
"""CPUCLOCK_SCHED: with `~pid << 3`, the number of a process's CPU clock (clock_getcpuclockid(3)), in nanoseconds."""


def _threads(pid: int) -> Iterator[tuple[int, Thread]]:
    for tid in map(int, os.listdir(f"/proc/{pid}/task")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            task = Path(f"/proc/{pid}/task/{tid}")
            name, _, rest = task.joinpath("stat").read_text().partition("(")[2].rpartition(")")
            nanoseconds = int(task.joinpath("schedstat").read_text().split()[0])
            yield tid, Thread(name, nanoseconds * 1e-9, int(rest.split()[7]))
