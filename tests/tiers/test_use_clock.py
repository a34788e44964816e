"""The order of uses among hosts, whatever their clocks say and whatever stands in the file that they go on from."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.own_files import PRIVATE
from kvpact.tiers.use_clock import SharedClock

SECONDS = st.integers(-10 * 365 * 86400, 10 * 365 * 86400)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), SECONDS), min_size=2, max_size=30), st.binary(max_size=9))
def test_h98_each_use_is_after_all_before_it_on_whatever_host(uses: list[tuple[int, int]], left: bytes) -> None:
    """Each of four hosts comes with its own clock, some are set while they run, and one begins anew after each use."""
    right = time.time_ns
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "clock"
        path.write_bytes(left)
        hosts: dict[int, SharedClock] = {}
        told: list[int] = []
        for host, ahead in uses:
            patch.setattr(time, "time_ns", lambda ahead=ahead: right() + ahead * 10**9)
            if host == 0 or host not in hosts:
                hosts[host] = SharedClock(path, PRIVATE)
            told.append(hosts[host].now())
            assert hosts[host].local.now() >= told[-1]
        assert told == sorted(set(told))
        assert max(told).bit_length() <= 63, "a time that file systems can keep"


def test_h98_without_the_file_the_own_clock_goes_on(tmp_path: Path) -> None:
    clock = SharedClock(tmp_path / "missing" / "clock", PRIVATE)
    assert time.time_ns() - 10**9 < clock.now() < clock.now() < time.time_ns() + 10**9
