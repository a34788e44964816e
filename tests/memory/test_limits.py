"""What the machine and its cgroups leave of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.errors import ConfigError
from kvpact.memory import limits


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (
            "0::/job\n",
            {"job/memory.max": "1000", "job/memory.current": "400", "job/memory.stat": "inactive_file 50"},
            650,
        ),
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "4", "job/memory.stat": ""}, 1 << 20),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "max",
                "a/memory.max": "900",
                "a/memory.current": "100",
                "a/memory.stat": "anon 5",
            },
            800,
        ),
        (
            "4:memory:/seen/outside\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "5000",
                "memory/memory.usage_in_bytes": "6000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1500",
            },
            500,
        ),
        ("3:cpu:/\n", {}, 1 << 20),
    ],
)
def test_the_smallest_of_machine_and_cgroups_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, membership: str, files: dict[str, str], expected: int
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    1024 kB\n")
    (proc / "self/cgroup").write_text(membership)
    for name, content in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(content + "\n")
    monkeypatch.setattr(limits, "PROC", proc)
    monkeypatch.setattr(limits, "CGROUPS", cgroups)
    assert limits.available_memory_bytes() == expected


def test_h129_what_there_is_in_all_is_the_smaller_of_the_machine_and_the_cgroups_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However much of it others hold now: that may pass, and is asked when the arena is made."""
    group = tmp_path / "cgroup" / "job"
    (tmp_path / "proc" / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 1 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job\n")
    for name, text in {"memory.max": "max", "memory.current": "4", "memory.stat": ""}.items():
        (group / name).write_text(text)
    monkeypatch.setattr(limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
    limits.require_possible(4 << 20)
    (group / "memory.max").write_text(str(3 << 20))
    assert limits.total_memory_bytes() == 3 << 20
    limits.require_possible(3 << 19, 2)
    with pytest.raises(ConfigError, match=r"memory=4MiB: .* has 3MiB in all; set `memory` .* such as 1.5MiB"):
        limits.require_possible(4 << 20)
