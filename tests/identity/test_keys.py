"""Keys against everything that may or may not change them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import KEY_BYTES, BlockKeys, MediaSpan, Namespace, RequestIdentity

NAMESPACE = bytes(range(32))
BLOCK_SIZE = 4
TOKENS = list(range(100, 122))
"""Five full blocks of four tokens, and two tokens more."""


def keys_of(
    identity: RequestIdentity | None = None, tokens: list[int] | None = None, namespace: bytes = NAMESPACE
) -> list[bytes]:
    keys = BlockKeys(namespace, BLOCK_SIZE, identity or RequestIdentity())
    return list(keys.extend(TOKENS if tokens is None else tokens))


def first_changed(changed: list[bytes], original: list[bytes] | None = None) -> int:
    """The first block whose key differs; every later one must differ too, for a key stands for the whole prefix."""
    original = keys_of() if original is None else original
    same = [left == right for left, right in zip(original, changed, strict=True)]
    start = same.index(False) if False in same else len(same)
    assert not any(same[start:])
    return start


def test_only_full_blocks_have_keys() -> None:
    assert len(keys_of()) == 5
    assert {len(key) for key in keys_of()} == {KEY_BYTES}
    assert len(set(keys_of(tokens=[7] * 20))) == 5, "equal blocks at other places have other keys"
    assert keys_of(tokens=TOKENS[:3]) == []


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.data())
def test_keys_extended_step_by_step_are_those_computed_at_once(tokens: list[int], data: st.DataObject) -> None:
    keys = BlockKeys(NAMESPACE, BLOCK_SIZE, RequestIdentity(salt="tenant"))
    for length in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        keys.extend(tokens[:length])
    assert keys.extend(tokens) == keys_of(RequestIdentity(salt="tenant"), tokens)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_key_is_the_digest_of_all_tokens_up_to_the_end_of_its_block(ahead: int) -> None:
    """Written down a second time: what other programs need to name blocks as kvpact does."""
    fields = [
        b"kvpact-key", (3).to_bytes(2, "little"), NAMESPACE, FIRST_EPOCH.value, bytes(32), (4).to_bytes(8, "little"),
        ahead.to_bytes(8, "little"), b"adapter", b"salt",
    ]  # fmt: skip

    def framed(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    root = sha256(framed(*fields)).digest()
    packed = b"".join(token.to_bytes(4, "little") for token in TOKENS)
    image = MediaSpan(start=9, count=1, content="sha256:cat")
    keys = BlockKeys(NAMESPACE, 4, RequestIdentity("adapter", "salt", (image,)), ahead=ahead).extend(TOKENS)
    first = [sha256(root + bytes(32) + packed[: 4 * (4 * block + 4 + ahead)]).digest() for block in range(2)]
    begin = 1 if ahead > 1 else 2  # the first block whose key covers token 9
    assert keys[:begin] == first[:begin]
    extras = sha256(framed(framed(b"media", b"sha256:cat", (9 - 4 * begin).to_bytes(8, "little")))).digest()
    anew = sha256(first[begin - 1] + extras + packed[16 * begin : 4 * (4 * begin + 4 + ahead)]).digest()
    assert keys[begin] == anew
    if not ahead:
        assert keys[3:] == [sha256(first[1] + extras + packed[32:end]).digest() for end in (64, 80)]


@given(tokens=st.lists(st.integers(0, 99), max_size=60), data=st.data(), ahead=st.integers(0, 5))
def test_keys_made_in_pieces_are_those_made_at_once(tokens: list[int], data: st.DataObject, ahead: int) -> None:
    media = data.draw(st.lists(st.builds(MediaSpan, st.integers(0, 40), st.integers(1, 9), st.just("a")), max_size=2))
    identity = RequestIdentity(media=tuple(media))
    at_once = BlockKeys(NAMESPACE, 4, identity, ahead=ahead).extend(tokens)
    pieces = BlockKeys(NAMESPACE, 4, identity, ahead=ahead)
    for most in data.draw(st.lists(st.integers(0, 16), max_size=5).map(sorted)):
        assert pieces.extend(tokens, most) == at_once[: max(len(pieces.keys), min(most, len(at_once)))]
    assert pieces.extend(tokens) == at_once
    assert len({*at_once}) == len(at_once)


def test_keys_are_computed_once() -> None:
    """A second call reads no token of a block that has a key: handing it other tokens there changes nothing."""
    keys = BlockKeys(NAMESPACE, BLOCK_SIZE, RequestIdentity())
    before = list(keys.extend(TOKENS[:16]))
    assert keys.extend([0] * 16 + TOKENS[16:])[:4] == before
    assert keys.keys == keys_of()


@given(st.integers(0, 19))
def test_a_token_changes_its_block_and_all_later_ones(position: int) -> None:
    tokens = list(TOKENS)
    tokens[position] += 1
    assert first_changed(keys_of(tokens=tokens)) == position // BLOCK_SIZE


def test_tokens_of_an_unfinished_block_change_nothing() -> None:
    assert keys_of(tokens=[*TOKENS[:20], 1, 2, 3]) == keys_of()


def test_token_ids_use_all_32_bits() -> None:
    assert keys_of(tokens=[0, 0, 0, 1]) != keys_of(tokens=[0, 0, 0, 1 + 2**31])
    assert len(keys_of(tokens=[0, 0, 0, 2**32 - 1])) == 1
    assert not keys_of(tokens=[0, 0, 0, 2**32])


def test_h23_two_namespaces_share_no_key() -> None:
    fields = {"model": "llama", "dtype": "bfloat16", "block_size": "16", "layers": "16", "layout": "NHD", "ranks": "1"}
    digests = {Namespace(fields).digest}
    for name in fields:
        digests.add(Namespace({**fields, name: fields[name] + "x"}).digest)
        digests.add(Namespace({other: value for other, value in fields.items() if other != name}).digest)
    assert len(digests) == 1 + 2 * len(fields)
    assert len({keys_of(namespace=digest)[0] for digest in digests}) == len(digests)
    assert Namespace(dict(reversed(fields.items()))).digest == Namespace(fields).digest


def test_h24_another_adapter_changes_every_key() -> None:
    assert first_changed(keys_of(RequestIdentity(adapter="sha256:1"))) == 0
    assert keys_of(RequestIdentity(adapter="sha256:1")) != keys_of(RequestIdentity(adapter="sha256:2"))


def test_h24_another_salt_changes_every_key() -> None:
    assert first_changed(keys_of(RequestIdentity(salt="tenant"))) == 0
    assert keys_of(RequestIdentity(salt="tenant")) != keys_of(RequestIdentity(salt="other"))
    assert keys_of(RequestIdentity(salt="x")) != keys_of(RequestIdentity(adapter="x")), "the fields cannot be confused"


def test_h24_media_change_keys_from_their_first_block_on() -> None:
    image = MediaSpan(start=6, count=8, content="sha256:cat")
    with_image = keys_of(RequestIdentity(media=(image,)))
    assert first_changed(with_image) == 1, "the image covers tokens 6 to 13, blocks 1 to 3"
    for other in [replace(image, content="sha256:dog"), replace(image, start=7)]:
        assert first_changed(keys_of(RequestIdentity(media=(other,))), with_image) == 1


def test_h24_media_that_start_in_an_earlier_block_count_with_their_offset() -> None:
    """Tokens 8 to 11 are placeholders in both requests, but of other parts of the same image."""
    early, late = (MediaSpan(start=start, count=8, content="sha256:cat") for start in (4, 5))
    assert first_changed(keys_of(RequestIdentity(media=(early,))), keys_of(RequestIdentity(media=(late,)))) == 1


@given(st.integers(0, 21), st.integers(1, 10))
def test_h24_media_change_exactly_what_follows_their_start(start: int, count: int) -> None:
    identity = RequestIdentity(media=(MediaSpan(start, count, "sha256:cat"),))
    assert first_changed(keys_of(identity)) == min(start // BLOCK_SIZE, 5)


@given(st.integers(0, 4))
def test_h24_prompt_embeddings_change_keys_from_their_block_on(block: int) -> None:
    with_embeddings = keys_of(RequestIdentity(embeddings={block: b"digest of the rows"}))
    assert first_changed(with_embeddings) == block
    assert first_changed(keys_of(RequestIdentity(embeddings={block: b"other rows"})), with_embeddings) == block


def test_h37_keys_of_another_epoch_are_other_keys_from_the_first_block_on() -> None:
    epochs = [FIRST_EPOCH, Epoch.of_word("v1"), Epoch.of_word("v2"), Epoch.draw(), Epoch.draw()]
    first = [BlockKeys(NAMESPACE, 4, RequestIdentity(), epoch).extend(range(8))[0] for epoch in epochs]
    assert len(set(first)) == len(epochs)
    assert BlockKeys(NAMESPACE, 4, RequestIdentity(), Epoch.of_word("v1")).extend(range(4)) == [first[1]]


def test_keys_of_another_group_are_other_keys() -> None:
    plain = BlockKeys(NAMESPACE, 4, RequestIdentity())
    windows = BlockKeys(NAMESPACE, 4, RequestIdentity(), group=b"w" * 32)
    assert set(plain.extend(range(16))).isdisjoint(windows.extend(range(16)))


@given(
    spans=st.lists(st.builds(MediaSpan, st.integers(0, 40), st.integers(1, 12), st.sampled_from("ab")), max_size=4),
    known=st.integers(0, 4),
    tokens=st.integers(0, 48),
    ahead=st.integers(0, 2),
)
def test_h47_keys_of_a_request_that_has_grown_are_those_of_one_that_came_so(
    spans: list[MediaSpan], known: int, tokens: int, ahead: int
) -> None:
    """Media of a later chunk: what stands before them keeps its keys, and nothing else does."""
    whole = RequestIdentity(media=tuple(spans))
    growing = BlockKeys(NAMESPACE, 4, RequestIdentity(media=tuple(spans[:known])), ahead=ahead)
    before = list(growing.extend(range(tokens)))
    kept = growing.renew(whole)
    after = BlockKeys(NAMESPACE, 4, whole, ahead=ahead).extend(range(48))
    assert growing.extend(range(48)) == after
    assert before[:kept] == after[:kept]
    assert kept == len(before) or before[kept] != after[kept]


def test_a_living_request_cannot_change_its_adapter() -> None:
    keys = BlockKeys(NAMESPACE, 4, RequestIdentity(adapter="a"))
    with pytest.raises(ValueError, match="keeps its adapter"):
        keys.renew(RequestIdentity(adapter="b"))


def test_h24_media_and_embeddings_cannot_be_confused() -> None:
    media = RequestIdentity(media=(MediaSpan(0, 4, "x"),))
    embeddings = RequestIdentity(embeddings={0: b"x" + bytes(8)})
    assert keys_of(media) != keys_of(embeddings)


KEYS_IN_A_PROCESS = """
from kvpact.identity.keys import *
identity = RequestIdentity("adapter", "salt", (MediaSpan(2, 5, "image"),), {3: b"rows"})
namespace = Namespace({name: name for name in {"model", "dtype", "layout", "ranks"}}).digest
print(BlockKeys(namespace, 4, identity).extend(range(20))[-1].hex())
"""


def test_h25_keys_do_not_depend_on_the_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", KEYS_IN_A_PROCESS],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(found) == 1


GOLDEN_KEYS = [
    "8965504bc381154a4e6c2e65746a98cbac7aee0f2817d7f3891bfae833938f9c",
    "d3b775a93e7aa96f440d5d4670f5680cfdf982ee0330d4c31461d0b782d299bf",
    "cdc4b20e1cdf73a990e246f3a2009b8642cc4400b22e711c91ed1795b0420b42",
    "f4c41246fc9ab654322e0bd85b67bc905ce47a81ca2beaf5410fca0ce04c3974",
    "da464cefe34feadfba8fa5de668b30a4f2d926be5737eaa89939371911b4fcee",
]
GOLDEN_PLAIN_KEY = "d24c77d6cbc9ed5ceb32a54736cfe6d507b8ea5cbd3c1d88588af93e97d08536"
GOLDEN_NAMESPACE = "87878441118bbe3a785406bcc38bd9d35a5f8cfb637856aeb2b3dc7b217a9490"


def test_h25_keys_are_the_same_in_every_release() -> None:
    """These bytes name what lies on users' disks: if they must change, raise KEY_FORMAT."""
    identity = RequestIdentity("adapter", "salt", (MediaSpan(2, 5, "image"),), {3: b"rows"})
    assert [key.hex() for key in keys_of(identity)] == GOLDEN_KEYS
    assert keys_of()[0].hex() == GOLDEN_PLAIN_KEY
    assert Namespace({"model": "llama", "dtype": "bfloat16"}).digest.hex() == GOLDEN_NAMESPACE


