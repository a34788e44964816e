"""Status of an engine: one JSON document, with a version, for `kvpact status` and `stats_file`.

Owns the document's form. A thread beside the scheduler's makes it from parts that can be read at any time: nothing here
waits, and nothing is changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

import msgspec

from kvpact import __version__
from kvpact.cache.cache import PactCache
from kvpact.cache.records import Prompts, RequestRecord, name_of
from kvpact.errors import DataError
from kvpact.memory.arena import Standing
from kvpact.memory.mapping import pid_namespace
from kvpact.metrics import MEMORY, Metrics, MissReason, Snapshot, StartVerdict, lost_blocks, series, tiers_in
from kvpact.tiers.backends import NEIGHBOURS
from kvpact.units import format_age

VERSION: Final = 1
"""The document's; it grows when a field gets another meaning or goes."""

_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')

FEW: Final = 10
"""Least number of lookups; if fewer all miss, that means nothing yet."""

CHANGES: Final = {
    MissReason.NOT_STORED: "nothing",
    MissReason.TOO_SHORT: "nothing, or lower `min_match_blocks`: most prompts, or their stored parts, are too short",
    MissReason.UNKNOWN_IDENTITY: "see docs/request-identity.md: most requests have inputs without a content digest",
    MissReason.DISABLED: "read the engine's log: it gives the reason why the cache is off",
    MissReason.MUST_COMPUTE: "nothing",
    MissReason.UNALIGNED: "leave --prefix-match-unit out where it is set; else nothing",
    MissReason.FAILED_BEFORE: "read the engine's log: loads fail",
    MissReason.NO_ROOM: "raise `memory`: it has no room for blocks from the tiers",
    MissReason.DEADLINE: "use a faster tier, or a longer `prepare_deadline`",
    MissReason.RECOMPUTE_FASTER: "nothing, or put a faster tier in front",
    MissReason.CROWDED: "give the engine more memory for KV, or fewer requests at once",
    MissReason.ASKED_AT_STEP: "nothing",
    MissReason.OVERDUE: "read the engine's log: copies do not end",
    MissReason.TIER_DOWN: "read the engine's log: a tier was down",
    MissReason.NOT_DELIVERED: "read the engine's log: a tier does not deliver blocks that it holds",
    MissReason.STATE_MISSING: "nothing: such prompts hit when they come again",
}
"""Advice by the most frequent reason of misses."""


class TierState(msgspec.Struct):
    """One tier below memory."""

    name: str
    trouble: str = ""
    """Reason why it is paused; "" if it is not."""
    complaint: str = ""
    """Fault of a tier in use: too slow, full, read-only; "" if there is none."""
    doubted_for: float = 0.0
    """Seconds that it has been paused, or too slow."""


