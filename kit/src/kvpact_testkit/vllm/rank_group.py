"""vLLM's process groups, played for ranks that are all in one thread.

Owns what a rank's group answers; no rank waits for another.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvpact_testkit.results import NotObservable


class CollectiveNotPossible(NotObservable):
    """A connector's worker half uses a collective, which is not possible with all ranks in one thread."""


class RankGroup:
    """A rank's process group, as far as connectors ask for ranks.

    Collectives of more than one rank are refused, but what the first rank tells the others, as ranks begin in order.
    """

    _told: ClassVar[list[Any]] = []
    """What the first rank told the others; empty when the last of them has heard it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = world_size
        self.ranks = list(range(world_size))
        self.first_rank, self.last_rank = 0, world_size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == world_size - 1

    def broadcast_object(self, told: Any = None, src: int = 0) -> Any:
        """Return what the first rank tells all ranks, like vLLM. CollectiveNotPossible if that is not told yet."""
        if self.world_size == 1:
            return told
        if self.is_first_rank:
            self._told[:] = [told]
        if src or not self._told:
            raise CollectiveNotPossible("the connector tells other ranks something before they are there")
        return self._told.pop() if self.is_last_rank else self._told[0]

    def __getattr__(self, name: str) -> Any:
        if self.world_size > 1:
            raise CollectiveNotPossible(
                f"the connector uses `{name}` of its rank's process group, which needs ranks of their own"
            )
        raise AttributeError(name)
