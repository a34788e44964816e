"""`kvpact inspect`, `verify`, `gc` and `tiers` for tiers given by their URL, as tables or as JSON.

Owns the tables and their texts. The tiers read and remove; no credential is printed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any, Final

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.text import Text

from kvpact.cli.screen import BAD, bad, busy, console, print_json, progress, table
from kvpact.cli.slabs import model_of, show_damage
from kvpact.errors import ConfigError, DataError, TierError, reason_of
from kvpact.identity.keys import KEY_BYTES
from kvpact.metrics import series
from kvpact.own_files import NotOurs, OwnFolder, require_makeable
from kvpact.tiers.backends import SCHEMES
from kvpact.tiers.daemon_pool import DaemonPool
from kvpact.tiers.disk.slab import SLAB_SUFFIX
from kvpact.tiers.disk.slab_directory import SlabDirectory, look_at
from kvpact.tiers.free_space import scarcity
from kvpact.tiers.registry import load_seal, open_for_tool, open_store
from kvpact.tiers.shared.inspection import older, summarize, verify_store
from kvpact.tiers.shared.store import RecordStore, StoreError, remove_all
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import TierURL, parse_tier_url
from kvpact.units import format_age, format_size

PROBES: Final = 5
"""Lookups of a missing record by which `kvpact tiers` measures a store's latency."""

NAME_DIGITS: Final = 8
"""Least number of digits of a namespace's name in `kvpact gc --namespace`."""

WORKS: Final = "works"
"""State of a tier that answers."""

_PATIENCE_S: Final = 2.0
_ANSWER_S: Final = 10.0
_DIRECTORIES: Final = ("dir", "file")

COUNTED: Final = (
    "tier_up",
    "lookup_seconds",
    "read_bytes_per_second",
    "held_blocks",
    "used_bytes",
    "tier_failures",
    "skipped_lookups",
)
"""Metrics of a tier that `kvpact tiers` shows of a running engine."""


