"""Keys that were made before are found again by an engine's hashes, and are what hashing again would make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any, overload

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpact.identity import keys as keys_module
from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKeys, KnownRuns, RequestIdentity

NAMESPACE = bytes(range(32))
BLOCK_SIZE = 4
RUN = 8
"""Tokens of a run here: two blocks."""


@pytest.fixture(autouse=True, scope="module")
def short_runs() -> Iterator[None]:
    """Runs of two blocks, of which eight are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_module, "RUN_TOKENS", RUN)
        patch.setattr(keys_module, "MAX_RUNS", 8)
        yield


def engine_hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """As an engine makes them: a chain in which the salt is part of the first block alone."""
    hashes, before = [], b"none"
    for end in range(block_size, len(tokens) + 1, block_size):
        block = tokens[end - block_size : end], salt if end == block_size else None
        before = sha256(repr((before, block)).encode()).digest()
        hashes.append(before)
    return hashes


class ReadTokens(Sequence[int]):
    """Tokens that know how many of them were read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.read = 0
        self._tokens = list(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        found = self._tokens[at]
        self.read += len(found) if isinstance(found, list) else 1
        return found


def names_of(known: KnownRuns, tokens: Sequence[int], salt: str = "", **fields: Any) -> BlockKeys:
    """The names of a request whose engine hashes its blocks."""
    known = known._replace(hashes=engine_hashes(list(tokens), known.block_size, salt))
    return BlockKeys(NAMESPACE, BLOCK_SIZE, RequestIdentity(salt=salt, known=known), **fields)


def hashed_again(tokens: Sequence[int], salt: str = "", **fields: Any) -> list[bytes]:
    """The keys, by a request of which nothing is known."""
    return BlockKeys(NAMESPACE, BLOCK_SIZE, RequestIdentity(salt=salt), **fields).extend(tokens)


MANY = st.lists(st.sampled_from([[1] * 4, [1] * 4, [1, 1, 1, 2], [2]]), max_size=7).map(lambda parts: [*chain(*parts)])
"""Tokens of prompts that begin alike."""


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], str, dict[str, Any], list[int]]:
    """Tokens, a salt, what else is part of a root, and up to which block keys are asked for, call by call."""
    root = {
        "epoch": draw(st.sampled_from([FIRST_EPOCH, Epoch.of_word("other")])),
        "group": draw(st.sampled_from([bytes(32), b"g" * 32])),
        "ahead": draw(st.sampled_from([0, 0, 1])),
    }
    return draw(MANY), draw(st.sampled_from(["", "acme"])), root, draw(st.lists(st.integers(0, 7), max_size=2))


@pytest.mark.parametrize("hash_block", [1, 2, 4, 3, 8], ids=lambda size: f"hashes of {size} tokens")
@settings(max_examples=30)
@given(arrived=st.lists(requests(), min_size=2, max_size=8))
def test_keys_are_those_that_hashing_makes_whoever_came_before(
    hash_block: int, arrived: list[tuple[list[int], str, dict[str, Any], list[int]]]
) -> None:
    """Two requests that keys tell apart share no run: by tokens, salt, epoch, group, or what a key covers ahead."""
    known = KnownRuns({}, hash_block)
    for tokens, salt, root, pieces in arrived:
        names = names_of(known, tokens, salt, **root)
        for most in pieces:
            names.extend(tokens, most)
        assert names.extend(tokens) == hashed_again(tokens, salt, **root)
        assert len(known.runs) <= 8


@settings(max_examples=30)
@given(MANY, st.lists(st.integers(0, 28), max_size=6))
def test_keys_of_a_request_that_grows_are_kept_as_its_runs_fill(tokens: list[int], lengths: list[int]) -> None:
    known, hashes = KnownRuns({}, BLOCK_SIZE), list[bytes]()
    names = BlockKeys(NAMESPACE, BLOCK_SIZE, RequestIdentity(known=known._replace(hashes=hashes)))
    for length in sorted(lengths):
        hashes[:] = engine_hashes(tokens[:length], BLOCK_SIZE)
        names.extend(tokens[:length])
    hashes[:] = engine_hashes(tokens, BLOCK_SIZE)
    assert names.extend(tokens) == hashed_again(tokens)
    assert names_of(known, tokens).extend(tokens) == hashed_again(tokens)


def test_h68_of_a_prompt_that_came_before_only_what_fills_no_run_is_hashed_again() -> None:
    known, prompt = KnownRuns({}, BLOCK_SIZE), list(range(4 * RUN + BLOCK_SIZE))
    first, again = ReadTokens(prompt), ReadTokens(prompt)
    wanted = names_of(known, prompt).extend(first)
    assert names_of(known, prompt).extend(again) == wanted
    assert (first.read, again.read) == (len(prompt), BLOCK_SIZE)


def test_known_keys_are_taken_beyond_those_asked_for_because_they_cost_nothing() -> None:
    """A request may begin anywhere in a run, and asks for pieces from there on."""
    known, prompt = KnownRuns({}, BLOCK_SIZE), list(range(4 * RUN))
    wanted = names_of(known, prompt).extend(prompt)
    again = ReadTokens(prompt)
    assert names_of(known, prompt).extend(again, 3) == wanted
    assert again.read == 0


def test_what_one_request_adds_to_a_known_run_is_no_part_of_it_for_the_next() -> None:
    known, prompt = KnownRuns({}, BLOCK_SIZE), list(range(RUN + BLOCK_SIZE))
    for _ in range(3):
        assert names_of(known, prompt).extend(prompt) == hashed_again(prompt)


def test_a_request_that_has_a_part_of_a_run_takes_the_rest_of_it() -> None:
    known, prompt = KnownRuns({}, BLOCK_SIZE), list(range(RUN))
    begun = names_of(known, prompt)
    begun.extend(prompt, 1)
    names_of(known, prompt).extend(prompt)
    assert begun.extend(prompt) == hashed_again(prompt)


def test_keys_that_cover_the_next_token_are_never_taken_for_those_of_another_next_token() -> None:
    """The engine's hash of a block says nothing of what comes after it."""
    known, stem = KnownRuns({}, BLOCK_SIZE), list(range(RUN))
    for following in (1, 2):
        prompt = [*stem, following]
        assert names_of(known, prompt, ahead=1).extend(prompt) == hashed_again(prompt, ahead=1)


