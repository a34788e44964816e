"""Mapping of a memory file, and the ids by which a process knows that it can open another one's."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from kvpact.memory.prefault import HUGE_BYTES

MAP_FIXED = 0x10
"""Flag of mmap, equal on all Linux architectures of vLLM; Python's mmap does not name it."""


def map_aligned(descriptor: int, size: int) -> tuple[mmap.mmap, int]:
    """Map a file; returns the mapping and the offset in it where the first `size` bytes are aligned for huge pages.

    The file has `HUGE_BYTES` more, a hole that takes no memory. Raises OSError.
    """
    mapping = mmap.mmap(descriptor, size + HUGE_BYTES)
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -base % HUGE_BYTES
    if start:  # Python's mmap cannot choose the address, so map the file again, inside our own mapping
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        flags = mmap.MAP_SHARED | MAP_FIXED
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(base + start, size, access, flags, descriptor, 0) != base + start:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapping, start


def boot_id() -> str:
    """Id of this host and its boot; "" if the host has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Namespace of process ids of this process; "" if the host has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
