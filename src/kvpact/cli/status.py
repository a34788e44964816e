"""`kvpact status` and `kvpact why`: statuses of running engines, in lines that fit a terminal.

Asks a server's metrics page, or the sockets of this user's engines. Owns the words; the numbers are the engines'.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from textwrap import wrap
from typing import Final
from urllib.request import urlopen

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvpact.cache.records import Prompts, RequestRecord
from kvpact.cache.retaining import TenantBlocks
from kvpact.cache.status import EngineStatus, TierState, status_document, troubles_in
from kvpact.cache.status_socket import NO_PLACE, answers, places
from kvpact.cli.screen import console, print_json, table
from kvpact.errors import DataError, KvpactError, printable, reason_of
from kvpact.hints.schema import Brought
from kvpact.metrics import MEMORY, MISS_HINTS, PREFIX, Metrics, UnmadeCheck, explain_misses, series
from kvpact.tiers.backends import NEIGHBOURS
from kvpact.units import format_age

WIDTH: Final = 80
LABEL: Final = 19
"""Characters of the label that begins a line, and of the space behind it."""

SHOWN: Final = 20
"""Requests that `kvpact why` lists without an id."""

BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total"
ALWAYS_THERE: Final = {"vllm:num_requests_running", "vllm:prefix_cache_hits_total"}
"""Metrics on every page of vLLM, unless the server runs with --disable-log-stats."""

PAGE_SECONDS: Final = 10.0


UNMADE: Final = {
    UnmadeCheck.GIVEN_UP: "{:,} checks skipped, because resets cancelled the saves",
    UnmadeCheck.FAILED: "{:,} checks failed (see the engine's log)",
}
"""Texts for checks without a verdict, by reason."""


def show_status(url: str | None, *, leases: bool, as_json: bool) -> bool:
    """Print the status of engines; returns whether all their tiers are up. Raises KvpactError if none answers."""
    if url and leases:
        raise KvpactError("a metrics page has no leases; leave the URL out, on the engine's machine")
    engines = [_read_page(url)] if url else _engines()
    if as_json:
        print_json(status_document(engines, leases=leases))
    else:
        for each in engines:
            _print_lines(each.title, status_lines(each))
            for line in _leases_of(each) if leases else ():
                console().print(line)
    return not any(tier.trouble for each in engines for tier in each.tiers)


def _read_page(url: str) -> EngineStatus:
    """Sum over all engines on the metrics page of a server. Raises KvpactError."""
    page = f"{url.rstrip('/').removesuffix('/metrics')}/metrics"
    right = "give the URL of a running server, such as http://localhost:8000"
    if not page.startswith(("http://", "https://")):
        raise KvpactError(f"{url} is not an http URL; {right}")
    try:
        with urlopen(page, timeout=PAGE_SECONDS) as answer:
            families = [*text_string_to_metric_families(answer.read().decode())]
    except (OSError, ValueError) as error:
        raise KvpactError(f"{page} cannot be read: {reason_of(error)}; {right}") from None
    found = defaultdict[str, float](float)
    engines = set[str]()
    down = set[str]()
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.removeprefix(PREFIX).removesuffix("_total" if sample.name.startswith(PREFIX) else "")
        labels = [f'{label}="{text}"' for label, text in sample.labels.items() if label not in ("engine", "model_name")]
        found[f"{name}{{{','.join(labels)}}}" if labels else name] += sample.value
        engines |= {sample.labels["engine"]} if name != sample.name else set()
        down |= {sample.labels["tier"]} if name == "tier_up" and not sample.value else set()
    if not engines and not found.keys() & ALWAYS_THERE:
        right = "leave that option out, or run kvpact status without a URL on the engine's machine"
        raise KvpactError(f"{page} has no statistics: the server runs with --disable-log-stats; {right}")
    if not engines:
        raise KvpactError(f"{page} has no metrics of kvpact; start the server with `kvpact serve`, and send a prompt")
    local = found[f'{BY_SOURCE}{{source="local_cache_hit"}}'] or found["vllm:prefix_cache_hits_total"]
    other = found[f'{BY_SOURCE}{{source="external_kv_transfer"}}'] or found["vllm:external_prefix_cache_hits_total"]
    tiers = [TierState(*tier) for tier in troubles_in(found, down).items()]
    prompts = Prompts(len(engines), *map(int, (found["vllm:prompt_tokens_total"], local, other)))
    return EngineStatus(pid=0, model=page, block_size=0, metrics=dict(found), tiers=tiers, prompts=prompts)


def _engines() -> list[EngineStatus]:
    """All engines of this user that answer, with a line for each other one. Raises KvpactError if none does."""
    found = list[EngineStatus]()
    refused = list[str]()
    for path, answer in answers():
        try:
            found.append(EngineStatus.parse(answer))
        except DataError as error:
            refused.append(f"{path}: {error}")
    if not found:
        asked = " or ".join(str(parent / name) for parent, name in places()) or NO_PLACE
        right = "pass the server's URL, or run this as the engine's user, on its machine and inside its container"
        raise KvpactError("; ".join(refused) or f"no kvpact engine found for this user ({asked}); {right}")
    for line in refused:
        print(f"kvpact: {printable(line)}", file=sys.stderr)
    return found


def status_lines(engine: EngineStatus) -> Iterator[tuple[str, str]]:
    """Lines about an engine, each as its label and its text."""
    yield from (("start", note) for note in engine.verdict.notes)
    if engine.verdict.unserved:
        yield "cached", f"nothing: {engine.verdict.unserved}"
        return
    prompts = engine.prompts
    cached = prompts.engine_tokens + prompts.used_tokens

    def share(tokens: int) -> str:
        return f"{tokens / prompts.tokens:6.1%}" if prompts.tokens else "     -"

    yield "served from cache", f"{share(cached)} {cached:,} of {prompts.tokens:,} prompt tokens"
    tiers = {tier.name: tier for tier in engine.tiers}
    for source, tokens in engine.tokens_by_source().items():
        text = share(tokens)
        room = engine.count("capacity_blocks", source)
        failures = engine.count("tier_failures", source)
        dropped = engine.count("dropped_writes", source)
        text += f", {engine.count('held_blocks', source) / room:.0%} of {room:,} blocks full" if room else ""
        text += f", {failures:,} failures" if failures else ""
        text += f", {dropped:,} writes dropped" if dropped else ""
        tier = tiers.get(source, TierState(source))
        text += f", {tier.complaint}" if tier.complaint else ""
        if source in tiers and series("tier_up", source) not in engine.metrics:
            text += ", not asked yet"
        yield f" from {source}", text + (", DOWN" if tier.trouble else "")
    retained = engine.count("retained_blocks")
    if retained:
        part = retained / max(1, engine.count("capacity_blocks", MEMORY))
        yield "retained", f"{part:.1%} of memory, {retained:,} blocks, by clients' hints"
    expected = engine.expected_turns
    brought = {use: engine.count("brought_blocks", use) for use in Brought}
    if expected or any(brought.values()):
        text = ", ".join(f"{blocks:,} {use}" for use, blocks in brought.items())
        yield "expected", f"turns: {expected:,}; blocks read before one: {text}"
    yield from _tenants_of(engine)
    if engine.announced_blocks is not None:
        yield "events", f"on, {engine.announced_blocks:,} blocks announced"
    if engine.count("unproven_copies"):
        counts = {reason: int(engine.metrics.get(series("unmade_checks", reason), 0)) for reason in UNMADE}
        unmade = "; ".join(UNMADE[reason].format(count) for reason, count in counts.items() if count)
        yield "copies", f"each is still checked, so no tier gets blocks yet{'; ' + unmade if unmade else ''}"
    seconds = engine.metrics.get("spared_prefill_seconds", 0)
    is_known = seconds or engine.metrics.get("prefill_speed") or not prompts.used_tokens
    yield "prefill time saved", f"{seconds:,.1f} s" if is_known else "unknown until the engine computes a prompt"
    yield "lookups", explain_misses({**Metrics().snapshot(), **engine.metrics})
    yield "to change", engine.to_change()


def _tenants_of(engine: EngineStatus) -> Iterator[tuple[str, str]]:
    """A line for each tenant's share of memory, and one for that of all others."""
    for name, blocks in engine.by_tenant().items():
        held = blocks.get(TenantBlocks.HELD, 0)
        share = blocks.get(TenantBlocks.SHARE, 0)
        retained = blocks.get(TenantBlocks.RETAINED, 0)
        text = f"{held:,} blocks in memory, share {share:,}"
        text += f", {held - share:,} lent" if held > share else ""
        text += f", {retained:,} retained" if retained else ""
        yield f"tenant {name}", text


