"""The other engines of this host whose memory this one may load from, as the scheduler's thread sees them.

Owns the list. The thread of `kvpact.pool.meeting` replaces it whole, so a look at it waits for nothing and takes no
lock. An engine leaves the list as soon as its connection has ended; its mapping and descriptors stay until the last
reference to its `OtherEngine` is gone: who leases there keeps one until every copy from its slots has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from kvpact.index.neighbour import Neighbour
from kvpact.memory.arena import SegmentAddress


@dataclass(eq=False)
class OtherEngine:
    """One engine that was met."""

    name: str
    """Label of the engine, for people: the name of its socket."""
    index: Neighbour
    """Table of that engine, and this engine's leases there; for the scheduler's thread."""
    segments: tuple[SegmentAddress, ...]
    """For each rank, the segment with the slots of the same rank there. This process has the descriptors: its ranks
    open and check them as those of each other, but for reading (`kvpact.memory.neighbour_slots`)."""
    node: int | None
    """Memory node of its slots; None if they may be on any, or the host has one."""
    slots: int
    """Number of its slots; of extents where there are several classes."""
    num_bytes: int
    """Bytes of its slots, over all ranks."""
    gone: bool = False
    """True once its connection has ended: it is asked for nothing any more."""


class Neighbours:
    """Engines that were met and are not gone."""

    def __init__(self) -> None:
        self._met: tuple[OtherEngine, ...] = ()
        self._begin_anew: Callable[[], None] | None = None
        self.owes_reset = False
        """True if the last `reset` had no descriptor or memory for a new table: nobody uses this engine's memory until
        another call succeeds, which the next step's end makes."""

    def current(self) -> tuple[OtherEngine, ...]:
        """All of them, those on this engine's memory node first."""
        return self._met

    def reset(self) -> None:
        """Let no other engine use what it has found in this one's memory; all that met it meet it anew.

        For the scheduler's thread; waits for nobody.
        """
        if self._begin_anew is not None:
            self._begin_anew()

    def on_reset(self, begin_anew: Callable[[], None]) -> None:
        """Call `begin_anew` at each reset from now on. By the meeting."""
        self._begin_anew = begin_anew

    def enter(self, engine: OtherEngine, let_go: Callable[[], None], *, is_near: bool) -> None:
        """Add an engine; `let_go` is called, on any thread, once nothing refers to it any more. By the meeting."""
        weakref.finalize(engine, let_go).atexit = False
        self._met = (engine, *self._met) if is_near else (*self._met, engine)

    def leave(self, engine: OtherEngine) -> None:
        """Remove an engine whose connection has ended. By the meeting."""
        engine.gone = True
        self._met = tuple(one for one in self._met if one is not engine)
