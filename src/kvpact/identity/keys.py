"""Names for blocks: the keys that identify their content, and the namespace that bounds their use.

Owns kvpact's own block keys (SHA-256 over a whole prefix), the namespace digest, and a store of keys made before. Knows
no engine: a request's content arrives as plain values.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import starmap
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from blake3 import blake3

from kvpact.border import json_object
from kvpact.errors import NAME_CHARS, DataError
from kvpact.identity.epochs import FIRST_EPOCH, Epoch

if TYPE_CHECKING:
    from hashlib import _Hash

BlockKey: TypeAlias = bytes
"""Name (32 bytes) of one block and every token before it; equal in every process, host and release."""

KEY_BYTES = 32
TOKEN_BYTES = 4
"""Bytes of a token id in the preimage of a key."""
KEY_FORMAT = 3
"""Version of a key's preimage, incremented with each change, so that old and new records never match."""

RUN_TOKENS = 8192
"""Tokens of a run. See `KnownRuns`."""
MAX_RUNS = 256
"""Most runs kept: two million tokens, in blocks of 16 in 12 MB."""


class KnownRuns(NamedTuple):
    """Keys made before, run by run: in one process an engine's own hashes find them again.

    `runs` has the keys of each run and the state after the last one, of all requests of an engine; the oldest goes when
    there are too many. `hashes`, a list that grows with the request, are the engine's, of blocks of `block_size`
    tokens. If two requests have one salt and an equal hash, they must have all tokens before the end of that block in
    common, and no other inputs; a request without that guarantee has no `KnownRuns`.

    The tokens after a prompt's last whole run are hashed again, in blocks of 16 in at most 0.23 ms. With runs of half
    the size this is halved, and a new prompt costs 3 % more.
    """

    runs: dict[bytes, tuple[list[BlockKey], _Hash]]
    block_size: int
    hashes: Sequence[bytes] = ()

    def name(self, root: bytes, end: int) -> bytes:
        """Key in `runs` of a run that ends after so many tokens; empty if the engine has no hash of a block there."""
        blocks, rest = divmod(end, self.block_size)
        return b"" if rest or blocks > len(self.hashes) else root + self.hashes[blocks - 1]

    def keep(self, root: bytes, end: int, keys: list[BlockKey], state: _Hash) -> None:
        """Keep a run that ends after so many tokens, if it has a name; `keys` and `state` must not change later."""
        if name := self.name(root, end):
            self.runs[name] = keys, state
        if len(self.runs) > MAX_RUNS:
            del self.runs[next(iter(self.runs))]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Image, audio clip or video in a prompt: `count` placeholder tokens from `start` on, named by its content."""

    start: int
    count: int
    content: str


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Inputs of a request besides token ids that determine the content of its KV blocks.

    `adapter` names the adapter's weights by content (a digest, never the user's name for it), `salt` separates tenants,
    `media` are the spans whose embeddings replace placeholder tokens, `embeddings` has for each block index a digest of
    the prompt embeddings that replace the block's tokens. `known` determines nothing: it saves work.
    """

    adapter: str = ""
    salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    known: KnownRuns | None = field(default=None, compare=False, repr=False)

    def same_root(self, other: RequestIdentity) -> bool:
        """True if adapter and salt are equal, which hold for the whole request; media and embeddings may differ."""
        return (self.adapter, self.salt) == (other.adapter, other.salt)


