"""kvpact's messages in the envelopes that vLLM carries: they hold nothing but bytes (H80)."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpact.contract import WorkerReport
from kvpact.wire import (
    StepMessage,
    WorkerHandshake,
    decode_handshake,
    decode_report,
    decode_step,
    encode_handshake,
    encode_report,
    encode_step,
)


@dataclass
class PactMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    payload: bytes

    @classmethod
    def of(cls, message: StepMessage) -> PactMetadata:
        """Encode a step."""
        return cls(encode_step(message))

    def message(self) -> StepMessage:
        """Decode the step."""
        return decode_step(self.payload)


@dataclass
class PactHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once."""

    payload: bytes

    @classmethod
    def of(cls, hello: WorkerHandshake) -> PactHandshake:
        """Encode a worker's hello."""
        return cls(encode_handshake(hello))

    def hello(self) -> WorkerHandshake:
        """Decode the hello."""
        return decode_handshake(self.payload)


@dataclass
class PactWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, every step, from every rank; true even when there is nothing to say (H40)."""

    payload: bytes

    @classmethod
    def of(cls, report: WorkerReport) -> PactWorkerMetadata:
        """Encode a report."""
        return cls(encode_report(report))

    def report(self) -> WorkerReport:
        """Decode it."""
        return decode_report(self.payload)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PactWorkerMetadata:
        """Combine two ranks' reports; vLLM calls this over all ranks of a step."""
        if not isinstance(other, PactWorkerMetadata):
            raise TypeError(f"expected a report of kvpact, not {type(other).__name__}")
        return PactWorkerMetadata.of(self.report().aggregate(other.report()))

    def __bool__(self) -> bool:
        """True: vLLM skips falsy reports."""
        return True
