"""Has the tiers opened as soon as the weights' digest is known: at once, or later on a thread of its own.

Owns the wait for the weights' digest, which may mean reading all of a model's files. Until then the engine serves from
memory. Block keys do not depend on the digest, tiers do, so what memory holds then may be written to them.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Final

from kvpact.config import CANNOT_BE_USED, KvpactConfig
from kvpact.errors import ConfigError
from kvpact.identity.base_weights import SET_MODEL_ID, BaseWeights, cannot_tell
from kvpact.identity.keys import Namespace
from kvpact.identity.weights import ReadingStopped, WeightsUnknown
from kvpact.threads import give_way, start_background
from kvpact.tiers.awaited import open_tiers
from kvpact.tiers.base import RecordMac
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.registry import TierContext, may_be_planted
from kvpact.tiers.urls import tier_labels
from kvpact.units import format_size

logger = logging.getLogger(__name__)

READ_AT_ONCE_BYTES = 256 << 20
"""Bytes of the model's files that are read before the engine answers its first request: 0.2 seconds."""

OPEN_SECONDS = 10.0
"""Most seconds that a start waits for a tier to open; a later one is used as soon as it has been opened."""

SECURITY: Final = "https://github.com/kvpact/kvpact/blob/main/SECURITY.md"
"""Page on the protection of stored KV against other users."""

STOP_SECONDS = 1.0
"""Seconds that a shutdown waits at most for the end of reading; a tier being opened then closes by itself."""


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """Tiers and their namespace; some tiers may still be awaited.

    A tier that a person must correct first is missing, and the log says why; `numbers` are places in the configuration.
    """

    namespace: Namespace
    queues: tuple[TierExecutor, ...]
    numbers: tuple[int, ...]

    def close(self) -> None:
        """Close tiers that were given no operation yet."""
        for queue in self.queues:
            queue.close(0.0)
            queue.tier.close()


@dataclass(eq=False)
class LateTiers:
    """The tiers of one engine. Its public methods are for the scheduler's thread."""

    _config: KvpactConfig
    _seal: RecordMac
    _known: Namespace
    """The namespace without the weights."""
    _slot_bytes: int
    """A block's size over all ranks."""
    _weights: BaseWeights
    _identity: str | None = None
    _opened: OpenTiers | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False
    _thread: threading.Thread | None = None

    def open(self) -> OpenTiers | None:
        """The tiers, if little has to be read for them, and none if there can be none; None if `poll` has them later.

        Raises ConfigError if files that are needed cannot be read, with `require_tiers` if a tier cannot be used, and
        for a `write_queue` that no block fits in.
        """
        self._check_queue()
        required = self._config.require_tiers
        try:
            unread = self._weights.unread_bytes
            identity = self._weights.identity() if required or unread <= READ_AT_ONCE_BYTES else None
        except WeightsUnknown as error:
            if required:
                raise ConfigError(f'"require_tiers": true, and there can be none: {error}; {SET_MODEL_ID}') from None
            return self._do_without(error)
        except OSError as error:
            raise cannot_tell(error) from None
        if identity is not None:
            return self._open_all(identity)
        logger.info(
            "kvpact: tiers start after %.3g GB of weight files are hashed in the background (once; kept for the next "
            "start)",
            unread / 1e9,
        )
        self._thread = start_background("kvpact-late-tiers", self._run)
        return None

    def _check_queue(self) -> None:
        queue = self._config.write_queue
        if self._config.tiers and queue < self._slot_bytes:
            raise ConfigError(
                f'"write_queue": {format_size(queue)} is less than one block of this engine '
                f"({format_size(self._slot_bytes)}), so nothing could be written to the tiers: "
                f'set "{-(-2 * self._slot_bytes >> 20)}MiB" or more'
            )

    def poll(self) -> OpenTiers | None:
        """Tiers that were opened since the last call."""
        opened = self._opened
        self._opened = None
        return opened

    def close(self) -> None:
        """Stop reading, and close tiers that are not used yet."""
        with self._lock:
            self._stopped = True
            opened = self.poll()
        if opened is not None:
            opened.close()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        """Read at low priority, and open at the usual one: threads that a tier starts inherit it."""
        began = time.monotonic()
        start_background("kvpact-weights", self._read).join()
        if self._identity is None:
            return
        logger.info("kvpact: identified the model's weights in %.1f s", time.monotonic() - began)
        opened = self._open_all(self._identity)
        with self._lock:
            if not self._stopped:
                self._opened = opened
                return
        opened.close()

    def _read(self) -> None:
        give_way()
        try:
            self._identity = self._weights.identity(lambda: self._stopped)
        except ReadingStopped:
            pass
        except Exception as error:
            self._opened = self._do_without(error)

    def _do_without(self, error: Exception) -> OpenTiers:
        logger.error("kvpact: serving from memory only, without tiers: %s; restart, or %s", error, SET_MODEL_ID)
        return OpenTiers(self._known, (), ())

    def _open_all(self, weights: str) -> OpenTiers:
        namespace = replace(self._known, fields={**self._known.fields, "weights": weights})
        place = TierContext(namespace, self._slot_bytes, self._seal)
        opened = open_tiers(self._config.tiers, place, OPEN_SECONDS)
        missing = next((tier for tier in opened if tier.there is None), None)
        if self._config.require_tiers and missing is not None:
            for tier in opened:
                tier.close()
            raise ConfigError(CANNOT_BE_USED.format(missing.url, missing.reason))
        tiers = {number: tier for number, tier in enumerate(opened) if not tier.is_given_up}
        urls = [self._config.tiers[number] for number in tiers]
        if planted := ", ".join(str(url) for url in urls if may_be_planted(url, self._seal)):
            logger.warning(
                "kvpact: %s is unauthenticated: anyone who can write there can inject KV; set record_key_file, see %s",
                planted,
                SECURITY,
            )
        threads = self._config.io_threads
        write_bytes = self._config.write_queue
        labels = tier_labels(self._config.tiers)
        queues = tuple(
            TierExecutor(tier, threads, write_bytes, woken_by_owner=True, label=labels[number])
            for number, tier in tiers.items()
        )
        return OpenTiers(namespace, queues, tuple(tiers))
