"""An examination's document as lines for people. Reads the document alone, so that a file can be shown again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvpact.torch_cuda.doctor.verdicts import TRIED, goals
from kvpact.units import format_size


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The figures that matter most, the goals, and what to set."""
    sections: Mapping[str, Mapping[str, Any]] = document["sections"]
    for name, show in (
        ("machine", _machine),
        ("pinning", _pinning),
        ("bus", _bus),
        ("bandwidth", lambda found: _bandwidth(found, sections.get("bus", {}))),
        ("order", _order),
        ("start", _start),
        ("computing_thread", _computing_thread),
        ("beside", _beside),
        ("spans", _spans),
        ("long_batches", _long_batches),
        ("captures", _captures),
    ):
        section = sections.get(name)
        if section is None:
            continue
        if section.get("error") and "rows" not in section:
            yield f"{name}: not measured: {section['error']}"
        else:
            yield from show(section)
    yield "goals"
    yield from (f"  {goal.line()}" for goal in goals(sections))
    yield "verdicts"
    for one in document["verdicts"]:
        yield f"  {one['level']}: {one['text']}"
    if not document["verdicts"]:
        yield "  nothing to set"
    if not document["sound"]:
        yield "kvpact's copies must not be used here"
    elif all(name in sections for name in TRIED):
        yield "kvpact's copies may be used here"
    else:
        yield f"whether kvpact's copies may be used here was not tried: that takes the sections {' and '.join(TRIED)}"


def _machine(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{found['gpu']}: driver {_or_unknown(found['nvidia_driver'])}, CUDA {_or_unknown(found['cuda_of_driver'])}, "
        f"torch {_or_unknown(found['torch'])} for CUDA {_or_unknown(found['cuda_of_torch'])}"
    )
    links = [
        f"generation {_or_unknown(found[f'link_generation_{when}'])} x {_or_unknown(found[f'link_lanes_{when}'])}"
        for when in ("now", "most")
    ]
    yield f"link: {links[0]} while idle, at most {links[1]}"
    limit = found["memlock_limit_bytes"]
    yield (
        f"NUMA node of the device {_or_unknown(found['device_numa_node'])}, of this process "
        f"{found['process_numa_nodes'] or '?'}; locked memory: {'no limit' if limit is None else format_size(limit)}"
    )


def _pinning(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["by_chunk"]:
        seconds, pages = row["seconds_per_gib"], "" if row["pages_taken_before"] else " of new pages"
        yield (
            f"pinning in chunks of {format_size(row['chunk_bytes'])}{pages}: "
            f"{'failed' if seconds is None else f'{seconds:.3f} s/GiB'}, worst launch {row['worst_launch_ms']:.2f} ms"
        )


def _bus(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"bus: {found['in_gb_per_s']:.1f} GB/s in, {found['out_gb_per_s']:.1f} out, "
        f"{found['both_at_once_gb_per_s']:.1f} both at once"
    )


def _bandwidth(found: Mapping[str, Any], bus: Mapping[str, Any]) -> Iterator[str]:
    """Each rate with its share of the bus in its direction."""
    most = {"load": bus.get("in_gb_per_s"), "save": bus.get("out_gb_per_s")}
    for row in found["rows"]:
        share = f"{row['gb_per_s'] / most[row['way']]:.1%} of the bus" if most[row["way"]] else "bus not measured"
        yield (
            f"{row['way']} {row['what']:10} {row['layout']} page {format_size(row['page_bytes']):>6} entry "
            f"{format_size(row['entry_bytes']):>6} x {row['entries']:<6} {row['path']:12} {row['gb_per_s']:7.1f} GB/s "
            f"({share}, spread {row['spread']:.0%}), {row['call_us_per_entry']:.2f} us an entry"
            f"{', chosen' if row['chosen'] else ''}"
        )


def _order(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"fences, of {found['turns']}: wrong out {found['wrong_out_in_stream_order']}, in "
        f"{found['wrong_in_in_stream_order']}; at any time: out {found['wrong_out_at_any_time']} (never asked for), in "
        f"{found['wrong_in_at_any_time']}"
    )


def _start(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"start over {format_size(found['arena_bytes'])}: {found['start_seconds']:.2f} s, "
        f"{format_size(found['usable_bytes_at_start'])} usable then; round trip bit for bit in "
        f"{found['round_trip_seconds']:.3f} s"
    )


def _computing_thread(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        yield (
            f"step, {row['step']} ({row['blocks']} blocks): {row['begin_us']:.0f} us to begin, "
            f"{row['hooks_us']:.0f} us of other hooks, {row['cpu_us']:.0f} us of CPU"
        )


def _beside(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        yield (
            f"beside {row['way']}s {row['layout']} page {format_size(row['page_bytes'])} at "
            f"{row['copies_gb_per_s']:.1f} GB/s: graph {row['graph_alone_ms']:.3f} ms, {row['slower']:+.1%}; 4 KiB in "
            f"{row['small_in_alone_us']:.0f} -> {row['small_in_beside_us']:.0f} us, out "
            f"{row['small_out_alone_us']:.0f} -> {row['small_out_beside_us']:.0f} us"
        )


def _spans(found: Mapping[str, Any]) -> Iterator[str]:
    said = ", ".join(f"{row['copy'].replace('_', ' ')} {row['error_code']}" for row in found["rows"])
    yield f"error codes of copies over pinned pieces: {said} ({found['end']})"


def _long_batches(found: Mapping[str, Any]) -> Iterator[str]:
    said = ", ".join(f"{row['entries']}: {row['gb_per_s']:.1f} GB/s" for row in found["rows"])
    yield f"long batches: {said} ({found['end']})"


def _captures(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        who = "as kvpact's threads" if row["attached_as_kvpact"] else "as CUDA has it by default"
        yield f"pinning beside captures, {who}: {row['good_captures']} of {row['captures']} good"
    if found["end"] != "ok":
        yield f"pinning beside captures: the trial ended with {found['end']!r}"


def _or_unknown(value: object) -> str:
    return "?" if value is None else str(value)
