"""The picture of a plan's lifecycle, drawn from the ledger's own table so that the two cannot differ.

`python scripts/draw_lifecycle.py` prints it; with file names it redraws it in them, between its two markers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvpact.cache.plan import ENDINGS, TRANSITIONS, PlanState

BEGIN = "<!-- lifecycle:begin -->"
END = "<!-- lifecycle:end -->"


def diagram() -> str:
    """The lifecycle as a Mermaid state diagram in a Markdown fence, which code hosts show as a picture."""
    arrows = [
        f"    {'[*]' if state is PlanState.NONE else state} --> {to}: {event}"
        for (state, event), to in TRANSITIONS.items()
    ]
    endings = [f"    {state} --> [*]" for state in PlanState if state in ENDINGS]
    return "\n".join(["```mermaid", "stateDiagram-v2", *arrows, *endings, "```"])


def redraw(text: str) -> str:
    """`text` with the current diagram between its markers. ValueError if it does not have both, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no place for the lifecycle picture: the text needs a line {BEGIN} and, later, a line {END}")
    return f"{before}{BEGIN}\n{diagram()}\n{END}{after}"


def main(paths: list[str]) -> None:
    """Print the diagram, or redraw it in each of the files."""
    if not paths:
        print(diagram())
    for path in map(Path, paths):
        path.write_text(redraw(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
