"""The fenced blocks of README.md and docs/*.md, and what stands for the placeholders in them when they are run.

Owns how a block is found and how its placeholders are filled in; which block is run where stands in test_documents.py.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).parents[1]

PACKAGES: Final = (ROOT / "src" / "kvpact", ROOT / "kit" / "src" / "kvpact_testkit")
"""The code of the two distributions."""

HOMES: Final = (PACKAGES[0], PACKAGES[1].parent)
"""Where a page's `file.py` may be: in the product, or in the kit as `kvpact_testkit/file.py`."""

CODE: Final = ("sh", "python", "toml")
"""Languages of blocks that a reader runs, or puts into a file; others show what was printed, a picture, a query."""

NOT_CODE: Final = ("text", "mermaid", "json", "diff", "promql", "yaml")

PLACEHOLDERS: Final = (
    "MODEL",
    "disk:///var/cache/kvpact?capacity=200GiB",
    "disk://$HOME/kvpact?capacity=200GiB",
    "/var/cache/kvpact",
    "redis://user:password@cache:6379/0",
    "redis://cache:6379/0",
    "8GiB",
    "URL",
    "NAME",
)
"""What a reader replaces by something of his own; the first that fits is taken, so the longer ones stand first."""

_PLACEHOLDER: Final = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in PLACEHOLDERS))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    path: str
    """Of the document, relative to the repository."""
    line: int
    """Of its fence, counted from 1."""
    language: str
    text: str
    file: str
    """The file that the reader is to write it to, from the comment `<!-- name.py -->` above it; "" for none."""

    @property
    def is_code(self) -> bool:
        return self.language in CODE

    @property
    def name(self) -> str:
        """For a person: where it is, and its first line."""
        return f"{self.path}:{self.line} ({self.file or self.text.splitlines()[0][:60]})"


def documents() -> list[Path]:
    """The README and all pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def document_blocks(path: Path | str) -> list[Block]:
    """All fenced blocks of one document, in order; `path` may be relative to the repository."""
    document = ROOT / path
    return list(_blocks(str(document.relative_to(ROOT)), document.read_text(encoding="utf-8").splitlines()))


def block_with(path: str, text: str) -> Block:
    """The one code block of a document that holds `text`."""
    [found] = [block for block in document_blocks(path) if block.is_code and text in block.text]
    return found


def filled_in(text: str, values: Mapping[str, str]) -> str:
    """`text` with every placeholder replaced by its value. KeyError names a placeholder that has none."""
    return _PLACEHOLDER.sub(lambda found: values[found[0]], text)


def _blocks(path: str, lines: list[str]) -> Iterator[Block]:
    begin, fence, above = 0, "", ""
    for number, line in enumerate(lines, start=1):
        mark = re.match(r"\s*(```+)\s*(\w*)\s*$", line)
        if mark is None:
            above = above if fence or not line.strip() else line
        elif not fence:
            begin, fence, language = number, mark[1], mark[2]
            named = re.fullmatch(r"<!-- ([\w.]+\.\w+) -->", above)
        elif mark[1] == fence and not mark[2]:
            text = "\n".join(lines[begin : number - 1]) + "\n"
            yield Block(path, begin, language, text, named[1] if named else "")
            fence = above = ""
    assert not fence, f"{path}:{begin}: this fence is not closed"


def load_script(path: str) -> ModuleType:
    """The module of a script of this repository, which no package holds."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # where a dataclass looks for its module
    specification.loader.exec_module(module)
    return module