def parse_place(text: str) -> TierURL | Path:
    """Tier URL, or directory of slabs, from the command line. Raises ConfigError."""
    if "://" not in text:
        return Path(text)
    try:
        if text.startswith(("disk:", "dir:")) and "capacity=" not in text:
            url = parse_tier_url(f"{text}{'&' if '?' in text else '?'}capacity=1GiB")
            url = replace(url, options={name: value for name, value in url.options.items() if name != "capacity"})
        else:
            url = parse_tier_url(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Path(url.path) if url.scheme == "disk" else url


@contextmanager
def opened(url: TierURL) -> Iterator[RecordStore]:
    """Store of a URL, for reading; its errors become TierErrors."""
    store = open_store(url, for_tool=True)
    try:
        yield store
    except StoreError as error:
        message = str(error)
        raise TierError(message if message.startswith(store.place) else f"{url}: {message}") from None
    finally:
        store.close()


@contextmanager
def opened_as_it_is(url: TierURL) -> Iterator[RecordStore]:
    """`opened`, but a missing or unreadable directory raises TierError."""
    if url.scheme in _DIRECTORIES:
        with OwnFolder.look(Path(url.path)) as folder:
            if not Path(url.path).is_dir():
                raise TierError(f"{url.path} is not a directory; give the path of a {url.scheme} tier")
            if folder.is_there and not os.access(folder.held, os.R_OK | os.X_OK):
                raise TierError(f"{folder.path} cannot be read by user {os.geteuid()}; run as its owner")
    with opened(url) as store:
        yield store


@contextmanager
def opened_for_removal(url: TierURL) -> Iterator[RecordStore]:
    """`opened_as_it_is`, but not for another user's directory: rewritten files must keep their owner."""
    if url.scheme in _DIRECTORIES:
        with OwnFolder.look(Path(url.path)) as folder:
            folder.require_ours()
    with opened_as_it_is(url) as store:
        yield store


def inspect_store(url: TierURL, *, as_json: bool) -> None:
    """Print namespaces, blocks, bytes and ages of a shared store. Raises TierError."""
    with busy(f"reading {url}"), opened_as_it_is(url) as store:
        groups = summarize(store)
        usage = store.usage()
        unfinished = store.unfinished().used_bytes
    if as_json:
        print_json(
            {
                "place": str(url),
                "namespaces": [asdict(group) | {"sealed": group.sealed} for group in groups],
                "usage": asdict(usage),
                "unfinished_bytes": unfinished,
            }
        )
        return
    output = console()
    if unfinished:
        files = "unfinished files, being written or left by killed engines; engines remove them after an hour"
        output.print(f"{format_size(unfinished)} in {files}")
    if not groups:
        output.print(f"no records of kvpact in {url}")
        return
    rows = table(["namespace", "sealed", "model"], ["blocks", "bytes", "newest", "oldest"])
    for group in groups:
        rows.add_row(
            group.group.partition("-")[0],
            "yes" if group.sealed else "no",
            model_of(group.fields),
            str(group.blocks),
            format_size(group.bytes),
            format_age(group.newest_age),
            format_age(group.oldest_age),
        )
    output.print(rows)


def verify_shared_store(url: TierURL, *, as_json: bool, key_file: Path | None) -> bool:
    """Read every record of a shared store; returns whether all are verified. Raises TierError and ConfigError."""
    seal = load_seal(key_file)
    with (
        opened_as_it_is(url) as store,
        progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()) as bar,
    ):
        task = bar.add_task(url.scheme, total=None)
        report = verify_store(store, seal, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print_json({"place": str(url), **{name: value for name, value in asdict(report).items() if name != "place"}})
        return not report.damaged
    output = console()
    rows = table(["store"], ["records", "verified", "damaged", "other seal", "gone meanwhile"])
    counts = (report.records, report.sound, len(report.damaged), report.unsealed, report.gone)
    rows.add_row(str(url), *map(str, counts), style=BAD if report.damaged else None)
    output.print(rows)
    show_damage(output, [[f"{record.name[:50]}: {record.reason}" for record in report.damaged]])
    return not report.damaged


def collect(place: TierURL | Path, namespace: str | None, seconds: float | None, *, dry_run: bool) -> int:
    """Remove records or slabs, with `dry_run` none; returns their number.

    Of the namespace whose name begins with `namespace`: all, or those older than `seconds`. Without a namespace, older
    ones that no engine will read; slabs, if no engine has used them for that time.

    Raises TierError: no namespace begins with it, several do, an engine uses the slab, or the store fails.
    """
    before = None if seconds is None else time.time() - seconds
    with busy(f"looking through {place}" if dry_run else f"removing from {place}"):
        return _collect(place, namespace, before, dry_run=dry_run)


def _collect(place: TierURL | Path, namespace: str | None, before: float | None, *, dry_run: bool) -> int:
    if isinstance(place, Path):
        with _locked_slabs(place) as slabs:
            doomed = _doomed(slabs, namespace, before, place)
            failed = list[OSError]()
            for slab in () if dry_run else doomed:
                try:
                    slab.unlink(missing_ok=True)
                except OSError as error:  # the others are removed anyway
                    failed.append(error)
            if failed:
                slabs_left = f"{len(failed)} of {len(doomed)} slabs, such as {failed[0].filename}"
                raise TierError(f"cannot remove {slabs_left}: {failed[0].strerror}; the others are removed")
            return len(doomed)
    with (opened_as_it_is if dry_run else opened_for_removal)(place) as store:
        group = "" if namespace is None else _group_in(store, namespace, place)
        names = [record.name for record in store.names(group)] if before is None else [*older(store, before, group)]
        return len(names) if dry_run else remove_all(store, names)


def _doomed(slabs: Sequence[Path], namespace: str | None, before: float | None, place: Path) -> list[Path]:
    if namespace is not None:
        chosen = _the_one({_namespace_of(slab) for slab in slabs}, namespace, place)
        slabs = [slab for slab in slabs if _namespace_of(slab) == chosen]
    found = [(slab, seen) for slab in slabs if (seen := look_at(slab)) is not None]
    if before is not None:
        return [slab for slab, seen in found if not seen.in_use and seen.modified < before]
    for slab, seen in found:
        if seen.in_use:
            raise TierError(f"{slab} is in use by an engine; stop it first")
    return [slab for slab, _ in found]


@contextmanager
def _locked_slabs(path: Path) -> Iterator[list[Path]]:
    """Slabs of a directory, locked: no process creates or removes one meanwhile. Raises TierError."""
    directory = SlabDirectory.look(path)
    try:
        with directory.locked(_PATIENCE_S):
            yield list(directory.slab_paths())
    except OSError as error:
        raise TierError(f"cannot remove from {path}: {error.strerror}; give the directory of a disk tier") from None


def _namespace_of(slab: Path) -> str:
    """Name of a slab's namespace, of which each engine has a slab with another number."""
    return slab.name.removesuffix(SLAB_SUFFIX).partition("-")[0]


def _group_in(store: RecordStore, wanted: str, place: TierURL) -> str:
    return _the_one({record.name.partition("/")[0] for record in store.names()}, wanted, place)


def _the_one(names: set[str], wanted: str, place: object) -> str:
    if len(wanted) < NAME_DIGITS:
        raise ConfigError(f"--namespace: give at least the first {NAME_DIGITS} digits of its name, not {wanted!r}")
    found = sorted(name for name in names if name.startswith(wanted))
    if len(found) != 1:
        known = ", ".join(found or sorted(names)) or "(it has none)"
        raise TierError(f"{len(found)} namespaces in {place} begin with {wanted!r}; give one of: {known}")
    return found[0]


def show_tiers(urls: Sequence[TierURL], *, as_json: bool) -> bool:
    """Probe tiers and print their state; without URLs print running engines' counts of theirs.

    Returns whether all work.
    """
    engines = {} if urls else _as_engines_say()
    with busy("probing the tiers"):
        rows = probe_all(urls)
    if as_json:
        print_json({"now": rows, "engine": [row | {"engine": name} for name in engines for row in engines[name]]})
        return all(row["usable"] for row in rows)
    output = console()
    if not rows and not any(engines.values()):
        output.print("no tier is configured, and no running engine of this user has one; give a URL or --config FILE")
    if rows:
        asked = table(["tier", "state"], ["look-up", "used", "capacity"])
        for row in rows:
            state = row["state"] if row["usable"] else bad(row["state"])
            sizes = (format_size(row[name]) if row[name] else "" for name in ("used_bytes", "capacity_bytes"))
            asked.add_row(row["tier"], state, _milliseconds(row["lookup_seconds"]), *sizes)
        output.print(asked)
    for name, counted in engines.items():
        if counted:
            output.print(f"counted by the engine of {name}:")
            shown = table(["tier", "breaker"], ["look-up", "read", "held blocks", "used", "failures", "skipped"])
            for row in counted:
                shown.add_row(*_as_shown(row))
            output.print(shown)
    return all(row["usable"] for row in rows)


def probe_all(urls: Sequence[TierURL]) -> list[dict[str, Any]]:
    """Probe all tiers at once: `usable`, a `state` in words, and figures in bytes and seconds, None where unknown.

    A tier that has not answered after 10 s counts as not usable.
    """
    pool = DaemonPool("kvpact-probe", len(urls))
    asked = [pool.submit(partial(_probe, url)) for url in urls]
    done = wait(asked, _ANSWER_S).done
    return [_row(url, future if future in done else None) for url, future in zip(urls, asked, strict=True)]


def _row(url: TierURL, answer: Future[dict[str, Any]] | None) -> dict[str, Any]:
    state = f"no answer within {_ANSWER_S:.0f} s"
    if answer is not None:
        try:
            return {"tier": str(url), "usable": True, "state": WORKS} | answer.result()
        except Exception as error:  # by another package, or a defect: the other tiers are shown
            state = reason_of(error)
    return {"tier": str(url), "usable": False, "state": state, **_figures(None, 0, 0)}


def _probe(url: TierURL) -> dict[str, Any]:
    """Figures of a usable tier, and its state if not `WORKS`. Raises TierError and ConfigError with the reason."""
    if url.scheme in ("disk", *_DIRECTORIES):
        _require_usable(Path(url.path))
    if url.scheme == "disk":
        used = sum(512 * path.stat().st_blocks for path in SlabDirectory(Path(url.path)).slab_paths())
        return _figures(None, used, url.capacity) | _room_for(url, used)
    if url.scheme not in SCHEMES:
        return _probe_of_others(url)
    with opened(url) as store:
        seconds = median(repeat(lambda: store.exists(["0" * 16 + "/" + "0" * 64]), number=1, repeat=PROBES))
        usage = store.usage()
    return _figures(seconds, usage.used_bytes, usage.capacity_bytes) | _room_for(url, usage.used_bytes)


def _room_for(url: TierURL, used: int) -> dict[str, str]:
    """State of a tier with less free space than its capacity; it works with less."""
    if "capacity" not in url.options:
        return {}
    path = Path(url.path)
    shortage = scarcity(path if path.exists() else path.parent, url.capacity, used)
    return {"state": shortage} if shortage else {}


def _probe_of_others(url: TierURL) -> dict[str, Any]:
    """Probe another package's tier through the methods of `Tier`. Raises TierError."""
    tier = open_for_tool(url)
    try:
        seconds = median(repeat(lambda: tier.lookup([bytes(KEY_BYTES)]), number=1, repeat=PROBES))
        health = tier.health()
        held = tier.store.usage() if isinstance(tier, SharedTier) else tier.capacity()
    except Exception as error:
        raise TierError(f"{url}: {reason_of(error)}") from error
    finally:
        tier.close()
    state = {} if health.ok else {"usable": False, "state": health.reason}
    return _figures(seconds, held.used_bytes, held.capacity_bytes) | state


def _figures(lookup: float | None, used: int, capacity: int) -> dict[str, Any]:
    return {"lookup_seconds": lookup, "used_bytes": used or None, "capacity_bytes": capacity or None}


def _require_usable(directory: Path) -> None:
    """Raise NotOurs if an engine could not use a directory, or could not create it in its parent."""
    with OwnFolder.look(directory) as folder:
        folder.require_ours()
        if not folder.is_there:
            require_makeable(directory)
        elif not os.access(folder.held, os.R_OK | os.W_OK | os.X_OK):
            raise NotOurs(f"{folder.path} cannot be read and written by user {os.geteuid()}; change its owner or mode")


def _as_engines_say() -> dict[str, list[dict[str, Any]]]:
    """Counts of the tiers of this user's running engines, by model and process; silent engines are omitted."""
    from kvpact.cache.status import EngineStatus
    from kvpact.cache.status_socket import answers

    found = dict[str, list[dict[str, Any]]]()
    for _, answer in answers():
        with suppress(DataError):
            engine = EngineStatus.parse(answer)
            rows = [_as_counted(engine.metrics, tier.name) for tier in engine.tiers]
            found[engine.title] = rows
    return found


def _as_counted(counts: Mapping[str, float], name: str) -> dict[str, Any]:
    def of(metric: str) -> float:
        return counts.get(series(metric, name), 0)

    lookups = counts.get(f'lookup_seconds_count{{tier="{name}"}}', 0)
    seconds = counts.get(f'lookup_seconds_sum{{tier="{name}"}}', 0) / (lookups or 1)
    known = {"tier_up": counts.get(series("tier_up", name)), "lookup_seconds": seconds}
    return {"tier": str(name), **{metric: of(metric) for metric in COUNTED}, **known}


def _as_shown(row: Mapping[str, Any]) -> list[str | Text]:
    """Cells of a tier's row, in the order of `COUNTED`."""
    speed = int(row["read_bytes_per_second"])
    used = int(row["used_bytes"])
    return [
        row["tier"],
        bad("open") if row["tier_up"] == 0 else "",
        _milliseconds(row["lookup_seconds"]),
        f"{format_size(speed)}/s" if speed else "",
        f"{row['held_blocks']:.0f}" if row["held_blocks"] else "",
        format_size(used) if used else "",
        bad(f"{row['tier_failures']:.0f}") if row["tier_failures"] else "",
        f"{row['skipped_lookups']:.0f}" if row["skipped_lookups"] else "",
    ]


def _milliseconds(seconds: float | None) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds else ""
