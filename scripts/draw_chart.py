"""Charts of bars. The one of first-token times is drawn from the README's own table so that the two cannot differ.

`python scripts/draw_chart.py` writes docs/first-token.svg, whose longest bar is whole, and prints the figures' age in
commits; tests/test_generated.py compares. `write_benchmarks.py` draws the others, where a bar may end in an arrow head.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CHART = ROOT / "docs" / "first-token.svg"

TIMES = "first token, median"
"""The heading of the table's column with the times."""
LEFT, WIDTH, ROW, TOP = 300, 300, 26, 44
"""Pixels: where bars begin, the longest bar, a row's height, the first row."""

STYLE = """
.page { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 13px sans-serif } .title { font-weight: bold }
.ours { fill: #0969da } .others { fill: #8c959f }
@media (prefers-color-scheme: dark) {
.page { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .ours { fill: #58a6ff } .others { fill: #6e7681 } }
"""


def table(readme: str) -> list[list[str]]:
    """The first two cells of the table's heading and of each of its rows."""
    lines = readme.partition("\n| a prompt of ")[2].partition("\n\n")[0].splitlines()
    heading, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")[:2]] for line in lines]
    assert heading[1] == TIMES, heading
    return [["A prompt of " + heading[0], TIMES], *rows]


def milliseconds(time: str) -> float:
    """The last figure of a cell: "6.4 s", "1,196 ms", "83.4 and 87.0 ms"."""
    figure, unit = re.findall(r"([\d.,]+) (m?s)\b", time)[-1]
    return float(figure.replace(",", "")) * (1 if unit == "ms" else 1000)


class Bar(NamedTuple):
    """One row of a chart: what, its figure as it is shown, its length in the chart's unit, whether it is kvpact's."""

    what: str
    shown: str
    length: float
    ours: bool


def drawn_bar(number: int, bar: Bar, longest: float) -> str:
    """What, its bar, its figure."""
    middle = TOP + ROW * number + ROW // 2
    end = LEFT + round(WIDTH * min(bar.length / longest, 1))
    head = f"L{end + 12},{middle} " if bar.length > longest else ""
    return f"""\
<text x="{LEFT - 10}" y="{middle + 4}" text-anchor="end">{escape(bar.what)}</text>
<path class="{"ours" if bar.ours else "others"}" \
d="M{LEFT},{middle - 8} H{end} {head}L{end},{middle + 8} H{LEFT} Z"/>
<text x="{end + 18}" y="{middle + 4}">{escape(bar.shown)}</text>"""


def drawn(title: str, bars: Sequence[Bar], longest: float) -> str:
    """The whole file; bars that are longer than `longest` end in an arrow head, which the title explains."""
    title += " (an arrow: longer than the chart)" if any(bar.length > longest for bar in bars) else ""
    width, height = LEFT + WIDTH + 130, TOP + ROW * len(bars) + 14
    rows = "\n".join(drawn_bar(number, bar, longest) for number, bar in enumerate(bars))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>{STYLE}</style>
<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>
<text class="title" x="16" y="26">{escape(title)}</text>\n{rows}\n</svg>\n"""


def chart(readme: str) -> str:
    """The README's; bold rows of its table are kvpact's."""
    (what, times), *rows = table(readme)
    bars = [Bar(name.strip("*"), time, milliseconds(time), name.startswith("**")) for name, time in rows]
    return drawn(f"{what}: {times}", bars, max(bar.length for bar in bars))


if __name__ == "__main__":
    import figures_age

    CHART.write_text(chart((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
    figures_age.main()
