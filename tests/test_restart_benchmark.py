"""What `python -m benchmarks restart` does to stores, and what stands in its rows. No engine runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from select import select

import pytest

from stalled_disk import can_stall, stalled_disk

pytest.importorskip("vllm")

from benchmarks.e2e_runs import Warm
from benchmarks.restart import Readings, row
from benchmarks.restart_stores import flip_bits

from kvpact_testkit.compare.stores import disk_bytes


def test_the_same_share_of_bits_is_flipped_in_every_store(tmp_path: Path) -> None:
    sizes = {"one": 1 << 20, "two/small": 1 << 12, "two/large": 3 << 20}
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    flips = flip_bits(tmp_path, 1e-5)
    assert flips == round(sum(sizes.values()) * 8 * 1e-5)
    found = {name: sum(map(int.bit_count, (tmp_path / name).read_bytes())) for name in sizes}
    assert sum(found.values()) == flips
    assert found["two/large"] > found["one"] > found["two/small"]
    assert {name: (tmp_path / name).stat().st_size for name in sizes} == sizes
    assert disk_bytes(tmp_path) >= sum(sizes.values())
    assert flip_bits(tmp_path / "nowhere", 1e-5) == disk_bytes(tmp_path / "nowhere") == 0


@pytest.mark.skipif(not can_stall(), reason="takes root and a control group for disks")
def test_a_stalled_disk_answers_nobody_until_it_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    read = "input(); print('begun', flush=True); print(len(open(sys.argv[1], 'rb').read()), flush=True)"
    command = [sys.executable, "-c", f"import sys; {read}", str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        with stalled_disk(tmp_path, [reader.pid]):
            reader.stdin.write(b"\n")
            assert reader.stdout.readline() == b"begun\n"
            assert select([reader.stdout], [], [], 1.0)[0] == []
        assert reader.stdout.readline() == b"1048576\n"
    os.close(descriptor)


def warm(ttft_ms: float, cached_tokens: int, verdict: str = "") -> Warm:
    return Warm(ttft_ms, 50.0, cached_tokens, verdict)


def test_a_store_that_was_lost_has_the_times_of_the_first_round_alone() -> None:
    first, later = [warm(1000.0, 0), warm(1200.0, 0)], [warm(100.0, 512), warm(100.0, 512)]
    lost = row("it", 512, Readings(first=first, restart=[*first, *later], cached=later), [40.0], None)
    assert (lost["hits"], lost["restart_over_local"], lost["readings"]) == (0.0, 22.0, 2)
    assert "page_cache_over_local" not in lost
    kept = row("it", 512, Readings(first=later, restart=[*later, warm(150.0, 512)], cached=later), [40.0], None)
    assert (kept["hits"], kept["restart_over_local"], kept["page_cache_over_local"]) == (1.0, 2.0, 2.0)
    assert (kept["restart_p50_ms"], kept["restart_p99_ms"], kept["over_enough"]) == (100.0, 149.0, 2.5)
    assert kept["answers"] == "equal"


def test_a_row_has_wrong_answers_failed_requests_and_bytes_against_the_bound() -> None:
    readings = [warm(100.0, 512), warm(100.0, 512, "other tokens")]
    found = Readings([90.0], [60.0], first=readings, restart=readings, bytes_on_disk=3 << 20, wrong=2, failed=4)
    shown = row("it", 512, found, [50.0], 4 << 20)
    assert shown["cold_over"] == 1.5
    assert (shown["wrong"], shown["failed"], shown["disk_mib"], shown["bound_mib"]) == (2, 4, 3, 4)
    assert shown["answers"] == "1 of 2: other tokens"
