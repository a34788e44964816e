"""Opens tiers, each on a thread of its own, and tries those again that cannot be used yet.

Owns what comes before the first use of a tier of any kind: it is opened and asked once. A server that is not up, a path
that is not mounted and a right that is not given yet cost it a pause, never the engine's life.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from kvpact.errors import NoSuchTier, TierError, reason_of
from kvpact.threads import start_background
from kvpact.tiers.backends import BACKEND_OF, kind_of
from kvpact.tiers.base import Tier, TierCapacity, TierHealth
from kvpact.tiers.breaker import pauses
from kvpact.tiers.log_once import LogOnce
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import TierURL

logger = logging.getLogger(__name__)

_ASKED: Final = (bytes(32),)
"""The key of no block."""


class AwaitedTier(Tier):
    """What a tier is until it can be used: it refuses everything, until `there` is the tier to use in its place.

    Before that a kind that another package adds counts as shared.
    """

    def __init__(self, url: TierURL, place: TierContext) -> None:
        """Begin to try."""
        backend = BACKEND_OF.get(url.scheme)
        self.name = kind_of(url.scheme)
        self.exclusive = backend is not None and not backend.shared
        self.url = url
        self.there: Tier | None = None
        self.reason = "it has not answered yet"
        """Why the last try failed."""
        self.is_given_up = False
        """Whether a person must correct something first, so that it is not tried again."""
        self.tried = threading.Event()
        """Set after the first try."""
        self._place = place
        self._closed = threading.Event()
        start_background("kvpact-open-tier", self._open)

    def _open(self) -> None:
        tier, said = None, LogOnce(logger)
        for pause in pauses():
            try:
                tier = tier or open_tier(self.url, self._place)
                tier.lookup(_ASKED)
                if not (health := tier.health()).readable:
                    raise TierError(health.reason)
                self.there = tier
                break
            except BaseException as error:  # of another package, in whatever language, or a defect: the thread goes on
                self.is_given_up = isinstance(error, NoSuchTier)
                self.reason = reason_of(error)
                text = "serving without the tier %s" + (": %s" if self.is_given_up else " until it can be used: %s")
                said.log(self.reason, logging.ERROR, f"kvpact: {text}", self.url, self.reason)
            self.tried.set()
            if self.is_given_up or self._closed.wait(pause):
                break
        if self.there is not None and self.tried.is_set():
            logger.warning("kvpact: the tier %s is used from now on", self.url)
        self.tried.set()
        if tier is not None and self._closed.is_set():
            tier.close()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TierError(f"{self.url} cannot be used yet: {self.reason}")

    lookup = get = put = delete = clear = _refuse

    def capacity(self) -> TierCapacity:
        return TierCapacity(0, 0, 0)

    def health(self) -> TierHealth:
        return TierHealth(False, self.reason, readable=False)

    def close(self) -> None:
        """See `Tier`. One that is being opened is closed by the thread that opens it."""
        self._closed.set()
        if self.there is not None:
            self.there.close()


def open_tiers(urls: Sequence[TierURL], place: TierContext, seconds: float) -> list[AwaitedTier]:
    """Open the tiers at these URLs, all at once; each that hangs is waited for `seconds`, and comes later."""
    tiers = [AwaitedTier(url, place) for url in urls]
    for tier in tiers:
        tier.tried.wait(seconds)
    return tiers
