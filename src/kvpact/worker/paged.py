"""Pages of the engine's KV memory: where they lie in whatever layout the engine chose, and how their bytes are copied.

Owns the view of a tensor as `[num_blocks, page_bytes]` and the copy engines that move pages to and from arena slots;
never decides which or when. Imports no accelerator library; tensors are used through their own methods.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpact.errors import ConfigError, PactViolation
from kvpact.memory.arena import ArenaSegment, SlotLayout

Bytes: TypeAlias = npt.NDArray[np.uint8]

RUN_BYTES: Final = 32 << 10
"""Runs of neighbouring pages shorter than this, on average, are copied by index (benchmarks/copy_paths.py)."""


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer's KV memory as `[num_blocks, page_bytes]`: a page is `chunks` equal runs of bytes at a fixed stride."""

    name: str
    address: int
    num_blocks: int
    block_stride: int
    chunks: int
    chunk_stride: int
    chunk_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return self.chunks * self.chunk_bytes

    @classmethod
    def from_tensor(cls, name: str, tensor: Any, num_blocks: int) -> PagedLayer:
        """See `tensor` as pages. Raises ConfigError for a layout in which a page is not regular runs of bytes."""
        if not all(hasattr(tensor, method) for method in ("data_ptr", "stride", "element_size", "shape")):
            raise ConfigError(
                f"layer {name}: KV memory of type {type(tensor).__name__} is not paged, one tensor is needed"
            )
        shape = [int(size) for size in tensor.shape]
        strides = [int(stride) * int(tensor.element_size()) for stride in tensor.stride()]
        layout = f"layer {name}: KV memory of shape {tuple(shape)}, strides {tuple(strides)} bytes"
        blocks = block_axis(shape, num_blocks)
        if blocks is None:
            raise ConfigError(f"{layout} has no axis, or no single one, for its {num_blocks} blocks")
        # An engine may split each block over several smaller ones for its kernels; the axis then has a multiple.
        parts = shape[blocks] // num_blocks
        block_stride = strides[blocks] * parts
        axes = [(strides[axis], size) for axis, size in enumerate(shape) if axis != blocks]
        axes.append((strides[blocks], parts))
        runs = [(int(tensor.element_size()), 1)]  # (stride, count), innermost first, merged where they touch
        for stride, size in sorted(axis for axis in axes if axis[1] > 1):
            inner_stride, inner_count = runs[-1]
            if stride == inner_stride * inner_count:
                runs[-1] = (inner_stride, inner_count * size)
            else:
                runs.append((stride, size))
        chunk_bytes = runs[0][0] * runs[0][1]
        chunk_stride, chunks = runs[1] if len(runs) == 2 else (chunk_bytes, 1)
        extents = ((1, chunk_bytes), (chunk_stride, chunks), (block_stride, num_blocks))
        nested = pairwise(sorted(extent for extent in extents if extent[1] > 1))
        if len(runs) > 2 or any(outer[0] < inner[0] * inner[1] for inner, outer in nested):
            raise ConfigError(f"{layout} does not hold each block as equal runs of bytes at one stride")
        return cls(name, int(tensor.data_ptr()), num_blocks, block_stride, chunks, chunk_stride, chunk_bytes)

    def view(self) -> Bytes:
        """The memory itself, `[num_blocks, chunks, chunk_bytes]`; valid as long as the engine keeps its tensor."""
        strides = (self.block_stride, self.chunk_stride, 1)
        shape = (self.num_blocks, self.chunks, self.chunk_bytes)
        size = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_uint8 * size).from_address(self.address)
        return np.lib.stride_tricks.as_strided(np.ctypeslib.as_array(memory), shape, strides)


def block_axis(shape: Sequence[int], num_blocks: int) -> int | None:
    """The axis that counts blocks: the first, or the second behind keys and values; None if that is not certain."""
    behind_halves = len(shape) == 5 and shape[0] == 2
    if behind_halves and shape[1] % num_blocks == 0:
        return None if num_blocks == 2 else 1
    return 0 if shape and shape[0] and shape[0] % num_blocks == 0 else None


