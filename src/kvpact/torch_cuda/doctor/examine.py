"""The examination: section after section, each into the file as soon as it is over, then goals and verdicts.

Owns the order of the sections and the document. An error in a section is recorded, and the others go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvpact import __version__
from kvpact.own_files import replace_own
from kvpact.torch_cuda.doctor.bench import Bench
from kvpact.torch_cuda.doctor.beside import beside, computing_thread, start
from kvpact.torch_cuda.doctor.children import SECONDS, TRIALS, child_results
from kvpact.torch_cuda.doctor.facts import machine_facts
from kvpact.torch_cuda.doctor.hazards import order
from kvpact.torch_cuda.doctor.shapes import Shape
from kvpact.torch_cuda.doctor.speed import bandwidth, bus, pinning
from kvpact.torch_cuda.doctor.verdicts import goals, is_sound, verdicts
from kvpact.torch_cuda.doctor.workspace import Amounts

FORMAT: Final = 1
"""Of the document. Keys are added to it, never changed."""

BESIDE_SHAPES: Final = 4
"""Shapes of which loads and saves are run beside a graph."""

MEASURED: Final[dict[str, Callable[[Bench, Amounts, Sequence[Shape]], dict[str, Any]]]] = {
    "pinning": lambda bench, amounts, shapes: pinning(bench, amounts),
    "bus": lambda bench, amounts, shapes: bus(bench, amounts),
    "bandwidth": bandwidth,
    "order": lambda bench, amounts, shapes: order(bench, amounts),
    "start": start,
    "computing_thread": computing_thread,
    "beside": lambda bench, amounts, shapes: beside(bench, amounts, shapes[:BESIDE_SHAPES]),
}
"""Sections that are measured in this process."""

SECTIONS: Final = ("machine", *MEASURED, *TRIALS)
"""In order."""

Child = Callable[[str], dict[str, Any]]
"""A trial's name -> its results, from a process of its own."""


@dataclass(slots=True)
class Examination:
    """One device's examination, and what was found so far."""

    bench: Bench
    amounts: Amounts
    shapes: Sequence[Shape]
    child: Child
    file: Path | None = None
    """Gets the document after each section."""
    told: Callable[[str], None] = lambda line: None
    """Called with a line for people after each section."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, only: Sequence[str] = ()) -> dict[str, Any]:
        """All sections, or some; returns the document."""
        for name in SECTIONS:
            if only and name not in only:
                continue
            began = time.monotonic()
            try:
                self.figures[name] = self._measure(name)
                self.bench.end_section()
            except Exception as error:
                self.figures[name] = {"error": f"{type(error).__name__}: {error}"}
            seconds = time.monotonic() - began
            said = self.figures[name].get("error")
            self.told(f"{name}: {seconds:.1f} s{f', {said}' if said else ''}")
            self._write()
        return self.document()

    def document(self) -> dict[str, Any]:
        """What was found so far, with stable keys; units are in the names."""
        found = verdicts(self.figures)
        return {
            "format": FORMAT,
            "kvpact": __version__,
            "sections": self.figures,
            "goals": [goal.document() for goal in goals(self.figures)],
            "verdicts": [{"level": one.level, "text": one.text} for one in found],
            "sound": is_sound(found),
        }

    def _measure(self, name: str) -> dict[str, Any]:
        if name in TRIALS:
            return self.child(name)
        if name == "machine":
            about = self.bench.about()
            return machine_facts(about["pci_bus_id"]) | about
        return MEASURED[name](self.bench, self.amounts, self.shapes)

    def _write(self) -> None:
        if self.file is not None:
            replace_own(self.file, json.dumps(self.document(), indent=1).encode())


def child_of(arguments: Sequence[str]) -> Child:
    """Trials by `python -m kvpact.torch_cuda.doctor --trial NAME` and these arguments."""
    return lambda name: child_results(["-m", "kvpact.torch_cuda.doctor", "--trial", name, *arguments], SECONDS)
