"""Judges the readings of a demonstration: the figures, whether they pass, and the table that shows them.

The verdict is a function of the readings alone. Never touches an engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.phases import (
    COLD,
    COLD_KVPACT,
    COUNTS,
    LOCAL_HIT,
    PHASES,
    WARM_DISK,
    WARM_MEMORY,
    Reading,
    Results,
)

REUSED_SHARE = 0.95
"""At least this share of the reusable tokens must come from the cache in every warm phase."""

COLD_CPU_SHARE = 0.01
"""Maximum share of kvpact in a cold prompt's CPU time, but for pages touched for the first time. More is reported, and
is no failure: other work slows all code."""

UNPROVEN_ON_GPUS = "Run by us on one H100 (docs/gpu.md): here the copies prove themselves while they serve."


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One row of the table. Tokens are sums over the phase's requests, times are milliseconds to the first token."""

    name: str
    requests: int
    prompt_tokens: int
    reusable_tokens: int
    cached_tokens: int
    ttft_ms: float
    ttft_ms_quartiles: tuple[float, float]
    speedup: float
    identical: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The demonstration's outcome; it passed when `failures` is empty."""

    model: str
    phases: list[PhaseFigures]
    gpu: str
    """The name of the GPU that the engines computed on; "" for the CPU."""
    cold_cpu_share: float | None
    """CPU seconds of kvpact's threads and scheduler hooks for cold prompts, over those of the prompts themselves.

    None where the kernel does not count the CPU time of threads.
    """
    pages_cpu_share: float | None
    """The part of it for pages of memory that are touched for the first time."""
    cold_overhead: float
    """Time to first token of a cold prompt with kvpact over without, minus 1: the median over prompts."""
    cold_overhead_quartiles: tuple[float, float]
    identical: bool
    promised: int
    committed: int
    loaded: int
    used: int
    leases_held: int
    spared_seconds: list[float]
    """Seconds of prefill spared, before the restart and after it."""
    failures: list[str]


def judge(results: Results) -> Report:
    """Compare every reading with its reference and name what fails.

    A prompt answered with kvpact must match the same prompt without it: a cold one the cold one, a warm one the
    engine's own prefix hit, because in bfloat16 a hit and a full prefill differ by themselves.
    """
    readings: dict[str, list[Reading]] = defaultdict(list)
    for reading in results.readings:
        readings[reading.phase].append(reading)
    first = {
        phase: {reading.prompt: reading.output for reading in reversed(found)} for phase, found in readings.items()
    }
    references = {COLD: COLD, LOCAL_HIT: LOCAL_HIT, COLD_KVPACT: COLD, WARM_MEMORY: LOCAL_HIT, WARM_DISK: LOCAL_HIT}
    cold = median(_milliseconds(readings[COLD]))
    phases = [_figures(phase, readings[phase], first[references[phase]], results.block_size, cold) for phase in PHASES]
    ratios = [
        output.first_token_seconds / first[COLD][prompt].first_token_seconds - 1
        for prompt, output in first[COLD_KVPACT].items()
    ]
    prompts = sum(cost.prompts for cost in results.cold_costs)
    return Report(
        model=results.model,
        gpu=results.gpu,
        phases=phases,
        cold_cpu_share=sum(cost.kvpact for cost in results.cold_costs) / prompts if prompts else None,
        pages_cpu_share=sum(cost.pages for cost in results.cold_costs) / prompts if prompts else None,
        cold_overhead=median(ratios),
        cold_overhead_quartiles=_quartiles(ratios),
        identical=all(phase.identical for phase in phases),
        promised=results.counts["promised"],
        committed=results.counts["committed"],
        loaded=results.counts["loaded"],
        used=results.counts["used"],
        leases_held=results.leases_held,
        spared_seconds=[*results.spared_seconds],
        failures=[*_failures(phases), *_ledger_failures(results, phases)],
    )