def test_a_namespace_survives_its_description() -> None:
    namespace = Namespace({"model": 'ünï "quoted"', "dtype": "bfloat16"})
    assert Namespace.parse(namespace.describe()) == namespace
    assert namespace.digest.hex().startswith(namespace.name)
    assert len(namespace.name) == 16
    for bad in ["[]", '{"a": 1}']:
        with pytest.raises(ValueError, match="JSON object"):
            Namespace.parse(bad)


def test_differences_of_namespaces_are_told_field_by_field() -> None:
    here, there = Namespace({"model": "a", "dtype": "fp8", "layers": "2"}), Namespace({"model": "b", "dtype": "fp8"})
    assert here.differences(there) == ["layers: 2 here, (absent) there", "model: a here, b there"]
    assert here.differences(here) == []


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        BlockKeys(NAMESPACE, 0, RequestIdentity())


def test_a_key_that_looks_ahead_covers_the_next_token_and_waits_for_it() -> None:
    def keys_of(tokens: Sequence[int], identity: RequestIdentity | None = None, ahead: int = 1) -> list[bytes]:
        return BlockKeys(NAMESPACE, 4, identity or RequestIdentity(), ahead=ahead).extend(tokens)

    tokens = list(range(13))
    whole = keys_of(tokens)
    assert [len(keys_of(tokens[:known])) for known in (0, 1, 4, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2, 2, 3]
    growing = BlockKeys(NAMESPACE, 4, RequestIdentity(), ahead=1)
    assert [len(growing.extend(tokens[:known])) for known in range(14)][-1] == 3
    assert growing.keys == whole
    parts = keys_of([*tokens[:8], 99, *tokens[9:]])
    assert (parts[0], parts[1] == whole[1]) == (whole[0], False)
    assert keys_of([*tokens[:9], 99]) == whole[:2], "one token ahead and no more"
    assert not {*whole}.intersection(keys_of(tokens, ahead=0))
    image = RequestIdentity(media=(MediaSpan(8, 3, "image"),))
    assert [key == plain for key, plain in zip(keys_of(tokens, image), whole, strict=True)] == [True, False, False]
    rows = RequestIdentity(embeddings={2: b"rows"})
    assert [key == plain for key, plain in zip(keys_of(tokens, rows), whole, strict=True)] == [True, False, False]
    assert keys_of([*tokens[:8], -1, 1, 1, 1, 1]) == whole[:1]
    assert keys_of([*tokens[:7], -1, *tokens[8:]]) == whole[:1]
    assert keys_of([*tokens[:4], -1, *tokens[5:]]) == []