def _framed(*parts: bytes) -> bytes:
    """Length-prefixed concatenation, so that no two lists of parts share an encoding."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@lru_cache(maxsize=1024)
def _root_of(
    namespace: bytes, epoch: bytes, group: bytes, block_size: int, ahead: int, adapter: str, salt: str
) -> bytes:
    """Root of the keys of all requests with this adapter and this salt; few engines have many of them."""
    root = _framed(
        b"kvpact-key",
        KEY_FORMAT.to_bytes(2, "little"),
        namespace,
        epoch,
        group,
        block_size.to_bytes(8, "little"),
        ahead.to_bytes(8, "little"),
        adapter.encode(),
        salt.encode(),
    )
    return sha256(root).digest()


class BlockKeys:
    """Block keys of one request, computed once and extended as the request grows; never recomputed per step.

    Only full blocks have a key. `namespace` is 32 bytes, `block_size` in tokens, `group` names a KV cache group (32
    bytes; zeros where there is one). A key is the SHA-256 of 64 bytes and all token ids up to the end of its block, 4
    bytes each, little endian. The 64 bytes are the root and zeros. A block with other inputs than tokens begins anew:
    after it they are the key before the block, and a digest of these inputs. SHA-256 is a chain by itself, so a key
    costs its own block's tokens, and one call to hash them.

    With `ahead` a key covers so many tokens after its block too, and exists once they are known: the layers of a draft
    model compute a token's keys and values from the next token too.

    Content that cannot be encoded so (a token id below 0 or from 2^32 on, text that is not Unicode) has no key: the
    keys end before the first such block, and nothing is raised (P14).
    """

    __slots__ = ("_frames", "_hashed", "_identity", "_root", "ahead", "block_size", "ended", "keys")

    def __init__(
        self,
        namespace: bytes,
        block_size: int,
        identity: RequestIdentity,
        epoch: Epoch = FIRST_EPOCH,
        group: bytes = bytes(KEY_BYTES),
        ahead: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {block_size}")
        self.block_size = block_size
        self.ahead = ahead
        self._frames = Struct(f"{TOKEN_BYTES * block_size}s").iter_unpack
        self.keys: list[BlockKey] = []
        self.ended = False
        """True once a block without a key was found: no further keys are made, whatever tokens follow."""
        self._identity = identity
        of_engine = namespace, epoch.value, group, block_size, ahead
        try:
            is_short = len(identity.adapter) + len(identity.salt) <= 2 * NAME_CHARS  # roots outlive the request (H118)
            root_of = _root_of if is_short else _root_of.__wrapped__
            self._root = root_of(*of_engine, identity.adapter, identity.salt)
        except UnicodeEncodeError:
            self._root = _root_of(*of_engine, "", "")
            self.ended = True
        self._hashed: _Hash | None = sha256(self._root + _NO_EXTRAS)
        """State after the last key; None after keys were dropped."""

    def count(self, num_tokens: int) -> int:
        """Number of blocks with a key in a request of `num_tokens` tokens, if all its content can be encoded."""
        return max(0, num_tokens - self.ahead) // self.block_size

    def extend(self, token_ids: Sequence[int], most: int | None = None) -> list[BlockKey]:
        """Compute the keys of blocks that `token_ids` (the whole request so far) newly completes; returns all keys.

        Computes none after the first `most` blocks, so that a caller can spread the work over steps; known keys are
        added.
        """
        size = self.block_size
        last = self.count(len(token_ids))
        if most is not None and most < last:
            last = most
        known = self._identity.known if not self.ahead else None
        if known is not None and len(self.keys) < last and not self.ended:
            self._take_known(known, self.count(len(token_ids)))
        if (first := len(self.keys)) >= last or self.ended:
            return self.keys
        packed = _packed(self._packable(token_ids[first * size : last * size + self.ahead]))
        nbytes = TOKEN_BYTES * size
        after = TOKEN_BYTES * self.ahead
        count = (len(packed) - after) // nbytes
        if count < 1:
            return self.keys
        hashed = self._hashed or self._hashed_again(token_ids)
        if self._identity.media or self._identity.embeddings:
            hashed = self._extend_with_extras(hashed, packed, count, after)
        else:
            if not first:
                hashed.update(packed[:after])
            packed = packed[after : after + count * nbytes]
            digest = hashed.digest
            keys = self.keys
            run = max(1, RUN_TOKENS // size)
            while packed:
                to_end = nbytes * (run - len(keys) % run)
                made = [digest() for _ in starmap(hashed.update, self._frames(packed[:to_end]))]
                keys += made
                packed = packed[to_end:]
                if known is not None and not len(keys) % run:
                    known.keep(self._root, len(keys) * size, keys[-run:] if len(made) < run else made, hashed.copy())
        self._hashed = hashed
        return self.keys

    def _take_known(self, known: KnownRuns, last: int) -> None:
        """Add the keys of known runs, each as a whole, and none after the first `last` blocks."""
        keys = self.keys
        run = max(1, RUN_TOKENS // self.block_size)
        while (end := len(keys) - len(keys) % run + run) <= last:
            found = known.runs.get(known.name(self._root, end * self.block_size))
            if found is None:
                return
            keys += found[0][len(keys) - end :]
            self._hashed = found[1].copy()

    def _extend_with_extras(self, hashed: _Hash, packed: memoryview, count: int, after: int) -> _Hash:
        """Add keys of `count` blocks, some of which have other inputs than tokens; returns the new state."""
        nbytes = TOKEN_BYTES * self.block_size
        for at in range(0, count * nbytes, nbytes):
            try:
                extras = self._extras(self._identity, len(self.keys))
            except _NAMELESS:
                self.ended = True
                break
            if extras != _NO_EXTRAS:
                hashed = sha256((self.keys[-1] if self.keys else self._root) + extras)
            begins = extras != _NO_EXTRAS or not self.keys
            hashed.update(packed[at if begins else at + after : at + nbytes + after])
            self.keys.append(hashed.digest())
        return hashed

    def _hashed_again(self, token_ids: Sequence[int]) -> _Hash:
        """State after the last key, from the tokens before it."""
        begin = 0
        extras = _NO_EXTRAS
        for block in reversed(range(len(self.keys))):
            if (extras := self._extras(self._identity, block)) != _NO_EXTRAS:
                begin = block
                break
        hashed = sha256((self.keys[begin - 1] if begin else self._root) + extras)
        if self.keys:
            end = len(self.keys) * self.block_size + self.ahead
            hashed.update(_packed(array("I", token_ids[begin * self.block_size : end])))
        return hashed

    def _packable(self, token_ids: Sequence[int]) -> array[int]:
        """Token ids of whole blocks, with those after them that their keys cover, up to the first block without a key.

        That is one with an id that does not fit into 4 bytes.
        """
        try:
            return array("I", token_ids)  # one call, because the scheduler's thread waits for it
        except _NAMELESS:
            self.ended = True
            fitting = next((at for at, token in enumerate(token_ids) if not _fits(token)), 0)
            return array("I", token_ids[: self.count(fitting) * self.block_size + min(self.ahead, fitting)])

    def renew(self, identity: RequestIdentity) -> int:
        """Replace the identity of a request that has grown or changed; returns the number of keys that stay valid.

        Drops the others: `extend` computes them again. Raises ValueError if adapter or salt differ, which a live
        request cannot change.
        """
        if not identity.same_root(self._identity):
            raise ValueError("a request keeps its adapter and its salt; one with others has other block keys")
        kept = 0
        with suppress(*_NAMELESS):
            while kept < len(self.keys) and self._extras(identity, kept) == self._extras(self._identity, kept):
                kept += 1
        self._identity = identity
        if kept < len(self.keys):
            self._hashed = None
            self.keys = self.keys[:kept]  # a copy: holders of the old list keep its keys
        return kept

    def _extras(self, identity: RequestIdentity, block: int) -> bytes:
        """Digest of 32 bytes over the block's inputs besides its tokens, and over those of the tokens ahead."""
        start = block * self.block_size
        end = start + self.block_size + self.ahead
        parts = [
            _framed(b"media", span.content.encode(), (span.start - start).to_bytes(8, "little", signed=True))
            for span in identity.media
            if span.start < end and span.start + span.count > start
        ]
        for number in range(block, -(-end // self.block_size)):
            if number in identity.embeddings:
                ahead = b" ahead" * (number - block)
                parts.append(_framed(b"embeddings" + ahead, identity.embeddings[number]))
        return sha256(_framed(*parts)).digest() if parts else _NO_EXTRAS


_NO_EXTRAS = bytes(KEY_BYTES)

_NAMELESS = (OverflowError, TypeError, UnicodeEncodeError)
"""Errors of encoding a block without a key."""


def _packed(tokens: array[int]) -> memoryview:
    """Bytes of the tokens, `TOKEN_BYTES` each, little endian."""
    if sys.byteorder == "big":
        tokens.byteswap()
    return memoryview(tokens).cast("B")


def _fits(token: object) -> bool:
    return isinstance(token, int) and 0 <= token < 1 << 32


@dataclass(frozen=True, slots=True)
class Namespace:
    """Facts that must be equal for two engines to share KV bytes, by name, and the digest over them."""

    fields: Mapping[str, str]
    model: str = field(default="", compare=False)
    """Name of the model, for tools. It determines nothing: the same weights may have other names."""

    @property
    def digest(self) -> bytes:
        """Digest of 32 bytes, independent of the order of the fields."""
        return blake3(self.describe().encode()).digest()

    @property
    def name(self) -> str:
        """First 16 hex digits of the digest, for file names and logs."""
        return self.digest.hex()[:16]

    def describe(self) -> str:
        """Canonical JSON of the fields; stored beside the data so that a mismatch can be explained."""
        return json.dumps(dict(sorted(self.fields.items())), separators=(",", ":"), ensure_ascii=True)

    @property
    def for_people(self) -> Namespace:
        """Namespace with the model's name among its fields, as tools show it."""
        return Namespace({"model": self.model, **self.fields} if self.model else self.fields)

    @classmethod
    def parse(cls, text: bytes | str) -> Namespace:
        """Inverse of `describe`. Raises DataError if `text` is not a JSON object of strings."""
        found = json_object(text)
        fields = {name: value for name, value in found.items() if isinstance(value, str)}
        if len(fields) < len(found):
            raise DataError(f"a namespace is a JSON object of strings, not {text[:80]!r}")
        return cls(fields)

    def differences(self, other: Namespace) -> list[str]:
        """Lines for people, one for each field in which the two differ."""
        names = sorted({*self.fields, *other.fields})
        return [
            f"{name}: {self.fields.get(name, '(absent)')} here, {other.fields.get(name, '(absent)')} there"
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        ]
