"""`kvpact inspect` and `kvpact verify`: a disk tier's files, shown to a person or as JSON.

Owns the tables, the progress bar and the wording. Never changes a file, and leaves the reading to the tier. Floor 4.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from kvpact.errors import TierError
from kvpact.tier_urls import format_size
from kvpact.tiers.inspect import DamagedRecord, SlabSummary, VerifyReport, scan_directory, verify_slab
from kvpact.tiers.slab import SLAB_SUFFIX

TABLE_WIDTH: Final = 2000
"""Columns, at most; a terminal wraps longer lines by itself, and a file has no width."""

RECORDS_SHOWN: Final = 20
"""Damaged records listed for a person; `--json` lists all."""


def inspect_directory(path: Path, *, as_json: bool) -> None:
    """Print what the slabs in a directory hold. Raises TierError if it cannot be read."""
    slabs = scan_directory(path)
    if as_json:
        print_json({"slabs": [asdict(slab) for slab in slabs]})
        return
    output = console()
    if not slabs:
        output.print(f"no slabs in {path}")
        return
    shown = table(["namespace", "state"], ["blocks", "of", "bytes", "file", "newest", "oldest"])
    for slab in slabs:
        ages = (age(slab.newest_age), age(slab.oldest_age)) if slab.blocks else ("", "")
        shown.add_row(
            slab.namespace,
            _state(slab),
            str(slab.blocks),
            str(slab.slots),
            format_size(slab.payload_bytes),
            format_size(slab.file_bytes),
            *ages,
        )
    output.print(shown)
    for slab in slabs:
        if slab.problem:
            output.print(slab.problem)


def verify_directory(path: Path, *, as_json: bool) -> bool:
    """Read every record of the slabs in a directory, or of one slab file; whether all is sound.

    Raises:
        TierError: `path` cannot be read.
    """
    slabs = [path] if path.suffix == SLAB_SUFFIX and path.is_file() else [slab.path for slab in scan_directory(path)]
    reports: list[VerifyReport] = []
    unreadable: dict[Path, str] = {}
    with progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        for slab in slabs:
            task = bar.add_task(slab.stem, total=None)
            try:
                reports.append(verify_slab(slab, partial(_advance, bar, task)))
            except TierError as error:
                unreadable[slab] = str(error)
    if as_json:
        print_json(
            {
                "slabs": [asdict(report) | {"torn": report.torn} for report in reports],
                "unreadable": {str(slab): reason for slab, reason in unreadable.items()},
            }
        )
    else:
        _show_verification(path, reports, unreadable)
    return not unreadable and not any(report.damaged for report in reports)


def _advance(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)


def _show_verification(path: Path, reports: list[VerifyReport], unreadable: dict[Path, str]) -> None:
    output = console()
    if not reports and not unreadable:
        output.print(f"no slabs in {path}")
    if reports:
        shown = table(["slab"], ["records", "sound", "damaged", "torn", "orphans", "changed"])
        for report in reports:
            counts = (report.records, report.sound, len(report.damaged), report.torn, report.orphans, report.changed)
            shown.add_row(report.path.stem, *map(str, counts))
        output.print(shown)
    for report in reports:
        for record in report.damaged[:RECORDS_SHOWN]:
            output.print(_damage(record, report.path))
        if len(report.damaged) > RECORDS_SHOWN:
            output.print(f"... and {len(report.damaged) - RECORDS_SHOWN} more; --json lists all")
    for reason in unreadable.values():
        output.print(reason)
    if any(report.damaged for report in reports):
        output.print("damaged records are never served: the engine takes them for misses and writes them anew")


def _damage(record: DamagedRecord, path: Path) -> str:
    key = f" (block {record.key[:16]})" if record.key else ""
    return f"{path.stem} slot {record.slot}{key}: {record.reason}"


def _state(slab: SlabSummary) -> str:
    if slab.problem:
        return "unreadable"
    if slab.in_use_by is None:
        return "idle"
    return f"pid {slab.in_use_by}" if slab.in_use_by else "in use"


def age(seconds: float) -> str:
    """A time for a person to read."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def table(names: list[str], numbers: list[str]) -> Table:
    """Columns of text on the left, columns of numbers on the right."""
    columns = [Column(name, no_wrap=True) for name in names]
    columns += [Column(name, no_wrap=True, justify="right") for name in numbers]
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def console() -> Console:
    """Standard output, without rich's guesses about what a path or a number means; no cell is cut short."""
    return Console(highlight=False, markup=False, soft_wrap=True, width=TABLE_WIDTH)


def progress(*columns: ProgressColumn) -> Progress:
    """A bar on standard error, while something goes on; nothing where nobody looks."""
    screen = Console(stderr=True)
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def print_json(document: dict[str, object]) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, indent=2, default=str))
