"""The machine around a GPU: its bus, its NUMA nodes, and limits of this process. Reads files, and calls nothing."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any, Final

GENERATIONS: Final = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""GT/s of a lane -> generation of PCI Express."""

ROOT: Final = Path("/")


def machine_facts(pci_bus_id: str, root: Path = ROOT) -> dict[str, Any]:
    """What is known of the device's place; None for what this machine does not say."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "pci_bus_id": pci_bus_id,
        "nvidia_driver": nvidia_release(root),
        **link(pci_bus_id, root),
        "device_numa_node": _number(root / f"sys/bus/pci/devices/{pci_bus_id}/numa_node"),
        "process_numa_nodes": numa_nodes(os.sched_getaffinity(0), root),
        "memlock_limit_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "linux": os.uname().release,
        "cpus": os.cpu_count(),
        "cpu": next(iter(re.findall(r"^model name\s*: (.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)), None),
        "huge_pages": _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or None,
        "huge_pages_of_memfds": _text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled") or None,
    }


def link(pci_bus_id: str, root: Path = ROOT) -> dict[str, int | None]:
    """The device's link now, which may sleep while nothing is copied, and at most."""
    folder = root / "sys/bus/pci/devices" / pci_bus_id
    found: dict[str, int | None] = {}
    for name, when in (("current", "now"), ("max", "most")):
        speed = re.match(r"([\d.]+) GT/s", _text(folder / f"{name}_link_speed"))
        found[f"link_generation_{when}"] = GENERATIONS.get(float(speed[1])) if speed else None
        found[f"link_lanes_{when}"] = _number(folder / f"{name}_link_width")
    return found


def nvidia_release(root: Path = ROOT) -> str | None:
    """The release of NVIDIA's kernel module, such as "580.65.06"."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    return found[1] if found else None


def numa_nodes(cpus: set[int], root: Path = ROOT) -> list[int]:
    """The NUMA nodes that have one of these CPUs."""
    nodes = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        parts = [part.split("-") for part in _text(folder / "cpulist").split(",") if part]
        if any(int(part[0]) <= cpu <= int(part[-1]) for part in parts for cpu in cpus):
            nodes.append(int(folder.name.removeprefix("node")))
    return sorted(nodes)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None
