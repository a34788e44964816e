"""The heavy proofs, `pytest -m proof`: python scripts/run_proofs.py [ARGUMENTS FOR PYTEST]

A busy machine must not refuse good work, so a proof that failed is run once more, alone in a pytest of its own, and
counts as failed only if it fails again. Both runs are printed, and at the end what counts, in pytest's form.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from closing_line import closing_line, good, shown

SOME_FAILED = 1
"""pytest's exit code when all tests were run; what is neither this nor 0 is no run that could be judged."""


def run_pytest(cache: Path, *arguments: str) -> tuple[int, tuple[Counter[str], float] | None]:
    """Its exit code and its closing line, None if it never came to that. Prints the output as it comes."""
    command = [sys.executable, "-m", "pytest", "-m", "proof", "-o", f"cache_dir={cache}", *arguments]
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            output.append(line)
    return run.returncode, closing_line("".join(output))


def main(arguments: list[str]) -> int:
    """Run them all, and those that failed again."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvpact-proofs-") as directory:
        cache = Path(directory, "cache")
        code, closing = run_pytest(cache, "--durations", "0", "--durations-min", "1", *arguments)
        if code not in (0, SOME_FAILED) or closing is None:
            print(f"\nthe proofs could not be run to their end: pytest's exit code is {code}")
            return 1
        counts, _ = closing
        if code == SOME_FAILED:
            counts["failed"] = counts["error"] = 0
            for proof in json.loads((cache / "v/cache/lastfailed").read_text()):
                print(f"\nonce more, alone: {proof}", flush=True)
                code, closing = run_pytest(Path(directory, "again"), proof)
                counts["passed" if code == 0 and closing else "failed"] += 1
    print(f"\n{shown(counts, time.monotonic() - began)}")
    return 0 if good(counts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
