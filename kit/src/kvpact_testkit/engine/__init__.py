"""The embedded engine: the contract made executable, with an oracle instead of a model.

A small engine in the shape of vLLM's V1: requests, a block pool with prefix caching, a scheduler, simulated ranks. It
calls the cache as `contract.py` says, or as a stock vLLM release would (`EngineQuirks`). Needs numpy only.
"""

from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact_testkit.engine.block_pool import BlockPool
from kvpact_testkit.engine.config import EngineConfig
from kvpact_testkit.engine.context import EngineContext
from kvpact_testkit.engine.counts import EngineCounts
from kvpact_testkit.engine.engine import Engine, StepClock
from kvpact_testkit.engine.multi import MultiCache, MultiWorker
from kvpact_testkit.engine.oracle import OracleViolation
from kvpact_testkit.engine.output import SchedulerOutput
from kvpact_testkit.engine.quirks import EngineQuirks
from kvpact_testkit.engine.reference import ReferenceCache, reference_engine
from kvpact_testkit.engine.request import Request, RequestStatus
from kvpact_testkit.engine.simulated_worker import ByteSegment, JobBehavior, SimulatedWorker
from kvpact_testkit.engine.step_hook import agree_on_hits, apply_external_hits
from kvpact_testkit.engine.v1_connector import V1ConnectorCache, V1ConnectorWorker

__all__ = [
    "BlockPool",
    "ByteSegment",
    "Engine",
    "EngineConfig",
    "EngineContext",
    "EngineCounts",
    "EngineQuirks",
    "GroupKind",
    "GroupSet",
    "JobBehavior",
    "KVCacheGroup",
    "MultiCache",
    "MultiWorker",
    "OracleViolation",
    "ReferenceCache",
    "Request",
    "RequestStatus",
    "SchedulerOutput",
    "SimulatedWorker",
    "StepClock",
    "V1ConnectorCache",
    "V1ConnectorWorker",
    "agree_on_hits",
    "apply_external_hits",
    "reference_engine",
]
