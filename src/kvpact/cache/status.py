"""What an engine tells people who ask it: one JSON document, with a version.

Owns the document's form. It is made on a thread beside the scheduler's, from what that thread can be asked at any time:
nothing here waits, and nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import Final

import msgspec

from kvpact import __version__
from kvpact.cache.cache import PactCache
from kvpact.cache.records import Prompts, RequestRecord, name_of
from kvpact.errors import DataError
from kvpact.memory.arena import Standing
from kvpact.metrics import MEMORY, Metrics, Snapshot, StartVerdict, series, tiers_in

VERSION: Final = 1
"""The document's; it grows when a field gets another meaning or goes."""


class TierState(msgspec.Struct):
    """One tier below memory."""

    name: str
    trouble: str = ""
    """Why it is left alone; "" if it is not."""
    complaint: str = ""
    """What is wrong with it although it is asked: too slow, full, read-only; "" if nothing."""
    doubted_for: float = 0.0
    """Seconds for which it has been left alone, or too slow."""


class Lease(msgspec.Struct):
    """An open plan, which holds blocks in memory."""

    request_id: str
    state: str
    blocks: tuple[int, int]
    """First block, and the one after the last."""
    tokens: int
    seconds: float
    """Since the engine last prepared or committed it."""


class EngineStatus(msgspec.Struct, kw_only=True):
    """One engine now. `metrics` are series as `kvpact.metrics` names them, tokens, bytes, blocks and seconds."""

    version: int = VERSION
    kvpact: str = __version__
    pid: int
    model: str
    block_size: int
    metrics: Snapshot
    verdict: StartVerdict = StartVerdict()
    time: float = 0.0
    """Now, on the clock of `records`."""
    tiers: list[TierState] = []
    leases: list[Lease] = []
    records: list[RequestRecord] = []
    prompts: Prompts = msgspec.field(default_factory=Prompts)

    def encoded(self) -> bytes:
        """The document as an engine sends it."""
        return msgspec.json.encode(self)

    @classmethod
    def parse(cls, raw: bytes) -> EngineStatus:
        """The document that an engine sent. Raises DataError."""
        if not raw:
            raise DataError("the engine has not answered in time")
        try:
            version = msgspec.json.decode(raw, type=_Versioned).version
            if version == VERSION:
                return msgspec.json.decode(raw, type=cls)
        except msgspec.DecodeError as error:
            raise DataError(f"no status of an engine: {error}") from None
        raise DataError(f"version {version} of the status, not {VERSION}: the engine runs another release of kvpact")


class _Versioned(msgspec.Struct):
    version: int


def troubles_in(metrics: Mapping[str, float], down: Container[str]) -> dict[str, str]:
    """What is wrong with each tier of an engine, by its counts; memory is named only if something is.

    A tier that an engine does without is `down`; one that was not asked yet is not.
    """
    tiers = dict.fromkeys((*tiers_in(metrics), *tiers_in(metrics, "tier_up")))
    found = {tier: "the engine's log says why" if tier in down else "" for tier in tiers if tier != MEMORY}
    return found | ({MEMORY: "a copy was wrong, so nothing is served"} if metrics.get("refuted_copies") else {})


def status_of(
    cache: PactCache | None, metrics: Metrics, model: str, block_size: int, verdict: StartVerdict | None = None
) -> EngineStatus:
    """The status of an engine, with what kvpact's own cache knows if it has that.

    The tiers' gauges are those that the scheduler's thread has set last, but for their health.
    """
    found = EngineStatus(pid=os.getpid(), model=model, block_size=block_size, metrics=metrics.snapshot())
    found.verdict = verdict or found.verdict
    if cache is None:
        return found
    found.metrics |= {series(name, label): total for name, total, label in cache.ledger.totals.counts()}
    found.metrics[series("held_blocks", MEMORY)] = cache.index.held_count
    found.metrics[series("capacity_blocks", MEMORY)] = cache.index.num_slots
    arena = cache.tiers.arena
    found.metrics["unproven_copies"] = int(arena.standing is Standing.OPEN)
    found.metrics |= {series("unmade_checks", reason): checks for reason, checks in arena.unmade_checks.items()}
    clients = [(client, client.health) for client in cache.tiers.clients]
    ups = {series("tier_up", client.name): int(not health.is_paused) for client, health in clients if health.is_known}
    found.metrics |= ups
    down = [tier for tier in tiers_in(found.metrics, "tier_up") if not found.metrics[series("tier_up", tier)]]
    now = found.time = cache.tiers.clock()
    tiers = {name: TierState(name, trouble) for name, trouble in troubles_in(found.metrics, down).items()}
    for client, health in clients:
        tiers[client.name] = TierState(client.name, health.trouble, client.complaint, client.probes.doubted_for(now))
    found.tiers = [*tiers.values()]
    found.leases = [
        Lease(
            name_of(plan.request_id),
            plan.state,
            (plan.blocks.start, plan.blocks.end),
            plan.committed_tokens or plan.promised_tokens,
            now - plan.renewed_at,
        )
        for plan in cache.ledger.open_plans()
    ]
    found.records, prompts = cache.requests.records.all(), cache.requests.records.prompts
    found.prompts = msgspec.structs.replace(prompts, used_tokens=cache.ledger.totals.used_tokens)
    return found
