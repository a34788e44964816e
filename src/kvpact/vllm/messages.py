"""kvpact's messages in the envelopes that vLLM carries: the envelopes hold only bytes (H80)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpact.contract import WorkerReport
from kvpact.wire import Message, StepMessage, WorkerHandshake, decode, encode


@dataclass
class _Envelope(Generic[Message]):
    payload: bytes
    kind: ClassVar[Any]
    """The class of the message."""

    @classmethod
    def of(cls, message: Message) -> Self:
        """Encode a message."""
        return cls(encode(message))

    def message(self) -> Message:
        """Decode it. Raises as `wire.decode`."""
        message: Message = decode(self.payload, self.kind)
        return message


class PactMetadata(_Envelope[StepMessage], KVConnectorMetadata):
    """Scheduler to workers, every step."""

    kind = StepMessage


# Messages of steps that order nothing, as most do: without a forward pass, and with one. Immutable.
NOTHING_TO_DO = tuple(PactMetadata.of(StepMessage(computes=computes)) for computes in (False, True))


class PactHandshake(_Envelope[WorkerHandshake], KVConnectorHandshakeMetadata):
    """Worker to scheduler, once."""

    kind = WorkerHandshake


class PactWorkerMetadata(_Envelope[WorkerReport], KVConnectorWorkerMetadata):
    """Workers to scheduler, every step, from every rank; true even when the report is empty (H40)."""

    kind = WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PactWorkerMetadata:
        """Combine two ranks' reports; vLLM calls this over all ranks of a step."""
        if not isinstance(other, PactWorkerMetadata):
            raise TypeError(f"expected a report of kvpact, not {type(other).__name__}")
        return PactWorkerMetadata.of(self.message().aggregate(other.message()))

    def __bool__(self) -> bool:
        """True: vLLM skips falsy reports."""
        return True
