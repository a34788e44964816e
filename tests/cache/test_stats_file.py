"""The counts of several engines of one configuration: each has a file of its own, found again by who reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpact.cache import stats_file
from kvpact.cache.stats_file import StatsFile, stats_files


def counts_in(directory: Path) -> dict[str, float]:
    return {path.name: json.loads(path.read_text())["lookups"] for path in directory.glob("*.json")}


@pytest.mark.parametrize("replica", [0, 1])
def test_each_engine_of_one_configuration_keeps_its_own_counts(
    replica: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`replica` 1 is the second of a server's two engines; 0 the one of a second server."""
    monkeypatch.setattr(stats_file, "TRIES", 2)
    path = tmp_path / "stats.json"
    first, second = StatsFile(path), StatsFile(path, *([replica] if replica else []))
    first.offer({"lookups": 1.0})
    while not path.exists():
        pass
    second.close({"lookups": 2.0})
    first.close({"lookups": 3.0})
    assert counts_in(tmp_path) == {"stats.json": 3.0, "stats-1.json": 2.0}
    assert stats_files(path) == [path, tmp_path / "stats-1.json"]
    StatsFile(path).close({"lookups": 4.0})
    assert counts_in(tmp_path)["stats.json"] == 4.0, "what ended engines had is had by the next ones"


def test_engines_that_live_are_shown_without_those_that_were_killed(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    StatsFile(path, 2).close({"lookups": 2.0})
    (tmp_path / "stats-x.json").write_text("{}")
    assert stats_files(path) == [tmp_path / "stats-2.json"]
    use = "import sys, pathlib; from kvpact.cache.stats_file import StatsFile; "
    use += "file = StatsFile(pathlib.Path(sys.argv[1]), 1); file.offer({}); print('up', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", use, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    while not (tmp_path / "stats-1.json").exists():
        assert child.poll() is None
    assert stats_files(path) == [tmp_path / "stats-1.json"]
    child.kill()
    child.communicate()
    assert stats_files(path) == [tmp_path / "stats-1.json", tmp_path / "stats-2.json"]
    assert stats_files(tmp_path / "none" / "stats.json") == [tmp_path / "none" / "stats.json"]
