"""The messages between the scheduler's process and the workers, as bytes.

Owns the messages and their encoding. Each message begins with the release that made it. Nothing is unpickled (H80).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvpact import __version__
from kvpact.contract import StepWork, WorkerReport
from kvpact.errors import ConfigError, DataError
from kvpact.memory.arena import SegmentAddress

Message = TypeVar("Message", bound="StepMessage | WorkerHandshake | WorkerReport | LentSegment")

VERSION: Final = 4
"""Version of the messages: changes whenever one of their fields changes."""


@dataclass(frozen=True, slots=True)
class UnorderedLoad:
    """A load that could not be ordered although the engine relies on it; the workers report it as failed."""

    request_id: str
    block_ids: tuple[int, ...]
    synchronous: bool


@dataclass(frozen=True, slots=True)
class SharedTierConfig:
    """What a worker needs to open the same shared tiers as the scheduler's half, which alone knows all ranks.

    `tiers` has pairs: the number by which the scheduler's half knows a tier, and the tier's place in the configuration.
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
    """The tiers to search; present in every step whose work has lookups."""
    adapters: tuple[AdapterUsed, ...] = ()
    """The adapters that this step must use for requests that run with loaded blocks for the first time."""
    changes: tuple[int, ...] = ()
    """With loads or saves: per rank, how many changes of its weights it had reported when they were ordered."""
    computes: bool = True
    """Whether the step has a forward pass."""


@dataclass(frozen=True, slots=True)
class WorkerHandshake:
    """What a worker reports once: the address of its part of the arena, and what the bytes of its blocks mean."""

    rank: int
    segment: SegmentAddress
    step_hook: bool = False
    """Whether the worker calls its connector before each step."""
    watches_weights: bool = False
    """Whether the worker reports changes of its weights in the segment's notice."""
    facts: dict[str, str] = field(default_factory=dict)
    """Facts about the content of its blocks that only this worker knows, by name: see `kvpact.vllm.worker_identity`."""
    group_bytes: tuple[int, ...] = ()
    """Per KV cache group, bytes of a block on this rank; 0 for one without layers here."""
    slot_classes: tuple[int, ...] = ()
    """Per KV cache group, the class of its slots; empty if all are of one."""
    copies_per_block: int = 0
    """Copies of a block that its computing thread gives to a device; 0 if none does."""
    slots_of: int | None = None
    """The rank in whose segment this one's slots lie, because both hold the same bytes; None: in its own."""


@dataclass(frozen=True, slots=True)
class LentSegment:
    """What the first of several ranks with the same bytes tells the others, once: where the slots of all lie."""

    segment: SegmentAddress
    layer_page_bytes: tuple[int, ...]
    """Bytes of each layer in a slot, in order: the others' must be the same."""


def encode(message: StepMessage | WorkerHandshake | WorkerReport | LentSegment) -> bytes:
    """The message as bytes."""
    return _HEADER + msgspec.msgpack.encode(message)


def decode(payload: bytes, kind: type[Message]) -> Message:
    """The message. Raises ConfigError if another install made it, DataError if it is not a `kind`."""
    if payload == _SILENT and isinstance(_SILENCE, kind):
        return _SILENCE
    what, decoder = _KINDS[kind]
    if not payload.startswith(_HEADER):
        sender = re.match(rb"kvpact [^\n]{1,99}(?=\n)", payload)
        raise ConfigError(
            f"{what} comes from {sender[0].decode(errors='replace') if sender else 'another kvpact'}; this process has "
            f"{_HEADER.decode().strip()}, from {Path(__file__).parent}: install the same release of kvpact for all of "
            "the engine's processes, on each of its machines"
        )
    try:
        message: Message = decoder.decode(memoryview(payload)[len(_HEADER) :])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"{what} cannot be understood: {error}") from None
    return message


_HEADER = f"kvpact {__version__}, messages {VERSION}\n".encode()
_KINDS: dict[type, tuple[str, msgspec.msgpack.Decoder[Any]]] = {
    StepMessage: ("a step of the scheduler", msgspec.msgpack.Decoder(StepMessage)),
    WorkerHandshake: ("a worker's handshake", msgspec.msgpack.Decoder(WorkerHandshake)),
    WorkerReport: ("a worker's report", msgspec.msgpack.Decoder(WorkerReport)),
    LentSegment: ("the first rank's memory", msgspec.msgpack.Decoder(LentSegment)),
}
# Most reports of a single rank are empty: each costs the scheduler one comparison.
_SILENCE = WorkerReport({0: {}})
_SILENT = encode(_SILENCE)
