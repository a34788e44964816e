"""A comparison as a table, a JSON document and a chart. Judges nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpact_testkit.compare.chart import Mark, drawn, milliseconds
from kvpact_testkit.compare.estimate import Estimate
from kvpact_testkit.compare.judge import ENOUGH_FLIPS, Row, Spread, Wrong, ranked

HEADS = (
    "", "wrong\nalone", "differ\nin load", "new,\nalone", "first token\nin load: p50\n(quartiles)", "p99",
    "requests\na second", "gaps of decoding clients:\nmedian, p99, most (count)",
    "prompt tokens served", "after\na restart", "wrong after\nflipped bits", "disk / bound,\nMiB",
)  # fmt: skip

MIB = 1 << 20


def table(rows: Sequence[Row], width: int) -> Table:
    """A row of each subject, as the command was given them."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, width=width)
    for number, head in enumerate(HEADS):
        shown.add_column(head, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        if row.never_started:
            shown.add_row(row.name, *["see below"] * bool(row.failure))
        else:
            shown.add_row(*cells(row))
    return shown


def cells(row: Row) -> Iterator[str]:
    """Figures of a row as text; "-" where nothing was measured."""
    yield row.name
    yield of(row.alone)
    yield of(row.differ)
    yield spread(row.new_ms, quartiles=False)
    yield spread(row.first_ms)
    yield ms(row.first_p99_ms)
    yield "-" if row.requests_per_s is None else f"{row.requests_per_s:.2f}"
    middle = row.gap_ms.median if row.gap_ms else None
    gaps = ", ".join(ms(gap) for gap in (middle, row.gap_p99_ms, row.gap_most_ms))
    yield f"{gaps} ({row.gaps:,})" if row.gaps else "-"
    yield served(row.served, row.sources)
    wrong = f", {of(row.restart_wrong)} wrong" if row.restart_wrong and row.restart_wrong.wrong else ""
    restarted = f"{spread(row.restart_ms, quartiles=False)}, {share(row.restart_served)}{wrong}"
    yield "-" if row.restart_ms is None else restarted
    few = f" (of {row.flips_asked} blocks only)" if row.flips_asked < ENOUGH_FLIPS else ""
    yield "-" if row.damaged_wrong is None else f"{of(row.damaged_wrong)}{few}, {share(row.damaged_served)} served"
    yield disk(row)


def disk(row: Row) -> str:
    """Bytes of the store over its bound."""
    if row.disk_bytes is None:
        return "-"
    bound = "no bound" if row.disk_bound is None else f"{row.disk_bound / MIB:,.0f}"
    return f"{row.disk_bytes / MIB:,.0f} / {bound}{' ABOVE IT' if row.above_bound else ''}"


def notes(rows: Sequence[Row], prompts: int, unstable: int) -> Iterator[str]:
    """Sentences below the table: what was left out, and the last sentence of each server that failed."""
    yield f"{prompts} prompts asked alone; {unstable} left out: two runs without a cache gave them different answers."
    for row in rows:
        if row.failure:
            yield f"{row.name}: {row.failure}"
        if row.estimate is not None and row.served is not None:
            yield f"{row.name}: {row.served:.1%} of the load served; its index, one after the other: {row.estimate:.1%}"
        if row.wrong:
            yield f"{row.name}: {row.wrong} answers with other tokens than the engine without a cache"
        if row.no_time:
            yield f"{row.name}: no time was left to flip bits in its store"
        if row.above_bound:
            yield f"{row.name}: the store took {disk(row)} MiB"


def show(rows: Sequence[Row], prompts: int, unstable: int, console: Console) -> None:
    """Print the table and its notes."""
    console.print(table(rows, max(console.width, 150)), crop=False, overflow="ignore")
    for line in notes(rows, prompts, unstable):
        console.print(Text(line), soft_wrap=True)


def show_estimates(found: Sequence[Estimate], console: Console) -> None:
    """Print hit rates over sizes."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("memory, tokens", "disk, tokens", "from memory", "from disk", "served"):
        shown.add_column(head, justify="right")
    for one in found:
        parts = [f"{part / one.tokens:.1%}" for part in (one.from_memory, one.from_disk)]
        shown.add_row(f"{one.memory:,}", f"{one.disk:,}", *parts, f"{one.served:.1%}")
    console.print(shown)


def chart(rows: Sequence[Row]) -> str:
    """Times to the first token in the load, and after a restart; "" if there is none."""
    marks = []
    for row in ranked(rows):
        for found, where in ((row.first_ms, "in the load"), (row.restart_ms, "after a restart")):
            if found is not None:
                name = f"{row.name}, {where}"
                marks.append(Mark(name, found.median, found.low, found.high, row.name.startswith("kvpact")))
    return drawn("First token: median and quartiles (logarithmic)", marks) if marks else ""


def document(rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document."""
    return {**about, "rows": [row.document() for row in rows]}


def of(wrong: Wrong | None) -> str:
    return "-" if wrong is None else f"{wrong.wrong} of {wrong.judged}"


def ms(value: float | None) -> str:
    return "-" if value is None else milliseconds(value)


def spread(found: Spread | None, *, quartiles: bool = True) -> str:
    if found is None:
        return "-"
    between = f" ({milliseconds(found.low)} to {milliseconds(found.high)})" if quartiles else ""
    return f"{milliseconds(found.median)}{between}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def served(value: float | None, sources: Mapping[str, float]) -> str:
    """A share, and where most of it came from."""
    total = sum(sources.values())
    parts = [f"{name} {tokens / total:.0%}" for name, tokens in sorted(sources.items(), key=lambda pair: -pair[1])]
    return f"{share(value)} ({', '.join(parts)})" if total else share(value)