class Lease(msgspec.Struct):
    """Open plan; it holds blocks in memory."""

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
    pid_namespace: str = ""
    """Namespace of process ids that has this one; "" if the host or the release names none."""
    model: str
    block_size: int
    metrics: Snapshot
    verdict: StartVerdict = StartVerdict()
    remedies: dict[str, str] = {}
    """Series of lookups, or tokens, that lacked a state -> the option that keeps it."""
    expected_turns: int = 0
    """Turns of sessions that clients' hints expect."""
    announced_blocks: int | None = None
    """Blocks that routers know of, counted in each place; None: the engine publishes no KV events."""
    time: float = 0.0
    """Now, on the clock of `records`."""
    tiers: list[TierState] = []
    leases: list[Lease] = []
    blocks_leased_from: dict[str, int] = {}
    """Blocks that it leases in the memory of each other engine of this host, by the engine's name."""
    blocks_leased_to_others: int = 0
    """Blocks of its own memory that other engines lease."""
    records: list[RequestRecord] = []
    prompts: Prompts = msgspec.field(default_factory=Prompts)

    def encoded(self) -> bytes:
        """Document as an engine sends it."""
        return msgspec.json.encode(self)

    @classmethod
    def parse(cls, raw: bytes) -> EngineStatus:
        """Decode the document that an engine sent. Raises DataError."""
        if not raw:
            raise DataError("the engine has not answered in time")
        try:
            version = msgspec.json.decode(raw, type=_Versioned).version
            if version == VERSION:
                return msgspec.json.decode(raw, type=cls)
        except msgspec.DecodeError as error:
            raise DataError(f"no status of an engine: {error}") from None
        raise DataError(f"version {version} of the status, not {VERSION}: the engine runs another release of kvpact")

    @property
    def title(self) -> str:
        """Name for people: model and process; and the namespace of its id, as of a container, if that is not theirs."""
        elsewhere = self.pid_namespace and self.pid_namespace != pid_namespace()
        process = f"process {self.pid}" + (f" of {self.pid_namespace}" if elsewhere else "")
        return f"{self.model}, {process}" if self.pid else self.model

    def count(self, name: str, tier: str = "") -> int:
        """A count of the engine, or of one tier; 0 if its release of kvpact does not have it."""
        return int(self.metrics.get(series(name, tier) if tier else name, 0))

    def by_tenant(self) -> dict[str, dict[str, int]]:
        """Blocks of each tenant in memory by kind, those of others first; none without tenants."""
        found: dict[str, dict[str, int]] = {}
        for name, blocks in self.metrics.items():
            if name.startswith("tenant_blocks{"):
                labels = dict(_LABEL.findall(name))
                found.setdefault(labels["tenant"], {})[labels["kind"]] = int(blocks)
        return found

    def tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens that were not computed, by the engine's own cache, memory, neighbours if any, each tier."""
        neighbours = (NEIGHBOURS,) if self.count("used_tokens_from", NEIGHBOURS) else ()
        tiers = (MEMORY, *neighbours, *(each.name for each in self.tiers))
        by_tier = {tier: self.count("used_tokens_from", tier) for tier in tiers}
        return {"engine": self.prompts.engine_tokens} | by_tier

    def to_change(self) -> str:
        """Advice: the one thing to change."""
        if self.verdict.unserved:
            return self.verdict.unserved
        missed, reason = max((self.metrics.get(series("misses", reason), 0), reason) for reason in MissReason)
        lookups = self.count("lookups")
        for tier in self.tiers:
            if tier.trouble:
                ago = f" for {format_age(tier.doubted_for)}" if tier.doubted_for else ""
                return f"{tier.name} is down{ago}: {tier.trouble}"
            if self.count("dropped_writes", tier.name) > self.count("written_blocks", tier.name):
                return f"raise `write_queue`, or use a faster tier: most writes to {tier.name} are dropped"
        if not lookups + self.count("spared_lookups"):
            return "nothing yet: no prompt has been looked up"
        is_short = lost_blocks(self.metrics) * 10 > self.count("saved_blocks")
        for lacking, remedy in self.remedies.items():
            of_tokens = lacking.endswith("tokens")  # more states are kept then, which a full place has no room for
            whole = self.prompts.tokens if of_tokens else lookups
            if self.metrics.get(lacking, 0) * 10 >= max(1, whole) and not (of_tokens and is_short):
                return remedy
        if not missed or missed * 10 < lookups:
            return "nothing"
        if reason is MissReason.NOT_STORED and lookups < FEW and missed == lookups:
            return "nothing yet: a new prompt always misses; send one again"
        if reason is MissReason.NOT_STORED and lost_blocks(self.metrics) * 2 > self.count("saved_blocks"):
            return "raise `memory`, or add a larger tier: most saved blocks have been evicted everywhere"
        return CHANGES[reason]


class _Versioned(msgspec.Struct):
    version: int


def _by_name(counts: Mapping[str, float]) -> dict[str, Any]:
    """Counts by name: a number, or for one with labels a list of objects, each with its labels and its `value`."""
    found: dict[str, Any] = {}
    for key, value in counts.items():
        name, _, labels = key.partition("{")
        if labels:
            found.setdefault(name, []).append({**dict(_LABEL.findall(labels)), "value": value})
        else:
            found[name] = value
    return found


