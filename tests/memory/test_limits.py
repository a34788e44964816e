"""What the machine and its cgroups leave of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

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