def _leases_of(engine: EngineStatus) -> Iterator[str]:
    if not engine.leases:
        yield "no leases"
    for lease in engine.leases:
        yield f"{lease.request_id}: {lease.state}, {lease.tokens:,} tokens for {format_age(lease.seconds)}"
    for name, blocks in engine.blocks_leased_from.items():
        yield f"neighbour {name}: {blocks:,} blocks leased there"
    if engine.blocks_leased_from or engine.blocks_leased_to_others:
        yield f"neighbours: {engine.blocks_leased_to_others:,} blocks leased here"


def _print_lines(head: str, lines: Iterator[tuple[str, str]]) -> None:
    output = console()
    output.print(head)
    for label, text in lines:
        for line in wrap(f"{label:<{LABEL - 1}} {text}", WIDTH, subsequent_indent=" " * LABEL):
            output.print(line, style="bold red" if text.endswith("DOWN") else None)


# Requests


def show_requests(wanted: str | None, *, as_json: bool) -> None:
    """Print the record of the request with this id, or of the last ones. Raises KvpactError if there is none."""
    engines = _engines()
    found = [(engine, record) for engine in engines for record in engine.records if _is_of(record, wanted)]
    found.sort(key=lambda each: each[1].arrived_at)
    if not found:
        missing = f'no record of request "{wanted}"' if wanted else "no record of a request"
        kept = sum(len(engine.records) for engine in engines)
        for engine in engines:
            if engine.verdict.unserved:
                raise KvpactError(f"{missing}: {engine.verdict.unserved}")
        right = "give the id of a response, such as cmpl-1234, soon after it"
        raise KvpactError(f"{missing} among the last {kept}; {right}")
    if as_json:
        shown = [{**msgspec.to_builtins(record), "block_size": engine.block_size} for engine, record in found]
        print_json({"requests": shown})
    elif wanted:
        for engine, record in found:
            _print_lines(record.request_id, _story_of(engine, record))
    else:
        rows = table(["request", "outcome"], ["age", "prompt", "engine", "promised", "used"])
        for engine, record in found[-SHOWN:]:
            numbers = (record.prompt_tokens, record.engine_tokens, record.promised_tokens, record.used_tokens)
            outcome = record.ended or record.miss or _so_far(engine, record)
            age = format_age(engine.time - record.arrived_at)
            rows.add_row(record.request_id[:24], outcome, age, *map(str, numbers))
        console().print(rows)


