"""How far apart engines are that compute the same prompts in other batches, in KV bytes and in answers.

The last bits of a matrix product depend on its shape, so where batches vary nothing is equal bit by bit. Two runs of an
engine that loads nothing say how far apart right results are; a wrong block is orders of magnitude further away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from company_answers import Said
from slab_surgery import SlabSurgery

from kvpact.identity.keys import BlockKeys, RequestIdentity
from kvpact_testkit.demo.messages import Output

Blocks = Mapping[tuple[int, ...], np.ndarray]
"""All tokens up to the end of a block -> its keys and values, in float32."""


def saved_blocks(slabs: Path, texts: Iterable[Sequence[int]], block: int, salt: str = "") -> Blocks:
    """What the disk tier in this directory holds of the texts, which an engine in float32 asked about with `salt`."""
    (path,) = slabs.glob("kvpact/*.slab")
    slab = SlabSurgery(path)
    found = {}
    for text in texts:
        keys = BlockKeys(slab.keys_namespace, block, RequestIdentity(salt=salt)).extend(text)
        for number, key in enumerate(keys, 1):
            if (payload := slab.payload(key)) is not None:
                found[tuple(text[: number * block])] = np.frombuffer(payload, np.float32)
    return found


def texts(prompts: Sequence[Sequence[int]], answers: Sequence[Output]) -> list[list[int]]:
    """Prompts with their answers, but for the last token, whose keys and values nobody computed."""
    return [[*tokens, *answer.tokens[:-1]] for tokens, answer in zip(prompts, answers, strict=True)]


def blocks_apart(some: Blocks, others: Blocks) -> float:
    """The largest difference of two numbers in any block that both have."""
    return max(float(np.abs(some[name] - others[name]).max()) for name in some.keys() & others.keys())


def nearest_wrong_block(blocks: Blocks) -> float:
    """The smallest of such differences between any block and the one that stands in its place in another text."""
    by_place: dict[int, list[np.ndarray]] = {}
    for name, numbers in blocks.items():
        by_place.setdefault(len(name), []).append(numbers)
    return min(float(np.abs(one - other).max()) for rivals in by_place.values() for one, other in pairwise(rivals))


def answers_apart(one: Output | Said, other: Output | Said) -> float:
    """The largest difference of two log-probabilities of the same token at the same place.

    Where the most likely tokens are as good as equal the answers part, and what follows them cannot be compared.
    Infinite if they part where one of the tokens is not among the other's likely ones.
    """
    max_computed = 0.0
    places = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True)
    for token, its_token, likely, its_likely in places:
        mine, its = dict(likely), dict(its_likely)
        if token not in its or its_token not in mine:
            return math.inf
        max_computed = max(max_computed, *(abs(mine[both] - its[both]) for both in mine.keys() & its.keys()))
        if token != its_token:
            break
    return max_computed
