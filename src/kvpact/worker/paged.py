"""Pages of the engine's KV memory: their addresses in the layout that the engine has chosen.

Owns the view of a tensor as `[num_blocks, page_bytes]`, and the pairs of pages and slots; copies nothing. Imports no
accelerator library; tensors are used through their own methods.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpact.errors import ConfigError, PactViolation
from kvpact.memory.arena import SlotLayout

Bytes: TypeAlias = npt.NDArray[np.uint8]

GROUPS: Final = 4
"""Into which layers are joined at least: what a step waits for arrives beside its forward pass, piece by piece."""


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
        """The pages of `tensor`. Raises ConfigError for a layout in which a page is not regular runs of bytes."""
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
    """The axis that counts blocks: the first, or the second after keys and values; None if it is ambiguous."""
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
    groups: tuple[range, ...]
    """Layers whose pages of a block are adjacent, so that one copy moves them all."""
    device_type: str
    tensors: tuple[Any, ...] = field(repr=False)
    """Kept so that the memory stays valid."""

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
        tensors = tuple(kv_caches.values())
        groups = join_adjacent(layers, -(-len(layers) // GROUPS))
        return cls(tuple(layers), layer_index, num_blocks, groups, devices.pop(), tensors)

    @property
    def layout(self) -> SlotLayout:
        """The layout of one block of this rank in its arena slot."""
        return SlotLayout(tuple(layer.page_bytes for layer in self.layers))

    def joined(self, group: range) -> PagedLayer:
        """The layers of a group as one."""
        layers = self.layers[group.start : group.stop]
        page_bytes = sum(layer.chunk_bytes for layer in layers)
        return layers[0] if len(layers) == 1 else replace(layers[0], chunk_bytes=page_bytes, chunk_stride=page_bytes)


def join_adjacent(layers: Sequence[PagedLayer], most: int) -> tuple[range, ...]:
    """Groups of at most `most` layers whose pages of a block are adjacent."""
    groups: list[range] = []
    for number, layer in enumerate(layers):
        group = groups[-1] if groups else range(0)
        first = layers[group.start]
        bytes_before = sum(one.chunk_bytes for one in layers[group.start : number])
        joins = (
            0 < len(group) < most
            and first.chunks == layer.chunks == 1
            and first.block_stride == layer.block_stride >= bytes_before + layer.chunk_bytes
            and layer.address == first.address + bytes_before
        )
        if joins:
            groups[-1] = range(group.start, number + 1)
        else:
            groups.append(range(number, number + 1))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The pairs of blocks and slots, computed once for all layers."""

    block_ids: npt.NDArray[np.intp]
    slots: npt.NDArray[np.intp]
    """Counted from the first one of their class."""
    runs: tuple[tuple[int, int, int], ...]
    """(first block id, first slot, count) of runs that are adjacent on both sides."""

    @classmethod
    def of(cls, block_ids: Sequence[int], slots: Sequence[int], first_slot: int = 0) -> CopyPlan:
        """Pair block ids with slots of one class, in order; `first_slot` is the class's first number."""
        if len(block_ids) != len(slots):
            raise PactViolation(f"each block needs one slot, not {len(block_ids)} blocks and {len(slots)} slots")
        runs: list[tuple[int, int, int]] = []
        places = [slot - first_slot for slot in slots]
        for block_id, slot in zip(block_ids, places, strict=True):
            if runs and (block_id, slot) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((block_id, slot, 1))
        return cls(np.asarray(block_ids, np.intp), np.asarray(places, np.intp), tuple(runs))
