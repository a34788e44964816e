"""What the figures of an examination mean: goals that are met or not, what is wrong, and what to set.

Pure functions of the figures; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvpact.units import format_size
from kvpact.worker.cuda.pinned import CHUNK_BYTES

Figures = Mapping[str, Mapping[str, Any]]
"""Section -> its figures, or {"error": text}."""

LARGE_BYTES: Final = 64 << 10
"""Entries of this size and more have the goal of the bus."""

SLOW_SHARE: Final = 0.7
"""Of the bus: a layout that reaches less is worth a change of it."""

BETTER: Final = 1.3
"""How many times faster another setting is before it is recommended."""

LAUNCH_MS: Final = 5.0
"""A launch of a kernel that takes longer while memory is pinned is seen by users."""

TRIED: Final = ("order", "start")
"""Sections without which nobody knows whether kvpact may serve."""

UNSOUND, ADVICE, NOTE = "unsound", "advice", "note"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and what it is to be; `met` is None for what was not measured."""

    name: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it is."""
        if self.value is None:
            return None
        over = self.at_least is None or self.value >= self.at_least
        return over and (self.at_most is None or self.value <= self.at_most)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "met": self.met}

    def line(self) -> str:
        """For people."""
        said = {True: "yes", False: "NO", None: "not measured"}[self.met]
        wanted = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        return f"{self.name}: {_number(self.value)}, {wanted}: {said}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding. `level`: "unsound" (kvpact must not serve here), "advice" (set this), "note"."""

    level: str
    text: str


def goals(figures: Figures) -> list[Goal]:
    """The goals of the copies for this project's releases, each as a ratio or a time."""
    bus = figures.get("bus", {})
    into, out = bus.get("in_gb_per_s"), bus.get("out_gb_per_s")
    chosen = [row for row in _rows(figures, "bandwidth") if row["chosen"]]
    loads = [row for row in chosen if row["way"] == "load"]
    large = [row["gb_per_s"] for row in loads if row["entry_bytes"] >= LARGE_BYTES]
    small = [row["gb_per_s"] for row in loads if row["entry_bytes"] < LARGE_BYTES]
    saves = [row["gb_per_s"] for row in chosen if row["way"] == "save" and row["entry_bytes"] >= LARGE_BYTES]
    slower = [row["slower"] for row in _rows(figures, "beside")]
    steps = {row["step"]: row["begin_us"] + row["hooks_us"] for row in _rows(figures, "computing_thread")}
    return [
        Goal("load of entries of 64 KiB and more / bus, worst", _share(large, into), at_least=0.9),
        Goal("load of smaller entries / bus, worst", _share(small, into), at_least=0.8),
        Goal("save of entries of 64 KiB and more / bus, worst", _share(saves, out), at_least=0.85),
        Goal("decode beside copies, slower by, worst", max(slower, default=None), at_most=0.02),
        Goal("microseconds of a step's hooks with loads", steps.get("submitted at once"), at_most=300),
        Goal("microseconds of a step's hooks without loads", steps.get("no loads"), at_most=30),
        Goal("seconds that the copies add to a start", figures.get("start", {}).get("start_seconds"), at_most=1.0),
    ]


def verdicts(figures: Figures) -> list[Verdict]:
    """All findings, those first because of which kvpact must not serve here."""
    found = [*_unsound(figures), *_errors(figures), *_machine(figures), *_pinning(figures), *_layout(figures)]
    found += _kernel(figures)
    return sorted(found, key=lambda one: (UNSOUND, ADVICE, NOTE).index(one.level))


def _unsound(figures: Figures) -> Iterable[Verdict]:
    order, start = figures.get("order", {}), figures.get("start", {})
    for name, what in (
        ("wrong_out_in_stream_order", "saves read blocks before the forward pass has written them"),
        ("wrong_in_in_stream_order", "loads are overwritten by what was computed before them"),
        ("wrong_in_at_any_time", "loads at any time are overwritten by what was computed before them"),
    ):
        if order.get(name):
            yield Verdict(UNSOUND, f"fences do not hold: {what}, {order[name]} times of {order['turns']}")
    for name in TRIED:
        if figures.get(name, {}).get("error"):
            yield Verdict(UNSOUND, f"the copies cannot be used, or not be tried ({name}): {figures[name]['error']}")
    if start.get("bit_exact") is False:
        yield Verdict(UNSOUND, "blocks came back with other bytes")
    for row in _rows(figures, "captures"):
        if row["attached_as_kvpact"] and row["good_captures"] < row["captures"]:
            yield Verdict(
                UNSOUND,
                f"pinning beside the capture of graphs harms it: {row['good_captures']} of {row['captures']} were "
                f"captured ({row['capture_error']})",
            )
    ended = figures.get("captures", {}).get("end", "ok")
    if ended == "hung" and not _rows(figures, "captures"):
        yield Verdict(UNSOUND, "pinning beside the capture of graphs: the trial never ended")
    inside = [row for row in _rows(figures, "spans") if row["copy"].startswith("inside")]
    for row in inside:
        if row["error_code"]:
            yield Verdict(UNSOUND, f"a copy of pinned memory ({row['copy']}) fails with error {row['error_code']}")


