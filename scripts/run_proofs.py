"""The heavy proofs, `pytest -m proof`: python scripts/run_proofs.py [--minutes MINUTES] [ARGUMENTS FOR PYTEST]

Two lanes take them file by file, each with a core of its own for its engines; then come those that need both cores. A
busy machine must not refuse good work, so the proofs of a file that failed are run once more, with nothing beside them,
and those count as failed that fail again. All runs are printed, and at the end what counts, in pytest's form.

With --minutes no proof begins after that time, in an order of files that each run draws anew. Those that are left are
skipped, each with its place, and a line at the end counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from closing_line import closing_line, good, shown
from in_time import NOT_RUN, UNTIL

SOME_FAILED, NONE_FOUND = 1, 5
"""pytest's exit codes when all tests were run, and when there were none; another one but 0 is no run to judge by."""

LANES = ("-m", "proof and not both_cores", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
ALONE = ("-m", "proof and both_cores")
SLOWEST = ("--durations", "0", "--durations-min", "1")
IN_TIME = ("-p", "in_time", "-rs")

OF_THE_LANES = 0.8
"""The part of the minutes that the lanes have; those that need both cores have the rest."""


class Unjudged(Exception):
    """A run that never came to its end."""


def run_pytest(cache: Path, *arguments: str, until: float | None = None) -> tuple[int, str]:
    """Its exit code and its output, which is printed as it comes. `until`: when no test begins any more."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    environment = dict(os.environ)
    if until is not None:
        command += IN_TIME
        folders = [str(Path(__file__).parent), environment.get("PYTHONPATH")]
        environment |= {UNTIL: str(until), "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            output.append(line)
    return run.returncode, "".join(output)


def run_twice(directory: Path, *arguments: str, until: float | None = None) -> Counter[str]:
    """How many proofs ended how, those that failed after their second run, and how many were left for want of time.

    Raises `Unjudged`.
    """
    code, output = run_pytest(directory / "cache", *SLOWEST, *arguments, until=until)
    closing = closing_line(output)
    if code not in (0, SOME_FAILED, NONE_FOUND) or (closing is None and code != NONE_FOUND):
        raise Unjudged(f"the proofs could not be run to their end: pytest's exit code is {code}")
    counts = closing[0] if closing else Counter[str]()
    counts[NOT_RUN] = sum(map(int, re.findall(rf"^SKIPPED \[(\d+)\] .*: {NOT_RUN}$", output, re.MULTILINE)))
    if code == SOME_FAILED:
        counts["failed"] = counts["error"] = 0
        for proofs in by_file(failed(directory / "cache")):
            print(f"\nonce more, alone: {' '.join(proofs)}", flush=True)
            code, output = run_pytest(directory / "again", "-m", "proof", *proofs)
            again: list[str] = []
            if code == SOME_FAILED and closing_line(output):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="no proof begins after this time")
    asked, for_pytest = parser.parse_known_args(arguments)
    began = time.monotonic()
    now = time.time()
    counts = Counter[str]()
    for lanes, part in ((LANES, OF_THE_LANES), (ALONE, 1.0)):
        until = None if asked.minutes is None else now + 60 * part * asked.minutes
        with tempfile.TemporaryDirectory(prefix="kvpact-proofs-") as directory:
            try:
                counts += run_twice(Path(directory), *lanes, *for_pytest, until=until)
            except Unjudged as error:
                print(f"\n{error}")
                return 1
    del counts["deselected"]  # each run's are the other's
    if counts[NOT_RUN]:
        print(f"\n{NOT_RUN}: {counts[NOT_RUN]} proofs, which are among the skipped")
    print(f"\n{shown(counts, time.monotonic() - began)}")
    return 0 if good(counts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
