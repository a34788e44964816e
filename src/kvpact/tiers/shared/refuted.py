"""Runs whose records in a shared store are invalid: each engine that found its own to be so has left a mark there.

Owns the marks' names, and the seconds for which an answer about them is believed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf
from typing import Final

from kvpact.tiers.record import new_run
from kvpact.tiers.shared.store import RecordStore

BELIEVED_SECONDS: Final = 10.0
"""Seconds until a run without a mark is asked about again."""


class RefutedRuns:
    """The runs of one group's records, this engine's among them. Thread-safe; `refute` and `ask` raise StoreError."""

    def __init__(self, store: RecordStore, group: str) -> None:
        self.own = new_run()
        self._store = store
        self._group = group
        self._refuted: set[bytes] = set()
        self._asked: dict[bytes, float] = {self.own: inf}
        """Time of the last look at which a run had no mark."""

    def refute(self) -> None:
        """Leave a mark: no engine is given a record of this one's run."""
        self._refuted.add(self.own)
        self._store.write([self._name(self.own)], [[b"what this run wrote is wrong: its copies of KV were"]])

    def ask(self, runs: Iterable[bytes]) -> None:
        """Ask the store about runs that nothing is known of, or not lately."""
        late = time.monotonic() - BELIEVED_SECONDS
        unsure = [run for run in {*runs} - self._refuted if self._asked.get(run, late) <= late]
        if unsure:
            marked = self._store.exists([self._name(run) for run in unsure])
            self._refuted.update(run for run, is_marked in zip(unsure, marked, strict=True) if is_marked)
            self._asked.update(dict.fromkeys(unsure, time.monotonic()))

    def __contains__(self, run: object) -> bool:
        """True if a run is known to have a mark."""
        return run in self._refuted

    def _name(self, run: bytes) -> str:
        return f"{self._group}/refuted-{run.hex()}"
