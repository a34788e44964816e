"""Records of the last requests, for `kvpact why`: lookups, plans and tokens of each.

Owns the records, of which there are at most `RECORDS`, and sums over all prompts. Whoever learns something of a
request writes it into its record; nothing here decides anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvpact.cache.lookup import Availability
from kvpact.cache.plan import Plan
from kvpact.errors import NAME_CHARS, kept_id, printable
from kvpact.metrics import EndReason, MissReason

RECORDS: Final = 256
"""Requests that have a record: about 100 KB, and at most 2 MB where clients choose long ids."""


def name_of(request_id: str) -> str:
    """A request's id as it is shown to people."""
    shown = request_id[:NAME_CHARS]
    return shown if shown.isascii() else printable(shown)


class RequestRecord(msgspec.Struct, gc=False):
    """One request. Tokens are sums over its plans that have ended; the other facts are those of the last look-up."""

    request_id: str = ""
    arrived_at: float = 0.0
    """Seconds on the cache's clock."""
    prompt_tokens: int = 0
    engine_tokens: int = 0
    """Tokens that the engine had itself when it first ran."""
    looked_up_from: int = -1
    """The first block that was looked up; -1 if none was."""
    found: Availability | None = None
    """Where its blocks were before any was read for it."""
    miss: MissReason | None = None
    """Reason why nothing was promised."""
    belief: str = ""
    """Belief about a tier that was not asked, or failed, and may have had it."""
    blocks: tuple[int, int] = (0, 0)
    """First block, and the one after the last, of its last plan that has ended."""
    plans: int = 0
    ended: EndReason | None = None
    """Reason for the end of its last plan."""
    promised_tokens: int = 0
    committed_tokens: int = 0
    loaded_tokens: int = 0
    used_tokens: int = 0
    used_again_tokens: int = 0
    saved_blocks: int = 0
    hints: dict[str, str] = {}
    """Outcomes of its client's hints, by name."""
    neighbours: tuple[str, ...] = ()
    """Other engines of this host from whose memory it loads, or has loaded."""

    def note_neighbour(self, name: str) -> None:
        """A load begins from another engine's memory."""
        if name not in self.neighbours:
            self.neighbours = (*self.neighbours, name)


class Prompts(msgspec.Struct):
    """Sums over the prompts that the engine has begun to compute."""

    requests: int = 0
    tokens: int = 0
    engine_tokens: int = 0
    used_tokens: int = 0
    """Tokens that the cache supplied, as the ledger counts them."""


class Records:
    """The last requests, by `kept_id`, the oldest first. Written by the scheduler's thread, read by any."""

    def __init__(self, clock: Callable[[], float], most: int = RECORDS) -> None:
        self._most = most
        self._clock = clock
        self._by_id: OrderedDict[str, RequestRecord] = OrderedDict()
        self.prompts = Prompts()

    def all(self) -> list[RequestRecord]:
        """All records; the list is the caller's."""
        return list(self._by_id.values())

    def begin(self, request_id: str, prompt_tokens: int) -> RequestRecord:
        """A request arrives."""
        kept = kept_id(request_id)
        self._by_id.pop(kept, None)
        record = self._by_id[kept] = RequestRecord(name_of(request_id), self._clock(), prompt_tokens)
        if len(self._by_id) > self._most:
            self._by_id.popitem(last=False)
        return record

    def note_ended(self, plan: Plan[Any, Any]) -> None:
        """A plan has ended, and its used tokens are known."""
        record = self._by_id.get(kept_id(plan.request_id))
        if record is not None:
            record.plans += 1
            start = plan.blocks.start
            record.blocks = start, start + plan.blocks.count
            record.ended = plan.reason
            record.promised_tokens += plan.promised_tokens
            record.committed_tokens += plan.committed_tokens
            record.loaded_tokens += plan.loaded_tokens
            record.used_tokens += plan.used_tokens
            record.used_again_tokens += plan.used_again_tokens

    def note_saved(self, request_id: str, blocks: int) -> None:
        """Blocks that the request has computed are stored."""
        record = self._by_id.get(kept_id(request_id))
        if record is not None:
            record.saved_blocks += blocks

    def note_begun(self, record: RequestRecord) -> None:
        """The engine computes the request for the first time."""
        self.prompts.requests += 1
        self.prompts.tokens += record.prompt_tokens
        self.prompts.engine_tokens += record.engine_tokens