def _errors(figures: Figures) -> Iterable[Verdict]:
    for name, section in figures.items():
        if section.get("error") and name not in TRIED and not section.get("rows"):
            yield Verdict(ADVICE, f"{name} could not be measured: {section['error']}")


def _machine(figures: Figures) -> Iterable[Verdict]:
    machine, bus = figures.get("machine", {}), figures.get("bus", {})
    node, own = machine.get("device_numa_node"), machine.get("process_numa_nodes")
    if node is not None and node >= 0 and own and node not in own:
        yield Verdict(
            ADVICE,
            f"the device is on NUMA node {node}, this process runs on {_listed(own)}: start the engine with "
            f"`numactl --cpunodebind={node} --preferred={node}`; across sockets copies can take twice as long",
        )
    for what in ("generation", "lanes"):
        now = bus.get(f"link_{what}_in_use") or machine.get(f"link_{what}_now")
        most = machine.get(f"link_{what}_most")
        if "in_gb_per_s" in bus and now and most and now < most:
            yield Verdict(
                ADVICE, f"the device's PCI Express link has {what} {now}, and could have {most}: see its slot"
            )
    if machine.get("copies_in_batches") is False:
        yield Verdict(ADVICE, "the driver copies entries one by one: version 570 (CUDA 12.8) and later take batches")
    if machine.get("kernels_read_host_memory") is False:
        yield Verdict(NOTE, "kernels cannot read this machine's memory: small pages go by the copy engines")


def _pinning(figures: Figures) -> Iterable[Verdict]:
    rows = _rows(figures, "pinning")
    failed = [row for row in rows if row["error"]]
    limit = figures.get("machine", {}).get("memlock_limit_bytes")
    if failed:
        said = "" if limit is None else f", which is {format_size(limit)}"
        yield Verdict(
            ADVICE,
            f"memory cannot be pinned ({failed[0]['error']}): raise the limit on locked memory{said} (ulimit -l "
            "unlimited, or --ulimit memlock=-1 for a container), or give the container more memory",
        )
    stalls = [row for row in rows if row["worst_launch_ms"] > LAUNCH_MS and row["chunk_bytes"] <= CHUNK_BYTES]
    if stalls:
        worst = max(stalls, key=lambda row: row["worst_launch_ms"])
        yield Verdict(
            NOTE,
            f"while memory is pinned in chunks of {format_size(worst['chunk_bytes'])}, a launch of a kernel took "
            f"{worst['worst_launch_ms']:.1f} ms: the first minute after a start may stutter",
        )


def _layout(figures: Figures) -> Iterable[Verdict]:
    """Where all layers of a block side by side are worth asking for."""
    bus = figures.get("bus", {})
    chosen = [row for row in _rows(figures, "bandwidth") if row["chosen"] and row["what"] == "background"]
    by_shape = {(row["way"], row["page_bytes"], row["layout"]): row for row in chosen}
    for (way, page_bytes, layout), apart in by_shape.items():
        inside = by_shape.get((way, page_bytes, "BLNHC"))
        most = bus.get("in_gb_per_s" if way == "load" else "out_gb_per_s")
        if layout != "LBNHC" or inside is None or not most:
            continue
        slow, fast = apart["gb_per_s"], inside["gb_per_s"]
        if slow < SLOW_SHARE * most and fast > BETTER * slow:
            yield Verdict(
                ADVICE,
                f'for pages of {format_size(page_bytes)}, "kv_layout": "blocks" would make entries of '
                f"{format_size(inside['entry_bytes'])}: {fast:.0f} instead of {slow:.0f} GB/s for {way}s",
            )


def _kernel(figures: Figures) -> Iterable[Verdict]:
    """Where the way that was chosen is not the faster one."""
    ways: dict[tuple[str, int, str], dict[bool, dict[str, Any]]] = {}
    for row in _rows(figures, "bandwidth"):
        if row["way"] == "load":
            ways.setdefault((row["layout"], row["page_bytes"], row["what"]), {})[row["chosen"]] = row
    for (layout, page_bytes, what), rows in ways.items():
        if len(rows) == 2 and rows[False]["gb_per_s"] > BETTER * rows[True]["gb_per_s"]:
            yield Verdict(
                NOTE,
                f"{layout}, pages of {format_size(page_bytes)}, {what}: the {rows[False]['path']} would load "
                f"{rows[False]['gb_per_s']:.0f} GB/s, the {rows[True]['path']} loads {rows[True]['gb_per_s']:.0f}",
            )


def is_sound(found: Iterable[Verdict]) -> bool:
    """Whether kvpact may serve with this device."""
    return all(one.level != UNSOUND for one in found)


def _rows(figures: Figures, section: str) -> list[dict[str, Any]]:
    found = figures.get(section, {})
    return list(found.get("rows") or found.get("by_chunk") or ())


def _share(rates: list[float], bus: float | None) -> float | None:
    return min(rates) / bus if rates and bus else None


def _listed(numbers: list[int]) -> str:
    return " and ".join(f"node {number}" for number in numbers)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