def test_h67_runs_are_kept_in_a_bound() -> None:
    known = KnownRuns({}, BLOCK_SIZE)
    for number in range(50):
        names_of(known, [number] * 3 * RUN).extend([number] * 3 * RUN)
    assert len(known.runs) == 8


def test_h24_a_salt_that_is_no_text_has_no_keys_though_the_prompt_is_known_without_one() -> None:
    known, prompt = KnownRuns({}, BLOCK_SIZE), list(range(2 * RUN))
    assert names_of(known, prompt).extend(prompt)
    lone = RequestIdentity(salt="\ud800", known=known._replace(hashes=engine_hashes(prompt, BLOCK_SIZE)))
    assert BlockKeys(NAMESPACE, BLOCK_SIZE, lone).extend(prompt) == []


def test_a_block_that_the_engine_has_not_hashed_yet_is_hashed_and_not_kept() -> None:
    known, prompt = KnownRuns({}, BLOCK_SIZE), list(range(2 * RUN))
    late = known._replace(hashes=engine_hashes(prompt, BLOCK_SIZE)[:-1])
    assert BlockKeys(NAMESPACE, BLOCK_SIZE, RequestIdentity(known=late)).extend(prompt) == hashed_again(prompt)
    assert len(known.runs) == 1


def test_engine_hashes_are_no_part_of_an_identity() -> None:
    """Equal content is equal, whatever is known of it."""
    assert RequestIdentity(known=KnownRuns({}, 4)) == RequestIdentity()
