"""`kvpact inspect` and `kvpact verify`: a disk tier's files, as tables or as JSON.

Owns the tables and their texts. Never changes a file; the tier reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvpact.cli.screen import BAD, bad, busy, console, print_json, progress, table
from kvpact.errors import TierError, printable
from kvpact.tiers.disk.inspection import DamagedRecord, SlabSummary, VerifyReport, scan_directory, verify_slab
from kvpact.tiers.disk.slab import SLAB_SUFFIX
from kvpact.units import format_age, format_size

RECORDS_SHOWN: Final = 20
"""Most damaged records listed in a table; `--json` lists all."""


def inspect_directory(path: Path, *, as_json: bool) -> None:
    """Print blocks, bytes and ages of the slabs in a directory. Raises TierError if it cannot be read."""
    with busy(f"reading {path}"):
        slabs = scan_directory(path)
    if as_json:
        print_json({"slabs": [asdict(slab) for slab in slabs]})
        return
    output = console()
    if not slabs:
        output.print(f"no slabs in {path}")
        return
    rows = table(["slab", "model", "state"], ["blocks", "of", "bytes", "file", "newest", "oldest"])
    for slab in slabs:
        ages = (format_age(slab.newest_age), format_age(slab.oldest_age)) if slab.blocks else ("", "")
        rows.add_row(
            slab.path.stem,
            model_of(slab.fields),
            bad(_state(slab)) if slab.problem else _state(slab),
            str(slab.blocks),
            str(slab.slots),
            format_size(slab.payload_bytes),
            format_size(slab.file_bytes),
            *ages,
        )
    output.print(rows)
    for slab in slabs:
        if slab.problem:
            output.print(slab.problem, style=BAD)


def model_of(fields: Mapping[str, str]) -> str:
    """Name of a namespace's model; its weights where no name was recorded."""
    return fields.get("model", fields.get("weights", ""))[:40]


def verify_directory(path: Path, *, as_json: bool) -> bool:
    """Read every record of the slabs in a directory, or of one slab file; returns whether all are verified.

    Raises:
        TierError: `path` cannot be read.
    """
    slabs = [path] if path.suffix == SLAB_SUFFIX and path.is_file() else [slab.path for slab in scan_directory(path)]
    reports: list[VerifyReport] = []
    unreadable: dict[Path, str] = {}
    name = TextColumn("{task.description}", markup=False)
    with progress(name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        for slab in slabs:
            task = bar.add_task(printable(slab.stem), total=None)
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
        rows = table(["slab"], ["records", "verified", "damaged", "torn", "orphans", "changed"])
        for report in reports:
            counts = (report.records, report.sound, len(report.damaged), report.torn, report.orphans, report.changed)
            rows.add_row(report.path.stem, *map(str, counts), style=BAD if report.damaged else None)
        output.print(rows)
    damaged = [[_damage(record, report.path) for record in report.damaged] for report in reports]
    show_damage(output, damaged, unreadable.values())


def show_damage(output: Console, damaged: Sequence[Sequence[str]], unreadable: Iterable[str] = ()) -> None:
    """Print the damaged records by slab or store, then the unreadable slabs."""
    for lines in damaged:
        for line in lines[:RECORDS_SHOWN]:
            output.print(line, style=BAD)
        if len(lines) > RECORDS_SHOWN:
            output.print(f"... and {len(lines) - RECORDS_SHOWN} more; --json lists all")
    for reason in unreadable:
        output.print(reason, style=BAD)
    if any(damaged):
        output.print("damaged records are never served: the engine counts them as misses and rewrites them")


def _damage(record: DamagedRecord, path: Path) -> str:
    key = f" (block {record.key[:16]})" if record.key else ""
    return f"{path.stem} slot {record.slot}{key}: {record.reason}"


def _state(slab: SlabSummary) -> str:
    if slab.problem:
        return "unreadable"
    if slab.in_use_by is None:
        return "idle"
    return f"pid {slab.in_use_by}" if slab.in_use_by else "in use"
