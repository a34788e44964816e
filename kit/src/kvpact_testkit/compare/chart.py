"""A chart of times on a logarithmic axis, as SVG: a mark at each median, a line from quartile to quartile."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

LEFT, WIDTH, ROW, TOP = 300, 420, 26, 44
"""Pixels: where the axis begins, its length, a row's height, the first row."""

COLOURS = """
.page { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 13px sans-serif } .title { font-weight: bold }
.grid { stroke: #d0d7de } .ours { fill: #0969da; stroke: #0969da } .others { fill: #8c959f; stroke: #8c959f }
@media (prefers-color-scheme: dark) {
.page { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .grid { stroke: #30363d }
.ours { fill: #58a6ff; stroke: #58a6ff } .others { fill: #6e7681; stroke: #6e7681 } }
"""


class Mark(NamedTuple):
    """One row: a name, median and quartiles in ms, whether it is kvpact's."""

    name: str
    median: float
    low: float
    high: float
    ours: bool


def drawn(title: str, marks: Sequence[Mark]) -> str:
    """The whole file; the axis goes from the power of ten below all to the one above. There is one mark at least."""
    least = floor(log10(min(max(mark.low, 1e-3) for mark in marks)))
    most = max(least + 1, ceil(log10(max(mark.high for mark in marks))))

    def at(ms: float) -> float:
        return round(LEFT + WIDTH * (log10(max(ms, 1e-3)) - least) / (most - least), 1)

    bottom = TOP + ROW * len(marks)
    lines = [
        f'<line class="grid" x1="{at(10.0**power)}" x2="{at(10.0**power)}" y1="{TOP}" y2="{bottom}"/>'
        f'<text x="{at(10.0**power)}" y="{bottom + 18}" text-anchor="middle">{milliseconds(10.0**power)}</text>'
        for power in range(least, most + 1)
    ]
    for number, mark in enumerate(marks):
        middle = TOP + ROW * number + ROW // 2
        kind = "ours" if mark.ours else "others"
        lines.append(
            f'<text x="{LEFT - 12}" y="{middle + 4}" text-anchor="end">{escape(mark.name)}</text>'
            f'<path class="{kind}" stroke-width="4" d="M{at(mark.low)},{middle} H{at(mark.high)}"/>'
            f'<circle class="{kind}" cx="{at(mark.median)}" cy="{middle}" r="6"/>'
            f'<text x="{LEFT + WIDTH + 16}" y="{middle + 4}">{milliseconds(mark.median)}</text>'
        )
    width, height = LEFT + WIDTH + 110, bottom + 32
    body = "\n".join(lines)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>{COLOURS}</style>
<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>
<text class="title" x="16" y="26">{escape(title)}</text>\n{body}\n</svg>\n"""


def milliseconds(value: float) -> str:
    """A time with three digits, in seconds from one on."""
    return f"{value / 1e3:.3g} s" if value >= 1e3 else f"{value:.3g} ms"
