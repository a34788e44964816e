"""A record header says what it frames, and refuses by name everything that is not so."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from documents import PACKAGES
from kvpact.tiers.base import (
    HEADER_BYTES,
    NO_SLOT,
    RECORD_FORMAT,
    RecordError,
    RecordHeader,
    is_empty_header,
    payload_digest,
)
from kvpact.tiers.record import FIELDS, valid_in_slab
from slab_tables import sealed

NAMESPACE = b"n" * 32
HEADER = RecordHeader(NAMESPACE, b"k" * 32, b"p" * 32, 7, 8192, b"d" * 16, 1000.5, 2000.5, slot=3)


def decode(raw: bytes, namespace: bytes = NAMESPACE, length: int = 8192, slot: int = 3) -> RecordHeader:
    return RecordHeader.decode(raw, namespace=namespace, length=length, slot=slot)


def test_a_header_has_256_bytes_and_comes_back() -> None:
    assert len(HEADER.encode()) == HEADER_BYTES == 256
    assert decode(HEADER.encode()) == HEADER


def test_the_first_block_has_no_parent() -> None:
    first = replace(HEADER, parent=b"", depth=0)
    assert decode(first.encode()).parent == b""


def test_a_block_that_stands_for_itself_says_how_deep_it_is() -> None:
    alone = replace(HEADER, parent=b"")
    assert (decode(alone.encode()), alone.depth) == (alone, 7)
    fields = np.frombuffer(replace(HEADER, parent=b"").encode() + HEADER.encode() * 2, FIELDS).copy()
    fields["depth"][2] = 0
    sealed(fields)
    slots = np.full(3, 3)
    assert valid_in_slab(fields, NAMESPACE, 8192, slots).tolist() == [True, True, False], "as one by one"


def test_a_record_outside_a_slab_has_no_slot() -> None:
    header = replace(HEADER, slot=NO_SLOT)
    assert RecordHeader.decode(header.encode(), namespace=NAMESPACE, length=8192) == header


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_h22_every_flipped_bit_is_refused(bit: int) -> None:
    raw = bytearray(HEADER.encode())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        decode(bytes(raw))


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_h22_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(RecordError, match="not a record"):
        decode(raw)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"namespace": b"o" * 32}, "of namespace 6f6f6f6f6f6f6f6f, not 6e6e6e6e6e6e6e6e"),
        ({"slot": 4}, "misplaced: written for slot 4, found in slot 3"),
        ({"length": 4096}, "payload of 4096 bytes, not 8192"),
        ({"depth": 0}, "depth 0 does not fit its parent"),
    ],
)
def test_h23_a_record_of_something_else_is_refused_by_name(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        decode(replace(HEADER, **wrong).encode())


def test_a_short_header_and_another_format_are_refused_by_name() -> None:
    with pytest.raises(RecordError, match="256 bytes, not 255"):
        decode(HEADER.encode()[:-1])
    raw = bytearray(HEADER.encode())
    raw[8] = 9
    with pytest.raises(RecordError, match=f"record format 9; this release reads format {RECORD_FORMAT}"):
        decode(bytes(raw))


def test_only_zeros_are_an_empty_header() -> None:
    assert is_empty_header(memoryview(bytearray(256)))
    assert not is_empty_header(HEADER.encode())


@given(st.binary(min_size=1, max_size=4096), st.data())
def test_a_digest_does_not_depend_on_how_the_ranks_cut_the_block(payload: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(payload)))
    view = memoryview(payload)
    assert payload_digest([view]) == payload_digest([view[:cut], view[cut:]])


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def test_h80_nothing_is_unpickled_or_evaluated() -> None:
    sources = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    assert sources
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = ["pickle"] if node.func.id in {"eval", "exec", "compile"} else []
            assert not FORBIDDEN & set(names), f"{path}:{getattr(node, 'lineno', 0)} can run what a store sends"
