"""What the two halves of the connector say to each other, as bytes: vLLM carries them, msgspec reads them.

Owns the wire format between the scheduler's process and the workers'. Nothing is unpickled by kvpact (H80): the objects
that vLLM transports hold nothing but bytes. Floor 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpact.arena import SegmentAddress
from kvpact.contract import StepWork, WorkerReport
from kvpact.step_match import StepLookup, StepRead


@dataclass(frozen=True, slots=True)
class BrokenLoad:
    """A load that could not be ordered although the engine counts on it; the workers report it as failed."""

    request_id: str
    block_ids: tuple[int, ...]
    synchronous: bool


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What a worker needs to open the shared tiers as the scheduler's half has: only that half knows all ranks.

    `tiers` has pairs: the position under which the scheduler's half knows a tier, and its place in the configuration.
    """

    namespace: str
    block_size: int
    rank_slot_bytes: tuple[int, ...]
    tiers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterUsed:
    """These blocks were loaded for adapter `number`, as its files of this `stamp` are."""

    number: int
    stamp: bytes
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One scheduler step, as the workers get it."""

    work: StepWork = field(default_factory=StepWork)
    broken: tuple[BrokenLoad, ...] = ()
    lookups: tuple[StepLookup, ...] = ()
    store: StoreAddress | None = None
    """Where to look; with every step that has `lookups`."""
    adapters: tuple[AdapterUsed, ...] = ()
    """What requests that run with loaded blocks for the first time must run with."""
    changes: tuple[int, ...] = ()
    """With loads or saves: how often each rank had said that its weights change, when they were ordered."""
    spoilt: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """With overdue loads, where vLLM can only be told of blocks: by job, those to be named."""


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """What a worker says of itself once: where its part of the arena is, and what the bytes of its blocks mean."""

    rank: int
    segment: SegmentAddress
    step_hook: bool = False
    """Whether the worker asks this half before each step."""
    watches_weights: bool = False
    """Whether the worker says in the segment's notice when its weights change."""
    facts: dict[str, str] = field(default_factory=dict)
    """What only this worker knows of the content of its blocks, by name: see `kvpact.vllm.worker_identity`."""


@dataclass
class PactMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    payload: bytes

    @classmethod
    def of(cls, message: StepMessage) -> PactMetadata:
        """Encode a step."""
        return cls(_NOTHING_TO_DO if message == _NO_WORK else msgspec.msgpack.encode(message))

    def message(self) -> StepMessage:
        """Decode the step."""
        return msgspec.msgpack.decode(self.payload, type=StepMessage)


@dataclass
class PactHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once."""

    payload: bytes

    @classmethod
    def of(cls, hello: WorkerHello) -> PactHandshake:
        """Encode a worker's hello."""
        return cls(msgspec.msgpack.encode(hello))

    def hello(self) -> WorkerHello:
        """Decode the hello."""
        return msgspec.msgpack.decode(self.payload, type=WorkerHello)


@dataclass(frozen=True, slots=True)
class RanksMessage:
    """One step's report over some ranks, with the reads of the one rank that tells them."""

    report: WorkerReport
    reads: tuple[StepRead, ...] = ()


@dataclass
class PactWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, every step, from every rank; true even when there is nothing to say (H40)."""

    payload: bytes

    @classmethod
    def of(cls, report: WorkerReport, reads: tuple[StepRead, ...] = ()) -> PactWorkerMetadata:
        """Encode a report, and what one rank has read from shared tiers."""
        return cls(msgspec.msgpack.encode(RanksMessage(report, reads)))

    def message(self) -> RanksMessage:
        """Decode it."""
        return _SILENCE if self.payload == _SILENT else _RANKS_MESSAGES.decode(self.payload)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PactWorkerMetadata:
        """Combine two ranks' reports; vLLM calls this over all ranks of a step."""
        if not isinstance(other, PactWorkerMetadata):
            raise TypeError(f"expected a report of kvpact, not {type(other).__name__}")
        mine, theirs = self.message(), other.message()
        return PactWorkerMetadata.of(mine.report.aggregate(theirs.report), mine.reads + theirs.reads)

    def __bool__(self) -> bool:
        """True: vLLM skips falsy reports."""
        return True


_RANKS_MESSAGES = msgspec.msgpack.Decoder(RanksMessage)
# Most steps order nothing and most reports of a single rank are empty: those cost the scheduler a comparison.
_NO_WORK = StepMessage()
_NOTHING_TO_DO = msgspec.msgpack.encode(_NO_WORK)
_SILENCE = RanksMessage(WorkerReport({0: {}}))
_SILENT = msgspec.msgpack.encode(_SILENCE)