def status_document(engines: Iterable[EngineStatus], *, leases: bool = False) -> dict[str, Any]:
    """The JSON that `kvpact status --json` prints and `stats_file` holds: tokens, seconds, bytes and blocks."""
    left_out = {"records"} if leases else {"records", "leases", "blocks_leased_from", "blocks_leased_to_others"}
    return {
        "engines": [
            {name: value for name, value in msgspec.to_builtins(each).items() if name not in left_out}
            | {"metrics": _by_name(each.metrics)}
            | {"tokens_by_source": each.tokens_by_source(), "to_change": each.to_change()}
            for each in engines
        ]
    }


def troubles_in(metrics: Mapping[str, float], down: Container[str]) -> dict[str, str]:
    """Fault of each tier of an engine, "" if none, by its counts; memory only if it has one.

    `down` has the tiers that an engine serves without; a tier that was not used yet is not among them.
    """
    tiers = dict.fromkeys((*tiers_in(metrics), *tiers_in(metrics, "tier_up")))
    found = {tier: "see the engine's log" if tier in down else "" for tier in tiers if tier != MEMORY}
    return found | ({MEMORY: "a copy was wrong, so no block is served"} if metrics.get("refuted_copies") else {})


def status_of(
    cache: PactCache | None, metrics: Metrics, model: str, block_size: int, verdict: StartVerdict | None = None
) -> EngineStatus:
    """Status of an engine; with plans, records and the tiers' health if it has kvpact's own cache.

    The tiers' other gauges are those that the scheduler's thread has set last.
    """
    found = EngineStatus(
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        model=model,
        block_size=block_size,
        metrics=metrics.snapshot(),
    )
    found.verdict = verdict or found.verdict
    if cache is None:
        return found
    found.metrics |= {series(name, label): total for name, total, label in cache.ledger.totals.counts()}
    found.metrics[series("held_blocks", MEMORY)] = cache.index.held_count
    found.metrics[series("capacity_blocks", MEMORY)] = cache.index.num_slots
    if cache.retaining is not None:
        found.metrics["retained_blocks"] = cache.retaining.chains.blocks
        found.expected_turns = len(cache.retaining.expected)
        found.metrics |= {series("tenant_blocks", *of): blocks for *of, blocks in cache.retaining.by_tenant()}
    arena = cache.tiers.arena
    found.metrics["unproven_copies"] = int(arena.standing is Standing.OPEN)
    found.metrics |= {series("unmade_checks", reason): checks for reason, checks in arena.unmade_checks.items()}
    clients = [(client, client.health) for client in cache.tiers.clients]
    ups = {series("tier_up", client.name): int(not health.is_paused) for client, health in clients if health.is_known}
    found.metrics |= ups
    down = [tier for tier in tiers_in(found.metrics, "tier_up") if not found.metrics[series("tier_up", tier)]]
    now = found.time = cache.tiers.clock()
    tiers = {client.name: TierState(client.name) for client in cache.tiers.beside}
    tiers |= {name: TierState(name, trouble) for name, trouble in troubles_in(found.metrics, down).items()}
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
    found.announced_blocks = cache.announcements.count if cache.announcements is not None else None
    found.records = cache.requests.records.all()
    prompts = cache.requests.records.prompts
    found.prompts = msgspec.structs.replace(prompts, used_tokens=cache.ledger.totals.used_tokens)
    return found


def add_neighbours(found: EngineStatus, cache: PactCache) -> None:
    """Fill in the blocks leased between engines, by calls of the kernel: for people who ask, not for `stats_file`."""
    found.blocks_leased_from = cache.others.leased_from()
    columns = cache.index.columns
    if columns is not None and columns.claims is not None:
        found.blocks_leased_to_others = columns.claims.count_leased(range(cache.index.num_slots))
