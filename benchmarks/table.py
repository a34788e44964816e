"""What the benchmarks print with: medians with their spread, and rows as a table. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles

Row = Mapping[str, object]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The columns `name` (median), `name_q1` and `name_q3` (quartiles; the least and the most of fewer than four)."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 3 else (min(values), 0.0, max(values))
    return {name: round(median(values), 4), f"{name}_q1": round(low, 4), f"{name}_q3": round(high, 4)}


def percentile(values: Sequence[float], percent: int) -> float:
    """Of one value that value."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def step_columns(seconds: Sequence[float]) -> dict[str, float]:
    """The columns of the steps' CPU times, in ms: median, 99th percentile and most."""
    columns = {
        "cpu_ms_step_median": median(seconds),
        "cpu_ms_step_p99": percentile(seconds, 99),
        "cpu_ms_worst_step": max(seconds),
    }
    return {name: round(value * 1e3, 4) for name, value in columns.items()}


def ratio(ours: float, reference: float) -> float | None:
    """Ours over the reference; None where that is nothing."""
    return round(ours / reference, 3) if reference else None


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown: quartiles in brackets after their median, no column for what no row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if any(row.get(name) is not None for row in rows)]
    spreads = {name for name in names if f"{name}_q1" in names}
    columns = [name for name in names if name.removesuffix("_q1").removesuffix("_q3") not in spreads or name in spreads]

    def cell(row: Row, name: str) -> str:
        shown = _shown(row.get(name))
        if name in spreads and row.get(name) is not None:
            shown += f" ({_shown(row[f'{name}_q1'])} to {_shown(row[f'{name}_q3'])})"
        return shown

    lines = [columns, ["---"] * len(columns), *([cell(row, name) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