@dataclass(frozen=True, slots=True)
class PagedKV:
    """All layers of the engine's KV memory on one rank, in the order of registration, which is forward order."""

    layers: tuple[PagedLayer, ...]
    layer_index: Mapping[str, int]
    num_blocks: int
    device_type: str
    tensors: tuple[Any, ...] = field(repr=False)
    """Held so that the memory stays where it is."""

    @classmethod
    def from_tensors(cls, kv_caches: Mapping[str, Any], num_blocks: int) -> PagedKV:
        """See the engine's tensors as pages; names that share one memory (cross-layer sharing) count as one layer.

        Raises ConfigError if there is nothing, if devices differ, or for a layout that cannot be seen as pages.
        """
        layers: list[PagedLayer] = []
        layer_index: dict[str, int] = {}
        for name, tensor in kv_caches.items():
            layer = PagedLayer.from_tensor(name, tensor, num_blocks)
            twin = next((i for i, other in enumerate(layers) if replace(other, name=name) == layer), None)
            if twin is None:
                layer_index[name] = len(layers)
                layers.append(layer)
            else:
                layer_index[name] = twin
        devices = {str(tensor.device.type) for tensor in kv_caches.values()}
        if len(devices) != 1:
            raise ConfigError(f"the KV memory must be on one device, found {sorted(devices) or 'no layer at all'}")
        return cls(tuple(layers), layer_index, num_blocks, devices.pop(), tuple(kv_caches.values()))

    @property
    def layout(self) -> SlotLayout:
        """How one block of this rank lies in its arena slot."""
        return SlotLayout(tuple(layer.page_bytes for layer in self.layers))


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Which blocks go with which slots, worked out once for all layers."""

    block_ids: npt.NDArray[np.intp]
    slots: npt.NDArray[np.intp]
    runs: tuple[tuple[int, int, int], ...]
    """(first block id, first slot, count) where both sides are neighbours."""

    @classmethod
    def of(cls, block_ids: Sequence[int], slots: Sequence[int]) -> CopyPlan:
        """Pair block ids with slots, in order."""
        if len(block_ids) != len(slots):
            raise PactViolation(f"each block needs one slot, not {len(block_ids)} blocks and {len(slots)} slots")
        runs: list[tuple[int, int, int]] = []
        for block_id, slot in zip(block_ids, slots, strict=True):
            if runs and (block_id, slot) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((block_id, slot, 1))
        return cls(np.asarray(block_ids, np.intp), np.asarray(slots, np.intp), tuple(runs))


class CopyEngine(Protocol):
    """How bytes move between pages and slots on one kind of device.

    Every method but `fence` may be called from several background threads at once and returns when the bytes have
    arrived. A device with its own queues (CUDA) registers the segment as pinned memory, copies on a side stream per
    thread and waits for its event; `fence` is where it records an event on the stream that computes.
    """

    def fence(self) -> Callable[[], None]:
        """Called on the computing thread; the result, called before a copy, waits for all that was computed so far."""

    def gather(self, layer: int, plan: CopyPlan) -> None:
        """Pages of one layer into arena slots. Raises PactViolation, and copies nothing, if one is not there."""

    def scatter(self, layer: int, plan: CopyPlan) -> None:
        """Arena slots into pages of one layer. Raises like `gather`."""


class CpuCopyEngine:
    """Copies in host memory, by numpy, without the GIL: long runs one call each, scattered small pages by index."""

    def __init__(self, paged: PagedKV, segment: ArenaSegment) -> None:
        if paged.layout.rank_slot_bytes > segment.rank_slot_bytes:
            raise PactViolation(
                f"one block of this engine takes {paged.layout.rank_slot_bytes} bytes, a slot has only "
                f"{segment.rank_slot_bytes}"
            )
        self._num_blocks = paged.num_blocks
        self._num_slots = segment.num_slots
        arena = np.frombuffer(segment.memory, np.uint8).reshape(segment.num_slots, segment.rank_slot_bytes)
        self._pages = [layer.view() for layer in paged.layers]
        self._pieces = [
            arena[:, start : start + layer.page_bytes].reshape(segment.num_slots, layer.chunks, layer.chunk_bytes)
            for layer, start in zip(paged.layers, paged.layout.layer_offsets, strict=True)
        ]
        if not all(np.shares_memory(piece[0], arena[0]) for piece in self._pieces):
            raise PactViolation("the view of a layer's slots is a copy of them")

    def fence(self) -> Callable[[], None]:
        """Nothing to wait for: what the caller computed is in memory."""
        return _nothing

    def gather(self, layer: int, plan: CopyPlan) -> None:
        """Pages of one layer into arena slots."""
        self._check(plan)
        pages, pieces = self._pages[layer], self._pieces[layer]
        if len(plan.block_ids) * pages[0].nbytes < RUN_BYTES * len(plan.runs) and len(plan.runs) > 1:
            pieces[plan.slots] = pages[plan.block_ids]
            return
        for block_id, slot, count in plan.runs:
            np.copyto(pieces[slot : slot + count], pages[block_id : block_id + count])

    def scatter(self, layer: int, plan: CopyPlan) -> None:
        """Arena slots into pages of one layer."""
        self._check(plan)
        pages, pieces = self._pages[layer], self._pieces[layer]
        if len(plan.block_ids) * pages[0].nbytes < RUN_BYTES * len(plan.runs) and len(plan.runs) > 1:
            pages[plan.block_ids] = pieces[plan.slots]
            return
        for block_id, slot, count in plan.runs:
            np.copyto(pages[block_id : block_id + count], pieces[slot : slot + count])

    def _check(self, plan: CopyPlan) -> None:
        for block_id, slot, count in plan.runs:
            if not (0 <= block_id <= self._num_blocks - count and 0 <= slot <= self._num_slots - count):
                raise PactViolation(
                    f"blocks {block_id} to {block_id + count - 1} of {self._num_blocks} and slots {slot} to "
                    f"{slot + count - 1} of {self._num_slots} cannot be copied: outside the memory"
                )


def copy_engine_for(paged: PagedKV, segment: ArenaSegment) -> CopyEngine:
    """The copy engine for the device that holds `paged`. Raises ConfigError if there is none."""
    if paged.device_type == "cpu":
        return CpuCopyEngine(paged, segment)
    raise ConfigError(f"KV memory on device {paged.device_type!r} cannot be copied by this release; supported: 'cpu'")


def _nothing() -> None:
    """A fence that is already passed."""
