"""Engines of one host that load from each other's memory, some of which are killed: wrong bytes, leases left, look-ups.

"storm": processes with the production index, arena and ledger, `--engines` of them, for `--seconds` each; with `--kill`
they are killed, stopped and replaced at random moments. "without leases": the same with the lease taken out of the
code, until a wrong byte is found. "look-up": microseconds of CPU in which a neighbour finds that a prompt of 2,048
blocks is not there, and in which it finds, leases and releases all of it, in one run of rows or in many. Needs no
engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.needs import find_testbeds
from benchmarks.table import spread
from kvpact.index.block_index import BlockIndex
from kvpact.index.claims import Claims
from kvpact.index.column_file import ColumnFile
from kvpact.index.neighbour import Neighbour
from kvpact.index.row_locks import LockFile
from kvpact.index.slot_space import PlainSlots

find_testbeds()

BLOCKS = 2048
"""32,768 tokens in blocks of 16."""
REPEATS = 200
RUNS = (1, 32, 128, 512)
"""Runs of rows in which the prompt is held."""


def look_up_row(runs: int) -> dict[str, Any]:
    """Look-ups in the table of another engine, in one process."""
    space, locks = PlainSlots(8 * BLOCKS), LockFile()
    columns = ColumnFile(space, Claims(locks))
    index = BlockIndex(space.num_rows, space=space, columns=columns)
    held, others, unknown = ([os.urandom(32) for _ in range(BLOCKS)] for _ in range(3))
    for first in range(0, BLOCKS, BLOCKS // runs):
        for keys in (held, others):  # whose rows lie between
            reservation = index.reserve(keys, first, first + BLOCKS // runs)
            assert reservation is not None
            index.complete(reservation.slots)
    neighbour = Neighbour(os.dup(columns.descriptor), locks.opened())
    misses, hits = list[float](), list[float]()
    for _ in range(REPEATS):
        began = time.thread_time()
        missed = neighbour.lease(unknown)
        misses.append(1e6 * (time.thread_time() - began))
        began = time.thread_time()
        leased = neighbour.lease(held)
        assert leased is not None
        neighbour.release(leased)
        hits.append(1e6 * (time.thread_time() - began))
        assert (missed, len(leased.slots), len(leased.runs)) == (None, BLOCKS, runs)
    neighbour.close()
    return {"what": "look-up", "engines": 2, "runs": runs, **spread("miss_us", misses), **spread("hit_us", hits)}


def rows(engines: Sequence[int] = (3, 8), seconds: float = 60.0, kill: bool = False) -> list[dict[str, Any]]:
    """A storm for each number of engines, one without leases, and the look-up."""
    from pool_engines import storm

    found = [{"what": "storm", "engines": count, **storm(seconds, count, kill=kill)} for count in engines]
    began = time.monotonic()
    without = storm(60.0, min(engines), kill=kill, leased=False)
    took = round(time.monotonic() - began, 1)
    broken = {"what": "without leases", "engines": min(engines), "seconds": took, **without}
    return [*found, broken, *map(look_up_row, RUNS)]
