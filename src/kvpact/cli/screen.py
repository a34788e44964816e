"""Output of commands, as JSON or on a terminal, which must not obey control characters in text from elsewhere.

Names, keys, paths and messages are escaped, because other users may have written them into a store. Every command
prints them through `console` and `table`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from kvpact.errors import printable

TABLE_WIDTH: Final = 2000
"""Most columns of output into a file or a pipe, where each row is a line."""

BAD: Final = "bold red"
"""Style of errors and damage; a terminal shows it unless NO_COLOR is set."""

_TEXT_COLUMNS: Final = 10
"""Least width of a column of text, in characters of a terminal; longer texts are folded."""


class Screen(Console):
    """Prints each text on a line, escaped by `printable`."""

    def print(self, *objects: Any, **options: Any) -> None:
        for item in objects:
            if isinstance(item, Rows) and self.is_terminal:
                super().print(item if item.least_width <= self.width else item.stacked(), soft_wrap=False)
            else:
                super().print(printable(item) if isinstance(item, str) else item, **options)


class Rows(Table):
    """A table whose cells are escaped by `printable`, for files and for terminals of any width."""

    def __init__(self, *columns: Column) -> None:
        super().__init__(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
        self._cells: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: Any, **options: Any) -> None:
        self._cells.append(tuple(printable(cell) if isinstance(cell, str) else cell for cell in cells))
        super().add_row(*self._cells[-1], **options)

    @property
    def least_width(self) -> int:
        """Least width of a terminal, in characters: numbers are whole, texts are folded."""
        taken = zip(self.columns, *self._cells, strict=True)
        return sum(
            2 + (max(map(len, [str(of.header), *cells])) if of.no_wrap else _TEXT_COLUMNS) for of, *cells in taken
        )

    def stacked(self) -> Table:
        """Table of the cells below one another, each behind its column's name, for a terminal that is too narrow."""
        stack = Table(Column(no_wrap=True), Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
        for cells in self._cells:
            for column, cell in zip(self.columns, cells, strict=True):
                stack.add_row(str(column.header), cell)
            stack.add_row("")
        return stack


def console(*, quiet: bool = False) -> Screen:
    """Standard output, without rich's highlighting and markup; no cell is truncated. `quiet`: nothing is shown."""
    screen = Screen(highlight=False, markup=False, soft_wrap=True, quiet=quiet)
    if not screen.is_terminal:
        screen.width = TABLE_WIDTH
    return screen


def table(names: list[str], numbers: list[str]) -> Rows:
    """Columns of text on the left, columns of numbers on the right."""
    columns = [Column(name, overflow="fold", min_width=_TEXT_COLUMNS) for name in names]
    columns += [Column(name, no_wrap=True, justify="right") for name in numbers]
    return Rows(*columns)


def bad(text: str) -> Text:
    """Cell in the style of errors and damage."""
    return Text(printable(text), BAD)


def busy(what: str) -> Progress:
    """Context of a terminal line that says `what` is going on, and for how many seconds."""
    bar = progress(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    bar.add_task(printable(what), total=None)
    return bar


def progress(*columns: ProgressColumn) -> Progress:
    """Progress bar on standard error; nothing where standard error is no terminal."""
    screen = Console(stderr=True)
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def print_json(document: dict[str, object]) -> None:
    """One JSON document on standard output, in ASCII, with DEL escaped too, which JSON lets through."""
    print(json.dumps(document, indent=2, default=str).replace("\x7f", "\\u007f"))
