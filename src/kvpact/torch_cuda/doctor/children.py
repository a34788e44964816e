"""Trials in a process of their own, because they may end the device's context, the process, or never end.

Owns the child's start and its end; each of its results is a line of JSON as soon as it is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from kvpact.torch_cuda.doctor.bench import Bench
from kvpact.torch_cuda.doctor.hazards import captures, long_batches, spans
from kvpact.torch_cuda.doctor.workspace import Amounts

SECONDS: Final = 60.0
"""A child that takes longer hangs."""

KILLED_SECONDS: Final = 5.0
"""A killed process may be stuck in the driver; it is left there."""

TRIALS: Final[dict[str, Callable[[Bench, Amounts], Iterator[dict[str, Any]]]]] = {
    "spans": spans,
    "long_batches": long_batches,
    "captures": captures,
}


def run_trial(name: str, bench: Bench, amounts: Amounts) -> None:
    """In the child: print each result."""
    for row in TRIALS[name](bench, amounts):
        print(json.dumps(row), flush=True)


def child_results(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Start `python command` and take its results; "end" says how it ended: "ok", "hung", or its exit status."""
    child = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        output, errors = child.communicate(timeout=seconds)
        end = "ok" if child.returncode == 0 else f"exit status {child.returncode}"
    except subprocess.TimeoutExpired:
        child.kill()
        output = errors = ""
        with suppress(subprocess.TimeoutExpired):
            output, errors = child.communicate(timeout=KILLED_SECONDS)
        end = "hung"
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {"end": end, "rows": rows, "error": errors.strip()[-500:] or None if end != "ok" else None}
