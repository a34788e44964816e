"""Verification of a table: every invariant that its columns, links, space and policy have together. Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpact.index.links import require, require_none
from kvpact.index.slot_space import PlainSlots
from kvpact.index.table import CANCELLED, DOOMED, FREE, HELD, RESERVED, SAVED, Table


def verify(table: Table, pins: Sequence[int]) -> None:
    """Verify every invariant in O(n log n); `pins` are those on each row. Raises PactViolation."""
    rows = np.arange(table.root)
    parent = table.links.parent_each[: table.root]
    above = table.state_each[parent]
    state = table.state_each[: table.root]
    known = (state >= RESERVED) & (state <= HELD)
    dropped = state >= CANCELLED
    leased = np.zeros(table.root, bool)
    claims = table.columns.claims if table.columns is not None else None
    for some_rows in claims.waiting if claims is not None else ():
        require(not leased[some_rows.start : some_rows.stop].any(), "a slot waits twice for the end of its lease")
        leased[some_rows.start : some_rows.stop] = True
    require(bool((state[leased] == DOOMED).all()), "a slot that waits for the end of its lease is in use")
    leads = above == HELD
    waits = above >= CANCELLED
    table.space.check()
    free = np.zeros(table.root, bool)
    for some in (*table.space.free, table.space.parked if isinstance(table.space, PlainSlots) else ()):
        free[np.array(some, np.int64)] = True
    plain = table.space.is_plain
    usable = rows < (table.space.usable if plain else table.root)
    accounted = known | free | dropped & usable
    require(bool((state <= DOOMED).all()), "a slot is in no state")
    require(int(known.sum()) == len(table.keys), "two keys share a slot")
    require(not (free & (known | dropped & usable)).any(), "the slots do not add up")
    require(not plain or bool((accounted == usable).all()), "a slot is neither known, free nor waiting")
    require(not (free & (state != FREE)).any(), "a slot in the free list is in use")
    numbers = rows[known]
    require(sorted(table.keys.lists()) == numbers.tolist(), "not exactly the known blocks are in the table of keys")
    found = table.keys.find_each(table.keys.names_at(numbers))
    require(bool((found == numbers).all()), "keys and slots disagree")
    table.links.check(known, dropped & ~leased)
    holds = np.array(pins) + np.isin(table.state_each, (RESERVED, SAVED, CANCELLED))
    needed = {table.root}
    for holder in np.flatnonzero((known | dropped) & (holds[: table.root] > 0)).tolist():
        row = holder
        while row not in needed:
            needed.add(row)
            row = table.links.parent[row]
    np.add.at(holds, table.links.parent_each[[*needed - {table.root}]], 1)
    holds[table.root] += 1
    counted = np.append(known | free | dropped, True)
    for row in np.flatnonzero(counted & (table.holds_each != holds)).tolist():
        require(False, f"slot {row} counts {table.holds[row]} holds and has {holds[row]}")
    require_none(known & ((above < RESERVED) | waits), "slot {row} has lost its parent")
    require_none(known & (state == HELD) & ~leads, "slot {row} is held without its parent")
    require_none(known & (state == SAVED) & leads, "slot {row} waits for a held parent")
    unheld = rows[known & (holds[: table.root] == 0)].tolist()
    table.policy.check([*filter(table.evictable_leaf, unheld)])
    if table.shares is not None:
        owners = np.frombuffer(table.shares.owner_of, np.uint8)[: table.root]
        counted_of = np.bincount(owners[known], minlength=len(table.shares.blocks)).tolist()
        require(table.shares.blocks == counted_of, f"blocks by owner: {table.shares.blocks}, not {counted_of}")
        same = (owners == owners[parent % table.root]) | (parent == table.root)
        require_none(known & ~same, "slot {row} has another owner than its parent")
    require(bool(holds[: table.root][dropped & ~leased].all()), "a dropped slot that nothing needs is not free")
    require(table.held == int((state == HELD).sum()), "the number of held blocks is wrong")
    unheld_classes = [*map(table.space.class_of, unheld)]
    evictable = [*map(unheld_classes.count, range(len(table.evictable)))]
    require(table.evictable == evictable, f"evictable blocks by class: {table.evictable}, not {evictable}")
