"""vLLM's two Triton kernels that copy states where there are drafts, as plain copies: its CPU build has neither.

Name `StateCopies` by `worker_extension_cls`; a worker that imports this module has both. They read the addresses that
vLLM hands over, in its runners of either version. In a convolution's state tokens must come before dimensions, as they
do by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_int32, memmove
from typing import Any

from vllm.triton_utils.dispatcher import register_kernels

INT32_BYTES = 4

METADATA = 8
"""Arguments of both kernels that say where states lie: the block tables, their stride, and six of states."""


def copy_state(request: int, source: int, target: int, accepted: int, tables: Any, stride: int, *states: Any) -> None:
    """Copy a request's states from a column of its block table to another, as they were after `accepted` more tokens.

    A convolution keeps all of a step's tokens in one block, a recurrent state has a block for each. `states` are the
    addresses, bytes of a block, bytes of an element, elements (of a token, or of all), tokens or 0, groups.
    """
    starts = tables.tolist()
    for base, block_bytes, element, elements, tokens, group in zip(*(one.tolist() for one in states), strict=True):
        row = starts[group] + INT32_BYTES * request * stride
        size, shift = element * elements, 0
        if tokens:
            size, shift = size * (tokens - accepted), size * accepted
        column = source if tokens else source + accepted
        blocks = [c_int32.from_address(row + INT32_BYTES * one).value for one in (column, target)]
        memmove(base + blocks[1] * block_bytes, base + blocks[0] * block_bytes + shift, size)


def rows(idx_mapping: Any, num_reqs: int) -> Sequence[int]:
    """The rows of the requests of a batch, without those that have none."""
    return range(num_reqs) if idx_mapping is None else [row for row in idx_mapping[:num_reqs].tolist() if row >= 0]


def before_step(running: Any, sources: Any, accepted: Any, *others: Any, **settings: Any) -> None:
    """`precopy_mamba_align_fused_kernel`: where a step runs in another block than the last, the state moves there."""
    tables, stride, *states, idx_mapping, num_reqs = without_rows_of_dimensions(others, settings)
    for row in rows(idx_mapping, num_reqs):
        source, target = int(sources[row]), int(running[row])
        if source >= 0 and source != target:
            copy_state(row, source, target, int(accepted[row]), tables, stride, *states)


def after_step(
    accepted: Any, running: Any, scheduled: Any, computed: Any, drafts: Any, *others: Any, **settings: Any
) -> None:
    """`postprocess_mamba_fused_kernel`: the state at a boundary that a step has passed goes into that one's block."""
    tables, stride, *states, accepted_out, idx_mapping, num_reqs = without_rows_of_dimensions(others, settings)
    unit = settings["block_size"]
    for row in rows(idx_mapping, num_reqs):
        more, source = int(accepted[row]) - 1, int(running[row])
        if settings.get("PRECOMPUTED_NEW_COMPUTED"):
            first = int(computed[row]) - more
        else:
            first = int(computed[row]) + int(scheduled[row]) - int(drafts[row])
        boundary = (first + more) // unit * unit
        if boundary < first:
            continue
        target = boundary // unit - 1
        if source == target:
            accepted_out[row] = 1
        if source != target or boundary > first:
            copy_state(row, source, target, boundary - first, tables, stride, *states)


def without_rows_of_dimensions(others: Sequence[Any], settings: Mapping[str, Any]) -> list[Any]:
    """A kernel's arguments, without those for states of convolutions that have dimensions before tokens."""
    assert not settings["CONV_STATE_DIM_FIRST"], "states that have dimensions before tokens are not copied"
    return [*others[:METADATA], *others[METADATA + 2 :]]


class StateCopies:
    """Nothing more for a worker: to import it is enough."""


register_kernels(
    {
        "vllm.v1.worker.mamba_utils.precopy_mamba_align_fused_kernel": before_step,
        "vllm.v1.worker.mamba_utils.postprocess_mamba_fused_kernel": after_step,
    }
)
