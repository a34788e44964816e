"""An engine's queues: requests that run, and requests that wait, in the order in which they are served."""

from __future__ import annotations

from bisect import insort
from itertools import count

from kvpact_testkit.engine.request import Request, RequestStatus


class Queues:
    """Running requests in the order of their admission, waiting ones by rank."""

    def __init__(self, *, by_priority: bool) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        """Sorted by `_rank`: by arrival, with `by_priority` by priority first."""
        self._by_priority = by_priority
        self._arrivals = count()

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival = next(self._arrivals)
        self._enqueue(request)

    def resume(self, request: Request, status: RequestStatus = RequestStatus.WAITING) -> None:
        """Put the request back into the queue, as waiting or preempted; it keeps its blocks."""
        request.status = status
        self._enqueue(request)

    def remove(self, request: Request) -> None:
        """Remove the request from the queue in which its status says it is, if any."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is not RequestStatus.WAITING_FOR_LOAD:
            self.waiting.remove(request)

    def least_important(self) -> Request:
        """The running request to preempt first."""
        return max(self.running, key=self._rank) if self._by_priority else self.running[-1]

    def last_holder(self, wanting: Request) -> Request | None:
        """The last waiting request with blocks, if none but `wanting` runs."""
        if any(request is not wanting for request in self.running):
            return None
        holders = (request for request in reversed(self.waiting) if request is not wanting and request.block_ids)
        return next(holders, None)

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=self._rank)

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self._by_priority else 0, request.arrival)
