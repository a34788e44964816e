"""Memory nodes near devices, and requests for pages from there.

Owns one of the kernel's calls and the nodes' files in /sys; knows no segments. With one node, and for devices without a
known node, there is nothing to ask for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")

MPOL_PREFERRED: Final = 1
"""Mode: take pages from this node, or from another one if it has none left."""

MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""Machine -> number of mbind; libc has no function for it."""

GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
"""Machine -> number of get_mempolicy."""

MPOL_F_ADDR: Final = 2
"""Flag: the mode of an address is asked for."""

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
    size, mode, bits, flags = map(ctypes.c_ulong, (num_bytes, MPOL_PREFERRED, _WORDS * _WORD_BITS + 1, 0))
    _call(MBIND, ctypes.c_ulong(address), size, mode, mask, bits, flags)


def preferred_node(address: int) -> int | None:
    """Node that `prefer` was called with for this address of shared memory, in any process; None if it was not."""
    mask = (ctypes.c_ulong * _WORDS)()
    mode = ctypes.c_int()
    bits, where, flags = map(ctypes.c_ulong, (_WORDS * _WORD_BITS + 1, address, MPOL_F_ADDR))
    with contextlib.suppress(OSError):  # the kernel has no such call, or a container forbids it
        _call(GET_MEMPOLICY, ctypes.byref(mode), mask, bits, where, flags)
    nodes = (at * _WORD_BITS + word.bit_length() - 1 for at, word in enumerate(mask) if word)
    return next(nodes, None) if mode.value == MPOL_PREFERRED else None


def _call(numbers: Mapping[str, int], *arguments: object) -> None:
    """Call the kernel. Raises OSError."""
    number = numbers.get(platform.machine())
    if number is None:
        raise OSError(f"the number of this call is not known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(number), *arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
