"""The heavy proofs, `pytest -m proof`: python scripts/run_proofs.py [ARGUMENTS FOR PYTEST]

Two lanes take them file by file, each with a core of its own for its engines; then come those that need both cores. A
busy machine must not refuse good work, so the proofs of a file that failed are run once more, with nothing beside them,
and those count as failed that fail again. All runs are printed, and at the end what counts, in pytest's form.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from closing_line import closing_line, good, shown

SOME_FAILED, NONE_FOUND = 1, 5
"""pytest's exit codes when all tests were run, and when there were none; another one but 0 is no run to judge by."""

LANES = ("-m", "proof and not both_cores", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
ALONE = ("-m", "proof and both_cores")
SLOWEST = ("--durations", "0", "--durations-min", "1")


class Unjudged(Exception):
    """A run that never came to its end."""


def run_pytest(cache: Path, *arguments: str) -> tuple[int, tuple[Counter[str], float] | None]:
    """Its exit code and its closing line, None if it never came to that. Prints the output as it comes."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            output.append(line)
    return run.returncode, closing_line("".join(output))


def run_twice(directory: Path, *arguments: str) -> Counter[str]:
    """How many proofs ended how, those that failed after their second run. Raises `Unjudged`."""
    code, closing = run_pytest(directory / "cache", *SLOWEST, *arguments)
    if code not in (0, SOME_FAILED, NONE_FOUND) or (closing is None and code != NONE_FOUND):
        raise Unjudged(f"the proofs could not be run to their end: pytest's exit code is {code}")
    counts = closing[0] if closing else Counter[str]()
    if code == SOME_FAILED:
        counts["failed"] = counts["error"] = 0
        for proofs in by_file(failed(directory / "cache")):
            print(f"\nonce more, alone: {' '.join(proofs)}", flush=True)
            code, closing = run_pytest(directory / "again", "-m", "proof", *proofs)
            again: list[str] = []
            if code == SOME_FAILED and closing:
                again = failed(directory / "again")
            elif code:
                again = proofs
            counts["failed"] += len(set(proofs).intersection(again))
            counts["passed"] += len(set(proofs).difference(again))
    return counts


def failed(cache: Path) -> list[str]:
    """The names of the proofs that failed in the runs with this cache."""
    names: list[str] = sorted(json.loads((cache / "v/cache/lastfailed").read_text()))
    if not names:
        raise Unjudged("pytest says that a proof failed, but not which")
    return names


def by_file(proofs: list[str]) -> Iterator[list[str]]:
    """The names, sorted, file by file."""
    for _, found in groupby(proofs, key=lambda name: name.partition("::")[0]):
        yield list(found)


def main(arguments: list[str]) -> int:
    """Run them all, and those that failed again."""
    began = time.monotonic()
    counts = Counter[str]()
    for lanes in (LANES, ALONE):
        with tempfile.TemporaryDirectory(prefix="kvpact-proofs-") as directory:
            try:
                counts += run_twice(Path(directory), *lanes, *arguments)
            except Unjudged as error:
                print(f"\n{error}")
                return 1
    del counts["deselected"]  # each run's are the other's
    print(f"\n{shown(counts, time.monotonic() - began)}")
    return 0 if good(counts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
