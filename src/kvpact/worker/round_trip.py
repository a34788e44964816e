"""Test of a device's copies before anything is served: blocks out and back, bit for bit.

Owns the test, and the comparison of blocks with slots. It runs over any `TransferEngine`, on memory that the engine
does not use yet, and restores it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final

import numpy as np

from kvpact.contract import LoadJob, SaveJob
from kvpact.errors import ConfigError
from kvpact.memory.arena import ArenaSegment
from kvpact.units import format_size
from kvpact.worker.copy.base import Transfer, TransferEngine, group_classes
from kvpact.worker.paged import Bytes, PagedKV

logger = logging.getLogger(__name__)

MAX_BLOCKS: Final = 64

TRIAL_SLOTS: Final = 3
"""Slots for each block: its own content, the pattern, and the copy that came back."""

DEADLINE_SECONDS: Final = 10.0
"""Seconds for each copy; one that takes longer counts as one that never ends."""

LIMIT_SECONDS: Final = 0.2
"""Seconds for all blocks in and out again: 256 MiB of Llama-3-8B take 5 ms at 55 GB/s, and 0.13 s at 2 GB/s."""

ATTEMPTS: Final = 3
"""Attempts; the best one counts: the first compiles the kernel for small pages, and the machine may be busy."""

PIECE_BYTES: Final = 4 << 20
"""Bytes of blocks that are compared at a time."""


def differences(
    paged: PagedKV,
    segment: ArenaSegment,
    group_id: int,
    block_ids: Sequence[int],
    slots: Sequence[int],
    run: Callable[[Callable[[], Bytes]], Bytes] = lambda read: read(),
) -> Iterator[set[int]]:
    """Yield, piece by piece, the blocks of a KV cache group whose bytes differ from their slots'.

    Reads blocks by indexing the engine's own tensors, so that a wrong address cannot prove itself; `run` calls the
    reading function.
    """
    size = sum(paged.layouts[group_id].layer_page_bytes)
    count = max(1, PIECE_BYTES // max(1, size))
    for start in range(0, len(slots), count):
        some = block_ids[start : start + count]
        rows = [np.frombuffer(segment.slot_view(slot), np.uint8)[:size] for slot in slots[start : start + count]]
        pages = run(partial(paged.read, group_id, some))
        yield {block for block, page, row in zip(some, pages, rows, strict=True) if (page != row).any()}


def differing(
    paged: PagedKV, segment: ArenaSegment, group_id: int, block_ids: Sequence[int], slots: Sequence[int]
) -> set[int]:
    """Union of all `differences`."""
    return set().union(*differences(paged, segment, group_id, block_ids, slots))


def require_round_trip(engine: TransferEngine, paged: PagedKV, segment: ArenaSegment, usable_slots: int) -> None:
    """Copy a pattern into blocks of each KV cache group and out again, by slots of the group's class.

    Uses the first `usable_slots` slots, or the slots of as many extents; `TRIAL_SLOTS` for each block. Raises
    ConfigError if there are fewer, or the pattern does not come back, or not within `LIMIT_SECONDS`.
    """
    for group_id, (layout, slot_class) in enumerate(
        zip(paged.layouts, group_classes(paged, segment.classes), strict=True)
    ):
        block_bytes = sum(layout.layer_page_bytes)
        if not block_bytes:
            continue
        slots = list(islice(slot_class.numbers(range(usable_slots)), TRIAL_SLOTS * MAX_BLOCKS))
        count = min(len(slots) // TRIAL_SLOTS, paged.num_blocks - 1)
        if count < 1:
            raise ConfigError(
                f"memory: {len(slots)} usable blocks are too few to test the device's copies: {TRIAL_SLOTS} are needed"
            )
        _try_group(engine, paged, segment, slots[: TRIAL_SLOTS * count], group_id, block_bytes)


def _try_group(
    engine: TransferEngine,
    paged: PagedKV,
    segment: ArenaSegment,
    slots: Sequence[int],
    group_id: int,
    block_bytes: int,
) -> None:
    """Test one KV cache group, with blocks of `block_bytes` bytes, three of these slots for each."""
    count = len(slots) // TRIAL_SLOTS
    blocks = tuple(range(1, 2 * count, 2)) if 2 * count <= paged.num_blocks else tuple(range(1, count + 1))
    kept, pattern, back = (tuple(slots[part * count : (part + 1) * count]) for part in range(TRIAL_SLOTS))
    views = {slot: np.frombuffer(segment.slot_view(slot), np.uint8)[:block_bytes] for slot in slots}
    random = np.random.default_rng(count)
    for slot in pattern:
        views[slot][:] = random.integers(0, 256, block_bytes, np.uint8)
    trial = _Trial(engine, blocks, group_id)
    trial.save(kept)
    seconds = _best_of_attempts(trial, pattern, back)
    elsewhere = differing(paged, segment, group_id, blocks, pattern)
    trial.load(kept)
    wrong = sum(
        block in elsewhere or bool((views[one] != views[other]).any())
        for block, one, other in zip(blocks, pattern, back, strict=True)
    )
    for view in views.values():
        view[:] = 0
    if wrong:
        raise ConfigError(
            f"the copies of this {paged.device_type} device cannot be used: {wrong} of {count} blocks came back "
            "with other bytes, or were not where the engine reads them; please report this with the output of `kvpact "
            "doctor`"
        )
    if seconds > LIMIT_SECONDS:
        raise ConfigError(
            f"the copies of this {paged.device_type} device are too slow to be used: {count} blocks of "
            f"{format_size(block_bytes)} in and out again took {seconds:.2f} s in the best of {ATTEMPTS} attempts, and "
            f"may take {LIMIT_SECONDS:g} s; `kvpact doctor` measures this machine's bus"
        )
    logger.info("%d blocks in and out again: %.1f ms, bit for bit", count, seconds * 1e3)


def _best_of_attempts(trial: _Trial, pattern: tuple[int, ...], back: tuple[int, ...]) -> float:
    """Seconds of the best copy of the pattern in and out again; the first one in time ends the attempts."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        began = time.monotonic()
        trial.load(pattern)
        trial.save(back)
        best = min(best, time.monotonic() - began)
        if best <= LIMIT_SECONDS:
            break
    return best


class _Trial:
    """Jobs over the same blocks, one after another."""

    def __init__(self, engine: TransferEngine, blocks: tuple[int, ...], group_id: int) -> None:
        self._engine = engine
        self._blocks = blocks
        self._group_id = group_id
        self._jobs = 0

    def save(self, slots: tuple[int, ...]) -> None:
        self._jobs += 1
        job = SaveJob(self._jobs, "round trip", 0, slots, self._blocks, self._group_id)
        self._wait("out of", self._engine.save([job]))

    def load(self, slots: tuple[int, ...]) -> None:
        self._jobs += 1
        job = LoadJob(self._jobs, "round trip", 0, slots, self._blocks, synchronous=True, group_id=self._group_id)
        transfers = self._engine.load([job])
        for transfer in transfers:
            transfer.wait(len(self._engine.groups), DEADLINE_SECONDS)
        self._wait("into", transfers)

    def _wait(self, way: str, transfers: Sequence[Transfer]) -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        self._engine.submit_all()
        while not all(transfer.ended for transfer in transfers):
            if time.monotonic() > end:
                raise ConfigError(f"copies {way} the KV memory did not end within {DEADLINE_SECONDS:g} s")
            time.sleep(0.0002)
        for transfer in transfers:
            if transfer.failed:
                raise ConfigError(f"copies {way} the KV memory failed: {transfer.error}") from transfer.error
