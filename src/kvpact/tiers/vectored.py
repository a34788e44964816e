"""Complete reads and writes of several pieces of memory at one offset of a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

VectoredCall: TypeAlias = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""

_IOV_MAX: Final = 1024


def completely(call: VectoredCall, descriptor: int, views: list[memoryview], offset: int) -> int:
    """Repeat `call` until all of `views` are moved or the file ends; return the bytes moved. Consumes `views`."""
    moved = 0
    views.reverse()
    while views:
        count = call(descriptor, views[: -_IOV_MAX - 1 : -1], offset + moved)
        if count == 0:
            break
        moved += count
        while views and count >= views[-1].nbytes:
            count -= views.pop().nbytes
        if count:
            views[-1] = views[-1][count:]
    return moved
