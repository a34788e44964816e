"""Memory nodes near devices, and requests for pages from there.

Owns two of the kernel's calls and the nodes' files in /sys; knows no segments. With one node, and for devices without a
known node, there is nothing to ask for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")

MPOL_PREFERRED: Final = 1
"""Mode: take pages from this node, or from another one if it has none left."""

MPOL_F_ADDR: Final = 2

SYSCALLS: Final = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Machine -> numbers of mbind and get_mempolicy; libc has no function for them."""

_WORD_BITS: Final = ctypes.sizeof(ctypes.c_ulong) * 8
_WORDS: Final = 1024 // _WORD_BITS
"""Words of a mask with a bit for each node that Linux can have."""


def near_node(pci_bus_id: str) -> int | None:
    """Memory node of a PCI device ("0000:65:00.0"); None if the machine has only one, or it is unknown."""
    node = -1
    with contextlib.suppress(OSError, ValueError):
        if (SYS / "devices/system/node/online").read_text().strip() != "0":
            node = int((SYS / "bus/pci/devices" / pci_bus_id / "numa_node").read_text())
    return node if node >= 0 else None


def prefer(node: int, address: int, num_bytes: int) -> None:
    """Take pages of this range from `node` from now on, while it has some.

    The range is whole memory pages. For shared memory this holds for every mapping of the file. Raises OSError where
    the kernel has no such call, or a container forbids it.
    """
    mask = (ctypes.c_ulong * _WORDS)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    _call(0, address, num_bytes, MPOL_PREFERRED, mask, _WORDS * _WORD_BITS + 1, 0)


def preferred(address: int) -> int | None:
    """Node preferred for pages at an address; None if there is no preference. Raises OSError."""
    mode = ctypes.c_int()
    mask = (ctypes.c_ulong * _WORDS)()
    _call(1, ctypes.byref(mode), mask, _WORDS * _WORD_BITS + 1, address, MPOL_F_ADDR)
    nodes = [bit for bit in range(_WORDS * _WORD_BITS) if mask[bit // _WORD_BITS] >> bit % _WORD_BITS & 1]
    return nodes[0] if mode.value == MPOL_PREFERRED and nodes else None


def _call(which: int, *arguments: object) -> None:
    numbers = SYSCALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"the number of this call is not known for {platform.machine()}")
    typed = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(numbers[which]), *typed):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
