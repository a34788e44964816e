"""Digests of a model's numbers, of all of them or of a cheap sample, to find changes.

Owns which tensors count and how they are read; decides nothing. Works on the tensor's device and copies one number per
tensor back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from kvpact.vllm.compat.objects import draft_module

SAMPLED_ELEMENTS = 1 << 16
"""Elements in the sample of all parameters together: it misses a change of one element in 10,000 once in 700 times."""

CHUNK_WORDS = 1 << 18
"""A tensor is digested in pieces of this many words of 8 bytes, so that no copy of the whole is made."""

SEED = 20261122
STRIDE = 0x9E3779B97F4A7C1 | 1
"""Weights are not chosen to make digests collide, so the factors need not be secret."""

SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element -> the integer type as which it is read: then a NaN equals itself."""


def models_of(worker: Any) -> list[Any]:
    """The modules whose weights the worker computes with: the model, and the draft model where there is one."""
    models = [worker.get_model(), draft_module(worker)]
    return [model for model in models if isinstance(model, torch.nn.Module)]


def parameters_of(models: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each parameter."""
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            yield f"{number} {name}", parameter.data


def tensors_of(models: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each parameter and each buffer."""
    yield from parameters_of(models)
    for number, model in enumerate(models):
        for name, buffer in model.named_buffers():
            yield f"{number} buffer {name}", buffer.data


def digest_of(models: Sequence[Any]) -> dict[str, int | None]:
    """Name -> digest over all bytes of the parameter or buffer; None where a tensor has no readable bytes.

    Not `torch.hash_tensor`: that is an XOR over the elements, and so 0 for an even number of equal ones, whatever they
    are; the scales of a norm are such a tensor. Reads about 2 GB/s on one CPU core.
    """
    sums = {name: _digest(tensor) for name, tensor in tensors_of(models)}
    return {name: int(total) if total is not None else None for name, total in sums.items()}


class Sample:
    """Some elements of each parameter when this object is made: more of large parameters, at least one of each."""

    def __init__(self, models: Sequence[Any]) -> None:
        tensors = [(name, tensor) for name, tensor in parameters_of(models) if _is_readable(tensor) and tensor.numel()]
        total = sum(tensor.numel() for _, tensor in tensors)
        source = torch.Generator().manual_seed(SEED)
        self._places: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            number = min(tensor.numel(), -(-tensor.numel() * SAMPLED_ELEMENTS // total))
            self._places[name] = torch.randint(tensor.numel(), (number,), generator=source).to(tensor.device)
        self._forms = _forms(models)
        self._values = self._read(models)

    def is_still_true(self, models: Sequence[Any]) -> bool:
        """True if the sampled elements still have their values, in parameters of the same names and shapes."""
        if _forms(models) != self._forms:
            return False
        now = self._read(models)
        return all(torch.equal(now[kind], values) for kind, values in self._values.items())

    def _read(self, models: Sequence[Any]) -> dict[tuple[torch.dtype, torch.device], torch.Tensor]:
        """The elements, in one tensor per dtype and device, so that few tensors are compared."""
        parts: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for name, tensor in parameters_of(models):
            if (places := self._places.get(name)) is not None:
                integers = tensor.view(SAME_SIZE[tensor.element_size()])
                parts.setdefault((integers.dtype, integers.device), []).append(torch.take(integers, places))
        return {kind: torch.cat(found) for kind, found in parts.items()}


def _forms(models: Sequence[Any]) -> list[tuple[str, torch.Size, torch.dtype, torch.device]]:
    return [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in parameters_of(models)]


def _is_readable(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.element_size() in SAME_SIZE


def _digest(tensor: torch.Tensor) -> torch.Tensor | None:
    """A sum that multiplies every word of 8 bytes by its own random odd factor."""
    if not _is_readable(tensor):
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # avoids a copy of a transposed tensor
    numbers = tensor.permute(order).contiguous().view(-1).view(torch.uint8)
    whole = numbers.numel() // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8, device=tensor.device)
    rest[: numbers.numel() - whole] = numbers[whole:]
    if numbers.storage_offset() % 8:
        numbers = numbers.clone()
    factors = _factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for words in (*numbers[:whole].view(torch.int64).split(CHUNK_WORDS), rest.view(torch.int64)):
        products = words * factors[: words.numel()]
        products ^= products >> 32  # otherwise two flips of a word's highest bit would cancel out
        total = total * STRIDE + products.sum()
    return total


@cache
def _factors(device: torch.device) -> torch.Tensor:
    source = torch.Generator().manual_seed(SEED)
    return (torch.randint(-(2**62), 2**62, (CHUNK_WORDS,), generator=source) | 1).to(device)