def _figures(
    name: str, readings: Sequence[Reading], reference: dict[int, Output], block_size: int, cold: float
) -> PhaseFigures:
    times = _milliseconds(readings)
    return PhaseFigures(
        name=name,
        requests=len(readings),
        prompt_tokens=sum(reading.prompt_tokens for reading in readings),
        # Whole blocks, and never the last token: its logits are what the first answer token is sampled from.
        reusable_tokens=sum((reading.prompt_tokens - 1) // block_size * block_size for reading in readings),
        cached_tokens=sum(reading.output.cached_tokens for reading in readings),
        ttft_ms=median(times),
        ttft_ms_quartiles=_quartiles(times),
        speedup=cold / median(times),
        identical=all(reading.output.same_answer(reference[reading.prompt]) for reading in readings),
    )


def _failures(phases: Sequence[PhaseFigures]) -> list[str]:
    failures = [f"{phase.name}: answers differ" for phase in phases if not phase.identical]
    for phase in phases:
        if phase.name in (COLD, COLD_KVPACT):
            if phase.cached_tokens:
                failures.append(f"{phase.name}: {phase.cached_tokens} tokens came from a cache, so it was not cold")
        elif phase.cached_tokens < REUSED_SHARE * phase.reusable_tokens:
            failures.append(
                f"{phase.name}: {phase.cached_tokens} of {phase.reusable_tokens} reusable tokens came from the cache, "
                f"at least {REUSED_SHARE:.0%} should"
            )
    return failures


def _ledger_failures(results: Results, phases: Sequence[PhaseFigures]) -> list[str]:
    failures = []
    if results.leases_held:
        failures.append(f"{results.leases_held} leases are held after the last answer, there should be none")
    counts = [results.counts[name] for name in COUNTS]
    if counts != sorted(counts, reverse=True):
        failures.append(f"the ledger counts {dict(zip(COUNTS, counts, strict=True))}, none may exceed the one before")
    skipped = sum(phase.cached_tokens for phase in phases if phase.name in (WARM_MEMORY, WARM_DISK))
    if results.counts["used"] < skipped:
        failures.append(f"the ledger counts {results.counts['used']} used tokens, the engine skipped {skipped}")
    if results.spared_seconds and not results.spared_seconds[-1]:
        failures.append(f"{WARM_DISK}: no second of prefill counts as spared, of tokens that came from the cache")
    return failures


def _milliseconds(readings: Sequence[Reading]) -> list[float]:
    return [reading.output.first_token_seconds * 1e3 for reading in readings]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return lower, upper


def _cold_cpu_line(share: float | None, pages: float | None) -> str:
    if share is None or pages is None:
        return "This kernel counts no CPU time of threads: kvpact's share is not known."
    return (
        f"kvpact takes {share - pages:.1%} of a cold prompt's CPU time (aim: {COLD_CPU_SHARE:.0%}), and {pages:.1%} to "
        "take memory from the machine, each page once."
    )


def _spared_line(seconds: Sequence[float]) -> str:
    """The seconds of both lives, in a sentence."""
    return f"Prefill spared: {seconds[0]:,.1f} s, and {seconds[-1]:,.1f} s after the restart."


def show(report: Report, console: Console) -> None:
    """Print the report as a table with the ledger's counts under it."""
    # Fits into 80 columns, the assumed width where the output is a file.
    table = Table(title="One prompt, computed once", title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("phase", no_wrap=True)
    for heading in ("tokens of\na prompt", "from\ncache", "first token,\nmedian", "quartiles,\nms", "against\ncold"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("tokens\nidentical", no_wrap=True)
    for phase in report.phases:
        low, high = phase.ttft_ms_quartiles
        table.add_row(
            phase.name,
            f"{phase.prompt_tokens / phase.requests:,.0f}",
            f"{phase.cached_tokens / phase.requests:,.0f}",
            f"{phase.ttft_ms:,.0f} ms",
            f"{low:,.0f}-{high:,.0f}",
            f"{phase.speedup:.1f} x",
            "reference" if phase.name in (COLD, LOCAL_HIT) else "yes" if phase.identical else "NO",
        )
    low, high = report.cold_overhead_quartiles
    counts = ", ".join(f"{name} {getattr(report, name):,}" for name in COUNTS)
    console.print(
        Group(
            table,
            Text(
                f"Means and medians of {report.phases[0].requests} prompts. Model, with random weights: {report.model}."
            ),
            Text(f"Ledger, in tokens: {counts}. Leases held: {report.leases_held}."),
            *([Text(_spared_line(report.spared_seconds))] if report.spared_seconds else []),
            *([Text(f"On {report.gpu}. {UNPROVEN_ON_GPUS}")] if report.gpu else []),
            Text(_cold_cpu_line(report.cold_cpu_share, report.pages_cpu_share)),
            Text(f"Time to its first token: {report.cold_overhead:+.1%} (quartiles {low:+.1%} to {high:+.1%})."),
            *(Text(f"FAILED  {failure}", style="bold red") for failure in report.failures),
        )
    )
