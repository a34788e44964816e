"""Protocol for moving bytes between the engine's pages and the arena's slots: one implementation per kind of device.

`kvpact.worker.transfer` orders copies, waits for them and reports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from kvpact.contract import LoadJob, SaveJob
from kvpact.errors import PactViolation
from kvpact.memory.arena import SlotClass
from kvpact.memory.neighbour_slots import NeighbourSlots
from kvpact.worker.paged import PagedKV

Job: TypeAlias = LoadJob | SaveJob


def require_cache_group(group_id: int, count: int) -> None:
    """Raise PactViolation unless a job's KV cache group is one of `count`."""
    if not 0 <= group_id < count:
        raise PactViolation(f"blocks of KV cache group {group_id} cannot be copied: there are {count} groups")


def classes_by_group(slot_bytes: Sequence[int], classes: Sequence[SlotClass]) -> list[SlotClass]:
    """Class of each KV cache group's slots, by a slot's bytes; see `kvpact.memory.extents.slot_classes`.

    The only class is that of all groups. Raises PactViolation if a group has none.
    """
    if len(classes) == 1:
        return [*classes] * len(slot_bytes)
    if [one.slot_bytes for one in classes] == [*slot_bytes]:
        return [*classes]
    by_size = {one.slot_bytes: one for one in classes}
    if missing := set(slot_bytes) - by_size.keys():
        raise PactViolation(f"no slots have {min(missing)} bytes, only {', '.join(map(str, by_size))}")
    return [by_size[size] for size in slot_bytes]


def group_classes(paged: PagedKV, classes: Sequence[SlotClass]) -> list[SlotClass]:
    """Class of each KV cache group's slots on this rank. Raises PactViolation if they are too small."""
    sizes = [layout.rank_slot_bytes for layout in paged.layouts]
    each = classes_by_group(sizes, classes)
    for size, slot_class in zip(sizes, each, strict=True):
        if size > slot_class.slot_bytes:
            raise PactViolation(f"one block of this engine takes {size} bytes, a slot has only {slot_class.slot_bytes}")
    return each


class Transfer(Protocol):
    """Copies of one job."""

    @property
    def ended(self) -> bool:
        """True once no more of it is being copied. Does not wait."""

    @property
    def failed(self) -> Sequence[int]:
        """Blocks of the job, counted from 0, that were not copied; after the end."""

    @property
    def error(self) -> Exception | None:
        """Exception that kept blocks from being copied, if any; after the end."""

    def wait(self, groups: int, seconds: float | None) -> bool:
        """Wait, on the computing thread, until the first `groups` of the engine's groups of layers are copied.

        Waits at most `seconds` (None: no limit); returns whether they are copied, or the transfer has ended. Only a
        synchronous load's groups arrive one by one, all others at the transfer's end.
        """

    def cancel(self) -> None:
        """Stop copying: the transfer ends at once, or when the current copy call returns; blocks not copied have
        failed."""


class TransferEngine(Protocol):
    """Carries out jobs on one kind of device: of each block, the pages of the layers in the job's KV cache group.

    The computing thread calls `load` and `save`, which return at once and never raise because of a job. Copies happen
    behind the thread's computation before the call. Saves end in order, because each block needs those saved before it.
    Loads need no order; synchronous ones come first, together, group by group. Saves pause for synchronous loads.
    Asynchronous ones may wait until `submit_some` or `submit_all` is called.
    """

    @property
    def layerwise(self) -> bool:
        """True if a synchronous load's groups arrive one by one, beside the forward pass."""

    @property
    def copies_per_block(self) -> int:
        """Most copies per block that the computing thread gives to a device; 0 without a device."""

    @property
    def groups(self) -> Sequence[range]:
        """Groups of layers that are copied together, each of one KV cache group; in the forward pass's order."""

    def load(self, jobs: Sequence[LoadJob]) -> Sequence[Transfer]:
        """Copy slots into pages. A synchronous load that cannot be copied fails completely, any other one block by
        block."""

    def save(self, jobs: Sequence[SaveJob]) -> Sequence[Transfer]:
        """Copy pages into slots."""

    def submit_some(self, max_copies: int | None = None, max_load_bytes: int | None = None) -> None:
        """Begin as many waiting copies as a step with a forward pass should pay for; each such step calls this.

        The limits are those of `StepWork`; of each direction in which copies wait, one block at least is begun.
        """

    def submit_all(self) -> None:
        """Begin all waiting copies, as nothing is computed now."""

    def use_neighbours(self, memory: Mapping[int, NeighbourSlots]) -> None:
        """Loads come from these engines' slots, too, by their numbers, and from no other one's any more."""

    def rebind(self, paged: PagedKV) -> None:
        """Use pages that came back here, perhaps at the same addresses, with as many bytes a block in each layer. No
        transfer is under way."""

    def close(self, seconds: float) -> bool:
        """Begin no more transfers; those not begun fail. Returns whether all ended within `seconds`. Idempotent."""
