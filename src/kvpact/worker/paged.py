"""Pages of the engine's KV memory: their addresses in the layout that the engine has chosen.

Owns the view of a tensor as `[num_blocks, page_bytes]`, the layers of each KV cache group, and the pairs of pages and
slots; copies nothing. Imports no accelerator library and uses tensors through their own methods.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpact.errors import ConfigError, PactViolation
from kvpact.memory.layout import SlotLayout

Bytes: TypeAlias = npt.NDArray[np.uint8]

GROUPS: Final = 4
"""Least number of layer groups: loads arrive group by group, so the forward pass starts before the last one."""


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer as `[num_blocks, page_bytes]`: a page is `chunks` equal runs of bytes at a fixed stride."""

    name: str
    address: int
    num_blocks: int
    block_stride: int
    chunks: int
    chunk_stride: int
    chunk_bytes: int
    tensor: Any = field(default=None, repr=False, compare=False)
    """Tensor of the layer, as registered by the engine."""
    block_axis: int = field(default=0, compare=False)
    """Axis of `tensor` that counts blocks."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return self.chunks * self.chunk_bytes

    @classmethod
    def from_tensor(cls, name: str, tensor: Any, num_blocks: int) -> PagedLayer:
        """Pages of `tensor`. Raises ConfigError for a layout in which a page is not regular runs of bytes."""
        shape = _shape_of(name, tensor)
        blocks = block_axis(shape, num_blocks)
        strides = [int(stride) * int(tensor.element_size()) for stride in tensor.stride()]
        layout = f"layer {name}: KV memory of shape {tuple(shape)}, strides {tuple(strides)} bytes"
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
        address = int(tensor.data_ptr())
        return cls(name, address, num_blocks, block_stride, chunks, chunk_stride, chunk_bytes, tensor, blocks)

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """A copy of these pages, `[blocks, page_bytes]`, by the tensor's own indexing instead of by addresses."""
        axis = self.block_axis
        tensor = _indexable(self.tensor).unflatten(axis, (self.num_blocks, self.tensor.shape[axis] // self.num_blocks))
        strides = tensor.stride()
        others = sorted((one for one in range(len(strides)) if one != axis), key=lambda one: -strides[one])
        pages = tensor.permute([axis, *others])[list(block_ids)].contiguous().cpu()
        memory = (ctypes.c_uint8 * (len(block_ids) * self.page_bytes)).from_address(pages.data_ptr())
        return np.array(memory, np.uint8).reshape(len(block_ids), self.page_bytes)

    def view(self) -> Bytes:
        """View of the memory, `[num_blocks, chunks, chunk_bytes]`; valid as long as the engine keeps its tensor."""
        strides = (self.block_stride, self.chunk_stride, 1)
        shape = (self.num_blocks, self.chunks, self.chunk_bytes)
        size = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_uint8 * size).from_address(self.address)
        return np.lib.stride_tricks.as_strided(np.ctypeslib.as_array(memory), shape, strides)


def _indexable(tensor: Any) -> Any:
    """View a tensor as bytes where an element is one: torch does not index all kinds of numbers in a byte."""
    return tensor.view(tensor.new_empty(0).byte().dtype) if tensor.element_size() == 1 else tensor


def _shape_of(name: str, tensor: Any) -> list[int]:
    """Raises ConfigError for anything but a tensor."""
    if not all(hasattr(tensor, method) for method in ("data_ptr", "stride", "element_size", "shape")):
        raise ConfigError(f"layer {name}: KV memory of type {type(tensor).__name__} is not paged, one tensor is needed")
    return [int(size) for size in tensor.shape]


def block_axis(shape: Sequence[int], num_blocks: int) -> int | None:
    """Axis that counts blocks: the first, or the second after keys and values; None if it is ambiguous."""
    behind_halves = len(shape) == 5 and shape[0] == 2
    if behind_halves and shape[1] % num_blocks == 0:
        return None if num_blocks == 2 else 1
    return 0 if shape and shape[0] and shape[0] % num_blocks == 0 else None


@dataclass(frozen=True, slots=True)
class PagedKV:
    """All layers of the engine's KV memory on one rank: KV cache group by group, in each in the order of registration.

    A block belongs to one KV cache group, and is a page of each of its layers. Pages of several groups may lie at the
    same addresses: the block owns them.
    """

    layers: tuple[PagedLayer, ...]
    layer_index: Mapping[str, int]
    """Layer name -> number."""
    num_blocks: int
    groups: tuple[range, ...]
    """Layers whose pages of a block are adjacent, so that one copy moves them all; in forward order."""
    device_type: str
    tensors: tuple[Any, ...] = field(repr=False)
    """Tensors of all layers, kept so that the memory stays valid."""
    cache_groups: tuple[range, ...]
    """Layers of each KV cache group, in the engine's numbering; a group may have none on this rank."""

    @classmethod
    def from_tensors(
        cls, kv_caches: Mapping[str, Any], num_blocks: int, cache_groups: Sequence[Sequence[str]] = ()
    ) -> PagedKV:
        """View the engine's tensors as pages; names that share one memory (cross-layer sharing) count as one layer.

        `cache_groups` has the layer names of each KV cache group; a single one, or none, is all layers. Raises
        ConfigError without layers, if devices differ, for a layout without pages, and for a layer of no group.
        """
        tensors = tuple(kv_caches.values())
        devices = {str(tensor.device.type) for tensor in tensors if hasattr(tensor, "device")}
        pages = {name: PagedLayer.from_tensor(name, tensor, num_blocks) for name, tensor in kv_caches.items()}
        if not tensors:
            raise ConfigError(
                "this rank has no layer with keys, values or states to store: use fewer pipeline stages, or serve this "
                "model without kvpact"
            )
        if len(devices) != 1:
            raise ConfigError(f"the KV memory must be on one device, found {sorted(devices) or 'none'}")
        layers: list[PagedLayer] = []
        layer_index: dict[str, int] = {}
        groups: list[range] = []
        borders = [0]
        for names in _names_by_group(pages, cache_groups):
            for name in names:
                known = range(borders[-1], len(layers))
                same = (number for number in known if _is_same_memory(pages[name], layers[number]))
                layer_index[name] = number = next(same, len(layers))
                if number == len(layers):
                    layers.append(pages[name])
            borders.append(len(layers))
            own = range(borders[-2], borders[-1])
            groups += join_adjacent(layers, own, -(-len(own) // GROUPS))
        of_groups = tuple(range(start, stop) for start, stop in pairwise(borders))
        made = cls(tuple(layers), layer_index, num_blocks, tuple(groups), devices.pop(), tensors, of_groups)
        return replace(made, groups=tuple(made.in_forward_order(groups)))

    def seen_in(self, kv_caches: Mapping[str, Any]) -> PagedKV:
        """View of the same layers in other memory. Raises ConfigError like `from_tensors`."""
        names = [[name for name, layer in self.layer_index.items() if layer in group] for group in self.cache_groups]
        return self.from_tensors(kv_caches, self.num_blocks, names)

    def read(self, group_id: int, block_ids: Sequence[int]) -> Bytes:
        """A copy of these blocks of a KV cache group as their slots have them. See `PagedLayer.read`."""
        group = self.cache_groups[group_id]
        return np.concatenate([layer.read(block_ids) for layer in self.layers[group.start : group.stop]], axis=1)

    def in_forward_order(self, parts: Iterable[range]) -> list[range]:
        """Parts of KV cache groups in the order in which the model computes them, by the numbers in layers' names.

        Layers of one group stay in their order.
        """
        if len(self.cache_groups) == 1:
            return list(parts)
        depths: list[int] = []
        for group in self.cache_groups:
            depths += accumulate((_depth(layer.name) for layer in self.layers[group.start : group.stop]), max)
        return sorted(parts, key=lambda part: depths[part.start])

    def cache_group_of(self, layer: int) -> int:
        """Number of the KV cache group to which a layer belongs."""
        return next(number for number, group in enumerate(self.cache_groups) if layer in group)

    @property
    def layouts(self) -> tuple[SlotLayout, ...]:
        """Layout of one block of this rank in its arena slot, per KV cache group."""
        pages = [layer.page_bytes for layer in self.layers]
        return tuple(SlotLayout(tuple(pages[group.start : group.stop])) for group in self.cache_groups)

    @property
    def layout(self) -> SlotLayout:
        """Layout of the only KV cache group."""
        (only,) = self.layouts
        return only

    @property
    def rank_slot_bytes(self) -> int:
        """Bytes of this rank's piece of a slot with room for a block of any KV cache group."""
        return max(layout.rank_slot_bytes for layout in self.layouts)

    @property
    def layer_offsets(self) -> tuple[int, ...]:
        """Offset of each layer's page in its group's slot, in bytes."""
        return tuple(offset for layout in self.layouts for offset in layout.layer_offsets)

    def joined(self, group: range) -> PagedLayer:
        """Layers of a group as one layer."""
        layers = self.layers[group.start : group.stop]
        page_bytes = sum(layer.chunk_bytes for layer in layers)
        return layers[0] if len(layers) == 1 else replace(layers[0], chunk_bytes=page_bytes, chunk_stride=page_bytes)


def _is_same_memory(layer: PagedLayer, other: PagedLayer) -> bool:
    return layer.address == other.address and replace(layer, name=other.name) == other


def _names_by_group(pages: Mapping[str, PagedLayer], cache_groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Names of each KV cache group's layers on this rank, in the order of registration.

    A name without a group must share the memory of one with a group; it is omitted then, and a step that reads it
    waits for all layers. Raises ConfigError otherwise, and for a name in two groups.
    """
    if len(cache_groups) <= 1:
        return [list(pages)]
    owner: dict[str, int] = {}
    for number, names in enumerate(cache_groups):
        for name in names:
            if owner.setdefault(name, number) != number:
                raise ConfigError(f"layer {name} is in KV cache group {owner[name]} and in group {number}")
    for name in (name for name in pages if name not in owner):
        if not any(_is_same_memory(pages[name], pages[other]) for other in owner if other in pages):
            raise ConfigError(
                f"layer {name} is in none of the {len(cache_groups)} KV cache groups, so a request's blocks of it are "
                "unknown"
            )
    return [[name for name in pages if owner.get(name) == number] for number in range(len(cache_groups))]


def _depth(name: str) -> int:
    """Number of a layer in the model, the first one in its name; 0 without any."""
    found = re.search(r"(?<![^.])\d+(?![^.])", name)
    return int(found[0]) if found else 0


def join_adjacent(layers: Sequence[PagedLayer], numbers: range, most: int) -> tuple[range, ...]:
    """Groups of at most `most` of these layers, whose pages of a block are adjacent."""
    groups: list[range] = []
    for number in numbers:
        group = groups[-1] if groups else range(0)
        layer = layers[number]
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
    """Pairs of blocks and slots, computed once for all layers."""

    block_ids: npt.NDArray[np.intp]
    slots: npt.NDArray[np.intp]
    """Slots, counted from the first one of their class."""
    runs: tuple[tuple[int, int, int], ...]
    """Runs that are adjacent on both sides: (first block id, first slot, count)."""

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
