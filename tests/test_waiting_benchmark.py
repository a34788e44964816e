"""What the benchmark of prompts that wait makes of its runs, and that the disk is held to the speed it is told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.table import percentile
from benchmarks.waiting_load import row

from stalled_disk import can_stall, disk_held_to

RUNS = [
    {"p50": 1.0, "p99": p99, "hits": hits, "failed": 0, "dropped": dropped, "leases": 0}
    for p99, hits, dropped in ((4.0, 0.5, 3), (2.0, 0.25, 0), (3.0, 0.75, 4))
]


def test_a_row_has_medians_of_runs_and_sums_of_what_must_not_be() -> None:
    made = row("kvpact", RUNS, samples=64, first=12.0)
    assert (made["samples"], made["p99_s"], made["hits"], made["over_first"]) == (192, 3.0, 0.5, 0.25)
    assert (made["failed"], made["dropped"], made["leases"]) == (0, 7, 0)
    assert row("first", RUNS, samples=64, first=0.0)["over_first"] == 1.0


def test_the_percentile_of_a_run_is_between_its_values() -> None:
    assert percentile([*range(101)], 99) == 99


READ = """
import os, sys
os.posix_fadvise(file := os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), 0, 0, os.POSIX_FADV_DONTNEED)
import mmap
memory = mmap.mmap(-1, 1 << 20)
while os.readv(file, [memory]):
    pass
"""


@pytest.mark.skipif(not can_stall(), reason="takes root and a control group for disks")
def test_a_disk_is_read_as_slowly_as_it_is_told(tmp_path: Path) -> None:
    """16 MiB at 20 MB/s take 0.8 s, whatever else the machine does."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(16 << 20))
    os.sync()
    with disk_held_to(tmp_path, 20_000_000) as slow:
        command = f"echo $$ > {slow}; exec {sys.executable} -c '{READ}' {file}"
        began = time.monotonic()
        subprocess.run(["sh", "-c", command], check=True)
        assert time.monotonic() - began > 0.7
