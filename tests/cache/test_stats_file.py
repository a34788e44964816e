"""The statuses of several engines of one configuration: each has a file of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpact.cache import stats_file
from kvpact.cache.stats_file import StatsFile
from kvpact.cache.status import EngineStatus, status_document


def counted(lookups: float) -> EngineStatus:
    return EngineStatus(pid=1, model="a/model", block_size=16, metrics={"lookups": lookups})


def counts_in(directory: Path) -> dict[str, float]:
    files = {path.name: json.loads(path.read_text()) for path in directory.glob("*.json")}
    return {name: file["engines"][0]["metrics"]["lookups"] for name, file in files.items()}


@pytest.mark.parametrize("replica", [0, 1])
def test_each_engine_of_one_configuration_keeps_its_own_counts(
    replica: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`replica` 1 is the second of a server's two engines; 0 the one of a second server."""
    monkeypatch.setattr(stats_file, "TRIES", 2)
    path = tmp_path / "stats.json"
    first, second = StatsFile(path), StatsFile(path, *([replica] if replica else []))
    first.offer(counted(1.0))
    while not path.exists():
        pass
    second.close(counted(2.0))
    first.close(counted(3.0))
    assert counts_in(tmp_path) == {"stats.json": 3.0, "stats-1.json": 2.0}
    assert json.loads(path.read_text()) == json.loads(json.dumps(status_document([counted(3.0)])))
    StatsFile(path).close(counted(4.0))
    assert counts_in(tmp_path)["stats.json"] == 4.0, "what ended engines had is had by the next ones"


def test_a_killed_engine_leaves_its_file_to_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    use = "import sys, pathlib; from kvpact.cache.stats_file import StatsFile; "
    use += "from kvpact.cache.status import EngineStatus; "
    use += "status = EngineStatus(pid=1, model='m', block_size=16, metrics={'lookups': 1}); "
    use += "StatsFile(pathlib.Path(sys.argv[1])).offer(status); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", use, path], stdin=subprocess.PIPE)
    while not path.exists():
        assert child.poll() is None
    child.kill()
    child.communicate()
    StatsFile(path).close(counted(2.0))
    assert counts_in(tmp_path) == {"stats.json": 2.0}