def _is_of(record: RequestRecord, wanted: str | None) -> bool:
    """True if a response's id is this request's: engines append to it."""
    return not wanted or record.request_id.startswith(wanted) or wanted.startswith(record.request_id)


def _is_spared(engine: EngineStatus, record: RequestRecord) -> bool:
    """True if the engine's own prefix cache had every block that could be loaded."""
    return 0 < (record.prompt_tokens - 1) // engine.block_size <= record.engine_tokens // engine.block_size


def _so_far(engine: EngineStatus, record: RequestRecord) -> str:
    """State of a request that is no miss and whose plans have not ended."""
    if record.looked_up_from >= 0:
        return "waiting"
    return "in engine" if _is_spared(engine, record) else "not asked"


def _story_of(engine: EngineStatus, record: RequestRecord) -> Iterator[tuple[str, str]]:
    size = engine.block_size
    start = record.looked_up_from
    end = (record.prompt_tokens - 1) // size
    age = format_age(engine.time - record.arrived_at)
    yield "prompt", f"{record.prompt_tokens:,} tokens, blocks of {size}, {age} ago"
    yield "engine had", f"{record.engine_tokens:,} tokens in its own prefix cache"
    spared = "no need: the engine itself had every block" if _is_spared(engine, record) else "no"
    yield "looked up", _blocks(start, end) if record.found is not None else spared
    if record.found is not None:
        found = []
        at = start
        names = (MEMORY, NEIGHBOURS, *(tier.name for tier in engine.tiers))
        own = record.found.resident - record.found.beside
        for name, held in zip(names, (own, record.found.resident, *record.found.by_tier), strict=False):
            found += [f"{_blocks(at, held)} in {name}"] if held > at else []
            at = max(at, held)
        yield "found", ", ".join(found) or "no block"
    if record.miss is not None:
        belief = f" ({record.belief})" if record.belief else ""
        yield "why not", f"{record.miss}: {MISS_HINTS[record.miss]}{belief}"
    for lease in (lease for lease in engine.leases if lease.request_id == record.request_id):
        yield "now", f"{lease.state}, {lease.tokens:,} tokens in {_blocks(*lease.blocks)}"
    if record.plans:
        counts = f"{record.promised_tokens:,} promised, {record.committed_tokens:,} committed"
        yield "tokens", f"{counts}, {record.loaded_tokens:,} loaded, {record.used_tokens:,} used"
        plans = "its only plan" if record.plans == 1 else f"the last of {record.plans} plans"
        yield "ended", f"{record.ended}: {plans}, for {_blocks(*record.blocks)}"
    if record.neighbours:
        yield "loaded from", f"memory of {', '.join(record.neighbours)}"
    yield "saved", f"{record.saved_blocks:,} blocks"
    yield from (("hint", f"{name}: {outcome}") for name, outcome in record.hints.items())
    yield from (("start", note) for note in engine.verdict.notes)


def _blocks(first: int, end: int) -> str:
    return f"blocks {first}-{end - 1}" if end > first else "no blocks"
