"""What an engine's prompts cost its processes: CPU seconds and page faults, kvpact's apart from the prompt's.

Owns the folder of hook times, which `measured_hooks.py` writes within the engine and a `Meter` reads outside.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvpact_testkit.demo.cpu_time import ENDED, Look, computed, look_at
from kvpact_testkit.demo.engine import EngineProcess
from kvpact_testkit.demo.phases import settle

FOLDER = "KVPACT_HOOK_TIMES"
"""The environment variable that names the folder."""

SECONDS = struct.Struct("d")
"""The content of each file."""

PARTS = {
    "kvpact-prefault": "pages",
    "kvpact-save": "copies",
    "kvpact-load": "copies",
    "kvpact-disk": "disk",
    "kvpact-stats": "counts",
}
"""The beginning of a thread's name -> what it is for."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One cold prompt: seconds to its first token, CPU seconds, and minor page faults of the worker's own threads.

    `pages_at_rest` is CPU seconds for pages taken after the answer, `taken_mib` how much memory the arena took in all,
    `parts` are kvpact's other CPU seconds by what they were spent on.
    """

    first_token: float
    prompt_cpu: float
    worker_faults: int
    kvpact_faults: int
    pages_at_rest: float
    taken_mib: float
    parts: dict[str, float]

    @property
    def kvpact_cpu(self) -> float:
        """All of kvpact's CPU seconds but those for pages at rest."""
        return sum(self.parts.values())


class Meter:
    """One engine and what its threads have used."""

    def __init__(self, engine: EngineProcess, hook_times: Path | None) -> None:
        self.engine, self._hook_times = engine, hook_times

    def _looks(self) -> dict[int, Look]:
        return look_at(self.engine.processes())

    def _arena_mib(self) -> float:
        """What the arenas of all ranks have of the machine."""
        blocks = 0
        for pid in (pid for pid, name in self.engine.processes().items() if "Worker" in name):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    if "memfd:kvpact-arena" in os.readlink(descriptor):
                        blocks += descriptor.stat().st_blocks
        return blocks * 512 / (1 << 20)

    def _hooks(self) -> dict[str, float]:
        if self._hook_times is None:
            return {}
        files = {file.name.partition("-")[0]: file.read_bytes() for file in self._hook_times.iterdir()}
        return {f"hooks, {half}": SECONDS.unpack(content)[0] for half, content in files.items()}

    def ask(self, asked: Sequence[Sequence[int]]) -> Iterator[Cost]:
        """The cost of each prompt, of which one token is wanted; with several, all but the last are not waited for."""
        hooks, arena, before = self._hooks(), self._arena_mib(), self._looks()
        for number, prompt in enumerate(asked):
            (output,) = self.engine.generate([prompt], max_tokens=1)
            answered = self._looks()
            if output.cached_tokens:
                raise RuntimeError(f"{output.cached_tokens} tokens of a cold prompt came from a cache")
            rested = answered
            if number + 1 == len(asked):
                settle(self.engine)
                rested = self._looks()
            now, arena_now = self._hooks(), self._arena_mib()
            parts, faults = _kvpact_parts(before, rested)
            at_rest = _kvpact_parts(answered, rested)[0].get("pages", 0.0)
            parts["pages"] -= at_rest
            parts.update({name: now[name] - hooks[name] for name in now})
            workers = [look.since(before[pid]) for pid, look in answered.items() if look.computes]
            yield Cost(
                first_token=output.first_token_seconds,
                prompt_cpu=computed(before, answered),
                worker_faults=sum(
                    count for use in workers for name, count in use.minor_faults.items() if "kvpact" not in name
                ),
                kvpact_faults=faults,
                pages_at_rest=at_rest,
                taken_mib=arena_now - arena,
                parts=dict(parts) if self._hook_times is not None else {},
            )
            hooks, arena, before = now, arena_now, rested


def _kvpact_parts(before: dict[int, Look], after: dict[int, Look]) -> tuple[dict[str, float], int]:
    parts: defaultdict[str, float] = defaultdict(float)
    faults = 0
    for pid, look in after.items():
        use = look.since(before[pid])
        for name, seconds in use.cpu_seconds.items():
            if name.startswith("kvpact"):
                what = next((what for start, what in PARTS.items() if name.startswith(start)), name)
                parts[what] += seconds
        parts[ENDED] += use.cpu_seconds[ENDED]
        faults += sum(count for name, count in use.minor_faults.items() if name.startswith("kvpact"))
    return parts, faults
