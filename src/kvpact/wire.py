"""Messages between the scheduler's process and the workers, and between engines of one host, as bytes.

Owns the messages and their encoding. Each message begins with the release that made it. Nothing is unpickled (H80).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvpact import __version__
from kvpact.contract import StepWork, WorkerReport
from kvpact.errors import ConfigError, DataError
from kvpact.memory.arena import SegmentAddress

Message = TypeVar(
    "Message", bound="StepMessage | WorkerHandshake | WorkerReport | LentSegment | MeetingQuestion | MeetingOffer"
)

VERSION: Final = 6
"""Version of the messages; it changes whenever one of their fields changes."""


@dataclass(frozen=True, slots=True)
class UnorderedLoad:
    """Load that could not be ordered although the engine relies on it; the workers report it as failed."""

    request_id: str
    block_ids: tuple[int, ...]
    synchronous: bool


@dataclass(frozen=True, slots=True)
class SharedTierConfig:
    """Settings for a worker to open the same shared tiers as the scheduler side, which alone knows all ranks.

    `tiers` has pairs: the scheduler side's number of a tier, and the tier's place in the configuration.
    """

    namespace: str
    block_size: int
    rank_slot_bytes: tuple[int, ...]
    tiers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterUsed:
    """Blocks that were loaded for adapter `number`, whose files had this `stamp`."""

    number: int
    stamp: bytes
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One scheduler step for the workers."""

    work: StepWork = field(default_factory=StepWork)
    broken: tuple[UnorderedLoad, ...] = ()
    store: SharedTierConfig | None = None
    """Tiers to search; present in every step whose work has lookups."""
    adapters: tuple[AdapterUsed, ...] = ()
    """Adapters that this step must use for requests that run with loaded blocks for the first time."""
    changes: tuple[int, ...] = ()
    """With loads or saves: per rank, the number of changes of its weights reported before they were ordered."""
    computes: bool = True
    """True if the step has a forward pass."""


@dataclass(frozen=True, slots=True)
class WorkerHandshake:
    """First report of a worker: the address of its part of the arena, and the layout of its blocks."""

    rank: int
    segment: SegmentAddress
    step_hook: bool = False
    """True if the worker calls its connector before each step."""
    watches_weights: bool = False
    """True if the worker reports changes of its weights in the segment's notice."""
    facts: dict[str, str] = field(default_factory=dict)
    """Facts about its blocks' content that only this worker knows, by name: see `kvpact.vllm.worker_identity`."""
    group_bytes: tuple[int, ...] = ()
    """Per KV cache group, bytes of a block on this rank; 0 for one without layers here."""
    slot_classes: tuple[int, ...] = ()
    """Per KV cache group, the class of its slots; empty if all are of one."""
    copies_per_block: int = 0
    """Number of copies per block that its computing thread gives to a device; 0 without a device."""
    slots_of: int | None = None
    """Rank in whose segment this one's slots lie, because both hold the same bytes; None: in its own."""


@dataclass(frozen=True, slots=True)
class LentSegment:
    """Message from the first of several ranks with the same bytes to the others, once: the segment of their slots."""

    segment: SegmentAddress
    layer_page_bytes: tuple[int, ...]
    """Bytes of each layer in a slot, in order: the others' must be the same."""


@dataclass(frozen=True, slots=True)
class MeetingQuestion:
    """Question of an engine to another on this host whether it may load from its memory."""

    name: str
    """Name of the asking engine's socket."""
    namespace: bytes
    """The namespace without the weights."""
    ranks: tuple[tuple[tuple[int, ...], tuple[int, ...], int | None], ...]
    """For each rank: bytes of a slot of each class, the class of each KV cache group, `WorkerHandshake.slots_of`."""


@dataclass(frozen=True, slots=True)
class MeetingOffer:
    """Yes to a `MeetingQuestion`, with descriptors: of the index's columns, the leases and these segments."""

    weights: str
    """Identity of the base weights."""
    segments: tuple[SegmentAddress, ...]
    """Segments with slots, in the ranks' order; of each, only the form counts for another process."""
    slots: int
    """Number of slots; of extents where there are several classes."""
    num_bytes: int
    """Bytes of the slots, over all ranks."""
    node: int | None
    """Memory node of the slots, if one was asked for."""
    neighbours: int
    """Number of engines that may lease from this one, the asking one included; changes follow as `NUMBER`s."""


NUMBER: Final = struct.Struct("<I")


def encode(message: Message) -> bytes:
    """Encode a message as bytes."""
    return _HEADER + msgspec.msgpack.encode(message)


def decode(payload: bytes, kind: type[Message]) -> Message:
    """Decode a message. Raises ConfigError if another install made it, DataError if it is not a `kind`."""
    if payload == _SILENT and isinstance(_SILENCE, kind):
        return _SILENCE
    name, decoder = _KINDS[kind]
    if not payload.startswith(_HEADER):
        sender = re.match(rb"kvpact [^\n]{1,99}(?=\n)", payload)
        raise ConfigError(
            f"{name} comes from {sender[0].decode(errors='replace') if sender else 'another kvpact'}; this process has "
            f"{_HEADER.decode().strip()}, from {Path(__file__).parent}: install the same release of kvpact for all of "
            "the engine's processes, on each of its machines"
        )
    try:
        message: Message = decoder.decode(memoryview(payload)[len(_HEADER) :])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"{name} cannot be decoded: {error}") from None
    return message


_HEADER = f"kvpact {__version__}, messages {VERSION}\n".encode()
_KINDS: dict[type, tuple[str, msgspec.msgpack.Decoder[Any]]] = {
    StepMessage: ("a step of the scheduler", msgspec.msgpack.Decoder(StepMessage)),
    WorkerHandshake: ("a worker's handshake", msgspec.msgpack.Decoder(WorkerHandshake)),
    WorkerReport: ("a worker's report", msgspec.msgpack.Decoder(WorkerReport)),
    LentSegment: ("the first rank's memory", msgspec.msgpack.Decoder(LentSegment)),
    MeetingQuestion: ("a question of another engine", msgspec.msgpack.Decoder(MeetingQuestion)),
    MeetingOffer: ("an offer of another engine", msgspec.msgpack.Decoder(MeetingOffer)),
}
# Most reports of a single rank are empty: each costs the scheduler one comparison.
_SILENCE = WorkerReport({0: {}})
_SILENT = encode(_SILENCE)
