"""Random steps of an engine over a `TransferEngine`: what is loaded is what was saved, whatever the device does when.

Owns the truth of every block and slot, to which KV cache group a block belongs, and of which class the slots of an
extent are. The same play runs over any device: what computes is put into the computing stream by the bed, and what a
kernel saw there is compared at the end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import ArenaSegment, SlotClass
from kvpact.worker.copy.base import Job, TransferEngine, group_classes
from kvpact.worker.paged import PagedKV
from kvpact.worker.transfer import RankTransfers

Page = npt.NDArray[np.uint8]

END_SECONDS = 20.0
"""By then a play's last copies have ended, or never will."""

MOVES = 0.3
"""How likely a save is to find that its class has got an extent of another one, where classes share extents."""

HALVES = 0.3
"""How likely a step with loads is to compute in two halves, each on a thread and a stream of its own."""


class DeviceBed(Protocol):
    """A device with an engine's KV memory on it, and the copies under test."""

    paged: PagedKV
    segment: ArenaSegment
    engine: TransferEngine

    def write(self, layer: int, block: int, content: Page) -> None:
        """In stream order: a kernel writes a page of a layer."""

    def read(self, layer: int, block: int) -> Callable[[], Page]:
        """In stream order: a kernel reads a page. What it saw is told after `finish`."""

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` on the engine's second computing thread, whose stream goes on from what this one's has now.

        The returned function waits for the thread; what this one's stream gets then comes after what `work` launched.
        """

    def finish(self) -> None:
        """Wait until the device has done everything."""


def page(layer: int, value: int, num_bytes: int) -> Page:
    """What a layer's page of a block with this value holds; another one in each byte, layer and value."""
    return ((np.arange(num_bytes) * 7 + layer * 31 + value * 131) % 251).astype(np.uint8)


@dataclass(slots=True)
class _Seen:
    """A page that a kernel has read, and what it must have held."""

    what: str
    got: Callable[[], Page]
    expected: Page


class Play:
    """One engine's steps."""

    def __init__(self, bed: DeviceBed, seed: int) -> None:
        self.bed = bed
        self.problems: list[str] = []
        """What went wrong."""
        self._random = random.Random(seed)
        self._layers = list(bed.paged.layers)
        self._groups = bed.paged.cache_groups
        self._names = _names_of(bed.paged)
        self._forward = [one.start for one in bed.paged.in_forward_order(range(n, n + 1) for n in self._names)]
        self._classes = group_classes(bed.paged, bed.segment.classes)
        """Of each KV cache group, that of its slots."""
        with_bytes = [one for one in dict.fromkeys(self._classes) if one.slot_bytes]
        self._extents = [with_bytes[number % len(with_bytes)] for number in range(bed.segment.num_slots)]
        """Of each extent the class of its slots; of each slot, where these have one class."""
        self._worker = RankTransfers(
            bed.engine, bed.paged.layer_index, 0, time.monotonic, layerwise=True, cache_groups=self._groups
        )
        self._blocks: dict[int, int] = {}
        """Block -> value; blocks that nothing is known of are not in it."""
        self._owners: dict[int, int] = {}
        """Block -> the KV cache group whose layers it has a page of."""
        self._slots: dict[int, int] = {}
        """Slot -> value."""
        self._contents: dict[int, int] = {}
        """Slot -> the KV cache group of which it has a block."""
        self._held_blocks: set[int] = set()
        """That a copy reads or writes."""
        self._held_slots: set[int] = set()
        self._jobs: dict[int, Job] = {}
        self._values = 0
        self._next_job = 0
        self._seen: list[_Seen] = []

    def begin(self, steps: int) -> None:
        """Play this many steps; copies may be under way afterwards."""
        for _ in range(steps):
            self._step()

    def run(self, steps: int) -> list[str]:
        """Play this many steps, and end; returns the problems."""
        self.begin(steps)
        self._settle()
        self.bed.finish()
        for block, value in self._blocks.items():
            for layer in self._layers_of(block):
                self._expect(f"block {block} at the end", layer, block, value)
        self.bed.finish()
        for seen in self._seen:
            if not np.array_equal(seen.got(), seen.expected):
                self.problems.append(f"{seen.what}: wrong bytes")
        return self.problems

    def _step(self) -> None:
        self._take_ended()
        wanted = [synchronous for synchronous in (True, True, False) if self._random.random() < 0.6]
        loads = [load for synchronous in wanted if (load := self._load(synchronous)) is not None]
        self._worker.start_loads(loads)
        self._worker.submit(computes=self._random.random() < 0.9)
        now = [(block, self._slots[slot]) for load in loads if load.synchronous for block, slot in _pairs(load)]
        written = {block: self._new_value() for block in self._free_blocks(3)}
        for block in written:
            self._owners[block] = self._any_group()
        in_halves = bool(now) and self._random.random() < HALVES
        for layer in self._forward:
            other_half = self.bed.beside(partial(self._attend, layer, now[1::2])) if in_halves else None
            self._attend(layer, now[::2] if in_halves else now)
            for block, value in written.items():
                if layer in self._layers_of(block):
                    self._write(layer, block, value)
            if other_half is not None:
                other_half()
        self._blocks.update(written)
        self._worker.wait_for_loads()
        for group_id in range(len(self._groups)):
            self._save(group_id, [block for block in written if self._owners[block] == group_id])
        for block in self._free_blocks(2):  # the next step's forward pass, as far as it has been launched
            self._fill(block)

    def _attend(self, layer: int, loaded: Sequence[tuple[int, int]]) -> None:
        """A layer of the step reads these (block, value), which were loaded for it."""
        self._worker.wait_for_layer(self._names[layer])
        for block, value in loaded:
            if layer in self._layers_of(block):
                self._expect(f"block {block}, loaded for the step, layer {layer}", layer, block, value)

    def _load(self, synchronous: bool) -> LoadJob | None:
        group_id = self._any_group()
        slots = [slot for slot in self._slots if slot not in self._held_slots and self._contents[slot] == group_id]
        count = min(len(slots), self._random.randint(1, 6))
        blocks = self._free_blocks(count)
        slots = self._some(slots, min(count, len(blocks)))
        if not slots:
            return None
        self._owners.update((block, group_id) for block in blocks[: len(slots)])
        for block in blocks[: len(slots) : 2]:  # zeroed before it is used
            for layer in self._layers_of(block):
                self._write(layer, block, 0)
        self._next_job += 1
        job = LoadJob(self._next_job, "r", 0, tuple(slots), tuple(blocks[: len(slots)]), synchronous, group_id)
        self._hold(job)
        for block, slot in _pairs(job):
            self._blocks[block] = self._slots[slot]
        return job

    def _save(self, group_id: int, blocks: Sequence[int]) -> None:
        slot_class = self._classes[group_id]
        if slot_class.extent_bytes and blocks and self._random.random() < MOVES:
            self._move_extent(slot_class)
        own = slot_class.numbers(number for number, owner in enumerate(self._extents) if owner == slot_class)
        slots = self._some([slot for slot in own if slot not in self._held_slots], len(blocks))
        if not slots:
            return
        self._next_job += 1
        job = SaveJob(self._next_job, "r", 0, tuple(slots), tuple(blocks[: len(slots)]), group_id)
        for slot in slots:
            self._slots.pop(slot, None)
            self._contents[slot] = group_id
        self._hold(job)
        self._worker.start_saves([job])

    def _move_extent(self, to: SlotClass) -> None:
        """An extent none of whose slots is being copied is the class's from now on; what it held is forgotten."""
        extents = [
            number
            for number, owner in enumerate(self._extents)
            if owner != to and self._held_slots.isdisjoint(owner.numbers([number]))
        ]
        if extents:
            number = self._random.choice(extents)
            for slot in self._extents[number].numbers([number]):
                self._slots.pop(slot, None)
            self._extents[number] = to

    def _hold(self, job: Job) -> None:
        self._jobs[job.job_id] = job
        self._held_blocks.update(job.block_ids)
        self._held_slots.update(job.slots)

    def _take_ended(self) -> None:
        for job_id, outcome in self._worker.poll().items():
            job = self._jobs.pop(job_id)
            if outcome.failed.ranges:
                self.problems.append(f"job {job_id} failed")
            if isinstance(job, SaveJob) and (before := self._saves_before(job_id)):
                self.problems.append(f"save {job_id} ended before {before}, ordered earlier")
            for block, slot in _pairs(job):
                self._held_blocks.discard(block)
                self._held_slots.discard(slot)
                if isinstance(job, SaveJob):
                    self._slots[slot] = self._blocks[block]
                    self._expect_slot(slot)
                else:
                    for layer in self._layers_of(block):
                        self._expect(f"block {block}, loaded from slot {slot}", layer, block, self._blocks[block])
                    if self._random.random() < 0.5:  # a tier reads another block into it
                        self._slots[slot] = self._new_value()
                        self._pieces(slot)[:] = self._slot_content(slot)

    def _saves_before(self, job_id: int) -> list[int]:
        """Earlier saves that have not ended: what is saved hangs on what was saved before."""
        return [number for number, job in self._jobs.items() if isinstance(job, SaveJob) and number < job_id]

    def _settle(self) -> None:
        end = time.monotonic() + END_SECONDS
        while self._jobs:
            self.bed.finish()
            self._worker.submit(computes=False)
            self._take_ended()
            if time.monotonic() > end:
                self.problems.append(f"jobs {sorted(self._jobs)} never end")
                return
            time.sleep(0.0005)

    def _free_blocks(self, most: int) -> list[int]:
        free = [block for block in range(self.bed.paged.num_blocks) if block not in self._held_blocks]
        return self._some(free, most)

    def _some(self, numbers: Sequence[int], most: int) -> list[int]:
        """At most so many of them: neighbours, as an allocator gives them at first, or any."""
        count = min(len(numbers), most)
        if self._random.random() < 0.5:
            first = self._random.randint(0, len(numbers) - count)
            return sorted(numbers)[first : first + count]
        return self._random.sample(list(numbers), count)

    def _any_group(self) -> int:
        """A KV cache group that has layers here."""
        some = [number for number, group in enumerate(self._groups) if group]
        return self._random.choice(some) if len(some) > 1 else some[0]

    def _layers_of(self, block: int) -> range:
        return self._groups[self._owners[block]]

    def _new_value(self) -> int:
        self._values += 1
        return self._values

    def _fill(self, block: int) -> None:
        self._blocks[block] = self._new_value()
        self._owners[block] = self._any_group()
        for layer in self._layers_of(block):
            self._write(layer, block, self._blocks[block])

    def _write(self, layer: int, block: int, value: int) -> None:
        self.bed.write(layer, block, page(layer, value, self._layers[layer].page_bytes))

    def _expect(self, what: str, layer: int, block: int, value: int) -> None:
        expected = page(layer, value, self._layers[layer].page_bytes)
        self._seen.append(_Seen(what, self.bed.read(layer, block), expected))

    def _pieces(self, slot: int) -> Page:
        num_bytes = sum(self.bed.paged.layouts[self._contents[slot]].layer_page_bytes)
        return np.frombuffer(self.bed.segment.slot_view(slot), np.uint8)[:num_bytes]

    def _slot_content(self, slot: int) -> Page:
        layers = self._groups[self._contents[slot]]
        return np.concatenate([page(layer, self._slots[slot], self._layers[layer].page_bytes) for layer in layers])

    def _expect_slot(self, slot: int) -> None:
        if not np.array_equal(self._pieces(slot), self._slot_content(slot)):
            self.problems.append(f"slot {slot}: wrong bytes were saved")


def _names_of(paged: PagedKV) -> dict[int, str]:
    """Number of a layer -> its name; what comes before a layer's last state is that layer, too."""
    last = {layer: name for name, layer in paged.layer_index.items()}
    return {layer: last[min(one for one in last if one >= layer)] for layer in range(len(paged.layers))}


def _pairs(job: Job) -> list[tuple[int, int]]:
    return list(zip(job.block_ids, job.slots, strict=True))
