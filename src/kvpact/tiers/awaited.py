"""Opens tiers, each on a thread of its own, and tries those again that cannot be used yet, or not any more.

Owns the opening of a tier of any kind and its first look-up: a server that is not up, a path that is not mounted and a
missing right cost it a pause, never the engine's life. And the reopening after its place was lost: a folder that is
removed, replaced or mounted over costs its content.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from functools import partial
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

LOOK_SECONDS: Final = 2.0
"""Seconds between two looks at the place of a tier in use, and between its loss and a new opening: until then the other
engines have closed what they held open there, and old and new together stay within the capacity."""

_ASKED: Final = (bytes(32),)
"""The key of no block."""


class AwaitedTier(Tier):
    """Stands for a tier that cannot be used, and refuses everything; once opened, `there` is the tier to use instead.

    Before that a kind that another package adds counts as shared. Whoever uses `there` looks at it again from time to
    time, since it is exchanged when its place is lost.
    """

    def __init__(self, url: TierURL, place: TierContext) -> None:
        """Begin to try."""
        backend = BACKEND_OF.get(url.scheme)
        self.name = kind_of(url.scheme)
        self.exclusive = backend is not None and not backend.shared
        self.url = url
        self.there: Tier | None = None
        self.reason = "it has not answered yet"
        """Why the last try failed, or the tier in use was lost."""
        self.is_given_up = False
        """True once the opening has failed for a reason that a person must correct: it is not tried again."""
        self.tried = threading.Event()
        """Set after the first try."""
        self._place = place
        self._closed = threading.Event()
        start_background("kvpact-open-tier", self._open)

    def _open(self) -> None:
        tier = None
        said = LogOnce(logger)
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
        elif tier is not None and tier is self.there:
            start_background("kvpact-watch-tier", partial(_watch_until_lost, weakref.ref(self), tier, self._closed))

    def replace(self, lost: Tier, why: str) -> None:
        """Stop using a tier that is `lost`, and open it anew once nothing of it is open."""
        self.reason = f"{why}; it is opened anew"
        self.there = None
        logger.warning("kvpact: the tier %s lost its content and is opened anew: %s", self.url, why)
        lost.close()
        while not self._closed.wait(LOOK_SECONDS):
            if lost.released:
                start_background("kvpact-open-tier", self._open)
                break

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TierError(f"{self.url} cannot be used yet: {self.reason}")

    lookup = get = put = delete = clear = _refuse

    def capacity(self) -> TierCapacity:
        return TierCapacity(0, 0, 0)

    def health(self) -> TierHealth:
        return TierHealth(False, self.reason, readable=False)

    def close(self) -> None:
        """Close the tier, if it is open; one that is being opened is closed by the thread that opens it."""
        self._closed.set()
        if self.there is not None:
            self.there.close()


def _watch_until_lost(awaited: weakref.ref[AwaitedTier], tier: Tier, closed: threading.Event) -> None:
    """Look at the place of a tier in use until it is lost, closed or collected."""
    while not closed.wait(LOOK_SECONDS) and awaited() is not None:
        try:
            why = tier.lost()
        except Exception as error:  # another package's, or it is being closed
            logger.debug("kvpact: cannot look at the tier %s: %s", tier.name, error)
            continue
        owner = awaited()
        if why and owner is not None:
            owner.replace(tier, why)
            return


def open_tiers(urls: Sequence[TierURL], place: TierContext, seconds: float) -> list[AwaitedTier]:
    """Open the tiers at these URLs, all at once; wait at most `seconds` for each, which otherwise comes later."""
    tiers = [AwaitedTier(url, place) for url in urls]
    for tier in tiers:
        tier.tried.wait(seconds)
    return tiers
